"""The job that every updater makes for itself, and an updater's part of the data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import Parameter
from torch.optim import Optimizer
from torch.utils.data import Sampler

from runtime.errors import InputError
from runtime.torch_compat import tree_leaves


@dataclass(frozen=True)
class Part:
    """One updater's part of the data: `index` of `parts`, over all updaters of all ranks."""

    index: int = 0
    parts: int = 1
    """Number of updaters of all ranks."""
    seed: int = 0
    """Seed of the partition, equal on all ranks."""


@dataclass(frozen=True, kw_only=True)
class LocalJob:
    """One training task. Each updater makes its own, in its own process, by calling the same function."""

    model: nn.Module
    """The model, on its device; the same on every rank but for values."""
    loss: Callable[[nn.Module, Any], Tensor]
    """(model, batch) → scalar."""
    optimizer: Callable[[Iterable[Parameter]], Optimizer]
    """Makes an optimizer of parameters; its state, the momentum, is the updater's own."""
    batch: Callable[[int, int], Any] | None = None
    """(number, rank) → the minibatch, on the device. The numbers 0, 1, … are given out to the rank's updaters."""
    loader: Callable[[Part], Iterable[Any]] | None = None
    """Makes one pass over the updater's part, repeatedly (see `PartSampler`); in place of `batch`."""
    schedule: Callable[[Optimizer], Any] | None = None
    """A `torch.optim.lr_scheduler` of an optimizer, if any: one step for each minibatch that the rank's updaters have
    begun, whichever of them it was."""

    def __post_init__(self) -> None:
        """Raise InputError unless there is one source of minibatches."""
        if (self.batch is None) == (self.loader is None):
            found = "neither" if self.batch is None else "both"
            raise InputError(f"LocalJob: found {found} of batch and loader, expected one of them; give one")


@dataclass(frozen=True)
class Request:
    """Arguments of `run_local_async`."""

    make: Callable[[], LocalJob]
    steps: int
    seed: int = 0
    timeout_s: float | None = None
    start_method: str = "spawn"
    on_lost: str = "continue"


class PartSampler(Sampler[int]):
    """Indices of one updater's part of a data set, which is drawn again in each pass; for a DataLoader.

    In one pass no sample is in two parts, all are in one, and parts differ in size by one at most. An updater that has
    begun its next pass may draw what another one has yet to see of the pass before.
    """

    def __init__(self, samples: int, part: Part) -> None:
        """Prepare the parts of a data set.

        Args:
            samples: number of samples of the data set.
            part: the updater's part, as `LocalJob.loader` is given it.

        Raises:
            InputError: there are fewer samples than updaters.
        """
        if samples < part.parts:
            raise InputError(
                f"PartSampler: found {samples} samples for {part.parts} updaters, expected at least one for each; use "
                f"fewer updaters"
            )
        self.samples, self.part = samples, part
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next pass, which decides what the part is.

        Args:
            epoch: number of the pass, from 0.
        """
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        # All updaters draw the same order of the pass, and each takes its stride of it.
        generator = torch.Generator().manual_seed(self.part.seed * 1_000_003 + self.epoch)
        drawn = torch.randperm(self.samples, generator=generator)
        return iter(drawn[self.part.index :: self.part.parts].tolist())

    def __len__(self) -> int:
        return len(range(self.part.index, self.samples, self.part.parts))


def batches_of(job: LocalJob, rank: int, part: Part) -> Callable[[int], Any]:
    """Return what gives an updater the minibatch for a number. It raises InputError where a pass is empty."""
    if job.loader is not None:
        passes = _passes(job.loader, part)
        return lambda number: next(passes)
    batch = job.batch
    assert batch is not None
    return lambda number: batch(number, rank)


def _passes(loader: Callable[[Part], Iterable[Any]], part: Part) -> Iterator[Any]:
    batches = loader(part)
    epoch = 0
    while True:
        by_batch: Any = getattr(batches, "batch_sampler", None)
        samplers: Any = getattr(batches, "sampler", None), by_batch, getattr(by_batch, "sampler", None)
        for sampler in {id(one): one for one in samplers if hasattr(one, "set_epoch")}.values():
            sampler.set_epoch(epoch)
        empty = True
        for batch in batches:
            empty = False
            yield batch
        if empty:
            raise InputError(
                f"LocalJob.loader: pass {epoch} of part {part.index} of {part.parts} has no minibatch, expected at "
                f"least one; use fewer updaters or smaller minibatches, or return what can be passed over again"
            )
        epoch += 1


def samples_of(batch: Any) -> int:
    """Return how many samples a minibatch has: the first dimension of its first tensor; 0 where there is none."""
    return next((leaf.shape[0] for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()), 0)
