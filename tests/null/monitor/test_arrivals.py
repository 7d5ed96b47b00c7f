"""Ranks at messages: who arrives last, how long the others wait, and how often ranks compare."""

from __future__ import annotations

import math

import pytest
import torch

import runtime.monitor.arrivals as arrivals
from runtime.comm.world import World
from runtime.errors import StragglerWarning
from runtime.monitor.arrivals import EVERY_STEPS, FIRST_STEP, Arrivals
from runtime.monitor.clock import WallClock
from runtime.monitor.recorder import StepMarks
from runtime.plan.last_ranks import (
    COMPUTE,
    INPUT,
    NETWORK,
    RankArrival,
    arrivals_of,
    compare_arrivals,
    find_straggler,
    with_causes,
)


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
    said: list[tuple[str, type[Warning]]] = []

    def gather_parts(part: torch.Tensor, what: str) -> torch.Tensor:
        sent.append(what)
        other = torch.tensor([1000.0, math.nan, 5000.0, 0.0] * (len(part) // 4) + [other_us, 1e4], dtype=torch.float64)
        return torch.cat([part, other])

    monkeypatch.setattr(world, "gather_parts", gather_parts)
    monkeypatch.setattr(arrivals, "object_device", lambda group: torch.device("cpu"))
    monkeypatch.setattr(world, "warn", lambda text, category: said.append((text, category)))
    found, steps = Arrivals(world, WallClock()), steps_of(20, 0.01)
    for _ in range(FIRST_STEP - 1):
        found.step_done(steps)
    assert (found.rows, sent) == ((), [])
    found.step_done(steps)
    assert [(row.last, round(row.others_waited_us)) for row in found.rows] == [(0, 0), (1, 1000)]
    assert [(one.last_rank, round(one.waited_us)) for one in found.messages] == [(1, 1000)]
    for _ in range(EVERY_STEPS):
        found.step_done(steps)
    assert len(sent) == rounds
    (text, category), *more = said
    assert (category, more) == (StragglerWarning, [])
    assert text.startswith(
        "rank 1 arrived last in at least nine of the last 10 steps; each other rank waits 1.00 ms of"
    )
    found.restart()
    assert found.rows == ()


def test_compute_is_that_of_all_micro_batches_and_what_ranks_wait_before_is_none_of_it() -> None:
    before, marks = StepMarks(1, 1), StepMarks(1, 1)
    before.update, before.update_end = -0.001, 0.0
    marks.micro_batches, marks.followed = [(0.010, 0.013, 0.020)], 0.012  # 2 ms for buffers
    marks.forward, marks.backward_end, marks.gathered_us = 0.025, 0.035, 3000.0
    marks.sent[0].start, marks.sent[0].end = 0.030, 0.034
    found = Arrivals(World(rank=0, ranks=2, group=None), WallClock())._figures(before, marks)
    assert list(found) == pytest.approx([4000.0, 3000.0, 1000.0 + 8000.0 + 10_000.0, 10_000.0 + 5000.0 - 3000.0])


@pytest.mark.parametrize(
    ("compute_us", "input_us", "cause"),
    [((10, 10, 610), (5, 5, 5), COMPUTE), ((10, 10, 60), (5, 5, 905), INPUT), ((10, 10, 60), (5, 5, 5), NETWORK)],
)
def test_what_takes_longer_on_the_last_rank_is_the_cause(
    compute_us: tuple[float, ...], input_us: tuple[float, ...], cause: str
) -> None:
    rows = with_causes(compare_arrivals([[900.0, 850.0, 100.0]], (0, 1, 2)), compute_us, input_us)
    assert [row.cause for row in rows] == [None, None, cause]
    assert f"rank 2 arrives last at 1 of 1 messages, late by {cause}; the others wait" in str(rows[2])
    assert arrivals_of([[900.0, 850.0, 100.0]])[0].late_us == (0.0, 50.0, 800.0)


@pytest.mark.parametrize(("late", "others", "found"), [(9, 1, 1), (8, 2, None), (10, 0, 1)])
def test_a_straggler_is_last_in_nine_of_ten_steps(late: int, others: int, found: int | None) -> None:
    steps = [[[700.0, 100.0, 800.0], [5.0, 4.0, 6.0]]] * late + [[[100.0, 700.0, 800.0], [math.nan, 0.0, 0.0]]] * others
    assert find_straggler(steps, 1e4) == found
    assert find_straggler(steps, 1e5) is None  # less than 5 % of a step
    assert find_straggler(steps[:9], 1e4) is None
