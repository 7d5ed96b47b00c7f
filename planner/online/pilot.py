"""The course of a run that brought no plan: DDP's buckets, then measure, decide, try, remember; again where it drifts.

All ranks take the same course: it depends on numbers of steps and on what ranks have told each other, never on a clock
of one rank alone. What planning may cost is a share of the time since the run began, so short steps are planned later.
"""

from __future__ import annotations

import math
import statistics
import warnings
import weakref
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, TypeVar

from planner.cost.model import scale
from planner.documents.profile import Contention, Profile
from planner.documents.text import pluralize
from planner.online.cache import Remembered
from planner.online.ddp import ddp_plan
from planner.online.deciding import Decision, names_of
from planner.online.measuring import (
    Curve,
    LinkProbe,
    Overlap,
    RankSample,
    Seen,
    curve_of,
    find_contention,
    make_profile,
    observe,
    own_messages,
    probe_sizes,
    us_per_byte,
    with_own_messages,
)
from planner.online.opening import Opening
from planner.online.trying import FEWEST_ROUNDS, climb, judge
from planner.profile.request import LOGGER, heard
from planner.strategies.baselines import CAPS_MIB
from runtime.errors import CacheWarning, PlannerError
from runtime.monitor.drift import complete
from runtime.monitor.trial import Rounds, trial_steps
from runtime.monitor.verdict import BLOCK_STEPS, Verdict
from runtime.plan import Plan, parse_plan
from runtime.session.session import Session

T = TypeVar("T")
Steps = Generator[Plan | None, None, T]
"""Goes on with each step that is done, and gives the plan of the next one, None for the present one."""

WARM_UP_STEPS, MEASURED_STEPS = 10, 20
FIRST_STAGE = (
    "the first steps warm up, then steps are measured; a plan takes some 100 steps of 50 ms, more of shorter ones"
)
LINKS_SHARE, PASSES = 0.018, 3
"""What messages that time the links may take of the steps that they are sent behind; and how often each size is."""
START_UP_US = 500.0
"""What a message is expected to take, beside the time of its bytes, before one has been seen."""
POLL_S = 0.5
"""How often, at most, ranks ask rank 0 for its plan."""
WORTH_TRYING = 0.01
"""Predicted gain from which a plan is tried, beside half of what predictions of the plans before were off."""
FAR_OFF = 0.015
"""Error of a predicted step from which other numbers of buckets are tried, too: they seldom win more than 2 %."""
MOST_TRIALS = 3
"""Trials of one search."""
MAY_LOSE, LEAST_LOSS_STEPS = 0.01, 0.5
"""Of the steps so far, how many all trials together may cost by plans that are slower; and how many of them have to be
left for another trial to begin.
"""
WATCHED_STEPS, WINDOW_STEPS = 50, 10
WATCH_S = 2.0
DRIFT = 0.2
"""Steps have drifted when every window of the last ones is longer than those before by this share, or shorter."""


