"""Whether a lossy plan really is faster than the exact one beside it (`fallback`): tried in its first steps.

Both train by turns, a few steps each, so that a drift of the machine hits both alike. Nothing is lost when they change
over: the residuals of the lossy plan are sent with the exact one's first step. Every rank measures its own steps; the
verdict is made from those of all ranks and so is the same on all of them.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from runtime.comm.world import World
from runtime.errors import FallbackWarning
from runtime.monitor.clock import Clock
from runtime.monitor.verdict import Verdict, faster, half_interval
from runtime.plan import Plan

WARM_UP_STEPS = 3
"""Of a run, before the first block; and the first of each block, which has come from another plan, is not counted."""
BLOCK_STEPS, ROUNDS = 5, 4
"""Each round has a block of each plan, the second one in the other order."""


class Trial:
    """The turns of both plans, and the verdict."""

    def __init__(self, plan: Plan, world: World, clock: Clock) -> None:
        assert plan.fallback is not None
        self.lossy = plan
        self._plans = {"lossy": plan, "exact": plan.fallback}
        self._world, self._clock = world, clock
        order = [("lossy", "exact") if number % 2 == 0 else ("exact", "lossy") for number in range(ROUNDS)]
        self._blocks = [name for pair in order for name in pair]
        self._step = -WARM_UP_STEPS
        self._marks: list[Any] = []
        self._times_us: dict[str, list[float]] = {"lossy": [], "exact": []}
        self.verdict: Verdict | None = None

    def step_done(self) -> Plan | None:
        """After each step: the plan to change over to, or None to stay with the present one. Ranks may meet here."""
        self._marks.append(self._clock.mark())
        self._step += 1
        if self._step <= 0 or self._step % BLOCK_STEPS:
            return None
        block = self._step // BLOCK_STEPS - 1
        between = self._clock.between_us
        # From the end of one step to the end of the next; the block's first step is left out.
        marks = self._marks[-BLOCK_STEPS:]
        times = [between(start, end) for start, end in pairwise(marks)]
        self._times_us[self._blocks[block]].append(statistics.median(times))
        self._marks = self._marks[-1:]
        if block + 1 < len(self._blocks):
            return self._changed(self._blocks[block], self._blocks[block + 1])
        everyone: list[dict[str, list[float]]] = self._world.gather(self._times_us, "comparing plans")
        self.verdict = judge(everyone)
        if not self.verdict.good:
            warnings.warn(self.verdict.text, FallbackWarning, stacklevel=2)
        return self._changed(self._blocks[block], "lossy" if self.verdict.good else "exact")

    def _changed(self, present: str, following: str) -> Plan | None:
        return None if present == following else self._plans[following]


def judge(ranks: Sequence[dict[str, list[float]]]) -> Verdict:
    """Return the verdict of all ranks' blocks: a step is as long as on the slowest rank."""
    lossy, exact = (np.array([rank[name] for rank in ranks]).max(axis=0) for name in ("lossy", "exact"))
    difference = exact - lossy  # of blocks that are neighbours in time
    noise_us = half_interval(difference.tolist())
    return faster(
        float(lossy.mean()), float(exact.mean()), noise_us, "steps of the lossy plan",
        "those of the exact plan beside it", "the exact plan",
    )  # fmt: skip
