"""Small models for FSDP2: chains of units, by hand or drawn by hypothesis."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from planner.documents.units import Unit, Units, UnitWeight
from planner.fsdp2.program import Shape
from planner.fsdp2.simulator import Costs

ROWS = 100


def chain_of(
    rows: Sequence[int], forward_us: Sequence[float], backward_us: Sequence[float], kept: Sequence[int], *,
    ranks: int = 4, root_rows: int = 0,
) -> Shape:  # fmt: skip
    """Units u0, u1, … of so many rows of one element."""
    leaves = tuple(
        Unit(
            module=f"u{index}", forward_us=forward_us[index], backward_us=backward_us[index],
            activation_bytes=kept[index], input_requires_grad=index > 0,
        )
        for index in range(len(rows))
    )  # fmt: skip
    weights = [UnitWeight(modules=(f"u{index}",), shape=(count,)) for index, count in enumerate(rows)]
    weights += [UnitWeight(modules=("",), shape=(root_rows,))] if root_rows else []
    return Shape.of(Units(units=leaves, weights=tuple(weights), state_factor=2.0), ranks)


def even(count: int, **fields: int) -> Shape:
    return chain_of([ROWS] * count, [20.0] * count, [40.0] * count, [1000] * count, **fields)


def fixed_costs(gather_us: float, scatter_us: float) -> Costs:
    """Messages that all take the same time."""
    return Costs(gather_us=lambda size: gather_us, scatter_us=lambda size: scatter_us, reduce_us=lambda size: 5.0)


@st.composite
def shapes(draw: st.DrawFn, most: int = 5) -> Shape:
    count = draw(st.integers(1, most))

    def some(low: int, high: int) -> list[int]:
        return draw(st.lists(st.integers(low, high), min_size=count, max_size=count))

    return chain_of(
        some(1, 5000), [float(time) for time in some(0, 300)], [float(time) for time in some(0, 600)], some(0, 20_000),
        ranks=draw(st.sampled_from([2, 4, 8])), root_rows=draw(st.sampled_from([0, 0, 700])),
    )  # fmt: skip


@st.composite
def lines(draw: st.DrawFn) -> Costs:
    """Messages that cost a start-up and a time per byte."""
    start_us, per_byte = draw(st.floats(0.0, 80.0)), draw(st.floats(0.0, 0.05))
    more = draw(st.floats(0.5, 2.0))
    return Costs(
        gather_us=lambda size: start_us + per_byte * size, scatter_us=lambda size: more * (start_us + per_byte * size),
        update_us=draw(st.floats(0.0, 50.0)),
    )  # fmt: skip