@dataclass
class Pilot:
    """The `runtime.session.session.Director` of one session."""

    session: Session
    opening: Opening
    watches: bool = True
    """Whether to plan again where steps drift."""
    story: list[str] = field(default_factory=list)
    """What happened, in words."""
    decided: Plan | None = None
    """The last plan that was decided on, whether it was kept or not."""

    def __post_init__(self) -> None:
        # The session holds its director: without a cycle both are freed with the script's last reference.
        self.session = weakref.proxy(self.session)
        self._decision: Decision | None = None
        self._cache = self.opening.cache
        self._present: Plan = self.session.plan
        self._next: Plan | None = None
        self._profile: Profile | None = None
        self._expected = self._doubt = 0.0
        """Predicted gain of the last plan; by how much the simulator is not to be believed."""
        self._off = 0.0
        """By how much predictions were off at most: of steps before the first trial, and of what was tried."""
        self._others: dict[int, tuple[Plan, float]] = {}
        """DDP's buckets of other sizes by number, and their predicted step over that of the plan decided from."""
        self._outside_us = 0.0
        """What of a step is in no prediction, on rank 0."""
        self._lost_steps = 0.0
        """What trials have cost, in steps of the plans that they began with."""
        self._stage: tuple[str, int] | None = (FIRST_STAGE, WARM_UP_STEPS + 2)
        """What the run does before it has something to say, and the step at which that ends."""
        remembered = self.opening.remembered
        if remembered is not None:
            self.decided, self._profile, self._stage = remembered.plan, remembered.profile, None
            self.story += [*remembered.story, "another run begins"]
            self.tell(f"planned from the first step, with {self._called(remembered.plan)} that an earlier run kept")
        self._course = self._run()

    def step_done(self) -> Plan | None:
        """See `runtime.session.session.Director`."""
        return next(self._course, None)

    @property
    def stage(self) -> str | None:
        """What planning does now and how many steps that still takes; None where it waits for nothing."""
        if self._stage is None or self.opening.way == "off":
            return None
        what, end = self._stage
        left = max(0, end - self.session.step)
        more = f", for about {pluralize(left, 'more step')}" if left else ""
        return f"now, after {pluralize(self.session.step, 'step')}: {what}{more}"

    def _begin_stage(self, what: str, steps: int) -> None:
        self._stage = what, self.session.step + steps

    def close(self) -> None:
        """End what runs beside training."""
        self._course.close()
        if self._decision is not None:
            self._decision.close()
            self._decision = None

    def tell(self, text: str, *, aloud: bool = False) -> None:
        """Add to the story; `aloud`: rank 0 says it, too."""
        self.story.append(f"step {self.session.step}: {text}")
        if aloud and self.session.world.rank == 0:
            with heard():
                LOGGER.info("planner: after %d steps: %s", self.session.step, text)

    def _run(self) -> Steps[None]:
        reference_us = None
        if self.opening.remembered is None:
            self._switch(self._ddp_in_order())
            yield from self._wait(1)
            if self.opening.way == "off":
                return
            if self.opening.way == "auto" and self.opening.measured_on is not None:
                yield from self._try_scaled()
            yield from self._improve()
        elif self.opening.remembered.settled or self.opening.way != "auto":
            reference_us = self.opening.remembered.step_us
        else:
            yield from self._improve()
        while self.opening.way == "auto" and self.watches:
            if (yield from self._drifted(reference_us)):
                yield from self._improve()
            reference_us = None
        yield from self._wait(1)  # back to the present plan, where a trial was the last thing that happened

    def _wait(self, steps: int) -> Steps[None]:
        """Let so many more steps pass; the first one begins with the next plan where there is one."""
        for _ in range(steps):
            following, self._next = self._next, None
            yield following

    def _switch(self, plan: Plan) -> None:
        if plan is not self._present:
            self._present = self._next = plan

    def _gather(self, value: Any, what: str) -> list[Any]:
        return self.session.world.gather(value, what)

    def _ddp_in_order(self) -> Plan:
        """Return DDP's buckets in the order in which gradients became ready on rank 0, as DDP does after a step."""
        session = self.session
        step = session.recorder.steps[-1]
        clock, names = session.recorder.clock, self._present.gradients
        at = {n: clock.between_us(step.backward, mark) for n, mark in zip(names, step.ready, strict=True) if mark}
        session.recorder.each_gradient = clock.cheap
        # What got no gradient comes last, where nothing waits for it.
        mine = sorted(names, key=lambda name: at.get(name, math.inf))
        order: list[str] = self._gather(mine, "agreeing on the order of gradients")[0]
        if tuple(order) == names:
            return self._present
        return ddp_plan(session.parameters, order, self._present.model, self._present.world)

    def _seen_outside_us(self) -> float:
        """Return what lies between an update and the next forward, and in no prediction: input, other micro-batches."""
        clock = self.session.recorder.clock
        steps = complete(self.session.recorder.steps, clock)[-WATCHED_STEPS:]
        return statistics.median(
            [clock.between_us(a.update_end or a.end, b.forward) for a, b in pairwise(steps)] or [0.0]
        )

    def _try_scaled(self) -> Steps[None]:
        """Try the plan that measurements on another number of ranks give for this one, before any are taken here."""
        key = self.opening.key

        def scaled() -> Profile:
            assert self.opening.other is not None
            profile = self.opening.other.profile
            assert profile is not None
            assert profile.cluster is not None
            return replace(profile, cluster=scale(profile.cluster, key.nodes, key.ranks // key.nodes))

        self.tell(f"measured by an earlier run on {pluralize(self.opening.measured_on or 0, 'rank')}, extrapolated to "
                  f"{key.ranks}, until it is measured here", aloud=True)  # fmt: skip
        plan = yield from self._decide(scaled, {_digest(self._present)})
        if plan is not None:
            yield from self._wait(max(0, WARM_UP_STEPS - self.session.step))
            yield from self._try(plan)

    def _improve(self) -> Steps[None]:
        """Measure the present plan's steps, decide, and keep what is faster."""
        self.session.recorder.each_gradient = True
        self._begin_stage(FIRST_STAGE, WARM_UP_STEPS)
        yield from self._wait(WARM_UP_STEPS)
        samples, curve = yield from self._measure()
        self.session.recorder.each_gradient = self.session.recorder.clock.cheap
        if not samples:
            self._stage = None
            self.tell("nothing was measured: no step was seen from the model's forward to the end of backward; call "
                      "the model itself, or give a plan", aloud=True)  # fmt: skip
            return
        tried, self._doubt, self._off = {_digest(self._present)}, 0.0, 0.0
        contention: Contention | None = None
        seen: list[Seen] = []

        def measured() -> Profile:
            self._profile = make_profile(self.session, samples, curve, contention)
            return self._profile

        for _ in range(MOST_TRIALS):
            plan = yield from self._decide(measured, tried)
            if plan is None or self.opening.way == "report":
                break
            tried.add(_digest(plan))
            found = yield from self._try(plan)
            seen += found
            if not found or (slowed := find_contention(seen, curve)) is None:
                break
            contention = slowed
            self.tell(
                f"compute beside messages takes {slowed.compute:.2f} times as long, messages beside compute "
                f"{slowed.network:.2f} times"
            )
        if self._off > FAR_OFF and self.opening.way == "auto" and not self._present.sharded:
            yield from self._try_sizes(tried)
        self._stage = None
        self._remember()

    def _measure(self) -> Steps[tuple[list[RankSample], Curve]]:
        """Send messages behind the next steps, as the budget allows, then look at the last steps of all ranks."""
        session = self.session
        mine = (observe(session, WARM_UP_STEPS // 2), self.session.recorder.step_us(WATCHED_STEPS))
        first: list[tuple[RankSample | None, float]] = self._gather(mine, "comparing the first steps")
        if not all(sample for sample, _ in first):
            return [], ()
        step_us = max(step for _, step in first)
        model_bytes = sum(_sizes(self._present))
        byte_us = us_per_byte([sample.overlap for sample, _ in first if sample], model_bytes)
        sizes = probe_sizes(model_bytes)
        expected_us = [LinkProbe.calls(size) * (START_UP_US + size * byte_us) for size in sizes]
        waits = [max(1, math.ceil(time_us / (LINKS_SHARE * step_us))) for time_us in expected_us]
        self._begin_stage("steps and messages are measured; then rank 0 decides, and what it found is tried",
                          PASSES * sum(waits))  # fmt: skip
        begun, spent_us, probe = session.step, 0.0, LinkProbe(session, sizes)
        try:
            for number in range(PASSES):
                for size, time_us in zip(sizes, expected_us, strict=True):
                    yield from self._wait(max(1, math.ceil(time_us / (LINKS_SHARE * step_us))))
                    probe.send(size)
                ranks: list[list[float]] = self._gather(probe.times_us(), "comparing times of messages")
                spent_us = max(map(sum, ranks))
                expected_us = [*map(min, expected_us, *(one[-len(sizes) :] for one in ranks))]
                if number + 1 < PASSES:  # what was not expected is made up for
                    yield from self._wait(max(0, math.ceil(spent_us / (LINKS_SHARE * step_us)) - session.step + begun))
        finally:
            probe.close()
        samples: list[RankSample] = self._gather(observe(session, MEASURED_STEPS), "comparing the last steps")
        own = own_messages(_sizes(self._present), [sample.overlap for sample in samples])
        curve = with_own_messages(curve_of(sizes, ranks), own)
        share = spent_us / max((session.step - begun) * step_us, 1.0)
        self.tell(f"measured {MEASURED_STEPS} steps, and messages of {len(sizes)} sizes behind {PASSES * len(sizes)} "
                  f"others: {spent_us / 1e3:.0f} ms, {share:.1%} of their time")  # fmt: skip
        return samples, curve

    def _decide(self, profile: Callable[[], Profile], tried: set[str]) -> Steps[Plan | None]:
        """Return rank 0's plan where it is worth a trial, on all ranks alike; training goes on meanwhile.

        `profile` is what it is decided on, called on rank 0 alone; `tried` are digests of the present plan and of those
        that were tried.
        """
        self._begin_stage("rank 0 decides, which takes some seconds; what it finds is tried", 0)
        problem: str | None = None
        sized = self._sized()
        if self.session.world.rank == 0:
            try:
                others = [names_of(plan.buckets) for plan in (self._present, *sized.values())]
                request = {
                    "profile": profile().to_document(), "accuracy": self.opening.key.accuracy,
                    "allow": list(self.opening.key.allow), "others": others,
                }  # fmt: skip
                self._decision = Decision(request)
            except Exception as error:  # the other ranks wait for the answer
                problem = f"{type(error).__name__}: {error}"
        every = max(
            self._gather(
                max(1, math.ceil(POLL_S * 1e6 / self.session.recorder.step_us(WATCHED_STEPS))), "agreeing when to ask"
            )
        )
        answer: dict[str, Any] | None = None
        while answer is None:
            yield from self._wait(every)
            if self._decision is not None and (answer := self._decision.poll()) is not None:
                self._decision = None
                answer |= {
                    "step_us": self.session.recorder.step_us(WATCHED_STEPS),
                    "outside_us": self._seen_outside_us(),
                }
            answer = {"problem": problem} if problem is not None else answer
            answer = self._gather(answer, "asking for rank 0's plan")[0]
        if "problem" in answer:
            self.tell(f"no plan was made, the run goes on with its buckets: {answer['problem']}", aloud=True)
            return None
        plan = self.decided = parse_plan(answer["plan"])
        self._outside_us = answer["outside_us"]
        predicted_us = self._predicted_us(plan) or 0.0
        present_us, *sized_us = (other_us + self._outside_us for other_us in answer["others_us"])
        self._off = self._off or abs(1.0 - present_us / answer["step_us"])
        self._others = {
            count: (plan, other_us / present_us)
            for (count, plan), other_us in zip(sized.items(), sized_us, strict=True)
        }
        words = (
            f"a plan of {pluralize(len(plan.buckets), 'bucket')} is predicted to take {predicted_us / 1e3:.2f} ms a "
            f"step, the present one {present_us / 1e3:.2f} ms"
        )
        if _digest(plan) in tried:
            same = _digest(plan) == _digest(self._present)
            self.tell(f"{words}: it {'is the present one' if same else 'has been tried'}",
                      aloud=self.opening.way == "report")  # fmt: skip
            if same and _extrapolated(self._present):
                self._switch(plan)  # the same buckets, with what was measured here
            return None
        self._expected = 1.0 - predicted_us / present_us
        if self._expected < WORTH_TRYING + self._doubt:
            self.tell(f"{words}: not worth a trial", aloud=self.opening.way == "report")
            return None
        if self.opening.way == "report":
            self.tell(f"{words}; PLANNER=auto would try it", aloud=True)
            return plan
        self.tell(f"{words}: it is tried")
        return plan

    def _try(self, plan: Plan) -> Steps[list[Seen]]:
        """Train by both plans in interleaved blocks and go on with the faster; return what was seen of the present one
        and of the plan, nothing where a rank cannot lay the plan out.

        Waits until trials may cost something again.
        """
        enough = math.ceil((self._lost_steps + LEAST_LOSS_STEPS) / MAY_LOSE)
        self._begin_stage(f"{self._called(plan)} is tried",
                          max(0, enough - self.session.step) + 2 * BLOCK_STEPS * FEWEST_ROUNDS)  # fmt: skip
        yield from self._wait(max(0, enough - self.session.step))
        old = self._present
        rounds: Rounds = []
        may_lose_steps = MAY_LOSE * self.session.step - self._lost_steps
        seen: dict[bool, list[Overlap]] = {True: [], False: []}

        def verdict_on(found: Rounds) -> Verdict | None:
            nonlocal rounds
            rounds = found
            return judge(found, (self._called(plan), self._called(old)), may_lose_steps * found[0][1])

        def look(tried: Plan) -> None:
            self._present = tried
            if (sample := observe(self.session, BLOCK_STEPS - 1)) is not None:
                seen[tried is plan].append(sample.overlap)

        self._next = None  # a block begins with its own plan
        verdict = yield from trial_steps(plan, old, old, self.session, verdict_on, look)
        if verdict is None:  # the session has said why
            self._present = old
            return []
        self._lost_steps += BLOCK_STEPS * max(0.0, sum(new / old - 1.0 for new, old in rounds))
        self.tell(verdict.text, aloud=True)
        # The simulator was wrong by this; half of it, for the next plan is made with what the trial has shown.
        gain = 1.0 - verdict.step_us / verdict.other_us
        if (predicted_us := self._predicted_us(plan)) is not None:
            self._off = max(self._off, abs(1.0 - predicted_us / verdict.step_us))
        self._doubt = max(0.0, self._expected - gain) / 2.0
        self._switch(plan if verdict.good else old)
        if verdict.good:  # the run may end before it has tried everything
            self._remember(verdict.step_us, settled=False)
        ranks: list[dict[bool, list[Overlap]]] = self._gather(seen, "comparing what plans overlap")
        if not all(one[True] and one[False] for one in ranks):
            return []
        tried = ((True, plan), (False, old))
        return [Seen(tuple(_sizes(one)), tuple(_mean(rank[new]) for rank in ranks)) for new, one in tried]

    def _try_sizes(self, tried: set[str]) -> Steps[None]:
        """Try DDP's buckets of other sizes, and keep what is faster: as it would be tuned by hand."""
        others = {count: other for count, other in self._others.items() if _digest(other[0]) not in tried}
        predicted = {count: ratio for count, (_, ratio) in others.items()}
        sizes = climb(predicted, len(self._present.buckets), self._off)
        count = next(sizes, None)
        if count is not None:
            self.tell(f"the simulator was {self._off:.0%} off here: other sizes of buckets are tried")
        while count is not None:
            plan, _ = others[count]
            yield from self._try(plan)
            try:
                count = sizes.send(self._present is plan)
            except StopIteration:
                count = None

    def _sized(self) -> dict[int, Plan]:
        """Return DDP's buckets of other sizes, by their number."""
        present, plans = self._present, dict[int, Plan]()
        for cap_mib in CAPS_MIB:
            plan = ddp_plan(self.session.parameters, present.gradients, present.model, present.world, cap_mib)
            plans.setdefault(len(plan.buckets), plan)
        return plans

    def _predicted_us(self, plan: Plan) -> float | None:
        """Return how far the end of an update is expected to lie behind that of the one before."""
        return plan.predicted.iteration_us + self._outside_us if plan.predicted is not None else None

    def _called(self, plan: Plan) -> str:
        if plan.predicted is not None:
            return f"the plan of {pluralize(len(plan.buckets), 'bucket')}"
        _, at, size = (plan.buckets[0].reason or "").partition(" at ")
        return f"DDP's buckets{at}{size}"

    def _drifted(self, reference_us: float | None) -> Steps[bool]:
        """Watch until steps have become longer or shorter than the first ones (or than `reference_us`)."""
        while True:
            step_us = max(self._gather(self.session.recorder.step_us(WATCHED_STEPS), "comparing times of steps"))
            yield from self._wait(max(WATCHED_STEPS + WARM_UP_STEPS, math.ceil(WATCH_S * 1e6 / step_us)))
            last = self.session.recorder.intervals_us()[-WATCHED_STEPS:]
            windows = [last[at : at + WINDOW_STEPS] for at in range(0, len(last) - WINDOW_STEPS + 1, WINDOW_STEPS)]
            medians = [statistics.median(window) for window in windows]
            everyone: list[list[float]] = self._gather(medians, "watching steps")
            if not all(everyone):
                continue
            shortest_us = max(min(one) for one in everyone)
            longest_us = max(max(one) for one in everyone)
            if reference_us is None:
                reference_us = statistics.median(max(column) for column in zip(*everyone, strict=False))
                self._remember(reference_us)
            elif shortest_us > (1.0 + DRIFT) * reference_us or longest_us < (1.0 - DRIFT) * reference_us:
                now_us = statistics.median(max(column) for column in zip(*everyone, strict=False))
                self.tell(f"steps take {now_us / 1e3:.2f} ms, and took {reference_us / 1e3:.2f} ms: planned again",
                          aloud=True)  # fmt: skip
                return True

    def _remember(self, step_us: float | None = None, *, settled: bool = True) -> None:
        """Leave the present plan to the next run, which goes on trying where it is not `settled`; rank 0 does, and says
        once where it cannot.
        """
        if self._cache is None or self.session.world.rank != 0 or self.opening.way != "auto":
            return
        if step_us is None:
            step_us = self.session.recorder.step_us(WATCHED_STEPS)
        kept = Remembered(
            key=self.opening.key, plan=self._present, profile=self._profile, step_us=round(step_us, 3),
            story=tuple(self.story[-20:]), settled=settled,
        )  # fmt: skip
        try:
            self._cache.write(kept)
        except (PlannerError, OSError) as error:
            self._cache = None
            warnings.warn(f"the plan is not remembered: {error}", CacheWarning, stacklevel=2)


def _extrapolated(plan: Plan) -> bool:
    return plan.predicted is not None and plan.predicted.extrapolated is True


def _sizes(plan: Plan) -> list[int]:
    return [bucket.size_bytes or 0 for bucket in plan.buckets]


def _digest(plan: Plan) -> str:
    """Equal for plans that do the same, whatever they predict."""
    buckets = tuple(replace(bucket, reason=None, size_bytes=None) for bucket in plan.buckets)
    steps = plan.updates if plan.sharded else None
    return Plan(
        model=plan.model, world=plan.world, accuracy=plan.accuracy, buckets=buckets, updates=steps,
        phase_order=plan.phase_order,
    ).digest()  # fmt: skip


def _mean(ones: Sequence[Overlap]) -> Overlap:
    """Return medians over blocks."""
    whole = [one for one in ones if one.sent_us]
    return Overlap(
        statistics.median(one.backward_end_us for one in ones),
        statistics.median(one.shared_us for one in ones),
        tuple(map(statistics.median, zip(*(one.sent_us for one in whole), strict=True))),
        tuple(map(statistics.median, zip(*(one.beside for one in whole), strict=True))),
    )
