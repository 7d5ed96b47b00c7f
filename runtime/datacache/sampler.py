"""The sampler of a cached dataset: the indices that this rank reads in an epoch, so that the caches are hit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import Sampler

from runtime.datacache.partition import Rules, Stage, epoch_orders, per_rank
from runtime.errors import InputError

if TYPE_CHECKING:
    from runtime.datacache.dataset import CachedDataset


class CachedSampler(Sampler[int]):
    """A `DistributedSampler` that keeps each node to the samples that it holds.

    Every epoch shuffles each node's samples anew and deals them out to its ranks. Its contract is DistributedSampler's:
    `set_epoch` before each epoch, as many samples on every rank, each sample once where ranks divide their number, else
    some twice (or, with `drop_last`, some not at all). Equal on all ranks: everything but the rank.
    """

    def __init__(
        self,
        dataset: CachedDataset,
        *,
        shuffle: bool = True,
        full: bool = False,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        """Make a sampler for this rank.

        Args:
            dataset: knows the ranks, and which node holds what.
            shuffle: whether to shuffle in each epoch; else indices ascend.
            full: whether to shuffle over all samples, in the very order of DistributedSampler, instead of within each
                node's. Samples of other nodes then come from the storage, or from these nodes with
                `CachedDataset(fetch=True)`.
            seed: seed of the shuffling.
            drop_last: whether to leave out what ranks do not divide, instead of reading some samples twice.
        """
        self.dataset = dataset
        self.rules = Rules(shuffle, full, seed, drop_last)
        self.epoch = 0
        self._before: tuple[Stage, ...] = ()
        """Parts of this epoch that other numbers of ranks did."""
        self._skip = 0
        """Samples that each of these ranks did of it, before it was interrupted."""
        self._begun = False

    @property
    def num_replicas(self) -> int:
        """Number of ranks, by DistributedSampler's name."""
        return len(self.dataset.partition.node_of_rank)

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next iteration's epoch. One that a checkpoint left in the middle continues there.

        Args:
            epoch: number of the epoch, from 0; decides the order.
        """
        if epoch != self.epoch:
            self._before, self._skip, self._begun = (), 0, False
        self.epoch = epoch

    def __len__(self) -> int:
        """Return the number of samples that this rank reads in this iteration, or in the next one if none has begun."""
        whole = per_rank(len(self.dataset), self.num_replicas, self.rules.drop_last)
        return (int(self._orders().shape[1]) if self._before else whole) - self._skip

    def __iter__(self) -> Iterator[int]:
        """Return the indices of an epoch. Raises InputError if the dataset's length has changed."""
        self.dataset.check_length()
        if self._begun:  # once more, without set_epoch: the whole epoch
            self._before, self._skip = (), 0
        self._begun = True
        return iter(self._orders()[self.dataset.rank, self._skip :].tolist())

    def _orders(self) -> np.ndarray:
        return epoch_orders(self.dataset.partition, self.rules, self.epoch, self._before)

    def state_dict(self, samples_done: int) -> dict[str, Any]:
        """Return what `load_state_dict` needs to continue in the middle of the epoch, on any ranks, as plain JSON.

        Args:
            samples_done: samples of this iteration that each rank has trained on: its steps × batch size. The
                sampler cannot know, since workers read ahead.

        Raises:
            InputError: the iteration has fewer samples.
        """
        if not 0 <= samples_done <= len(self):
            raise InputError(f"samples_done: found {samples_done}, expected 0 to {len(self)}, the samples of a rank in "
                             f"this iteration; count steps × batch size since it began")  # fmt: skip
        here = Stage(self.dataset.partition.node_of_rank, self._skip + samples_done)
        return {
            "epoch": self.epoch,
            "stages": [[list(stage.node_of_rank), stage.done] for stage in (*self._before, here)],
            **self._identity(),
        }

    def _identity(self) -> dict[str, Any]:
        """Return what has to be as it was for an epoch to continue."""
        return {
            "samples": len(self.dataset), "partition_seed": self.dataset.partition.seed, **asdict(self.rules)
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was called: the next iteration reads what remains of the epoch, each sample once.

        Every rank calls it with the same state. With other ranks than then, what remains is dealt out anew, whichever
        node holds it.

        Args:
            state: what `state_dict` returned on any rank.

        Raises:
            InputError: the state is of another dataset or other rules, or is damaged.
        """
        for name, here in self._identity().items():
            if name not in state or state[name] != here:
                found = repr(state[name]) if name in state else "nothing"
                raise InputError(
                    f"state of the sampler: {name}: found {found}, expected {here!r}; give the same dataset and "
                    f"options as when it was saved, or begin the epoch anew"
                )
        try:
            epoch = int(state["epoch"])
            stages = [Stage(tuple(int(node) for node in nodes), int(done)) for nodes, done in state["stages"]]
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(
                f"state of the sampler: found a damaged one ({error!r}), expected what state_dict returned; begin the "
                f"epoch anew"
            ) from None
        self.epoch, self._begun = epoch, False
        self._before, self._skip = tuple(stage for stage in stages if stage.done), 0
        if self._before and self._before[-1].node_of_rank == self.dataset.partition.node_of_rank:
            *earlier, last = self._before
            self._before, self._skip = tuple(earlier), last.done
