"""The rehearsal of a plan in phases: computation by area, and what the table holds of what ranks measured."""

from __future__ import annotations

import pytest

from benchmarks.phases import PIXELS, STEPS, STEPS_PER_EPOCH, Found, lines, plans_of, predicted_s, target
from planner.decide.phases import join_phases
from planner.rehearse.scale import Scale


def test_the_slowest_rank_counts_and_bits_are_counted() -> None:
    asked = target(1.0)
    plans = plans_of(asked.profile, asked.cluster)
    computed = [plan.predicted.iteration_us for plan in plans if plan.predicted]
    assert computed == sorted(computed)
    whole = join_phases(plans, list(PIXELS.values()), [STEPS_PER_EPOCH])
    said_s = predicted_s(plans)
    assert whole.predicted is not None
    assert sum(said_s) == pytest.approx(sum(STEPS) * whole.predicted.iteration_us / 1e6)
    ranks = [
        Found(scale=Scale(dilate=2.0, shrink=3.0), whole=whole, phases_s=phases_s, elements=1000, differing=differing)
        for phases_s, differing in (([2.0 * each for each in said_s], 0), ([1.5 * each for each in said_s], 7))
    ]
    *rows, _, words = lines(ranks)
    assert [row.rpartition(" | ")[2] for row in rows[2:]] == ["-50.0% |"] * 4
    assert "7 of 2,000 elements on 2 ranks have other bits" in words
