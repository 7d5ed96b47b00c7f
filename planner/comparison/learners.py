"""The models that contestants of `planner compare --learn` train, from equal starts over equal batches."""

from __future__ import annotations

import hashlib
import numbers
import random
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from planner.comparison.trained import Trained, TrainedScript
from planner.frontend.call import map_leaves
from planner.jobs.training import SEED, BuiltJob, build
from planner.profile.bench import Bench
from runtime.core.members import exchanged_buffers, exchanged_parameters
from runtime.errors import InputError
from runtime.optimizers.kinds import Optimizers, each_of
from runtime.torch_compat import lift_recompile_limits

DIGEST_BYTES = 1 << 16
"""Bytes of each tensor of a batch that are compared between contestants."""
WRAPPERS = ("module.", "_orig_mod.")
SEED_STRIDE = 10_000
"""Difference between the seeds of generators in two starts; ranks lie between."""


class LearnedJob(Trained):
    """A TrainingJob that one contestant trains and that is then thrown away; each step has a batch of its own."""

    def __init__(self, built: BuiltJob, first: int) -> None:
        """Train a job from its batch number `first` on."""
        super().__init__(built.model, built.job.metric)
        self.name, self._built, self._first = built.spec, built, first
        self._shared = built
        self.compile = built.job.compile
        self._prepared: tuple[int, Any] | None = None

    def optimizer(self) -> Optimizers:
        """Return the job's optimizer, or its optimizers."""
        return self._built.optimizer

    def restored(self, optimizer: Optimizers) -> AbstractContextManager[None]:
        """Keep nothing: no other contestant trains this model."""
        return nullcontext()

    def share(self, shares: Mapping[str, int] | None) -> Callable[[], float] | None:
        """Train by shares from the next batch on; see `Trained.share`."""
        self._shared = self._built.sharing(shares)
        return self._shared.weight

    def prepare(self, number: int) -> str:
        """Make the batch of a step, and return a digest of the job's, which is the same with any shares."""
        step = self._first + number
        batch = self._built.batch(step)
        self._prepared = number, batch if self._shared.share is None else self._shared.batch(step)
        return batch_digest(batch)

    def step(self, forward: nn.Module, optimizer: Optimizers, number: int) -> float | None:
        """Make one step of the job; arguments as of `Trained.step`."""
        if self._prepared is None or self._prepared[0] != number:
            self.prepare(number)
        assert self._prepared is not None
        loss = float(self._built.train(self._prepared[1], forward, optimizer))
        return loss * self._shared.loss_factor


