"""Comparison of all ranks, now and then, of how long each message took on them: who arrives last, and why."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from runtime.comm.world import World
from runtime.errors import StragglerWarning
from runtime.monitor.clock import Clock
from runtime.monitor.recorder import StepMarks
from runtime.plan.last_ranks import STRAGGLER_STEPS, MessageArrival, RankArrival, find_straggler, rank_arrivals
from runtime.torch_compat import object_device

FIRST_STEP, EVERY_STEPS = 20, 100
"""Step of a plan behind which ranks compare first, and the least number of steps from then on."""
COST = 0.001
"""Share of a run's time that comparing may cost."""
TIMES, PARTS = 2, 3
"""Figures of a step behind its messages' durations: the last are times of compute and of input, and before those is the
duration of `session.batches`' own messages."""


class Arrivals:
    """`rows` and `messages` have the last comparison, equal on all ranks; empty until there is one."""

    def __init__(self, world: World, clock: Clock) -> None:
        self._world, self._clock = world, clock
        self._warned: set[int] = set()
        """Ranks that a warning has named."""
        self.restart()

    def restart(self) -> None:
        """Forget what was compared: another plan begins."""
        self.rows: tuple[RankArrival, ...] = ()
        self.messages: tuple[MessageArrival, ...] = ()
        self.compute_us: tuple[float, ...] = ()
        """Time of each rank's forward, backward and update; empty also where it is not known of each."""
        self._left, self._cost_us = FIRST_STEP, 0.0

    def postpone(self) -> None:
        """Compare only steps from here on: ranks have other shares of the batch; all ranks call this."""
        self._left = max(self._left, STRAGGLER_STEPS + 1)

    def step_done(self, steps: Sequence[StepMarks]) -> None:
        """Count a step, whose gradients are all there, and compare when it is time; all ranks call this.

        Args:
            steps: marks of the last steps.
        """
        self._left -= 1
        if self._left or self._world.ranks == 1 or self._world.group is None:
            return
        begun_s = time.perf_counter()
        looked_at, messages = list(steps)[-STRAGGLER_STEPS - 1 :], len(steps[-1].sent)
        if len(looked_at) < 2:  # input is what lies between two steps
            self._left = FIRST_STEP
            return
        ends = [marks.end for marks in looked_at if self._clock.reached(marks.end)]
        whole_us = self._clock.between_us(ends[0], ends[-1]) / (len(ends) - 1) if len(ends) > 1 else math.nan
        mine = [one for step in self.figures(looked_at) for one in step]
        part = torch.tensor([*mine, self._cost_us, whole_us], dtype=torch.float64)
        part = part.to(object_device(self._world.group))
        everyone = self._world.gather_parts(part, "comparing when ranks arrive").view(self._world.ranks, -1).cpu()
        # Equal on all ranks: what the slowest one spent last time, and its shortest step.
        spent_us, step_us = float(everyone[:, -2].max()), float(everyone[:, -1].nan_to_num(math.inf).min())
        self._compare(everyone[:, :-2].view(self._world.ranks, -1, messages + PARTS), step_us)
        self._left = max(EVERY_STEPS, math.ceil(spent_us / (COST * max(1.0, step_us))))
        self._cost_us = (time.perf_counter() - begun_s) * 1e6

    def _compare(self, figures: Tensor, step_us: float) -> None:
        """Compare ranks by the figures of their last steps. Shape (ranks, steps, messages and `PARTS`)."""
        medians = figures.nanmedian(dim=1).values
        self.rows, self.messages = rank_arrivals(medians.tolist())
        computed_us = medians[:, -2].tolist()
        self.compute_us = () if any(map(math.isnan, computed_us)) else tuple(computed_us)
        straggler = find_straggler(figures[:, :, :-TIMES].permute(1, 2, 0).tolist(), step_us)
        if straggler is None or straggler in self._warned:
            return
        self._warned.add(straggler)
        others, cause = self._world.ranks - 1, self.rows[straggler].cause
        late_us = self.rows[straggler].others_waited_us / others
        self._world.warn(
            f"rank {straggler} arrived last in at least nine of the last {figures.shape[1]} steps; each other rank "
            f"waits {late_us / 1e3:.2f} ms of {step_us / 1e3:.2f} ms for it, and what is longer there is "
            f"{cause or 'not known'}; see session.report(), or give ranks shares of the batch by their speed",
            StragglerWarning,
        )

    def figures(self, steps: Iterable[StepMarks]) -> list[list[float]]:
        """Return the figures of each step but the first, before which no input is known: see `rank_arrivals`."""
        return [list(self._figures(*pair)) for pair in pairwise(steps)]

    def _figures(self, before: StepMarks, marks: StepMarks) -> Iterator[float]:
        """Yield the durations of a step's messages and of `session.batches`' own (NaN: there is none), the time of its
        compute and that of its input, in microseconds.
        """
        for one in marks.sent:
            yield self._between_us(one.start, one.end)
        yield marks.gathered_us or math.nan
        updated_us = self._between_us(before.update, before.update_end)
        computed_us = 0.0 if math.isnan(updated_us) else updated_us
        input_us, over = -marks.gathered_us, before.end if before.update_end is None else before.update_end
        begun = marks.followed  # in the first forward compute begins behind the exchange of buffers
        for forward, _, end in (*marks.micro_batches, (marks.forward, None, marks.backward_end)):
            computed_us += self._between_us(forward if begun is None else begun, end)
            input_us += self._between_us(over, forward)
            begun, over = None, end
        yield computed_us
        yield input_us

    def _between_us(self, start: object, end: object) -> float:
        known = start is not None and end is not None and self._clock.reached(end)
        return self._clock.between_us(start, end) if known else math.nan
