"""Whether what lossy buckets leave behind does no harm: δ of LAGS-SGD's Assumption 1, sampled while training.

Now and then, one bucket after the other, ranks add up what they hold back of a bucket, which costs a dense all-reduce
of it. δ compares that with what random-k of the summed gradients would leave (`runtime.sparse.compressors.delta`);
while it is at most 1, the paper's convergence holds. A bucket whose δ stays above 1 goes dense. All ranks see the same
sums, and rank 0's figures count, so that all decide alike.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from runtime.comm.world import World
from runtime.core.buckets import BucketBuffer
from runtime.errors import AccuracyWarning
from runtime.monitor.clock import Clock
from runtime.plan import NO_COMPRESSION, Plan
from runtime.sparse.compressors.delta import delta
from runtime.sparse.lossy import Lossy

FIRST_STEP = 10
"""Residuals fill in the first steps."""
COST = 0.005
"""Part of the time that sampling may take."""
FEWEST_STEPS = 20
"""Between two samples at the least."""
HARMFUL, SAMPLES = 1.0, 3
"""A bucket goes dense when so many samples of it in a row are above."""


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """One bucket at one step, over all ranks."""

    step: int
    delta: float
    energy: float
    """‖sent‖² / ‖sent + held back‖², of the sums over ranks."""
    residual_norm: float
    """Of the sum over ranks of what is held back."""


class Watched(Protocol):
    """A bucket of which the largest elements travel."""

    @property
    def bucket(self) -> BucketBuffer: ...
    @property
    def k(self) -> int:
        """How many elements each worker sends."""
        ...

    def sums(self, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
        """(what is held back, what was sent in the last step), added up over all ranks, which all call this. 1-D."""
        ...


@dataclass(frozen=True)
class LossyBucket:
    """See `Watched`; whose gradients become the sums."""

    bucket: BucketBuffer
    lossy: Lossy

    @property
    def k(self) -> int:
        return self.lossy.k

    def sums(self, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
        """See `Watched`."""
        held = self.lossy.carrier.held_back()
        dist.all_reduce(held, group=group)
        return held, self.lossy.carrier.sums()


class Guard:
    """Samples the buckets of one exchange that send their largest elements, in turn."""

    def __init__(self, buckets: Sequence[Watched], world: World, clock: Clock) -> None:
        self._buckets = buckets
        self._world, self._clock = world, clock
        self._turn, self._due, self._steps = 0, FIRST_STEP, 0
        self._last_step = clock.mark()
        self.samples: dict[int, list[Sampled]] = {one.bucket.index: [] for one in buckets}
        """By bucket."""

    def step_done(self, step: int) -> int | None:
        """After each step, before the optimizer: the bucket that has to go dense, if any. Ranks may meet here."""
        self._steps += 1
        if not self._buckets or self._world.group is None or self._steps < self._due:
            return None
        step_us = self._clock.between_us(self._last_step, self._clock.mark()) / self._steps
        begun = self._clock.mark()
        sampled = self._buckets[self._turn % len(self._buckets)]
        mine, index = self._sample(sampled, step), sampled.bucket.index
        cost_us = self._clock.between_us(begun, self._clock.mark())
        everyone = self._world.gather((mine, cost_us, step_us), "sampling what lossy buckets leave behind")
        slowest_us, shortest_us = max(one[1] for one in everyone), max(1.0, min(one[2] for one in everyone))
        self._turn += 1
        self._due, self._steps = max(FEWEST_STEPS, math.ceil(slowest_us / (COST * shortest_us))), 0
        self._last_step = self._clock.mark()
        found = self.samples[index]
        found.append(everyone[0][0])
        last = found[-SAMPLES:]
        harmful = len(last) == SAMPLES and all(sample.delta > HARMFUL for sample in last)
        return index if harmful else None

    def _sample(self, watched: Watched, step: int) -> Sampled:
        with self._world.naming(f"sampling {watched.bucket.label}"):
            held, sent = watched.sums(self._world.group)
        whole = float(torch.linalg.vector_norm(held + sent, dtype=torch.float64)) ** 2
        went = float(torch.linalg.vector_norm(sent, dtype=torch.float64)) ** 2
        return Sampled(
            step=step,
            delta=delta(held + sent, sent, watched.k),
            energy=went / whole if whole > 0.0 else 1.0,
            residual_norm=float(torch.linalg.vector_norm(held, dtype=torch.float64)),
        )


def without(plan: Plan, index: int, samples: list[Sampled]) -> Plan:
    """The plan with one bucket that sends everything; warns."""
    bucket = plan.buckets[index]
    values = ", ".join(f"{sample.delta:.2f}" for sample in samples[-SAMPLES:])
    warnings.warn(
        f"bucket {index} ({bucket.gradients[0]} … {bucket.gradients[-1]}) leaves more behind than random choice would "
        f"(δ {values}, expected at most {HARMFUL:g}): from now on it sends everything, and steps are longer than "
        f"predicted",
        AccuracyWarning,
        stacklevel=2,
    )
    # With the same phases, so that the plan's order of phases stands.
    algorithm = "torus_2d" if bucket.algorithm == "hitopk" else "library"
    dense = replace(bucket, collective="all_reduce", algorithm=algorithm, compressor=NO_COMPRESSION)
    return replace(plan, buckets=(*plan.buckets[:index], dense, *plan.buckets[index + 1 :]))
