"""The course of a run that brought no plan: DDP's buckets, then measure, decide, try, remember; again where it drifts.

All ranks take the same course: it depends on numbers of steps and on control messages, never on a clock of one rank
alone. What planning may cost is a share of the time since the run began, so short steps are planned later.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

from planner.cost.model import scale
from planner.decide.cut_choice import possible_cuts
from planner.documents.profile import Contention, Profile
from planner.documents.text import pluralize
from planner.ir import GAIN
from planner.model.problem import make_problem
from planner.online.candidates import Candidates
from planner.online.ddp import ddp_plan, in_dtype
from planner.online.measuring import (
    Overlap,
    Seen,
    exposed_us,
    find_contention,
    first_steps,
    make_profile,
    measure_run,
)
from planner.online.opening import Opening
from planner.online.planned_run import (
    DECIDING_S,
    FIRST_STAGE,
    MEASURING_S,
    MEASURING_STEPS,
    TRIAL_STEPS,
    WARM_UP_STEPS,
    WATCHED_STEPS,
    PlannedRun,
    Steps,
    called,
)
from planner.online.trials import Trials
from runtime.plan import Plan
from runtime.plan.executed import executed_digest
from runtime.session.session import Session
from runtime.torch_compat import is_compiled

FAR_OFF = 0.015
"""Error of a predicted step from which other numbers of buckets are tried, too: they seldom win more than 2 %."""
MOST_TRIALS = 3
"""Trials of one search."""
EIGHT_BITS_SAVE = 0.75
"""Share of the time of messages in float32 that is saved at most."""
WINDOW_STEPS = 10
WATCH_S = 2.0
DRIFT = 0.2
"""Steps have drifted when every window of the last ones is longer than those before by this share, or shorter."""


class Pilot:
    """The `runtime.session.session.Director` of one session."""

    def __init__(self, session: Session, opening: Opening, *, watches: bool = True, story: Sequence[str] = ()) -> None:
        """`watches`: whether to plan again where steps drift; `story`: what has happened before."""
        self.watches = watches
        self.is_overruled = False
        """Whether the caller has switched to a plan, and decides from then on."""
        self._run = run = PlannedRun(session, opening, story)
        self._candidates = Candidates(run)
        self._trials = Trials(run, self._candidates)
        self.story, self.tell = run.story, run.tell
        remembered = opening.remembered
        if remembered is not None:
            self._candidates.decided, run.profile, run.doing = remembered.plan, remembered.profile, None
            run.story += [*remembered.story, "another run begins"]
            run.tell(f"planned from the first step, with {called(remembered.plan)} that an earlier run kept")
        self._course = self._fly()

    @property
    def stage(self) -> str | None:
        """Return the stage of planning; see `PlannedRun.stage`."""
        return self._run.stage

    @property
    def is_unplanned(self) -> bool:
        """Return whether planning has begun, and no plan has been tried yet."""
        run = self._run
        return self.stage is not None and run.trials == 0 and run.opening.remembered is None

    def summary(self, *, ended: bool) -> str:
        """Return what planning has brought, in a sentence; `ended`: the run is over."""
        run = self._run
        if run.opening.way == "off":
            return "PLANNER=off: DDP's buckets, nothing was measured or tried"
        if self.is_unplanned:
            state = "the run ended before planning" if ended else "not planned yet"
            return f"{state}: about {pluralize(run.steps_left, 'more step')}"
        if run.opening.way == "report":
            return "PLANNER=report: kept DDP's buckets, nothing was tried"
        tried = f"{pluralize(run.trials, 'alternative')} tried"
        if run.ratio < 1.0:
            text = f"chose {called(run.present)}: {1.0 - run.ratio:.1%} less time a step ({tried})"
        elif run.has_changed:
            text = f"chose {called(run.present)}: no difference beyond the noise ({tried})"
        elif run.opening.remembered is not None:
            text = f"kept {called(run.present)}, which an earlier run found" + (f" ({tried})" if run.trials else "")
        elif self.decided is None:
            text = "kept DDP's buckets: no plan was made"
        elif run.trials:
            text = f"kept DDP's buckets: {tried}, none faster"
        else:
            text = "kept DDP's buckets: nothing is predicted to be worth a trial"
        return f"{text}; planning cost {run.cost_us / 1e6:.1f} s"

    def metrics(self) -> dict[str, float]:
        """Return what planning has cost, as `Session.metrics` does."""
        run = self._run
        return {"plans_tried": run.trials, "planning_us": run.cost_us, "planning_steps_left": run.steps_left}

    @property
    def decided(self) -> Plan | None:
        """Return the last plan that was decided on."""
        return self._candidates.decided

    def possible_cuts(self) -> list[str]:
        """Return what cuts of the graph would win where one was measured and is not to be cut; on rank 0."""
        profile, asked = self._run.profile, self._run.opening.key.compile
        if profile is None or profile.cluster is None or asked is not None or not is_compiled(self._run.session.model):
            return []
        choice = possible_cuts(make_problem(profile))
        return [] if choice is None else [choice.note]

    def step_done(self) -> Plan | None:
        """Return the plan of the next step; see `runtime.session.session.Director`."""
        return next(self._course, None)

    def close(self) -> None:
        """End the process that decides."""
        self._course.close()
        self._candidates.close()

    def _fly(self) -> Steps[None]:
        run = self._run
        reference_us = None
        if run.opening.remembered is None:
            first_us = self._took_us() if self._trials.tries_cuts else 0.0
            run.switch(self._ddp_in_order())
            yield from run.wait(1)
            run.compile_us = max(0.0, first_us - self._took_us()) if self._trials.tries_cuts else 0.0
            if run.opening.way == "off":
                return
            if run.opening.way == "auto" and run.opening.measured_on is not None:
                yield from self._try_scaled()
            yield from self._plan()
        elif run.opening.remembered.settled or run.opening.way != "auto":
            reference_us = run.opening.remembered.step_us
        else:
            yield from self._plan()
        while run.opening.way == "auto" and self.watches:
            if (yield from self._drifted(reference_us)):
                yield from self._plan()
            reference_us = None
        yield from run.wait(1)  # back to the present plan, where a trial was the last thing that happened

    def _took_us(self) -> float:
        """Return the time of the last step on this rank, from its first forward to the last average; 0: not known."""
        step, clock = self._run.session._recorder.steps[-1], self._run.session._recorder.clock
        begun = step.micro_batches[0][0] if step.micro_batches else step.forward
        return 0.0 if begun is None else clock.between_us(begun, step.end)

    def _ddp_in_order(self) -> Plan:
        """Return DDP's buckets in the order in which gradients became ready on rank 0, as DDP does after a step."""
        run = self._run
        session = run.session
        step = session._recorder.steps[-1]
        clock, names = session._recorder.clock, run.present.gradients
        at = {n: clock.between_us(step.backward, mark) for n, mark in zip(names, step.ready, strict=True) if mark}
        session._recorder.each_gradient = clock.cheap
        # What got no gradient comes last, where nothing waits for it.
        mine = sorted(names, key=lambda name: at.get(name, math.inf))
        order: list[str] = run.gather(mine, "agreeing on the order of gradients")[0]
        if tuple(order) == names:
            return run.present
        return ddp_plan(session._parameters, order, run.present.model, run.present.world)

    def _try_scaled(self) -> Steps[None]:
        """Try the plan that measurements on another number of ranks give for this one, before any are taken here."""
        run = self._run
        key = run.opening.key

        def scaled() -> Profile:
            assert run.opening.other is not None
            profile = run.opening.other.profile
            assert profile is not None
            assert profile.cluster is not None
            return replace(profile, cluster=scale(profile.cluster, key.nodes, key.ranks // key.nodes))

        there = pluralize(run.opening.measured_on or 0, "rank")
        text = f"measured by an earlier run on {there}, extrapolated to {key.ranks}, until it is measured here"
        run.tell(text, aloud=True)
        plan = yield from self._candidates.decide(scaled, {executed_digest(run.present)})
        if plan is not None:
            yield from run.wait(max(0, WARM_UP_STEPS - run.session.step))
            yield from self._trials.try_plan(plan)

    def _plan(self) -> Steps[None]:
        """Improve the plan; where other cuts of a compiled graph are faster, once more with these.

        Cuts are tried with exact plans, whose steps are whole: where the run keeps another kind, from the exact plan
        behind it, or DDP's buckets.
        """
        yield from self._improve()
        run = self._run
        if not self._trials.tries_cuts or run.opening.way != "auto":
            return
        run.take_guarded()
        kept, ratios = run.present, (run.ratio, run.exact_ratio)
        run.make_exact()
        if (exact := run.present).sharded:
            plain = ddp_plan(run.session._parameters, exact.gradients, exact.model, exact.world)
            run.switch(replace(plain, cuts=exact.cuts))
            run.ratio = run.exact_ratio = 1.0
        begun = run.present
        if (yield from self._trials.try_cuts()):
            yield from self._improve()
            if kept is not begun:
                yield from self._trials.try_plan(kept)
        elif kept is not begun:
            run.switch(kept)
            run.ratio, run.exact_ratio = ratios
            yield from run.wait(WARM_UP_STEPS)
        run.doing = None
        run.remember()

    def _improve(self) -> Steps[None]:
        """Measure an exact plan's steps, decide, and keep what is faster: an exact plan, and where riskier ones are
        allowed the best of each class against it.
        """
        run = self._run
        run.make_exact()
        run.session._recorder.each_gradient = True
        run.begin_stage(FIRST_STAGE, WARM_UP_STEPS, MEASURING_STEPS + TRIAL_STEPS, MEASURING_S + DECIDING_S)
        yield from run.wait(WARM_UP_STEPS)
        first = first_steps(run)
        if not first:
            run.session._recorder.each_gradient = run.session._recorder.clock.cheap
            run.doing = None
            run.tell(
                "nothing was measured: no step was seen from the model's forward to the end of backward; call the "
                "model itself, or give a plan",
                aloud=True,
            )
            return
        early = yield from self._try_narrow(first)
        samples, costs = yield from measure_run(run, first, narrow=self._looks_at_narrow)
        run.session._recorder.each_gradient = run.session._recorder.clock.cheap
        tried = {executed_digest(run.present)}
        self._candidates.begin()
        contention: Contention | None = None
        seen: list[Seen] = []

        def measured() -> Profile:
            run.profile = make_profile(run.session, run.profile, samples, costs, contention)
            return run.profile

        for _ in range(MOST_TRIALS):
            plan = yield from self._candidates.decide(measured, tried)
            if plan is None or run.opening.way == "report":
                break
            tried.add(executed_digest(plan))
            found = yield from self._trials.try_plan(plan)
            seen += found
            if not found or (slowed := find_contention(seen, costs.all_reduce)) is None:
                break
            contention = slowed
            run.tell(
                f"compute beside messages takes {slowed.compute:.2f} times as long, messages beside compute "
                f"{slowed.network:.2f} times"
            )
        bounded: Plan | None = None
        if self._looks_at_narrow:
            bounded = yield from self._candidates.decide(measured, tried, "bounded")
        relaxed: Plan | None = None
        if run.opening.key.accuracy == "relaxed" and not run.too_far:
            relaxed = yield from self._candidates.decide(measured, tried, "relaxed")
        if run.opening.way == "auto":
            fallback = replace(run.present, baselines=None, scaling=None, sources=None, notes=())
            for plan in (bounded, None if run.harmed else early, relaxed):
                if plan is not None and executed_digest(plan) not in tried:
                    tried.add(executed_digest(plan))
                    yield from self._trials.try_plan(replace(plan, fallback=fallback))
            # What wins more than the simulator errs wins over other sizes, too.
            if self._candidates.off > FAR_OFF and run.present.outer is None and not run.present.sharded:
                yield from self._trials.try_sizes(tried)
        run.doing = None
        run.remember(settled=not self._trials.tries_cuts)

    def _try_narrow(self, first: Sequence[Overlap]) -> Steps[Plan | None]:
        """Try DDP's buckets in 8 bits before anything is timed, where that could win: what they save pays for timing.

        Returns:
            The plan, where it is faster.
        """
        run = self._run
        may_save = EIGHT_BITS_SAVE * exposed_us(first) > GAIN * run.step_us
        if run.opening.way != "auto" or run.opening.key.accuracy == "exact" or run.harmed or run.present.predicted:
            return None
        if not run.gather(may_save, "agreeing whether messages take long")[0]:
            return None
        plan = in_dtype(run.present, run.session._parameters, "int8")
        yield from self._trials.try_plan(plan)
        return plan if run.present is plan else None

    @property
    def _looks_at_narrow(self) -> bool:
        """Return whether bounded plans are decided on: also to report what they would bring."""
        return self._run.opening.key.accuracy != "exact" or self._run.opening.way == "report"

    def _drifted(self, reference_us: float | None) -> Steps[bool]:
        """Watch until steps have become longer or shorter than the first ones (or than `reference_us`)."""
        run = self._run
        while True:
            step_us = max(run.gather(run.step_us, "comparing times of steps"))
            yield from run.wait(max(WATCHED_STEPS + WARM_UP_STEPS, math.ceil(WATCH_S * 1e6 / step_us)))
            last = run.session._recorder.intervals_us()[-WATCHED_STEPS:]
            windows = [last[at : at + WINDOW_STEPS] for at in range(0, len(last) - WINDOW_STEPS + 1, WINDOW_STEPS)]
            medians = [statistics.median(window) for window in windows]
            everyone: list[list[float]] = run.gather(medians, "watching steps")
            if not all(everyone) or not run.session._mode.predicted:  # a warm-up, of which nothing was predicted
                continue
            shortest_us = max(min(one) for one in everyone)
            longest_us = max(max(one) for one in everyone)
            now_us = statistics.median(max(column) for column in zip(*everyone, strict=False))
            if reference_us is None:
                reference_us = now_us
                run.remember(reference_us)
            elif shortest_us > (1.0 + DRIFT) * reference_us or longest_us < (1.0 - DRIFT) * reference_us:
                text = f"steps take {run.ms(now_us):.2f} ms, and took {run.ms(reference_us):.2f} ms: planned again"
                run.tell(text, aloud=True)
                return True
