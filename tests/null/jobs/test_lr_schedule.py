"""The learning-rate recipe of `planner run`."""

from __future__ import annotations

import pytest

from planner.jobs.lr_schedule import CONSTANT, LrSchedule
from runtime.errors import InputError


def test_a_recipe_is_read_and_scaled() -> None:
    recipe = LrSchedule.parse("scale:128, warmup:10,cosine")
    assert recipe == LrSchedule(scale_batch=128, warmup_steps=10, cosine=True)
    assert recipe.scaled(64, 8, blocks=False).peak == 4.0
    assert recipe.scaled(64, 8, blocks=True).peak == 5.0  # 1.25 times with blocks
    assert LrSchedule.parse("warmup:3").scaled(64, 8, blocks=True).peak == 1.0
    assert LrSchedule.parse("") == CONSTANT
    for wrong in ("scale", "scale:0", "warmup:-1", "cosine:3", "linear", "scale:٣"):
        with pytest.raises(InputError, match="--lr-schedule: found"):
            LrSchedule.parse(wrong)


def test_the_rate_rises_to_its_peak_and_decays_to_nothing() -> None:
    recipe = LrSchedule(scale_batch=8, warmup_steps=10, cosine=True, peak=3.0)
    factors = [recipe.factor(step, 50) for step in range(51)]
    assert factors[0] == 1.0
    assert factors[5] == 2.0
    assert max(factors) == factors[10] == 3.0
    assert factors[30] == pytest.approx(1.5)
    assert factors[50] == 0.0
    assert [LrSchedule(peak=3.0).factor(step, 50) for step in (0, 49)] == [3.0, 3.0]
    assert [LrSchedule.parse("warmup:4").factor(step, 9) for step in (0, 1, 4, 8)] == [0.0, 0.25, 1.0, 1.0]
