"""What a rehearsal plans to run fits into its minutes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.comparison.variants import DDP, PLAN, Variant
from planner.rehearse import ranks
from runtime.errors import InputError


@given(
    step_ms=st.floats(1.0, 20_000.0),
    factors=st.lists(st.floats(0.05, 4.0), max_size=5),
    caps=st.integers(0, 9),
    left_s=st.floats(1.0, 600.0),
)
def test_rounds_fit_into_what_is_left(step_ms: float, factors: list[float], caps: int, left_s: float) -> None:
    variants = [Variant(name=DDP, kind="ddp", predicted_us=1e3 * step_ms)]
    variants += [Variant(name=f"s{n}", kind="plan", predicted_us=1e3 * step_ms * f) for n, f in enumerate(factors)]
    variants.append(Variant(name=PLAN, kind="plan", predicted_us=1e3 * step_ms, plan=None))
    sizes = [(float(n), Variant(name=f"ddp:{n}", kind="ddp", predicted_us=1e3 * step_ms)) for n in range(caps)]
    if ranks._least_s([((one.predicted_us or 0.0) / 1e6, 1) for one in variants]) > left_s:
        with pytest.raises(InputError, match="expected --minutes"):
            ranks._rounds(variants, sizes, left_s, 4.0)
        return
    rounds, steps, kept = ranks._rounds(variants, sizes, left_s, 4.0)
    total_s = sum((one.predicted_us or 0.0) / 1e6 * ranks.ALONE_STEPS for one in variants)
    ddp_s = step_ms / 1e3
    total_s += rounds * (ranks.WARM_UP_STEPS + steps) * sum((one.predicted_us or 0.0) / 1e6 for one in variants)
    if kept:
        total_s += ddp_s * ranks.ALONE_STEPS + rounds * (ranks.WARM_UP_STEPS + steps) * ddp_s
        total_s += ranks.SWEEP.blocks(len(kept)) * (ranks.WARM_UP_STEPS + ranks.SWEEP.steps) * ddp_s
    assert total_s <= left_s * (1 + 1e-9)
    assert rounds >= ranks.LEAST_ROUNDS
    assert steps >= 1
    if rounds < ranks.MOST_ROUNDS and steps == ranks.BLOCK_STEPS:
        each_s = sum(one.predicted_us or 0.0 for one in variants) / 1e6 + (ddp_s if kept else 0.0)
        one_more_s = (ranks.WARM_UP_STEPS + steps) * each_s
        assert total_s + one_more_s > left_s * (1 - 1e-9)
