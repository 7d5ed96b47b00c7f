"""Which ranks arrive last at messages: now and then all ranks compare how long each message took on them.

A message ends on all ranks at once, so that it takes least on the rank that began it last. Clocks of hosts need not
agree.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from runtime.comm.world import World
from runtime.monitor.clock import Clock
from runtime.monitor.recorder import StepMarks
from runtime.torch_compat import object_device

FIRST_STEP, EVERY_STEPS = 20, 100
"""Step of a plan behind which ranks compare first, and the least number of steps from then on."""
COST = 0.001
"""Share of a run's time that comparing may cost."""


@dataclass(frozen=True, kw_only=True)
class RankArrival:
    """One rank at the messages of a step."""

    rank: int
    last: int
    """Number of messages at which it arrived last."""
    messages: int
    waited_us: float
    """Time in microseconds that it waited in all of them together for ranks that came later."""

    def __str__(self) -> str:
        return (
            f"rank {self.rank} arrives last at {self.last} of {self.messages} messages, and waits "
            f"{self.waited_us / 1e3:.2f} ms a step for others"
        )


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
        self.rows = tuple(compare_arrivals(everyone[:, :-2].T.tolist()))
        # Equal on all ranks: what the slowest one spent last time, and its shortest step.
        spent_us, step_us = float(everyone[:, -2].max()), float(everyone[:, -1].nan_to_num(math.inf).min())
        self._left = max(EVERY_STEPS, math.ceil(spent_us / (COST * max(1.0, step_us))))
        self._cost_us = (time.perf_counter() - begun_s) * 1e6

    def _durations_us(self, steps: Sequence[StepMarks], messages: int) -> Iterable[float]:
        for index in range(messages):
            sent = [marks.sent[index] for marks in steps]
            known = [(one.start, one.end) for one in sent if one.start is not None and one.end is not None]
            yield statistics.median(self._clock.between_us(*span) for span in known) if known else math.nan


def compare_arrivals(messages: Sequence[Sequence[float]]) -> Iterable[RankArrival]:
    """Yield a row for each rank from the durations of each message on every rank, in microseconds.

    Messages that were not timed on every rank are left out.
    """
    timed = [durations for durations in messages if not any(map(math.isnan, durations))]
    for rank in range(len(timed[0]) if timed else 0):
        yield RankArrival(
            rank=rank,
            last=sum(durations.index(min(durations)) == rank for durations in timed),
            messages=len(timed),
            waited_us=sum(durations[rank] - min(durations) for durations in timed),
        )
