"""Many segments in one launch, MSTopK's selection, and unpacking: on the host, against the reference."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from kernel_cases import FLOATS, bits, family, left_clean, same, select
from kernel_host import SMALL, HostBackend, needs_compiler, small_library
from torch import Tensor

from runtime.kernels import (
    TopkState,
    ef_topk_torch,
    make_state,
    ms_topk_,
    ms_topk_torch,
    unpack_,
    unpack_torch,
)
from runtime.kernels.backend import installed

pytestmark = needs_compiler
SIZES = (1, 700, 0, 33, 5 * SMALL.tile, 3, SMALL.tile - 3, 2 * SMALL.tile + 1, 64)
KEPT = (1, 7, 0, 33, 50, 1, 1, 200, 2)
NAMES = ("normal", "few values", "zeros", "student", "lognormal", "all equal", "two values", "layers", "nan")


def host(seed: int = 1) -> HostBackend:
    return HostBackend(small_library(), grid=4, resident=3, seed=seed)


def parts(step: int, order: Sequence[int], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [
        family(NAMES[i], SIZES[i], 10 * step + i, dtype) if SIZES[i] else torch.empty(0, dtype=dtype) for i in order
    ]


def by_reference(gradients: Sequence[Tensor], residuals: Sequence[Tensor], k: Sequence[int]) -> tuple[Tensor, ...]:
    """(values, indices, new residual) of all segments together."""
    found, start = [], 0
    for gradient, residual, kept in zip(gradients, residuals, k, strict=True):
        values, indices, new_residual = ef_topk_torch(gradient, residual, kept)
        found.append((values, indices + start, new_residual))
        start += gradient.numel()
    return tuple(torch.cat(column) for column in zip(*found, strict=True))


@pytest.mark.parametrize("order", [range(9), (8, 3, 4, 2, 7, 0, 1, 6, 5)], ids=["as is", "another order"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_segments_of_one_buffer(order: Sequence[int], dtype: torch.dtype) -> None:
    """Each with its own k, wherever it begins; as if each had been selected from alone."""
    sizes, k = [SIZES[i] for i in order], [KEPT[i] for i in order]
    state, residual = make_state(sizes, k, "cpu", shape=SMALL), torch.zeros(sum(sizes), dtype=dtype)
    for step in range(3):
        gradients = parts(step, order)
        found = select(host(step), state, torch.cat(gradients), residual)
        assert same(found, by_reference(gradients, residual.split(sizes), k))
        assert left_clean(state)
        assert [int(flag) for flag in state.nonfinite] == [int(NAMES[i] == "nan") for i in order]
        residual = torch.where(found[2].isfinite(), found[2], 0.0)


@pytest.mark.parametrize("name", ["normal", "few values", "all equal", "narrow", "nan", "lognormal"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_mstopk_takes_a_run_of_what_is_about_as_large_as_the_last(name: str, dtype: torch.dtype) -> None:
    n, k = 12 * SMALL.tile + 2, 90
    state = make_state([n], [k], "cpu", shape=SMALL)
    for step in range(3):
        gradient, residual = family(name, n, step, torch.float32), family("normal", n, 50, dtype)
        new, values, indices = (
            torch.empty_like(residual),
            torch.empty(k, dtype=dtype),
            torch.empty(k, dtype=torch.int32),
        )
        with installed("cpu", host(step)):
            ms_topk_(gradient, (residual, new), (values, indices), state, seed=step)
        assert same((values, indices, new), ms_topk_torch(gradient, residual, k, seed=step))
        exact = ef_topk_torch(gradient, residual, k)
        finite = values.isfinite() & exact[0].isfinite()
        assert bool((values.abs().float().sort().values >= 0.999 * exact[0].abs().float().sort().values)[finite].all())


def test_mstopk_draws_other_places_in_other_steps() -> None:
    gradient, residual = torch.ones(1000), torch.zeros(1000)
    drawn = {int(ms_topk_torch(gradient, residual, 10, seed=seed)[1][0]) for seed in range(20)}
    assert len(drawn) > 10


def messages(ranks: int, n: int, k: int, dtype: torch.dtype) -> Tensor:
    """Each rank's values and indices as words of one row, as they travel. Shape (ranks, 2 · k + 1)."""
    generator = torch.Generator().manual_seed(ranks + n)
    rows = []
    for _ in range(ranks):
        indices = torch.randperm(n, generator=generator)[:k].sort().values.to(torch.int32)
        values = torch.randn(k, generator=generator)
        rows.append(torch.cat((values.view(torch.int32), indices, torch.zeros(1, dtype=torch.int32))))
    return torch.stack(rows)


@pytest.mark.parametrize(
    ("ranks", "n", "k"), [(1, 1, 1), (3, 700, 700), (8, 9000, 90), (40, 3000, 31), (2, 70_000, 500)]
)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_unpack_adds_in_order_of_ranks(ranks: int, n: int, k: int, dtype: torch.dtype) -> None:
    rows = messages(ranks, n, k, dtype)
    values, indices = rows[:, :k].view(torch.float32), rows[:, k : 2 * k]
    if dtype == torch.bfloat16:
        values = values.to(dtype)
    for factor in (1.0, 1 / ranks):
        for sums_dtype in FLOATS:
            sums = torch.full((n,), 7.0, dtype=sums_dtype)
            with installed("cpu", host()):
                unpack_(sums, values, indices, factor=factor)
            expected = unpack_torch(values, indices, n, factor=factor, dtype=sums_dtype)
            assert torch.equal(bits(sums), bits(expected))


def test_unpack_of_clustered_indices_and_numbers_that_are_not_finite() -> None:
    """A rank may have many more elements in one place than a warp takes at a time."""
    k, n = 300, 5000
    indices = torch.stack([torch.arange(k) + start for start in (0, 4000, 512 - 17)]).to(torch.int32)
    values = torch.randn(3, k)
    values[1, 5], values[2, 9], values[0, 0] = float("nan"), float("inf"), -0.0
    sums = torch.empty(n)
    with installed("cpu", host()):
        unpack_(sums, values, indices)
    assert torch.equal(bits(sums), bits(unpack_torch(values, indices, n, factor=1.0, dtype=torch.float32)))


def test_a_round_trip_is_the_mean_of_what_was_sent() -> None:
    """What four ranks select, gathered and unpacked."""
    n, k, ranks = 4 * SMALL.tile, 40, 4
    sent: list[tuple[Tensor, Tensor]] = []
    dense = torch.zeros(n)
    for rank in range(ranks):
        state: TopkState = make_state([n], [k], "cpu", shape=SMALL)
        values, indices, _ = select(host(rank), state, family("normal", n, rank, torch.float32), torch.zeros(n))
        sent.append((values, indices))
        dense[indices.long()] += values
    sums = torch.empty(n)
    values, indices = (torch.stack(column) for column in zip(*sent, strict=True))
    with installed("cpu", host()):
        unpack_(sums, values, indices, factor=1 / ranks)
    assert torch.equal(sums, dense / ranks)