def batch_digest(batch: Any) -> str:
    """Return a digest of numbers in a batch, and of shapes, dtypes and first bytes of its tensors and arrays."""
    digest = hashlib.sha256()

    def take(leaf: Any) -> Any:
        if isinstance(leaf, numbers.Number | np.generic):
            digest.update(repr(leaf).encode())
            return leaf
        digest.update(f"{tuple(leaf.shape)} {leaf.dtype}".encode())
        count = max(1, DIGEST_BYTES // max(1, leaf.itemsize))
        if isinstance(leaf, np.ndarray):
            digest.update(b"" if leaf.dtype.hasobject else leaf.flat[:count].tobytes())
        elif leaf.layout == torch.strided and leaf.numel():
            flat = leaf.detach().reshape(-1)[:count]
            digest.update(flat.cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return leaf

    map_leaves(batch, lambda leaf: isinstance(leaf, Tensor | np.ndarray | np.generic | numbers.Number), take)
    return digest.hexdigest()


class Source:
    """Gives contestants their models."""

    one_by_one: str | None = None
    """Reason why contestants have to train one after the other, if any."""

    def __init__(self, name: str, bench: Bench, timeout_s: float | None, steps: int) -> None:
        """Train `steps` of each seed on the ranks of `bench`; `name` begins messages."""
        self.name, self.bench, self.timeout_s, self.steps = name, bench, timeout_s, steps

    def trained(self, seed: int) -> Trained:
        """Return a model at the start of a seed; every rank calls it."""
        raise NotImplementedError

    def seed_generators(self, seed: int) -> None:
        """Seed what a contestant draws from, the same for all of them; other ranks draw other values."""
        number = SEED + 1 + self.bench.world.rank + SEED_STRIDE * seed
        for set_seed in (random.seed, np.random.seed, torch.manual_seed):
            set_seed(number)


class JobSource(Source):
    """A new model of a job for each contestant."""

    def __init__(
        self, spec: str, device: str, start: str | None, bench: Bench, timeout_s: float | None, steps: int
    ) -> None:  # fmt: skip
        """Build the job `spec`; `start` is the file of a checkpoint."""
        super().__init__(spec, bench, timeout_s, steps)
        self._device, self._start = device, start

    def trained(self, seed: int) -> LearnedJob:
        """Build the job from the seed, or from the checkpoint."""
        built = build(self.name, self._device, SEED + seed)
        if built.job.compile is not None:
            lift_recompile_limits()
        done = 0 if self._start is None else load_checkpoint(self._start, built)
        world = self.bench.world
        if world.ranks > 1:
            world.broadcast([*exchanged_parameters(built.model), *exchanged_buffers(built.model)])
        self.seed_generators(seed)
        return LearnedJob(built, done + seed * self.steps)


class ScriptSource(Source):
    """A script's one model, which all contestants train from its present state."""

    one_by_one = "a script has one model"

    def __init__(self, trained: TrainedScript, bench: Bench, timeout_s: float | None, steps: int) -> None:
        super().__init__(trained.name, bench, timeout_s, steps)
        self._trained = trained

    def trained(self, seed: int) -> TrainedScript:
        """Return the model, which is restored after each contestant."""
        self._trained.first = seed * self.steps
        return self._trained


def load_checkpoint(path: str, built: BuiltJob) -> int:
    """Load model and optimizer from a file of `torch.save`, and return the number of steps that it was made after.

    Args:
        path: of a `state_dict` of the model, or of a dict with `model` or `model_state_dict`, and perhaps `optimizer`
            or `optimizer_state_dict` (a list, where the job has several) and `step`. Names may have the prefixes of DDP
            and `torch.compile`.
        built: the job.

    Raises:
        InputError: there is no such file, or it is of another model or optimizer.
    """
    try:
        state = torch.load(path, map_location=built.device, weights_only=True)
    except Exception as error:
        raise InputError(f"--from {path}: {error}; expected a file that torch.save wrote, of tensors only") from error
    if not isinstance(state, dict):
        raise InputError(f"--from {path}: found a {type(state).__name__}, expected a dict with model; save one")
    of_model = state.get("model", state.get("model_state_dict"))
    of_optimizer = state.get("optimizer", state.get("optimizer_state_dict"))
    whole = isinstance(of_model, dict)
    weights: Any = of_model if whole else state
    step = state.get("step", 0) if whole else 0
    if not isinstance(step, int):
        raise InputError(f"--from {path}: found step {step!r}, expected a whole number; save int(step)")
    try:
        built.model.load_state_dict(_unwrapped(weights, built.model.state_dict()))
        if whole and of_optimizer is not None:
            states = of_optimizer if isinstance(of_optimizer, list) else [of_optimizer]
            for one, saved in zip(each_of(built.optimizer), states, strict=True):
                one.load_state_dict(saved)
    except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
        first = " ".join(line.strip() for line in str(error).splitlines()[:2])
        raise InputError(f"--from {path}: {first}; expected a checkpoint of {built.spec}") from error
    return step


def _unwrapped(state: Mapping[str, Any], own: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a model's state without the prefixes of DDP and `torch.compile`, unless the model itself has them."""
    while state and not state.keys() & own.keys() and all(name.startswith(WRAPPERS) for name in state):
        state = {name.partition(".")[2]: tensor for name, tensor in state.items()}
    return state
