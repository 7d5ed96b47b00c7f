"""The one event loop of the models: compute and messages, each lane working through its ops, slow each other down.

An op begins when the one before it in its lane has ended, and all that it waits for in other lanes. While compute and a
message are under way, both proceed more slowly, by the message's factors; of several messages compute is slowed by the
worst. Messages do not slow each other down.

Models build ops (`planner.model.step_ops`, `planner.model.delay`, `planner.model.modes.late_gather`). Searches rest on
closed forms where a schedule has one (`planner.model.step`, `planner.model.replay`, `planner.search.merge`,
`planner.search.two_windows`), and compute what neighbours have in common once (`planner.model.replay.Replay`). Tests
compare the closed forms with this engine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

COMPUTE, NETWORK = "compute", "network"
"""Lanes; other networks have other names, such as `intra` and `inter`."""


class Op(NamedTuple):
    """A computation or a message."""

    lane: str
    time_us: float
    """Duration on an idle machine."""
    after: tuple[int, ...] = ()
    """Numbers of ops in other lanes that have to have ended."""
    kind: str = ""
    """`forward`, `backward`, `update`, …, or the name of a message's phase."""
    step: int = 0
    bucket: int | None = None
    factors: tuple[float, float] = (1.0, 1.0)
    """Slow-down (≥ 1) of compute and of a message while both are under way."""


class Ops(list[Op]):
    """Ops by number; each lane works through its own in this order."""

    def add(self, op: Op) -> int:
        """Append an op and return its number."""
        self.append(op)
        return len(self) - 1


def lanes_of(ops: Sequence[Op]) -> dict[str, list[int]]:
    """Return the numbers of each lane's ops."""
    lanes: dict[str, list[int]] = {}
    for number, op in enumerate(ops):
        lanes.setdefault(op.lane, []).append(number)
    return lanes


@dataclass(frozen=True, kw_only=True)
class Run:
    """Start and end of every op in microseconds, by its number."""

    ops: Sequence[Op]
    start_us: Sequence[float]
    end_us: Sequence[float]

    @cached_property
    def lanes(self) -> dict[str, list[int]]:
        """Numbers of each lane's ops."""
        return lanes_of(self.ops)

    @property
    def total_us(self) -> float:
        """End of the last op."""
        return max(self.end_us, default=0.0)

    def critical_path(self) -> list[int]:
        """Return ops without a gap between them, from the start to the end: shortening another one gains nothing.

        The path ends with the op that ends last, of several the last one. Where an op waited for two that ended at
        once, the path takes the one in its own lane.
        """
        before = {after: number for lane in self.lanes.values() for number, after in pairwise(lane)}
        number: int | None = max(range(len(self.ops)), key=lambda op: (self.end_us[op], op), default=None)
        path: list[int] = []
        while number is not None:
            path.append(number)
            waited_for = [*([before[number]] if number in before else []), *self.ops[number].after]
            number = max(waited_for, key=self.end_us.__getitem__, default=None)
        return path[::-1]

    def shares(self) -> dict[str, float]:
        """Return the share of each kind of op in the length of the critical path."""
        times_us: dict[str, float] = {}
        for number in self.critical_path():
            kind = self.ops[number].kind
            times_us[kind] = times_us.get(kind, 0.0) + self.end_us[number] - self.start_us[number]
        whole_us = sum(times_us.values())
        return {kind: time_us / whole_us for kind, time_us in times_us.items()} if whole_us > 0.0 else {}


def run_alone(ops: Sequence[Op]) -> Run:
    """Run ops of which none slows another, each numbered after those that it waits for."""
    start_us: list[float] = []
    end_us: list[float] = []
    free_us: dict[str, float] = {}
    for op in ops:
        start_us.append(max([free_us.get(op.lane, 0.0), *[end_us[before] for before in op.after]]))
        free_us[op.lane] = start_us[-1] + op.time_us
        end_us.append(free_us[op.lane])
    return Run(ops=ops, start_us=start_us, end_us=end_us)


def run(ops: Sequence[Op]) -> Run:
    """Run ops, from an idle machine to the end of the last one.

    Raises:
        ValueError: ops wait for each other.
    """
    lanes = lanes_of(ops)
    waiting = [numbers[::-1] for numbers in (lanes.pop(COMPUTE, []), *lanes.values())]
    under_way = [-1] * len(waiting)
    left_us = [op.time_us for op in ops]
    start_us, end_us, now_us = [0.0] * len(ops), [math.inf] * len(ops), 0.0
    while True:
        busy = []
        for lane, numbers in enumerate(waiting):
            number = under_way[lane]
            if number < 0 and numbers:
                for before in ops[numbers[-1]].after:
                    if end_us[before] > now_us:
                        break
                else:
                    under_way[lane] = number = numbers.pop()
                    start_us[number] = now_us
            if number >= 0:
                busy.append(number)
        if not busy:
            break
        # Searches run many ops, most of which are alone or with one other: each case has its own short loop.
        if under_way[0] < 0 or len(busy) == 1:
            passed_us = min([left_us[number] for number in busy])
            for number in busy:
                left_us[number] -= passed_us
        else:
            slow, passed_us = 1.0, math.inf
            for number in busy[1:]:
                compute, network = ops[number].factors
                slow = max(slow, compute)
                passed_us = min(passed_us, left_us[number] * network)
            passed_us = min(passed_us, left_us[busy[0]] * slow)
            for number in busy:
                factor = slow if number == busy[0] else ops[number].factors[1]
                ends = left_us[number] * factor <= passed_us
                left_us[number] = 0.0 if ends else left_us[number] - passed_us / factor
        now_us += passed_us
        for lane, number in enumerate(under_way):
            if number >= 0 and left_us[number] <= 0.0:
                end_us[number], under_way[lane] = now_us, -1
    if any(waiting):
        raise ValueError("ops wait for each other")
    return Run(ops=ops, start_us=start_us, end_us=end_us)
