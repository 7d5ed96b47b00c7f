"""Plans that rank 0 decides on in another process, and whether they are worth a trial."""

from __future__ import annotations

import glob
import math
import statistics
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

from planner.decide.defaults import ALLOWED, DEFAULT_PASSES
from planner.documents.profile import Profile
from planner.documents.text import pluralize
from planner.ir import ACCURACIES
from planner.online.ddp import ddp_plan
from planner.online.deciding import Decision, names_of
from planner.online.opening import IN_RUN
from planner.online.planned_run import DECIDING_S, TRIAL_STEPS, WATCHED_STEPS, PlannedRun, Steps
from planner.passes.outer import Outer
from planner.strategies.baselines import CAPS_MIB
from runtime.monitor.drift import complete
from runtime.monitor.verdict import Verdict
from runtime.plan import Accuracy, Plan, parse_plan
from runtime.plan.executed import executed_digest

POLL_S = 0.5
"""Least time between two questions of ranks for rank 0's plan."""
WORTH_TRYING = 0.01
"""Predicted gain from which a plan is tried, on top of half of the error of earlier predictions."""


class Candidates:
    """Plans that may be faster than the present one, and how far their predictions are believed."""

    def __init__(self, run: PlannedRun) -> None:
        self._run = run
        self._decision: Decision | None = None
        self.decided: Plan | None = None
        """The last plan that was decided on, whether it was kept or not."""
        self.expected = self.doubt = 0.0
        """Predicted gain of the last plan; by how much the simulator is not to be believed."""
        self.off = 0.0
        """Largest relative error of predictions: of steps before the first trial, and of tried plans."""
        self.others: dict[int, tuple[Plan, float]] = {}
        """DDP's buckets of other sizes by number, and their predicted step over that of the plan decided from."""
        self._outside_us = 0.0
        """Part of a step that is in no prediction, on rank 0."""

    def begin(self) -> None:
        """Begin another search: what is measured now counts."""
        self.doubt = self.off = 0.0

    def close(self) -> None:
        """End the process that decides."""
        if self._decision is not None:
            self._decision.close()
            self._decision = None

    def decide(
        self, profile: Callable[[], Profile], tried: set[str], accuracy: Accuracy = "exact"
    ) -> Steps[Plan | None]:
        """Return rank 0's plan where it is worth a trial, on all ranks alike; training continues meanwhile.

        Args:
            profile: what it is decided on, called on rank 0 alone.
            tried: digests of the present plan, which is exact, and of those that were tried.
            accuracy: the class of the plan; where that is not exact and an exact plan is as good, there is none.
        """
        run = self._run
        run.begin_stage("rank 0 decides, which takes some seconds; what it finds is tried", 0, TRIAL_STEPS, DECIDING_S)
        reports, sized = run.opening.way == "report", self._sized()
        problem: str | None = None
        if run.session._world.rank == 0:
            try:
                others = [names_of(plan.buckets) for plan in (run.present, *sized.values())]
                shared = run.present.updates.operator if run.present.updates else None
                options = {"accuracy": accuracy, "allow": list(run.opening.key.allow)} | self._limits(accuracy)
                request = {
                    "profile": profile().to_document(), "options": options, "others": others,
                    "owners": shared and shared.owners, "gathers": shared.messages if shared else (),
                    "inside": shared and shared.inside,
                }  # fmt: skip
                self._decision = Decision(request)
            except Exception as error:  # the other ranks wait for the answer
                problem = f"{type(error).__name__}: {error}"
        every = max(run.gather(max(1, math.ceil(POLL_S * 1e6 / run.step_us)), "agreeing when to ask"))
        answer: dict[str, Any] | None = None
        while answer is None:
            yield from run.wait(every)
            if self._decision is not None and (answer := self._decision.poll()) is not None:
                self._decision = None
                answer |= {"step_us": run.step_us, "outside_us": self._seen_outside_us()}
            answer = {"problem": problem} if problem is not None else answer
            answer = run.gather(answer, "asking for rank 0's plan")[0]
        if "problem" in answer:
            run.tell(f"no plan was made, the run goes on with its buckets: {answer['problem']}", aloud=True)
            return None
        plan = self.decided = self._as_cut(parse_plan(answer["plan"]))
        self._outside_us = answer["outside_us"]
        predicted_us = self.predicted_us(plan) or 0.0
        present_us, *sized_us = (other_us + self._outside_us for other_us in answer["others_us"])
        self.off = self.off or abs(1.0 - present_us / answer["step_us"])
        self.others = {
            count: (other, us / present_us) for (count, other), us in zip(sized.items(), sized_us, strict=True)
        }
        if accuracy != plan.accuracy:
            why = next((note for note in plan.notes if note.startswith(f"{accuracy}{ALLOWED}")), "the plan is exact")
            run.tell(why, aloud=reports)
            return None
        words = (
            f"{described(plan)} is predicted to take {run.ms(predicted_us):.2f} ms a step, the present one "
            f"{run.ms(present_us):.2f} ms"
        )
        if executed_digest(plan) in tried:
            same = executed_digest(plan) == executed_digest(run.present)
            run.tell(f"{words}: it {'is the present one' if same else 'has been tried'}", aloud=reports)
            if same and run.present.predicted is not None and run.present.predicted.extrapolated:
                run.switch(plan)  # the same buckets, with what was measured here
            return None
        self.expected = 1.0 - predicted_us / present_us
        if self.expected < WORTH_TRYING + self.doubt:
            run.tell(f"{words}: not worth a trial", aloud=reports)
            return None
        if reports:
            permitted = ACCURACIES.index(accuracy) <= ACCURACIES.index(run.opening.key.accuracy)
            run.tell(f"{words}; {'PLANNER=auto' if permitted else f'accuracy={accuracy!r}'} would try it", aloud=True)
            return plan
        run.tell(f"{words}: it is tried")
        return plan

    def _limits(self, accuracy: Accuracy) -> dict[str, Any]:
        """Return the options of a lossy plan: the encodings whose costs a run measures, what may not be encoded, and of
        relaxed passes the one whose costs a run knows.
        """
        if accuracy == "exact":
            return {}
        protected = "|".join(glob.escape(name) for name in sorted(self._run.harmed))
        passes = f"{DEFAULT_PASSES},{Outer.name}" if accuracy == "relaxed" else DEFAULT_PASSES
        return {"compress": IN_RUN, "protect": protected or None, "passes": passes}

    def learn(self, plan: Plan, verdict: Verdict) -> None:
        """Note by how much the simulator was wrong about a plan that has been tried."""
        gain = 1.0 - verdict.step_us / verdict.other_us
        if (predicted_us := self.predicted_us(plan)) is not None:
            self.off = max(self.off, abs(1.0 - predicted_us / verdict.step_us))
        # Half of it, for the next plan is made with what the trial has shown.
        self.doubt = max(0.0, self.expected - gain) / 2.0

    def _sized(self) -> dict[int, Plan]:
        """Return DDP's buckets of other sizes, by their number."""
        present, plans = self._run.present, dict[int, Plan]()
        for cap_mib in CAPS_MIB:
            plan = ddp_plan(self._run.session._parameters, present.gradients, present.model, present.world, cap_mib)
            plans.setdefault(len(plan.buckets), self._as_cut(plan))
        return plans

    def _as_cut(self, plan: Plan) -> Plan:
        """Return a plan that leaves the cuts of a compiled graph as they are: it is made from what they gave."""
        return replace(plan, cuts=self._run.present.cuts)

    def predicted_us(self, plan: Plan) -> float | None:
        """Return how far the end of an update is expected to lie behind that of the one before."""
        return plan.predicted.iteration_us + self._outside_us if plan.predicted is not None else None

    def _seen_outside_us(self) -> float:
        """Return what lies between an update and the next forward, and in no prediction: input, other micro-batches."""
        clock = self._run.session._recorder.clock
        steps = complete(self._run.session._recorder.steps, clock)[-WATCHED_STEPS:]
        return statistics.median(
            [clock.between_us(a.update_end or a.end, b.forward) for a, b in pairwise(steps)] or [0.0]
        )


def described(plan: Plan) -> str:
    """Return the number of buckets of a plan, and of those that are encoded."""
    narrow = [bucket for bucket in plan.buckets if not bucket.dense]
    dtypes = ", ".join(dict.fromkeys(str(bucket.compressor.dtype) for bucket in narrow))
    encoded = f", {len(narrow)} of them in {dtypes}," if narrow else ""
    outer = f", averaged every {plan.outer.every} steps," if plan.outer else ""
    return f"a plan of {pluralize(len(plan.buckets), 'bucket')}{encoded}{outer}"
