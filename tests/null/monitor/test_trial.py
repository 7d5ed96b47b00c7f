"""When a lossy plan counts as faster than the exact one beside it, and how both are tried."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from runtime.comm.world import World
from runtime.monitor.recorder import Recorder
from runtime.monitor.trial import BLOCK_STEPS, ROUNDS, WARM_UP_STEPS, Trial, judge, trial_steps
from runtime.monitor.verdict import Verdict
from runtime.plan import ModelReference, OuterSpec, Plan, PlanBucket, PlanWorld


@pytest.mark.parametrize(("lossy_us", "faster"), [(900.0, True), (1000.0, False), (1100.0, False)])
def test_a_clear_difference_counts(lossy_us: float, faster: bool) -> None:
    rng = np.random.default_rng(0)
    verdicts = [
        judge([(rng.normal(lossy_us, 10.0), rng.normal(1000.0, 10.0)) for _ in range(ROUNDS)]) for _ in range(50)
    ]
    share = sum(verdict is not None and verdict.good for verdict in verdicts) / len(verdicts)
    assert share > 0.95 if faster else share < 0.2


def test_the_text_has_both_times() -> None:
    verdict = judge([(1200.0, 1000.0)] * ROUNDS)
    assert verdict is not None
    assert (verdict.good, verdict.step_us, verdict.other_us) == (False, 1200.0, 1000.0)
    assert verdict.text == (
        "steps of the lossy plan take 1.20 ms, those of the exact plan beside it 1.00 ms (noise ± 0.00 ms): they are "
        "not faster, and the run goes on with the exact plan"
    )


class Run:
    """Steps of one rank whose length depends on the plan, and a second rank that takes `others_us`."""

    def __init__(self, plan: Plan, times_us: dict[str, float], others_us: dict[str, float]) -> None:
        self.plan, self.now_us, self._times_us, self._others_us = plan, 0.0, times_us, others_us
        clock: Any = SimpleNamespace(mark=lambda: self.now_us, between_us=lambda a, b: b - a, cheap=True)
        self.recorder = Recorder(clock, 1, 1)
        self.world: Any = SimpleNamespace(gather=self.gather, warn=World().warn, ranks=2)

    def gather(self, times_us: dict[bool, float], _what: str) -> list[dict[bool, float]]:
        return [times_us, {True: self._others_us["bounded"], False: self._others_us["exact"]}]

    def train(self, steps: Iterator[Plan | None], count: int, *, refuses: bool = False) -> list[str]:
        """Return the accuracy of the plan of each step."""
        seen = []
        for _ in range(count):
            seen.append(self.plan.accuracy)
            self.now_us += self._times_us[self.plan.accuracy]
            self.recorder.end_step()
            following = next(steps, None)
            if following is not None and not refuses:
                self.plan = following
                self.recorder.restart(1, 1)
        return seen


EXACT = Plan(
    model=ModelReference(name="test"), world=PlanWorld(ranks=2), accuracy="exact",
    buckets=(PlanBucket(gradients=("weight",)),),
)  # fmt: skip
LOSSY = Plan(
    model=EXACT.model, world=EXACT.world, accuracy="bounded", buckets=EXACT.buckets, fallback=EXACT
)  # fmt: skip


@pytest.mark.parametrize(("others_us", "kept"), [(700.0, "bounded"), (1200.0, "exact")])
def test_the_slowest_rank_decides_which_plan_stays(others_us: float, kept: str) -> None:
    run = Run(LOSSY, {"bounded": 800.0, "exact": 1000.0}, {"bounded": others_us, "exact": 1000.0})
    trial = Trial(LOSSY, run.world, run.recorder)
    steps: Any = iter(trial.step_done, object())
    expected = ["bounded"] * (WARM_UP_STEPS + BLOCK_STEPS) + ["exact"] * 2 * BLOCK_STEPS
    if kept == "exact":
        with pytest.warns(UserWarning, match="they are not faster"):
            seen = run.train(steps, WARM_UP_STEPS + 2 * BLOCK_STEPS * ROUNDS + 3)
    else:
        seen = run.train(steps, WARM_UP_STEPS + 2 * BLOCK_STEPS * ROUNDS + 3)
    assert seen[: len(expected)] == expected
    assert seen[-3:] == [kept] * 3
    assert trial.verdict is not None
    assert trial.verdict.step_us == max(800.0, others_us)


def test_a_plan_that_cannot_be_laid_out_is_not_judged() -> None:
    run = Run(EXACT, {"exact": 1000.0}, {"bounded": 1.0, "exact": 1.0})
    found: list[Verdict | None] = []

    def steps() -> Iterator[Plan | None]:
        found.append((yield from trial_steps((LOSSY, EXACT), EXACT, run.recorder, World(), judge)))

    assert run.train(steps(), 2 * BLOCK_STEPS, refuses=True) == ["exact"] * 2 * BLOCK_STEPS
    assert found == [None]


def test_a_block_of_outer_steps_is_a_whole_period() -> None:
    """The mean of H steps counts, from the one in which the first fragments arrive: here every eighth is long."""
    outer = replace(LOSSY, accuracy="relaxed", outer=OuterSpec(every=8, delay_steps=2))
    run = Run(outer, {"relaxed": 100.0, "exact": 1000.0}, {"bounded": 1.0, "exact": 1.0})
    found: list[float] = []

    def steps() -> Iterator[Plan | None]:
        def judged(rounds: Any) -> Verdict | None:
            found.append(rounds[0][0])
            return judge(rounds)

        for step in trial_steps((outer, EXACT), outer, run.recorder, run.world, judged):
            if run.plan is outer and (len(run.recorder.steps) % 8) == 5:
                run.now_us += 700.0
            yield step

    seen = run.train(steps(), 1 + (1 + 2 + 8) + BLOCK_STEPS)
    assert seen == ["relaxed"] * (1 + 1 + 2 + 8) + ["exact"] * BLOCK_STEPS
    assert found == [100.0 + 700.0 / 8]
