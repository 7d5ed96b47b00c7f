"""What a rehearsal plans to run fits into its minutes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.comparison.measure import LEAST_ROUNDS
from planner.comparison.variants import DDP, NO_COMMUNICATION, PLAN, BucketVariant
from planner.rehearse import bucketed_ranks, ranks
from runtime.errors import InputError

DILATE = 4.0


@given(
    step_ms=st.floats(1.0, 20_000.0),
    slower=st.floats(1.0, 10.0),
    factors=st.lists(st.floats(0.05, 8.0), max_size=5),
    caps=st.integers(0, 9),
    left_s=st.floats(1.0, 600.0),
)
def test_rounds_fit_into_what_is_left(
    step_ms: float, slower: float, factors: list[float], caps: int, left_s: float
) -> None:
    def variant(name: str, factor: float) -> BucketVariant:
        return BucketVariant(name=name, kind="plan", predicted_us=1e3 * step_ms * factor / DILATE)

    variants = [variant(NO_COMMUNICATION, 1.0), variant(DDP, slower), variant(PLAN, slower)]
    variants += [variant(f"s{number}", factor) for number, factor in enumerate(factors)]
    sizes = [(float(n), variant(f"ddp:{n}", slower)) for n in range(caps)]

    def blocks_of(steps: int) -> list[ranks.Blocks]:
        return bucketed_ranks.blocks_of(variants, steps, DILATE)

    if sum(each.least_s for each in blocks_of(1)) > left_s:
        with pytest.raises(InputError, match="expected --minutes"):
            ranks.choose_rounds(blocks_of, sizes, left_s, 4.0)
        return
    rounds, chosen = ranks.choose_rounds(blocks_of, sizes, left_s, 4.0)
    assert rounds.count >= LEAST_ROUNDS
    assert rounds.steps >= 1
    assert set(rounds.brief) == {
        one.name for one in variants if DILATE * (one.predicted_us or 0.0) > bucketed_ranks.SLOW * 1e3 * step_ms
    }
    ddp_s = slower * step_ms / 1e3
    measured = [(one.name, DILATE * (one.predicted_us or 0.0) / 1e6) for one in variants]
    total_s = 0.0
    if chosen:  # DDP's best size is measured with the others
        assert DDP not in rounds.brief
        measured.append(("best", ddp_s))
        total_s = ranks.SWEEP.blocks(len(chosen)) * (ranks.WARM_UP_STEPS + ranks.SWEEP.steps) * ddp_s
    one_more_s = 0.0
    for name, step_s in measured:
        brief = name in rounds.brief
        round_s = step_s * (ranks.WARM_UP_STEPS + (1 if brief else rounds.steps))
        total_s += step_s * (1 if brief else 2) + (LEAST_ROUNDS if brief else rounds.count) * round_s
        one_more_s += 0.0 if brief else round_s
    assert total_s <= left_s * (1 + 1e-9)
    if rounds.count < ranks.MOST_ROUNDS and rounds.steps == ranks.BLOCK_STEPS:
        assert total_s + one_more_s > left_s * (1 - 1e-9)
