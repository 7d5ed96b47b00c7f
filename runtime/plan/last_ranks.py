"""Ranks at messages: which arrives last, why, and how long the others wait for it. Torch-free.

A message ends on all ranks at once, so that it takes least on the rank that began it last. Clocks of hosts need not
agree.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from pydantic import Field

from runtime.plan.strict_json import MAX_RANKS, Count, Name, Record, TimeUs

STRAGGLER_STEPS, STRAGGLER_SHARE, STRAGGLER_LATE = 10, 0.9, 0.05
"""Steps that are looked at; share of them in which one rank is the last; share of a step by which it is later than any
other."""
COMPUTE, INPUT, NETWORK = "compute", "input", "network"
"""Causes of a late rank: its forward, backward and update; its script between steps, which loads the input; or neither,
but messages before."""

RankNumber = Annotated[int, Field(ge=0, lt=MAX_RANKS)]


@dataclass(frozen=True, kw_only=True)
class RankArrival(Record):
    """One rank at the messages of a step."""

    rank: RankNumber
    last: Count
    """Number of messages at which it arrived last."""
    messages: Count
    others_waited_us: TimeUs
    """Time in microseconds that all other ranks together waited for it, at those messages."""
    cause: Name | None = None
    """Cause of its lateness: `compute`, `input` or `network`; None: it is never last, or its parts are not known."""

    def __str__(self) -> str:
        why = f", late by {self.cause}" if self.cause else ""
        return (
            f"rank {self.rank} arrives last at {self.last} of {self.messages} messages{why}; the others wait "
            f"{self.others_waited_us / 1e3:.2f} ms for it"
        )


@dataclass(frozen=True, kw_only=True)
class MessageArrival(Record):
    """All ranks at one message of a step."""

    message: Count
    """Index of its bucket."""
    late_us: tuple[TimeUs, ...]
    """Time of each rank's arrival behind the first one, in order of rank."""

    @property
    def last_rank(self) -> int:
        """Place of the rank that arrived last."""
        return self.late_us.index(max(self.late_us))

    @property
    def waited_us(self) -> float:
        """Time that the first rank waited for the last one."""
        return max(self.late_us)


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


def arrivals_of(messages: Iterable[Sequence[float]]) -> tuple[MessageArrival, ...]:
    """Return when ranks arrive at each message that was timed on all of them, from its durations on every rank."""
    return tuple(
        MessageArrival(message=index, late_us=tuple(round(max(durations) - one, 3) for one in durations))
        for index, durations in enumerate(messages)
        if durations and not any(map(math.isnan, durations))
    )


def with_causes(
    rows: Sequence[RankArrival], compute_us: Sequence[float], input_us: Sequence[float]
) -> tuple[RankArrival, ...]:
    """Return the rows with what made ranks late: what takes longer than the others' median by half of the lateness.

    Args:
        rows: one for each rank.
        compute_us: time of each rank's forward, backward and update, in order of the rows.
        input_us: time of each rank's script between two steps.
    """
    found = []
    for at, row in enumerate(rows):
        late_us = row.others_waited_us / max(1, len(rows) - 1)
        excess_us = {
            cause: times[at] - statistics.median([*times[:at], *times[at + 1 :]] or [times[at]])
            for cause, times in ((COMPUTE, compute_us), (INPUT, input_us))
        }
        cause = max(excess_us, key=lambda one: excess_us[one])
        known = not any(map(math.isnan, excess_us.values()))
        if row.last and known:
            row = replace(row, cause=cause if excess_us[cause] >= late_us / 2 else NETWORK)
        found.append(row)
    return tuple(found)


def rank_arrivals(figures: Sequence[Sequence[float]]) -> tuple[tuple[RankArrival, ...], tuple[MessageArrival, ...]]:
    """Return each rank at the messages of a step, with causes, and all ranks at each message.

    Args:
        figures: of each rank, medians over steps in microseconds (NaN: not known): durations of buckets' messages, that
            of `session.batches`' own, and the times of compute and of input.
    """
    *durations, compute_us, input_us = zip(*figures, strict=True)
    rows = with_causes(compare_arrivals(durations, range(len(figures))), compute_us, input_us)
    return rows, arrivals_of(durations[:-1])


def find_straggler(steps: Iterable[Sequence[Sequence[float]]], step_us: float) -> int | None:
    """Return the place of the rank that arrives last in nine of ten steps, by more than 5 % of a step; None: no rank.

    Args:
        steps: of the last steps, durations of each message on every rank.
        step_us: time of a step.
    """
    last: list[int | None] = []
    for messages in steps:
        timed = [durations for durations in messages if not any(map(math.isnan, durations))]
        # What a rank waits for others in the whole step: the last one least.
        ranks = range(len(timed[0]) if timed else 0)
        waits = [sum(durations[at] - min(durations) for durations in timed) for at in ranks]
        first, second = [*sorted(waits), math.inf, math.inf][:2]
        late = len(waits) > 1 and second - first > STRAGGLER_LATE * step_us
        last.append(waits.index(first) if late else None)
    found = max(set(last), key=last.count, default=None)
    return found if len(last) >= STRAGGLER_STEPS and last.count(found) >= STRAGGLER_SHARE * len(last) else None
