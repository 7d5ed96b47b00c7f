"""Resources that each work through ops in a fixed order, from event to event: compute, and one network or several.

An op begins when the one before it has ended and, on another resource, the one that it waits for. While compute and a
network work, compute and the message slow each other down by the message's factors; of several messages compute is
slowed as by the worst.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Op(NamedTuple):
    time_us: float
    """Alone on the machine."""
    after: int = -1
    """The op of another resource that has to have ended before; -1: none."""
    kind: str = ""
    step: int = 0
    bucket: int | None = None
    factors: tuple[float, float] = (1.0, 1.0)
    """Of messages: by what compute and the message are slowed while both are under way."""
    on: int | None = None
    """The number of that resource; None: compute, and of compute the first network."""


class Lane:
    """One resource: its ops, and when those so far began and ended."""

    def __init__(self, ops: Sequence[Op]) -> None:
        self.ops = ops
        self.start_us: list[float] = []
        self.end_us: list[float] = []
        self._left_us = 0.0

    def works(self, ended: Sequence[int], now_us: float, otherwise: int) -> bool:
        """Whether it is at work; begins with the next op where that may begin.

        `ended` ops have ended of each resource; ops that name no resource wait for `otherwise`.
        """
        place = len(self.end_us)
        if place < len(self.start_us):
            return True
        if place == len(self.ops):
            return False
        op = self.ops[place]
        if op.after >= 0 and op.after >= ended[otherwise if op.on is None else op.on]:
            return False
        self.start_us.append(now_us)
        self._left_us = op.time_us
        return True

    @property
    def factors(self) -> tuple[float, float]:
        return self.ops[len(self.end_us)].factors

    def left_us(self, factor: float) -> float:
        """Time until the present op ends, at a speed of 1/factor."""
        return self._left_us * factor

    def go_on(self, passed_us: float, factor: float, now_us: float) -> None:
        """Works until `now_us`, for `passed_us`."""
        if self._left_us * factor <= passed_us:
            self.end_us.append(now_us)
        else:
            self._left_us -= passed_us / factor


def run_lanes(*ops: Sequence[Op]) -> tuple[Lane, ...]:
    """When every op begins and ends, by resource; the first one is compute.

    Raises:
        ValueError: ops wait for each other.
    """
    lanes, now_us = tuple(map(Lane, ops)), 0.0
    compute, networks = lanes[0], lanes[1:]
    while any(len(lane.end_us) < len(lane.ops) for lane in lanes):
        ended = [len(lane.end_us) for lane in lanes]
        computing = compute.works(ended, now_us, 1)
        sending = [lane for lane in networks if lane.works(ended, now_us, 0)]
        if not (computing or sending):
            raise ValueError("ops of the resources wait for each other")
        slow = max((lane.factors[0] for lane in sending), default=1.0) if computing else 1.0
        working = [(compute, slow)] if computing else []
        working += [(lane, lane.factors[1] if computing else 1.0) for lane in sending]
        passed_us = min(lane.left_us(factor) for lane, factor in working)
        now_us += passed_us
        for lane, factor in working:
            lane.go_on(passed_us, factor, now_us)
    return lanes
