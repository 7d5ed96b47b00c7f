"""Ranks at messages: who arrives last, how long the others wait, and how often ranks compare."""

from __future__ import annotations

import math

import pytest
import torch

import runtime.monitor.arrivals as arrivals
from runtime.comm.world import World
from runtime.monitor.arrivals import EVERY_STEPS, FIRST_STEP, Arrivals
from runtime.monitor.clock import WallClock
from runtime.monitor.recorder import StepMarks
from runtime.plan.last_ranks import RankArrival, compare_arrivals


def test_the_rank_of_the_shortest_message_is_last() -> None:
    rows = compare_arrivals([[500.0, 100.0], [50.0, 60.0], [math.nan, 1.0]], (3, 5))
    assert rows == (
        RankArrival(rank=3, last=1, messages=2, others_waited_us=10.0),
        RankArrival(rank=5, last=1, messages=2, others_waited_us=400.0),
    )
    assert str(rows[1]) == "rank 5 arrives last at 1 of 2 messages; the others wait 0.40 ms for it"
    assert compare_arrivals([], (3, 5)) == ()


def steps_of(count: int, step_s: float) -> list[StepMarks]:
    """Return steps with one bucket of 2 ms."""
    found = [StepMarks(1, 1) for _ in range(count)]
    for at, marks in enumerate(found):
        marks.end = at * step_s
        marks.sent[0].start, marks.sent[0].end = marks.end - 0.002, marks.end
    return found


@pytest.mark.parametrize(("other_us", "rounds"), [(0.0, 2), (1e5, 1)])
def test_ranks_compare_seldom(monkeypatch: pytest.MonkeyPatch, other_us: float, rounds: int) -> None:
    """The other rank takes 1 ms for the message, so it is last; what it spends on comparing makes that rarer."""
    world, sent = World(rank=0, ranks=2, group=object()), []  # type: ignore[arg-type]

    def gather_parts(part: torch.Tensor, what: str) -> torch.Tensor:
        sent.append(what)
        return torch.cat([part, torch.tensor([1000.0, other_us, 1e4], dtype=torch.float64)])

    monkeypatch.setattr(world, "gather_parts", gather_parts)
    monkeypatch.setattr(arrivals, "object_device", lambda group: torch.device("cpu"))
    found, steps = Arrivals(world, WallClock()), steps_of(5, 0.01)
    for _ in range(FIRST_STEP - 1):
        found.step_done(steps)
    assert (found.rows, sent) == ((), [])
    found.step_done(steps)
    assert [(row.last, round(row.others_waited_us)) for row in found.rows] == [(0, 0), (1, 1000)]
    for _ in range(EVERY_STEPS):
        found.step_done(steps)
    assert len(sent) == rounds
    found.restart()
    assert found.rows == ()
