"""The kernels' source, run on the host, selects what the reference says, whatever the input and the launch."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import FAMILIES, FLOATS, bits, expect_equal, family, left_clean, same, select, steady_residual
from kernel_host import SMALL, HostBackend, needs_compiler, small_library
from torch import Tensor

from runtime.kernels import ONE_BY_ONE, ef_topk_, ef_topk_torch, make_state
from runtime.kernels.backend import installed
from runtime.kernels.state import WARM

pytestmark = needs_compiler
TILE = SMALL.tile
DTYPES = [(gradient, residual) for gradient in FLOATS for residual in FLOATS]


def host(grid: int = 3, resident: int = 2, seed: int = 1) -> HostBackend:
    return HostBackend(small_library(), grid=grid, resident=resident, seed=seed)


def sizes_of(n: int) -> list[int]:
    """Numbers of elements to select from n."""
    return sorted({k for k in (1, 2, 31, n // 1000, n // 100, n // 10, n // 2, n - 1, n) if 1 <= k <= n})


@pytest.mark.parametrize("name", sorted(FAMILIES))
@pytest.mark.parametrize(("gradient_dtype", "residual_dtype"), DTYPES, ids=str)
def test_every_kind_of_input(name: str, gradient_dtype: torch.dtype, residual_dtype: torch.dtype) -> None:
    n = 6 * TILE + 5
    for k in (1, n // 100, n // 4, n):
        state, residual = make_state([n], [k], "cpu", shape=SMALL), torch.zeros(n, dtype=residual_dtype)
        for step in range(3):  # cold, then warm
            gradient = family(name, n, step, gradient_dtype)
            new = expect_equal(host(seed=step), state, gradient, residual)
            assert bool(state.nonfinite) == (
                not bool((residual.float() + gradient.float()).to(residual_dtype).isfinite().all())
            )
            residual = residual if state.nonfinite else new


@pytest.mark.parametrize("n", [1, 2, 7, 31, 32, 33, TILE - 4, TILE - 3, TILE - 1, TILE, TILE + 1, 2 * TILE + 1])
def test_every_number_of_elements(n: int) -> None:
    for k in sizes_of(n):
        state, residual = make_state([n], [k], "cpu", shape=SMALL), torch.zeros(n)
        for step in range(3):
            residual = expect_equal(host(), state, family("normal", n, step, torch.float32), residual)


def test_nothing_to_select_from() -> None:
    state = make_state([0], [0], "cpu", shape=SMALL)
    found = select(host(), state, torch.empty(0), torch.empty(0))
    assert [tensor.numel() for tensor in found] == [0, 0, 0]


@pytest.mark.parametrize("density", [0.01, 0.001])
@pytest.mark.parametrize(("gradient_dtype", "residual_dtype"), DTYPES, ids=str)
def test_steady_state_of_error_feedback(
    density: float, gradient_dtype: torch.dtype, residual_dtype: torch.dtype
) -> None:
    """Residuals pile up below the threshold; after the first steps nothing is read twice."""
    n = 40 * TILE
    k = int(density * n)
    residual = steady_residual(n, k).to(residual_dtype)
    state, generator = make_state([n], [k], "cpu", shape=SMALL), torch.Generator().manual_seed(5)
    for step in range(12):
        gradient = torch.randn(n, generator=generator).to(gradient_dtype)
        residual = expect_equal(host(seed=step), state, gradient, residual)
    (counters,) = state.counters()
    assert counters["calls"] == 12
    assert counters["hits"] >= 9, counters
    assert counters["direct"] == counters["restarted"] == 0, counters


def test_long_run_with_shocks() -> None:
    """The norm of the gradient jumps, layers stand still: wrong predictions cost time and never a bit."""
    n, k = 8 * TILE + 3, 40
    generator, residual = torch.Generator().manual_seed(2), torch.zeros(n)
    state = make_state([n], [k], "cpu", shape=SMALL, capacity=6 * k)
    for step in range(300):
        scale = {60: 10.0, 120: 0.1, 180: 0.0}.get(step, 1.0) * math.exp(
            0.3 * float(torch.randn(1, generator=generator))
        )
        scale *= 1.0 if step < 240 else 1e-3
        residual = expect_equal(host(seed=step), state, scale * torch.randn(n, generator=generator), residual)
    (counters,) = state.counters()
    assert counters["hits"] > 270, counters
    assert counters["calls"] == counters["cold"] + counters["hits"] + counters["misses"] + counters["overflows"] == 300


@pytest.mark.parametrize(("grid", "resident"), [(1, 1), (2, 1), (7, 3), (40, 4)])
@pytest.mark.parametrize("launches", [0, ONE_BY_ONE])
def test_any_launch(grid: int, resident: int, launches: int) -> None:
    """Blocks that have yet to begin are waited for by none; phases may be launched apart."""
    n, k = 12 * TILE + 9, 100
    state, residual = make_state([n], [k], "cpu", shape=SMALL), torch.zeros(n)
    for step in range(3):
        gradient = family("few values", n, step, torch.float32)
        found = select(host(grid, resident, seed=step), state, gradient, residual, launches=launches)
        assert same(found, ef_topk_torch(gradient, residual, k))
        assert left_clean(state)
        residual = found[2]


def test_state_after_a_call_depends_on_nothing_but_the_input() -> None:
    def warm(grid: int, seed: int) -> Tensor:
        n, state = 9 * TILE, make_state([9 * TILE], [50], "cpu", shape=SMALL)
        residual = torch.zeros(n)
        for step in range(3):
            residual = select(host(grid, seed=seed), state, family("laplace", n, step, torch.float32), residual)[2]
        return state.warm

    assert torch.equal(warm(1, 1), warm(5, 99))


@given(
    words=st.lists(st.integers(0, 2**32 - 1), min_size=len(WARM), max_size=len(WARM)),
    name=st.sampled_from(sorted(FAMILIES)),
    k=st.integers(1, 1500),
    dtype=st.sampled_from(FLOATS),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_any_warm_start_is_sound(words: list[int], name: str, k: int, dtype: torch.dtype, seed: int) -> None:
    n = 3 * TILE - 7
    state = make_state([n], [min(k, n)], "cpu", shape=SMALL)
    state.warm.copy_(torch.tensor(words).to(torch.int32))
    expect_equal(host(seed=seed), state, family(name, n, seed, dtype), family("normal", n, seed + 1, dtype))


@pytest.mark.parametrize("shift", range(4))
def test_tensors_may_begin_anywhere(shift: int) -> None:
    """Vectors are read where all three begin alike, else elements."""
    n, k = 2 * TILE, 30
    for other in range(4):
        gradient = family("normal", n + 8, 1, torch.bfloat16)[shift : shift + n]
        room = torch.zeros(n + 8)[other : other + n]
        state = make_state([n], [k], "cpu", shape=SMALL)
        expect_equal(host(), state, gradient, room)


def test_swapped_buffers_change_places() -> None:
    n, k = 3 * TILE, 20
    one, other, gradient = torch.zeros(n), torch.full((n,), 3.0), family("normal", n, 1, torch.float32)
    state = make_state([n], [k], "cpu", shape=SMALL)
    values, indices = torch.empty(k), torch.empty(k, dtype=torch.int32)
    expected = ef_topk_torch(gradient, other, k)
    with installed("cpu", host()):
        ef_topk_(gradient, (one, other), (values, indices), state, swapped=torch.ones(1, dtype=torch.int32))
    assert same((values, indices, one), expected)
    assert torch.equal(bits(other), bits(torch.full((n,), 3.0)))
