"""A run without a plan: its session, present plan, story and memory."""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar

from planner.documents.profile import Profile
from planner.documents.text import pluralize
from planner.online.cache import Remembered
from planner.online.ddp import AS_DDP
from planner.online.opening import Opening
from planner.online.trying import FEWEST_ROUNDS
from planner.profile.request import LOGGER, heard
from runtime.errors import CacheWarning, PlannerError
from runtime.monitor.verdict import BLOCK_STEPS
from runtime.plan import CompressorSpec, Plan
from runtime.session.session import Session

T = TypeVar("T")
Steps = Generator[Plan | None, None, T]
"""Resumed after each step; yields the plan of the next one, None for the present one."""

WATCHED_STEPS = 50
"""Last steps whose median is a step's time."""
WARM_UP_STEPS = 10
FIRST_STAGE = (
    "the first steps warm up, then steps are measured; a plan takes some 100 steps of 50 ms, more of shorter ones"
)
MEASURING_STEPS, MEASURING_S = 20, 2.0
"""Expected minimum of steps and of seconds in which links are measured."""
DECIDING_S = 3.0
"""Expected time in which rank 0 decides."""
TRIAL_STEPS = 2 * BLOCK_STEPS * FEWEST_ROUNDS
"""Steps of a trial."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A part of planning."""

    what: str
    end_step: int
    later_steps: int = 0
    """Expected minimum of steps from the end of this stage to the end of the first trial."""
    later_s: float = 0.0
    """Expected seconds of that in which steps are not counted."""


