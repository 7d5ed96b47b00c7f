"""Whether delayed steps are shorter than those of the warm-up: what is timed, told and decided."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
import torch

from runtime.errors import FallbackWarning
from runtime.monitor.pace import NO_TIMING, SKIPPED, TURNS, Pace


class Hands:
    """A clock that is set."""

    cheap = True

    def __init__(self) -> None:
        self.now_us = 0.0

    def mark(self) -> float:
        return self.now_us

    def between_us(self, start: float, end: float) -> float:
        return end - start

    def reached(self, mark: float) -> bool:
        return True


def told(k: int, synchronous: Sequence[float], delayed: Sequence[float]) -> list[tuple[float, float, float]]:
    """What one rank tells in each delayed step, by the times that its steps take."""
    clock = Hands()
    pace = Pace(clock, k)
    for step, time_us in enumerate(synchronous, 1):
        clock.now_us += time_us
        pace.synchronous_step(step)
    found = []
    for time_us in delayed:
        clock.now_us += time_us
        found.append(pace.delayed_step(k))
    return found


@pytest.mark.parametrize("k", [1, 3, 4])
def test_turns_of_k_steps_are_timed(k: int) -> None:
    """Every k-th delayed step takes longer; the first turns, and one with a validation in it, do not count."""
    delayed = [10.0 + 6.0 * (step % k == 0) for step in range(2 * (SKIPPED + TURNS) * k)]
    delayed[0], delayed[SKIPPED * k + 1] = 500.0, 9000.0
    found = told(k, [20.0] * (3 * TURNS * k), delayed)
    [said] = [one for one in found if one != NO_TIMING]
    assert found.index(said) == (SKIPPED + TURNS) * k
    assert said == pytest.approx((20.0, 10.0 + 6.0 / k, 0.0))


@pytest.mark.parametrize("k", [1, 3])
def test_all_of_the_first_turns_are_left_out(k: int) -> None:
    """Of steps that become shorter and shorter, the median is in the middle of those that count."""
    delayed = [1000.0 - step for step in range(2 * (SKIPPED + TURNS) * k)]
    [said] = [one for one in told(k, [20.0] * (3 * TURNS * k), delayed) if one != NO_TIMING]
    first, last = SKIPPED * k + 1, (SKIPPED + TURNS) * k
    assert said[1] == pytest.approx(1000.0 - (first + last) / 2.0)


def test_nothing_is_told_of_what_is_too_short_or_changes() -> None:
    assert set(told(2, [20.0] * (2 * TURNS), [10.0] * 200)) == {NO_TIMING}  # one mark too few in the warm-up
    assert set(told(2, [20.0] * (2 * TURNS + 1), [10.0] * (2 * (SKIPPED + TURNS)))) == {NO_TIMING}
    assert set(told(2, [20.0] * (2 * TURNS + 1), [10.0] * 200)) != {NO_TIMING}
    pace = Pace(Hands(), 2)
    for step in range(100):
        pace.synchronous_step(step)
    assert {pace.delayed_step(1) for _ in range(100)} == {NO_TIMING}  # the guard has shortened it


def test_steps_of_the_warm_up_follow_one_another() -> None:
    """Two exchanges for each step of the optimizer are not what delayed steps are, each of one exchange."""
    pace = Pace(Hands(), 1)
    for step in range(0, 200, 2):
        pace.synchronous_step(step)
    assert {pace.delayed_step(1) for _ in range(100)} == {NO_TIMING}


def test_a_checkpoint_keeps_what_the_warm_up_showed() -> None:
    """Delayed steps are timed anew, for nobody knows how long the pause was; a verdict is not repeated."""
    clock = Hands()
    pace = Pace(clock, 1)
    for step in range(1, TURNS + 2):
        clock.now_us += 20.0
        pace.synchronous_step(step)
    for _ in range(5):
        clock.now_us += 10.0
        assert pace.delayed_step(1) == NO_TIMING
    again = Pace(clock, 1)
    again.load(json.loads(json.dumps(pace.state())))
    clock.now_us += 1e6
    said = []
    for _ in range(2 * (SKIPPED + TURNS)):
        clock.now_us += 10.0
        said.append(again.delayed_step(1))
    assert [one for one in said if one != NO_TIMING] == [pytest.approx((20.0, 10.0, 0.0))]
    over = Pace(clock, 1)
    over.load(again.state())
    assert {over.delayed_step(1) for _ in range(100)} == {NO_TIMING}


def test_delay_has_to_be_faster_beyond_the_noise() -> None:
    """The mean over ranks decides, and nothing is decided while one has not told."""
    faster = torch.tensor([[20.0, 18.0, 1.0], [20.0, 18.5, 2.0]], dtype=torch.float64)
    pace = Pace(Hands(), 2)
    assert pace.allows(torch.tensor([[20.0, 30.0, 0.0], NO_TIMING], dtype=torch.float64))
    assert pace.verdict is None
    assert pace.allows(faster)
    assert pace.verdict is not None
    assert pace.verdict.good
    for slower in (faster + torch.tensor([0.0, 0.0, 1.0]), faster + torch.tensor([0.0, 2.0, 0.0])):
        with pytest.warns(FallbackWarning, match="not faster, and the run goes on with synchronous ones"):
            assert not pace.allows(slower)


def test_noise_is_that_of_medians() -> None:
    """Alternating times have quartiles 4 apart: 2 · 1.2533 · 4 / 1.349 / √16 in each half."""
    [said] = [one for one in told(1, [18.0, 22.0] * TURNS, [8.0, 12.0] * TURNS) if one != NO_TIMING]
    assert said[2] == pytest.approx(2.0 * 1.2533 * 4.0 / 1.349 / 4.0 * 2**0.5)
