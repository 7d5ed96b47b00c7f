"""Two resources that each work through pieces in a fixed order: compute and one network, from event to event.

A piece begins when the one before it has ended and, on the other resource, the one that it waits for. While both work,
compute and the message slow each other down by the message's factors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


class Piece(NamedTuple):
    """A piece of work."""

    time_us: float
    """Alone on the machine."""
    after: int = -1
    """The piece of the other resource that has to have ended before; -1: none."""
    kind: str = ""
    step: int = 0
    bucket: int | None = None
    factors: tuple[float, float] = (1.0, 1.0)
    """Of messages: by what compute and the message are slowed while both are under way."""


class Lane:
    """One resource: its pieces, and when those so far began and ended."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.pieces = pieces
        self.start_us: list[float] = []
        self.end_us: list[float] = []
        self._left_us = 0.0

    def works(self, ended: int, now_us: float) -> bool:
        """Whether it is at work; begins with the next piece where that may begin.

        Args:
            ended: number of pieces that have ended on the other resource.
            now_us: the time.
        """
        place = len(self.end_us)
        if place < len(self.start_us):
            return True
        if place == len(self.pieces) or self.pieces[place].after >= ended:
            return False
        self.start_us.append(now_us)
        self._left_us = self.pieces[place].time_us
        return True

    def left_us(self, factor: float) -> float:
        """Time until the present piece ends, at a speed of 1/factor."""
        return self._left_us * factor

    def go_on(self, passed_us: float, factor: float, now_us: float) -> None:
        """Works until `now_us`, for `passed_us`."""
        if self._left_us * factor <= passed_us:
            self.end_us.append(now_us)
        else:
            self._left_us -= passed_us / factor


def run_lanes(compute: Sequence[Piece], network: Sequence[Piece]) -> tuple[Lane, Lane]:
    """When every piece begins and ends: (compute, network).

    Raises:
        ValueError: pieces wait for each other.
    """
    one, two, now_us = Lane(compute), Lane(network), 0.0
    while len(one.end_us) < len(compute) or len(two.end_us) < len(network):
        computing, sending = one.works(len(two.end_us), now_us), two.works(len(one.end_us), now_us)
        if not (computing or sending):
            raise ValueError("pieces of the two resources wait for each other")
        slow, slowed = network[len(two.end_us)].factors if computing and sending else (1.0, 1.0)
        passed_us = min(one.left_us(slow) if computing else math.inf, two.left_us(slowed) if sending else math.inf)
        now_us += passed_us
        if computing:
            one.go_on(passed_us, slow, now_us)
        if sending:
            two.go_on(passed_us, slowed, now_us)
    return one, two
