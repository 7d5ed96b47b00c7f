"""A run without a plan is summarized in a sentence, from which on its cost and what is missing are known."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from builders import usual_profile

from planner import optimize
from planner.online.opening import Opening
from planner.online.pilot import Pilot
from planner.online.planned_run import TRIAL_STEPS
from runtime.plan import CompressorSpec, Plan


class Recorder:
    """Steps of 50 ms."""

    def step_us(self, _last: int) -> float:
        return 50_000.0


class Run:
    """A session, as far as a summary asks it."""

    _recorder, step = Recorder(), 12

    def __init__(self, plan: Plan) -> None:
        self.plan = plan


PLAN = optimize(usual_profile())


def pilot(way: Any = "auto") -> tuple[Pilot, Run]:
    session = Run(PLAN)
    opening = Opening(way=way, key=None, plan=PLAN)  # type: ignore[arg-type]
    return Pilot(session, opening), session  # type: ignore[arg-type]


def test_what_is_missing_before_there_is_a_plan() -> None:
    """2 s of measuring and 3 s of deciding are 100 steps of 50 ms."""
    found, session = pilot()
    assert found.summary(ended=False) == f"not planned yet: about {20 + 100 + TRIAL_STEPS} more steps"
    session.step = 11
    assert found.summary(ended=True) == f"the run ended before planning: about {1 + 20 + 100 + TRIAL_STEPS} more steps"
    assert found.metrics() == {
        "plans_tried": 0, "planning_us": 0.0, "planning_steps_left": 1 + 20 + 100 + TRIAL_STEPS
    }  # fmt: skip
    assert "nothing was measured" in pilot("off")[0].summary(ended=True)


@pytest.mark.parametrize(
    ("trials", "ratio", "decided", "words"),
    [
        (
            -2,
            1.0,
            PLAN,
            f"chose the plan of {len(PLAN.buckets)} buckets: no difference beyond the noise (2 alternatives tried)",
        ),
        (0, 1.0, None, "kept DDP's buckets: no plan was made"),
        (0, 1.0, PLAN, "kept DDP's buckets: nothing is predicted to be worth a trial"),
        (3, 1.0, PLAN, "kept DDP's buckets: 3 alternatives tried, none faster"),
        (1, 0.8, PLAN, f"chose the plan of {len(PLAN.buckets)} buckets: 20.0% less time a step (1 alternative tried)"),
    ],
)
def test_what_planning_has_brought_and_cost(trials: int, ratio: float, decided: Plan | None, words: str) -> None:
    """Negative numbers of trials stand for trials that ended with another plan, within the noise."""
    found, _session = pilot()
    run = found._run
    run.doing, run.trials, run.ratio, run.cost_us = None, abs(trials), ratio, 240_000.0
    run.has_changed = trials < 0
    found._candidates.decided = decided
    assert found.summary(ended=False) == f"{words}; planning cost 0.2 s"


def test_a_bucket_that_the_guard_restores_does_no_harm_again() -> None:
    """It is reported as restored, and later plans may encode it."""
    found, session = pilot()
    run, first = found._run, PLAN.buckets[0]
    narrow = replace(first, compressor=CompressorSpec(name="wire", dtype="int8"))
    bounded = replace(PLAN, accuracy="bounded", buckets=(narrow, *PLAN.buckets[1:]))
    run.present = bounded
    for plan, harmed, said in (
        (replace(bounded, buckets=PLAN.buckets), {*first.gradients}, "did harm, and are sent otherwise"),
        (bounded, set(), "compressed as planned again"),
    ):
        session.plan = plan
        run.take_guarded()
        assert (run.present, run.harmed) == (plan, harmed)
        assert said in run.story[-1]
