"""Tests which of two plans is faster: both train in interleaved blocks of steps.

A drift of the machine slows both alike. Nothing is lost where one replaces the other: the residuals of a lossy plan are
sent with the other one's first step. Every rank measures its own steps; verdicts are made from those of all ranks, of
which the slowest counts, and so are the same on all of them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Generator, Sequence

from runtime.comm.world import World
from runtime.errors import FallbackWarning
from runtime.monitor.recorder import Recorder
from runtime.monitor.verdict import BLOCK_STEPS, Verdict, faster, half_interval
from runtime.plan import Plan

WARM_UP_STEPS = 3
"""Steps of a run before the first block."""
ROUNDS = 4
"""Each round has a block of each plan, the second one in the other order."""


def block_of(plan: Plan) -> tuple[int, int]:
    """Return (steps that are not counted, steps that are) of a block with a plan: with outer steps a whole period, once
    each fragment has been launched `delay_steps` before.
    """
    spec = plan.outer
    return (1, BLOCK_STEPS - 1) if spec is None else (1 + spec.delay_steps, spec.every)


Rounds = Sequence[tuple[float, float]]
"""Median step, by round, of the new plan and of the old one in microseconds, on the slowest rank."""
Steps = Generator[Plan | None, None, Verdict | None]
"""Resumed after each step; yields the plan of the next one, None for the present one."""


def trial_steps(
    plans: tuple[Plan, Plan], present: Plan, recorder: Recorder, world: World,
    judge: Callable[[Rounds], Verdict | None], after_block: Callable[[Plan], None] = lambda _: None,
) -> Steps:  # fmt: skip
    """Train by two plans in interleaved blocks until there is a verdict; all ranks do this at the same step.

    Args:
        plans: the new one and the old one.
        present: the one of both that training has now.
        recorder: the session's, by which steps are timed.
        world: its ranks.
        judge: gives the verdict on the rounds so far, None where another round is needed.
        after_block: called with a block's plan when its steps are in the recorder.

    Returns:
        The verdict; None where a rank could not lay a plan out, and training stays with the other one.
    """
    new, old = plans
    rounds: list[tuple[float, float]] = []
    verdict: Verdict | None = None
    while verdict is None:
        times_us: dict[bool, float] = {}
        for plan in (new, old) if len(rounds) % 2 == 0 else (old, new):
            switches, restarts = plan is not present, recorder.restarts
            uncounted, counted = block_of(plan)
            yield plan if switches else None
            for _ in range(uncounted - 1):
                yield None
            begin = recorder.steps[-1].end
            for _ in range(counted):
                yield None
            if switches and recorder.restarts == restarts:
                return None
            present = plan
            whole_us = recorder.clock.between_us(begin, recorder.steps[-1].end)
            times_us[plan is new] = whole_us / counted if plan.outer else recorder.step_us(counted)
            after_block(plan)
        everyone: list[dict[bool, float]] = world.gather(times_us, "comparing plans")
        rounds.append((max(one[True] for one in everyone), max(one[False] for one in everyone)))
        verdict = judge(rounds)
    return verdict


class Trial:
    """Tries a lossy plan against its `fallback` in the first steps; the verdict is None until then."""

    def __init__(self, plan: Plan, world: World, recorder: Recorder) -> None:
        self.lossy = plan
        self.verdict: Verdict | None = None
        self._steps = self._run(recorder, world)

    def step_done(self) -> Plan | None:
        """Return the plan of the next step after each one, None for the present one. Ranks may meet here."""
        return next(self._steps, None)

    def _run(self, recorder: Recorder, world: World) -> Generator[Plan | None, None, None]:
        lossy, exact = self.lossy, self.lossy.fallback
        assert exact is not None
        for _ in range(WARM_UP_STEPS - 1):  # the first one is over
            yield None
        self.verdict = yield from trial_steps((lossy, exact), lossy, recorder, world, lambda rounds: judge(rounds))
        if self.verdict is not None and not self.verdict.good:
            world.warn(self.verdict.text, FallbackWarning)
            yield exact


def judge(rounds: Rounds) -> Verdict | None:
    """Return whether the lossy plan is faster than the exact one beyond the noise of the rounds."""
    if len(rounds) < ROUNDS:
        return None
    lossy_us, exact_us = (statistics.fmean(column) for column in zip(*rounds, strict=True))
    noise_us = half_interval([exact - lossy for lossy, exact in rounds])
    return faster(
        lossy_us, exact_us, noise_us, "steps of the lossy plan", "those of the exact plan beside it", "the exact plan"
    )