class PlannedRun:
    """The present plan and the next one are the same on all ranks."""

    def __init__(self, session: Session, opening: Opening, story: Sequence[str]) -> None:
        # The session holds its director: without a cycle both are freed with the script's last reference.
        self.session: Session = weakref.proxy(session)
        self.opening, self.story, self._cache = opening, list(story), opening.cache
        self.present: Plan = session.plan
        self.next: Plan | None = None
        self.profile: Profile | None = None
        """Profile that the last plan was decided from."""
        self.doing: Stage | None = Stage(
            what=FIRST_STAGE, end_step=WARM_UP_STEPS + 2, later_steps=MEASURING_STEPS + TRIAL_STEPS,
            later_s=MEASURING_S + DECIDING_S,
        )  # fmt: skip
        """Stage of planning; None: planning waits for nothing."""
        self.compile_us = 0.0
        """Time that graphs of a compiled model took to compile when it was seen last; 0: it is not compiled."""
        self.trials = 0
        """Number of plans that were tried."""
        self.cost_us = 0.0
        """Time that timed messages and slower plans in trials have cost."""
        self.ratio = 1.0
        """Step with the present plan over that with the first one, by those trials whose difference is beyond noise."""
        self.exact_ratio = 1.0
        """The same of the last exact plan."""
        self._planned: dict[tuple[str, ...], CompressorSpec] = {}
        """Gradients of each bucket that the guard sends otherwise → its planned form."""
        self.too_far = False
        """Whether the guard has ended outer steps: no later plan has any."""
        self.has_changed = False
        """Whether a trial has ended with another plan."""

    @property
    def stage(self) -> str | None:
        """Return the stage of planning and the number of steps that it still takes; None where it waits for nothing."""
        if self.doing is None or self.opening.way == "off":
            return None
        left = max(0, self.doing.end_step - self.session.step)
        more = f", for about {pluralize(left, 'more step')}" if left else ""
        return f"now, after {pluralize(self.session.step, 'step')}: {self.doing.what}{more}"

    @property
    def steps_left(self) -> int:
        """Expected number of steps until planning waits for nothing."""
        if self.doing is None or self.opening.way == "off":
            return 0
        waited = math.ceil(self.doing.later_s * 1e6 / self.step_us)
        return max(0, self.doing.end_step - self.session.step) + self.doing.later_steps + waited

    def begin_stage(self, what: str, steps: int, later_steps: int = 0, later_s: float = 0.0) -> None:
        """Begin a stage of a number of steps; see `Stage`."""
        end_step = self.session.step + steps
        self.doing = Stage(what=what, end_step=end_step, later_steps=later_steps, later_s=later_s)

    def tell(self, text: str, *, aloud: bool = False) -> None:
        """Add to the story; `aloud`: rank 0 logs it, too."""
        self.story.append(f"step {self.session.step}: {text}")
        if aloud and self.session._world.rank == 0:
            with heard():
                LOGGER.info("planner: after %d steps: %s", self.session.step, text)

    def wait(self, steps: int) -> Steps[None]:
        """Wait for a number of steps; the first one begins with the next plan where there is one."""
        for _ in range(steps):
            following, self.next = self.next, None
            yield following

    def take_guarded(self) -> None:
        """Take as the present plan what the guard has made of it (`runtime.sparse.guard`), the same on all ranks."""
        guarded = self.session.plan
        if self.next is None and self.present.outer is not None and guarded == self.present.fallback:
            self.tell("workers were too far from each other: steps are synchronous again")
            self.present, self.ratio, self.too_far = guarded, self.exact_ratio, True
        if self.next is not None or len(guarded.buckets) != len(self.present.buckets):
            return
        changed = [
            (before, after)
            for before, after in zip(self.present.buckets, guarded.buckets, strict=True)
            if before.gradients == after.gradients and before.compressor != after.compressor
        ]
        restored = [one.gradients for _, one in changed if self._planned.get(one.gradients) == one.compressor]
        for before, _ in changed:
            self._planned.setdefault(before.gradients, before.compressor)
        for gradients in restored:
            del self._planned[gradients]
        if harmful := len(changed) - len(restored):
            self.tell(f"{pluralize(harmful, 'bucket')} did harm, and are sent otherwise: no later plan narrows them")
        if restored:
            self.tell(f"{pluralize(len(restored), 'bucket')} that did harm are compressed as planned again")
        if changed:
            self.present = guarded

    @property
    def harmed(self) -> set[str]:
        """Return the gradients of buckets that the guard sends otherwise: no later plan encodes them."""
        return set(chain.from_iterable(self._planned))

    def make_exact(self) -> None:
        """Switch to the exact plan that the present one was tried against: bounded steps time no whole gradients."""
        self.take_guarded()
        if self.present.accuracy != "exact":
            self.switch(self.present.fallback or self.opening.plan)
            self.ratio = self.exact_ratio

    def switch(self, plan: Plan) -> None:
        if plan is not self.present:
            self.present = self.next = plan

    def gather(self, value: Any, what: str) -> list[Any]:
        return self.session._world.gather(value, what)

    @property
    def step_us(self) -> float:
        """Median of the last steps on this rank."""
        return self.session._recorder.step_us(WATCHED_STEPS)

    def ms(self, exchange_us: float) -> float:
        """Return the time from one exchange to the next as that of a step of the optimizer, in ms."""
        return exchange_us * self.session._recorder.exchanges_per_update / 1e3

    @property
    def saved(self) -> float:
        """Return what a bounded plan saves of the last exact one's step, as a share of its own step; 0 if exact."""
        return self.exact_ratio / self.ratio - 1.0

    def remember(self, step_us: float | None = None, *, settled: bool = True) -> None:
        """Save the present plan for the next run, on rank 0, which warns once where it cannot.

        Args:
            step_us: a step with the plan; None: the last ones' median.
            settled: whether the run has tried all that it would; the next one continues otherwise.
        """
        self.take_guarded()
        if self._cache is None or self.session._world.rank != 0 or self.opening.way != "auto":
            return
        if step_us is None:
            step_us = self.step_us
        kept = Remembered(
            key=self.opening.key, plan=self.present, profile=self.profile, step_us=round(step_us, 3),
            story=tuple(self.story[-20:]), settled=settled,
        )  # fmt: skip
        try:
            self._cache.write(kept)
        except (PlannerError, OSError) as error:
            self._cache = None
            warnings.warn(f"the plan is not remembered: {error}", CacheWarning, stacklevel=2)


def called(plan: Plan) -> str:
    """Return what a plan is called in the story."""
    if plan.predicted is not None:
        kind = "" if plan.accuracy == "exact" else f"{plan.accuracy} "
        return f"the {kind}plan of {pluralize(len(plan.buckets), 'bucket')}"
    reason = plan.buckets[0].reason or ""
    dtypes = ", ".join(dict.fromkeys(bucket.compressor.dtype or "" for bucket in plan.buckets if not bucket.dense))
    encoded = f" in {dtypes}" if dtypes else ""
    if plan.cuts is not None and not reason.startswith(AS_DDP):
        return f"{reason}{encoded}"
    _, at, size = reason.partition(" at ")
    return f"DDP's buckets{at}{size}{encoded}"
