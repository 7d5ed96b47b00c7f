"""Whether what lossy buckets leave behind does no harm: δ of LAGS-SGD's Assumption 1, sampled while training.

Now and then, one bucket after the other, ranks add up their residuals of a bucket, which costs a dense all-reduce of
it. δ compares that with what random-k of the summed gradients would leave (`delta`);
while it is at most 1, the paper's convergence holds. A bucket whose δ stays above 1 goes dense. All ranks see the same
sums, and rank 0's figures count, so that all decide alike.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from runtime.comm.world import World
from runtime.core.buckets import BucketBuffer
from runtime.errors import AccuracyWarning
from runtime.monitor.clock import Clock
from runtime.plan import NO_COMPRESSION, Plan

FIRST_STEP = 10
"""Residuals fill in the first steps."""
COST = 0.005
"""Part of the time that sampling may take."""
FEWEST_STEPS = 20
MAX_DELTA, SAMPLES_IN_A_ROW = 1.0, 3
"""A bucket goes dense when so many samples of it are above."""


def delta(accumulated_sum: Tensor, sent_sum: Tensor, k: int) -> float:
    """Return δ = ‖Σacc − Σsent‖² / E‖Σacc − RandK(Σacc)‖²; the assumption, and with it convergence, holds while δ ≤ 1.

    RandK keeps each of n elements with probability k/n, so the expectation is (1 − k/n)·‖Σacc‖²: nothing is drawn.
    `accumulated_sum` is the sum over ranks of residual + gradient, `sent_sum` of what was sent, zero where nothing was.
    δ is 0 where nothing was left behind, +∞ where something was though random-k would leave nothing, NaN where sums are
    not finite.
    """
    elements = accumulated_sum.numel()
    if sent_sum.shape != accumulated_sum.shape or not 0 <= k <= elements:
        raise ValueError(
            f"delta: found k = {k} of tensors of {tuple(accumulated_sum.shape)} and {tuple(sent_sum.shape)}; expected "
            f"two of one shape and k between 0 and their elements"
        )
    left = float(torch.linalg.vector_norm(accumulated_sum - sent_sum, dtype=torch.float64)) ** 2
    if left == 0.0:
        return 0.0
    whole = float(torch.linalg.vector_norm(accumulated_sum, dtype=torch.float64)) ** 2
    expected = (1.0 - k / elements) * whole
    return left / expected if expected else math.inf


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """One bucket at one step, over all ranks."""

    step: int
    delta: float
    energy: float
    """‖sent‖² / ‖sent + residual‖², of the sums over ranks."""
    residual_norm: float


@dataclass(frozen=True)
class Watched:
    """A bucket of which the largest elements are sent."""

    bucket: BucketBuffer
    k: int
    sums: Callable[[dist.ProcessGroup | None], tuple[Tensor, Tensor]]
    """(group) → (residual, what was sent in the last step), added up over all ranks, which all call this. 1-D."""


class Guard:
    """Samples the buckets of one exchange that send their largest elements, in turn."""

    def __init__(self, buckets: Sequence[Watched], world: World, clock: Clock) -> None:
        self._buckets = buckets
        self._world, self._clock = world, clock
        self._turn, self._due, self._steps = 0, FIRST_STEP, 0
        self._last_step = clock.mark()
        self.samples: dict[int, list[Sampled]] = {one.bucket.index: [] for one in buckets}

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
        # Rank 0's figures count, so that all ranks decide alike.
        found = self.samples[index]
        found.append(everyone[0][0])
        last = found[-SAMPLES_IN_A_ROW:]
        harmful = len(last) == SAMPLES_IN_A_ROW and all(sample.delta > MAX_DELTA for sample in last)
        return index if harmful else None

    def _sample(self, watched: Watched, step: int) -> Sampled:
        with self._world.error_context(f"sampling {watched.bucket.label}"):
            residual, sent = watched.sums(self._world.group)
        whole = float(torch.linalg.vector_norm(residual + sent, dtype=torch.float64)) ** 2
        went = float(torch.linalg.vector_norm(sent, dtype=torch.float64)) ** 2
        return Sampled(
            step=step,
            delta=delta(residual + sent, sent, watched.k),
            energy=went / whole if whole > 0.0 else 1.0,
            residual_norm=float(torch.linalg.vector_norm(residual, dtype=torch.float64)),
        )


def with_dense_bucket(plan: Plan, index: int, samples: list[Sampled]) -> Plan:
    """Return the plan with one bucket that sends everything; warns."""
    bucket = plan.buckets[index]
    values = ", ".join(f"{sample.delta:.2f}" for sample in samples[-SAMPLES_IN_A_ROW:])
    warnings.warn(
        f"bucket {index} ({bucket.gradients[0]} … {bucket.gradients[-1]}) leaves more behind than random choice would "
        f"(δ {values}, expected at most {MAX_DELTA:g}): from now on it sends everything, and steps are longer than "
        f"predicted",
        AccuracyWarning,
        stacklevel=2,
    )
    # With the same phases, so that the plan's order of phases stands.
    algorithm = "torus_2d" if bucket.algorithm == "hitopk" else "library"
    dense = replace(bucket, collective="all_reduce", algorithm=algorithm, compressor=NO_COMPRESSION)
    return replace(plan, buckets=(*plan.buckets[:index], dense, *plan.buckets[index + 1 :]))
