"""Whether compressed buckets do no harm, sampled while training.

Now and then, one bucket after the other, ranks look together at what a bucket has not sent; what they look at, and
what is too much, is the bucket's own affair (`runtime.sparse.samples`). A bucket that does harm several times in a row
is sent otherwise: in a wider format, or whole. All ranks see the same sums, and rank 0's figures count, so that all
decide alike. After a number of steps, which all ranks count, the bucket is compressed as planned again; each time that
it does harm soon after that, it waits twice as long.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from runtime.comm.world import World
from runtime.errors import AccuracyWarning
from runtime.monitor.clock import Clock
from runtime.plan import Plan, PlanBucket
from runtime.sparse.samples import Sampled, Watched

FIRST_STEP = 10
"""Residuals fill in the first steps."""
COST = 0.005
"""Part of the time that sampling may take."""
FEWEST_STEPS = 20
SAMPLES_IN_A_ROW = 3
"""Number of consecutive harmful samples of a bucket that are too many."""
FIRST_WAIT_STEPS = 1000
"""Steps until a bucket that did harm is compressed as planned again: several times what it takes to find the harm."""


@dataclass
class _Relaxed:
    """A bucket that did harm."""

    planned: PlanBucket
    wait_steps: int
    """Steps from harm to the next trial of what is planned."""
    step: int
    """Step at which its form changed last."""
    restored: bool = False
    """Whether it is compressed as planned again."""


class RelaxedBuckets:
    """Buckets of one plan that did harm: what was planned, and when it is tried again. Alike on all ranks, for it
    depends on the guard's findings and on numbers of steps alone.
    """

    def __init__(self) -> None:
        self._found: dict[int, _Relaxed] = {}

    def relax(self, index: int, present: PlanBucket, step: int) -> int:
        """Note that a bucket did harm at a step; return after how many steps it is compressed as planned again.

        Args:
            index: of the bucket in the plan.
            present: how it has been sent.
            step: number of the step.
        """
        found = self._found.get(index)
        if found is None:
            found = self._found[index] = _Relaxed(present, FIRST_WAIT_STEPS, step)
        elif found.restored:
            soon = step - found.step < found.wait_steps
            found.wait_steps = 2 * found.wait_steps if soon else FIRST_WAIT_STEPS
        found.step, found.restored = step, False
        return found.wait_steps

    def restore(self, plan: Plan, step: int) -> tuple[int, Plan] | None:
        """Return a bucket whose wait is over and the plan with it as it was planned; None if there is none. Each is
        returned once.
        """
        for index, found in self._found.items():
            if not found.restored and step - found.step >= found.wait_steps:
                found.step, found.restored = step, True
                return index, with_bucket(plan, index, found.planned)
        return None


def with_bucket(plan: Plan, index: int, bucket: PlanBucket) -> Plan:
    """Return the plan with another bucket in one place."""
    return replace(plan, buckets=(*plan.buckets[:index], bucket, *plan.buckets[index + 1 :]))


class Guard:
    """Samples the buckets of one exchange that may do harm, in turn."""

    def __init__(self, buckets: Sequence[Watched], world: World, clock: Clock) -> None:
        self._buckets = buckets
        self._world, self._clock = world, clock
        self._turn, self._due, self._steps = 0, FIRST_STEP, 0
        self._last_step = clock.mark()
        self.samples: dict[int, list[Sampled]] = {one.bucket.index: [] for one in buckets}
        self._announce()

    @property
    def _next(self) -> Watched:
        return self._buckets[self._turn % len(self._buckets)]

    def _announce(self) -> None:
        """Prepare the next bucket in turn if the next step is sampled."""
        if self._buckets and self._steps + 1 >= self._due:
            self._next.expect()

    def step_done(self, step: int) -> Watched | None:
        """Return, before each step of the optimizer, the bucket that does harm, if any. Ranks may meet here."""
        self._steps += 1
        if not self._buckets or self._world.group is None:
            return None
        harmful = self._look(step) if self._steps >= self._due else None
        self._announce()
        return harmful

    def _look(self, step: int) -> Watched | None:
        """Sample the bucket whose turn it is; return it where it has done harm too often."""
        step_us = self._clock.between_us(self._last_step, self._clock.mark()) / self._steps
        begun = self._clock.mark()
        watched = self._next
        with self._world.error_context(f"sampling {watched.bucket.label}"):
            mine = watched.sample(self._world.group, step)
        cost_us = self._clock.between_us(begun, self._clock.mark())
        everyone = self._world.gather((mine, cost_us, step_us), "sampling what lossy buckets leave behind")
        slowest_us, shortest_us = max(one[1] for one in everyone), max(1.0, min(one[2] for one in everyone))
        self._turn += 1
        self._due, self._steps = max(FEWEST_STEPS, math.ceil(slowest_us / (COST * shortest_us))), 0
        self._last_step = self._clock.mark()
        # Rank 0's figures count, so that all ranks decide alike.
        found = self.samples[watched.bucket.index]
        found.append(everyone[0][0])
        last = found[-SAMPLES_IN_A_ROW:]
        return watched if len(last) == SAMPLES_IN_A_ROW and all(sample.harmful for sample in last) else None

    def relax_bucket(self, plan: Plan, harmful: Watched, wait_steps: int) -> Plan:
        """Return the plan with one bucket that is sent otherwise for `wait_steps`; warns."""
        index = harmful.bucket.index
        bucket, samples = plan.buckets[index], self.samples[index][-SAMPLES_IN_A_ROW:]
        following, now = harmful.relaxed_bucket(bucket)
        violation = harmful.describe_violation(samples)
        self._world.warn(
            f"bucket {index} ({bucket.gradients[0]} … {bucket.gradients[-1]}) {violation}: from now on {now}, and "
            f"steps are longer than predicted; after {wait_steps} steps it is compressed as planned again",
            AccuracyWarning,
        )
        return with_bucket(plan, index, following)
