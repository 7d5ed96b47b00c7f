"""Every way that a selection can go is taken when the prediction is made wrong, and gives the same result."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from kernel_cases import FLOATS, expect_equal, family
from kernel_host import SMALL, HostBackend, needs_compiler, small_library
from torch import Tensor

from runtime.kernels import TopkState, make_state
from runtime.kernels.state import WARM

pytestmark = needs_compiler
N, K = 20 * SMALL.tile + 1, 64
HUGE = 0x7F000000


def set_warm(state: TopkState, **words: int) -> None:
    """Writes what the last step is said to have left."""
    for name, word in words.items():
        state.warm[:, WARM.index(name)] = word


def counted(
    state: TopkState, name: str = "normal", dtype: torch.dtype = torch.float32, seed: int = 9
) -> dict[str, int]:
    """Compares one call with the reference; returns what it counted."""
    before = state.counters()[0]
    (elements,) = state.layout.elements
    gradient, residual = family(name, elements, seed, torch.float32), family("normal", elements, seed + 1, dtype)
    expect_equal(HostBackend(small_library(), grid=4, resident=3), state, gradient, residual)
    after = state.counters()[0]
    return {key: after[key] - before[key] for key in WARM[WARM.index("calls") :]}


def warmed(dtype: torch.dtype = torch.float32, **options: int) -> TopkState:
    """A state that knows where the threshold of `counted`'s input lies."""
    state = make_state([N], [K], "cpu", shape=SMALL, **options)
    for seed in (1, 3, 5):
        counted(state, dtype=dtype, seed=seed)
    return state


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_usual_way_reads_everything_once(dtype: torch.dtype) -> None:
    found = counted(warmed(dtype), dtype=dtype)
    assert (found["hits"], found["filtered"], found["restarted"], found["direct"]) == (1, 0, 0, 0)
    assert found["passes"] == (0 if dtype == torch.bfloat16 else 1)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_cold(dtype: torch.dtype) -> None:
    found = counted(make_state([N], [K], "cpu", shape=SMALL), dtype=dtype)
    assert (found["cold"], found["hits"], found["filtered"], found["restarted"], found["direct"]) == (1, 0, 1, 0, 0)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_floor_too_high_with_the_threshold_in_the_window(dtype: torch.dtype) -> None:
    """The counts say where the threshold is: one more reading."""
    state = warmed(dtype)
    set_warm(state, floor=state.counters()[0]["threshold"] + (1 << 20))
    found = counted(state, dtype=dtype)
    assert (found["misses"], found["filtered"], found["restarted"], found["direct"]) == (1, 1, 0, 0)
    assert state.counters()[0]["multiple"] == 10


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_window_too_high(dtype: torch.dtype) -> None:
    state = warmed(dtype)
    set_warm(state, floor=HUGE, base=HUGE, shift=16)
    found = counted(state, dtype=dtype)
    assert (found["misses"], found["restarted"], found["filtered"]) == (1, 1, 1)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_window_too_low(dtype: torch.dtype) -> None:
    """All that counts is in the highest bin, and too much reaches the floor."""
    state = warmed(dtype, capacity=4 * K)
    set_warm(state, floor=0, base=0, shift=16)
    found = counted(state, dtype=dtype)
    assert (found["overflows"], found["misses"]) == (1, 0)


def test_window_too_low_with_room() -> None:
    """The candidates are sound, though no bin says where the threshold lies among them."""
    state = warmed(capacity=N)
    set_warm(state, floor=1 << 24, base=1 << 24, shift=12)
    found = counted(state)
    assert (found["hits"], found["filtered"], found["passes"]) == (1, 0, 3)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_no_room_for_more_than_k(dtype: torch.dtype) -> None:
    state = warmed(dtype, capacity=K)
    found = counted(state, dtype=dtype)
    assert found["overflows"] == 1 or found["misses"] == 1
    assert found["filtered"] + found["direct"] > 0


@pytest.mark.parametrize("name", ["all equal", "zeros", "two values", "all nan"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_more_ties_than_room(name: str, dtype: torch.dtype) -> None:
    """Candidates cannot hold them: everything is read in each pass."""
    state = make_state([N], [K], "cpu", shape=SMALL, capacity=2 * K)
    gradient, residual = family(name, N, 1, torch.float32), torch.zeros(N, dtype=dtype)
    for step in range(2):
        expect_equal(HostBackend(small_library(), seed=step), state, gradient, residual)
    assert state.counters()[0]["direct"] == 2


def test_so_many_that_candidates_do_not_pay() -> None:
    n = 1 << 17
    state, residual = make_state([n], [n // 3], "cpu", shape=SMALL), torch.zeros(n)
    assert state.layout.capacities == (0,)
    for step in range(2):
        residual = expect_equal(HostBackend(small_library()), state, family("normal", n, step, torch.float32), residual)
    (found,) = state.counters()
    assert (found["direct"], found["misses"], found["filtered"]) == (2, 0, 0)
    assert found["restarted"] == 0


def test_a_step_that_is_undone_teaches_nothing() -> None:
    state = warmed()
    before = state.counters()[0]
    counted(state, "nan")
    after = state.counters()[0]
    assert [after[name] for name in ("floor", "base", "shift")] == [before[name] for name in ("floor", "base", "shift")]
    assert (before["flags"], after["flags"]) == (0, 1)
    counted(state)
    assert state.counters()[0]["flags"] == 0


def test_reset_begins_cold() -> None:
    state = warmed()
    state.reset()
    assert counted(state)["cold"] == 1


@pytest.mark.parametrize("make", [lambda: warmed(), lambda: make_state([N], [K], "cpu", shape=SMALL)])
def test_room_is_bounded(make: Callable[[], TopkState]) -> None:
    """Nothing is written behind the candidates: what lies there are tables, which the next call still understands."""
    state = make()
    tables = [state.part(name).clone() for name in ("segments", "tile_segments", "chunk_segments")]
    for name in ("all equal", "one place", "normal"):
        counted(state, name)
    after: list[Tensor] = [state.part(name) for name in ("segments", "tile_segments", "chunk_segments")]
    assert all(torch.equal(one, other) for one, other in zip(tables, after, strict=True))
