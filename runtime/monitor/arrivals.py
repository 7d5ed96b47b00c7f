"""Comparison of all ranks, now and then, of how long each message took on them: who arrives last."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterable, Sequence

import torch

from runtime.comm.world import World
from runtime.monitor.clock import Clock
from runtime.monitor.recorder import StepMarks
from runtime.plan.last_ranks import RankArrival, compare_arrivals
from runtime.torch_compat import object_device

FIRST_STEP, EVERY_STEPS = 20, 100
"""Step of a plan behind which ranks compare first, and the least number of steps from then on."""
COST = 0.001
"""Share of a run's time that comparing may cost."""


class Arrivals:
    """`rows` has the last comparison, equal on all ranks; empty until there is one."""

    def __init__(self, world: World, clock: Clock) -> None:
        self._world, self._clock = world, clock
        self.restart()

    def restart(self) -> None:
        """Forget what was compared: another plan begins."""
        self.rows: tuple[RankArrival, ...] = ()
        self._left, self._cost_us = FIRST_STEP, 0.0

    def step_done(self, steps: Sequence[StepMarks]) -> None:
        """Count a step, whose gradients are all there, and compare when it is time; all ranks call this.

        Args:
            steps: marks of the last steps.
        """
        self._left -= 1
        if self._left or self._world.ranks == 1 or self._world.group is None:
            return
        begun_s = time.perf_counter()
        over = [marks for marks in steps if self._clock.reached(marks.end)]
        whole_us = self._clock.between_us(over[0].end, over[-1].end) / (len(over) - 1) if len(over) > 1 else math.nan
        mine = [*self._durations_us(over, len(steps[-1].sent)), self._cost_us, whole_us]
        part = torch.tensor(mine, dtype=torch.float64, device=object_device(self._world.group))
        everyone = self._world.gather_parts(part, "comparing when ranks arrive").view(self._world.ranks, -1).cpu()
        self.rows = compare_arrivals(everyone[:, :-2].T.tolist(), range(self._world.ranks))
        # Equal on all ranks: what the slowest one spent last time, and its shortest step.
        spent_us, step_us = float(everyone[:, -2].max()), float(everyone[:, -1].nan_to_num(math.inf).min())
        self._left = max(EVERY_STEPS, math.ceil(spent_us / (COST * max(1.0, step_us))))
        self._cost_us = (time.perf_counter() - begun_s) * 1e6

    def _durations_us(self, steps: Sequence[StepMarks], messages: int) -> Iterable[float]:
        for index in range(messages):
            sent = [marks.sent[index] for marks in steps]
            known = [(one.start, one.end) for one in sent if one.start is not None and one.end is not None]
            yield statistics.median(self._clock.between_us(*span) for span in known) if known else math.nan
