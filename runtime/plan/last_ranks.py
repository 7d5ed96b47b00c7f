"""Ranks at messages: which arrives last, and how long the others wait for it. Torch-free.

A message ends on all ranks at once, so that it takes least on the rank that began it last. Clocks of hosts need not
agree.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RankArrival:
    """One rank at the messages of a step."""

    rank: int
    last: int
    """Number of messages at which it arrived last."""
    messages: int
    others_waited_us: float
    """Time in microseconds that all other ranks together waited for it, at those messages."""

    def __str__(self) -> str:
        return (
            f"rank {self.rank} arrives last at {self.last} of {self.messages} messages; the others wait "
            f"{self.others_waited_us / 1e3:.2f} ms for it"
        )


def compare_arrivals(messages: Iterable[Sequence[float]], ranks: Sequence[int]) -> tuple[RankArrival, ...]:
    """Return a row for each rank from the durations of each message on every rank, in microseconds.

    Messages that were not timed on every rank are left out.
    """
    timed = [durations for durations in messages if durations and not any(map(math.isnan, durations))]
    last = [durations.index(min(durations)) for durations in timed]
    waited = [sum(durations) - len(durations) * min(durations) for durations in timed]
    return tuple(
        RankArrival(
            rank=rank, last=last.count(at), messages=len(timed),
            others_waited_us=sum(time for time, who in zip(waited, last, strict=True) if who == at),
        )
        for at, rank in enumerate(ranks)
        if timed
    )  # fmt: skip
