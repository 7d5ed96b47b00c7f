"""When a lossy plan counts as faster than the exact one beside it."""

from __future__ import annotations

import numpy as np
import pytest

from runtime.monitor.trial import ROUNDS, judge


def blocks(rng: np.random.Generator, mean_us: float, spread_us: float) -> list[float]:
    """A rank's medians of one plan's blocks."""
    times: list[float] = rng.normal(mean_us, spread_us, ROUNDS).tolist()
    return times


@pytest.mark.parametrize(("lossy_us", "faster"), [(900.0, True), (1000.0, False), (1100.0, False)])
def test_a_clear_difference_counts(lossy_us: float, faster: bool) -> None:
    rng = np.random.default_rng(0)
    verdicts = [
        judge([{"lossy": blocks(rng, lossy_us, 10.0), "exact": blocks(rng, 1000.0, 10.0)} for _ in range(2)])
        for _ in range(50)
    ]
    share = sum(verdict.good for verdict in verdicts) / len(verdicts)
    assert share > 0.95 if faster else share < 0.2


def test_the_slowest_rank_sets_the_pace() -> None:
    quick = {"lossy": [500.0] * ROUNDS, "exact": [1000.0] * ROUNDS}
    slow = {"lossy": [1200.0] * ROUNDS, "exact": [1000.0] * ROUNDS}
    assert judge([quick, quick]).good
    verdict = judge([quick, slow])
    assert (verdict.good, verdict.step_us, verdict.other_us) == (False, 1200.0, 1000.0)
    assert verdict.text == (
        "steps of the lossy plan take 1.20 ms, those of the exact plan beside it 1.00 ms (noise ± 0.00 ms): they are "
        "not faster, and the run goes on with the exact plan"
    )
