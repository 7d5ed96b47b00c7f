"""The contract of all compressors, driven by their registry, and what each promises beyond it."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import pytest
import torch
from compressor_cases import (
    DTYPES,
    KINDS,
    Case,
    cases,
    check_low_rank,
    check_sparse,
    check_wire,
    compress,
    encode,
    make,
    make_case,
    numbers,
    reference_topk,
    same_bits,
    send_factors,
    small_chunks,
    sparse,
    variants,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from runtime.plan import CompressorSpec
from runtime.plan.document import LARGEST_RANK
from runtime.sparse.compressors import magnitudes as magnitudes_module
from runtime.sparse.compressors import selectors as selectors_module
from runtime.sparse.compressors.magnitudes import seed_of
from runtime.sparse.compressors.powersgd import LowRankCompressor, Stacks, matrix_shape, orthonormalize
from runtime.sparse.compressors.selectors import draw
from runtime.sparse.compressors.sparse import SELECTORS, SparseCompressor
from runtime.sparse.compressors.wire import (
    EIGHT_BITS,
    NATIVE,
    ROUNDINGS,
    WIRE_DTYPES,
    Coded,
    Rounded,
    Scaled,
    make_wire,
)


@pytest.mark.parametrize("variant", list(variants()), ids=lambda v: " ".join(str(x) for x in v.values()))
@settings(max_examples=20)
@given(case=cases, small=st.booleans())
@example(case=make_case([0], ("normal", "normal"), 0, DTYPES[0]), small=True)
@example(case=make_case([700, 1, 0, 3000], ("all not finite", "equal"), 0, DTYPES[0]), small=True)
def test_contract(variant: dict[str, Any], case: Case, small: bool) -> None:
    compressor = make(variant, case.layers)
    if compressor is None:
        assert variant["name"] == "none"
        return
    with small_chunks() if small else mock.patch.dict({}):
        if isinstance(compressor, SparseCompressor):
            check_sparse(compressor, case)
        elif isinstance(compressor, LowRankCompressor):
            check_low_rank(compressor, case)
        else:
            check_wire(compressor, case)


@pytest.mark.parametrize("selector", ["exact", "sampled"])
@settings(max_examples=250)
@given(case=cases, density=st.sampled_from([0.001, 0.004, 0.012, 0.05, 0.2, 0.4]), small=st.booleans())
@example(case=make_case([3000], ("not finite", "zeros"), 5, DTYPES[0]), density=0.004, small=True)
@example(case=make_case([3000], ("ties", "zeros"), 5, DTYPES[0]), density=0.004, small=True)
def test_exactly_the_largest(selector: str, case: Case, density: float, small: bool) -> None:
    """Both have the same set in the same order as the reference, ties and NaN included."""
    total = case.total
    for scope in ("bucket", "layer"):
        compressor = sparse(selector, case.layers, density=density, scope=scope)
        with small_chunks() if small else mock.patch.dict({}):
            indices = check_sparse(compressor, case)
        expected = [
            reference_topk(total[segment.start : segment.start + segment.elements], segment.k) + segment.start
            for segment in compressor.segments
        ]
        assert torch.equal(indices.long(), torch.cat([torch.empty(0, dtype=torch.int64), *expected]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("selector", [pytest.param("exact", marks=pytest.mark.long), "sampled"])
def test_exactly_the_largest_of_many(selector: str, kind: str) -> None:
    """More than one chunk of the real size, and elements behind the last whole block."""
    case = make_case([2 * magnitudes_module.CHUNK + 77], (kind, "zeros"), 1, DTYPES[0])
    for density in (0.001, 0.02):
        compressor = sparse(selector, case.layers, density=density)
        assert torch.equal(check_sparse(compressor, case).long(), reference_topk(case.total, compressor.k))


def test_the_sampled_threshold_leaves_a_little_more_than_needed() -> None:
    """So that what follows is cheap; where too few elements reach it, the result is the same."""
    case = make_case([200_000], ("normal", "zeros"), 0, DTYPES[0])
    k = 2000
    expected = reference_topk(case.total, k)
    for seed in range(30):
        threshold = selectors_module._estimate(case.total, k, seed)
        assert k <= int((case.total.abs() >= threshold).sum()) <= 4 * k
    compressor = sparse("sampled", case.layers, density=0.01)
    for threshold in (1e-3, 3.5, math.inf):
        with mock.patch.object(selectors_module, "_estimate", return_value=threshold):
            assert torch.equal(check_sparse(compressor, case).long(), expected)


@settings(max_examples=150)
@given(case=cases, share=st.sampled_from([0.001, 0.05, 0.5, 1.0]))
def test_what_runs_on_devices_selects_the_same(case: Case, share: float) -> None:
    """It knows no data-dependent sizes, and runs on a CPU too."""
    total = case.total
    k = min(len(total), max(1, int(share * len(total))))
    expected = reference_topk(total, k)
    if k:
        assert torch.equal(magnitudes_module._largest_on_device(total, k), expected)
        assert torch.equal(magnitudes_module.largest(total, k), expected)


def test_ties_are_broken_by_index() -> None:
    """|x| = 2 twice among five ones: the first two ones go along; NaN is no larger than Inf."""
    gradient = torch.tensor([1.0, -1.0, 2.0, 1.0, 1.0, -2.0, 1.0])
    case = Case([("a", 7)], gradient, torch.zeros(7))
    assert check_sparse(sparse("exact", case.layers, k={"a": 4}), case).tolist() == [0, 1, 2, 5]
    odd = Case([("a", 5)], torch.tensor([9.0, math.inf, -math.inf, math.nan, math.nan]), torch.zeros(5))
    assert check_sparse(sparse("exact", odd.layers, k={"a": 3}), odd).tolist() == [1, 2, 3]


def reference_mstopk(magnitude: Tensor, k: int, seed: int) -> Tensor:
    """Algorithm 1 of CommLib as it is printed, but for the first upper threshold, +∞; counts over all elements."""
    mean, maximum = float(magnitude.sum(dtype=torch.float64)) / len(magnitude), float(magnitude.max())
    left, right, k1, k2 = 0.0, 1.0, 0, len(magnitude)
    upper, lower = math.inf, 0.0
    for _ in range(30):
        ratio = left + (right - left) / 2
        threshold = mean + ratio * (maximum - mean)
        count = int((magnitude >= threshold).sum())
        if count <= k:
            right = ratio
            if count > k1:
                k1, upper = count, threshold
        else:
            left = ratio
            if count < k2:
                k2, lower = count, threshold
    above = (magnitude >= upper).nonzero().view(-1)
    between = ((magnitude >= lower) & (magnitude < upper)).nonzero().view(-1)
    start = seed % (len(between) - (k - k1) + 1)
    return torch.cat((above, between[start : start + k - k1])).sort().values


@settings(max_examples=150)
@given(
    kind=st.sampled_from([kind for kind in KINDS if "not finite" not in kind]),
    elements=st.sampled_from([1, 5, 64, 1000, 4000]),
    density=st.sampled_from([0.001, 0.01, 0.3, 1.0]),
    seed=st.integers(0, 1000),
)
def test_mstopk_is_the_published_algorithm(kind: str, elements: int, density: float, seed: int) -> None:
    case = make_case([elements], (kind, "zeros"), seed, DTYPES[0])
    compressor = sparse("mstopk", case.layers, density=density)
    expected = reference_mstopk(case.total.abs(), compressor.k, seed_of("layer0", 3))
    with small_chunks():
        assert torch.equal(check_sparse(compressor, case).long(), expected)


@pytest.mark.parametrize("selector", sorted(SELECTORS))
def test_what_is_not_finite_is_sent(selector: str) -> None:
    """Other ranks have to see it, and no residual may keep it."""
    gradient = numbers("normal", 40_000, 0, torch.float32)
    gradient[[7, 20_000, 39_999]] = torch.tensor([math.nan, math.inf, -math.inf])
    case = Case([("a", 40_000)], gradient, torch.zeros(40_000))
    indices = check_sparse(sparse(selector, case.layers, density=0.001), case)
    assert {7, 20_000, 39_999} < set(indices.tolist())
    few = check_sparse(sparse(selector, case.layers, k={"a": 2}), case)
    assert few.tolist() == [7, 20_000]


@pytest.mark.parametrize("variant", [{"name": "topk"}, {"name": "topk", "selector": "mstopk"}, {"name": "randomk"}])
def test_nothing_is_lost_over_steps(variant: dict[str, Any]) -> None:
    """Whole numbers are added without rounding: all that was sent and what is left is all that came."""
    layers = [("a", 3000), ("b", 500)]
    compressor = make(variant | {"density": 0.02, "scope": "layer"}, layers)
    assert isinstance(compressor, SparseCompressor)
    residual, other, came, sent = (torch.zeros(3500) for _ in range(4))
    for step in range(40):
        gradient = numbers("normal", 3500, step, torch.float32).mul(50).round()
        values, indices = compressor.compress(gradient, residual, other, step)
        sent[indices] += values
        came += gradient
        residual, other = other, residual
    assert torch.equal(sent + residual, came)
    assert int((sent != 0).sum()) > 1000


def test_random_indices_depend_on_bucket_and_step_alone() -> None:
    layers = [("a", 500), ("b", 500)]
    compressor, twin = (make({"name": "randomk", "density": 0.1}, layers) for _ in range(2))
    other = make({"name": "randomk", "density": 0.1}, [("a", 500), ("c", 500)])
    assert isinstance(compressor, SparseCompressor)
    assert isinstance(twin, SparseCompressor)
    assert isinstance(other, SparseCompressor)
    one, two = (make_case([500, 500], ("normal", "normal"), seed, DTYPES[0]) for seed in (0, 9))
    (_, here), _ = compress(compressor, one, step=5)
    assert torch.equal(here, compress(twin, two, step=5)[0][1])
    assert not torch.equal(here, compress(compressor, one, step=6)[0][1])
    assert not torch.equal(here, compress(other, one, step=5)[0][1])
    both = make({"name": "randomk", "density": 0.1, "scope": "layer"}, layers)
    assert isinstance(both, SparseCompressor)
    (_, layered), _ = compress(both, one, step=5)
    assert not torch.equal(layered[:50], layered[50:] - 500)


@pytest.mark.parametrize("k", [1, 20, 35, 50])
def test_every_index_is_equally_likely(k: int) -> None:
    draws, elements = 1500, 50
    generator = torch.Generator().manual_seed(0)
    counts = torch.zeros(elements)
    for _ in range(draws):
        counts[draw(elements, k, generator)] += 1
    share = k / elements
    deviation = math.sqrt(draws * share * (1 - share))
    assert float(counts.sum()) == draws * k
    assert float((counts - draws * share).abs().max()) <= 5 * deviation


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 100])
@pytest.mark.parametrize("name", NATIVE)
def test_the_wire_saturates_without_loss(name: str, ranks: int) -> None:
    """Numbers around every power of two that float32 has, ends of range included; sums over ranks stay finite."""
    compressor = make_wire(CompressorSpec(name="wire", dtype=name), ranks, native=True)
    assert isinstance(compressor.format, Rounded)
    limit = compressor.format.limit
    exponents = torch.arange(-149, 128, dtype=torch.float64)[:, None]
    near = torch.tensor([1, 1 + 2.0**-23, 1 + 2.0**-22, 1 + 3 * 2.0**-23, 1.25, 1.5, 1.5 + 2.0**-23, 2 - 2.0**-23])
    values = (2.0**exponents * near.double()).view(-1)
    limits = torch.tensor([limit * (1 + step * 2.0**-23) for step in range(-4, 5)], dtype=torch.float64)
    values = torch.cat((values, limits, -values, -limits)).float()
    values = values[values.isfinite()]
    for dtype in (torch.float32, torch.float64):
        case = Case([("a", len(values))], values.to(dtype), torch.zeros(len(values), dtype=dtype))
        sent = check_wire(compressor, case)
        narrow = sent.to(compressor.dtype)
        assert torch.equal(narrow.to(dtype), sent)
        total = sum((narrow for _ in range(ranks - 1)), start=narrow)
        assert bool(total.isfinite().all())
        small = case.total.abs() <= limit
        assert same_bits(narrow[small], case.total[small].to(compressor.dtype) + 0.0)
    assert limit * ranks <= torch.finfo(compressor.dtype).max < limit * ranks * 2.02


def test_every_scale_serves_every_magnitude() -> None:
    """Blocks whose largest element is near each power of two that float32 has, and smaller ones beside it."""
    near = torch.tensor([1, 1 + 2.0**-23, 1 + 2.0**-16, 1.25, 1.5 + 2.0**-22, 2 - 2.0**-22, 2 - 2.0**-23])
    largest = (2.0 ** torch.arange(-149, 128, dtype=torch.float64)[:, None] * near.double()).view(-1)
    fractions = torch.cat(
        [torch.linspace(-1, 1, 40), torch.tensor([0.5, 1.5, 2.5, 63.5]) / 127, 2.0 ** -torch.arange(20)]
    )
    values = (largest[:, None] * fractions.double()).float()
    case = Case([("a", values.numel())], values.view(-1), torch.zeros(values.numel()))
    for dtype in WIRE_DTYPES:
        for rounding in ROUNDINGS:
            spec = CompressorSpec(
                name="wire", dtype=dtype, rounding=rounding, block=64 if dtype in EIGHT_BITS else None
            )
            compressor = make_wire(spec, 1)
            if dtype in EIGHT_BITS:
                assert compressor.format.block == len(fractions)
            check_wire(compressor, case)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("name", sorted(WIRE_DTYPES))
def test_the_mean_of_what_is_sent_is_the_gradient(name: str, rounding: str) -> None:
    """With error feedback, all that was sent and what is left is all that came, whatever one step loses; without, by
    chance alone, where rounding is stochastic.
    """
    case, steps = make_case([1000], ("normal", "zeros"), 4, DTYPES[0]), 400
    gradient, sent = case.gradient, {}
    for feedback in (True, False):
        compressor = make_wire(CompressorSpec(name="wire", dtype=name, rounding=rounding, error_feedback=feedback), 2)
        held, total = torch.zeros(1000), torch.zeros(1000, dtype=torch.float64)
        for step in range(steps):
            found, held = encode(compressor, Case(case.layers, gradient, held), step)
            total += found
            if step == 0:
                first = found
        off = (total / steps - gradient).abs()
        once = float((first - gradient).abs().max())
        assert once > 0.0
        if feedback:
            assert torch.allclose(total + held, gradient.double() * steps, rtol=1e-5, atol=1e-3 * once)
            assert float(off.max()) <= 2.1 * once / steps * (2 if rounding == "stochastic" else 1)
        elif rounding == "stochastic":
            assert float(off.max()) <= 5 * once / steps**0.5
        sent[feedback] = total


def test_rounding_by_chance_differs_from_step_to_step() -> None:
    """And is the same for one seed; numbers that a format has stay what they are."""
    case = make_case([5000], ("normal", "zeros"), 4, DTYPES[0])
    for name in WIRE_DTYPES:
        spec = CompressorSpec(name="wire", dtype=name, rounding="stochastic", error_feedback=False)
        compressor = make_wire(spec, 2)
        one, other = (encode(compressor, case, seed)[0] for seed in (1, 2))
        assert not torch.equal(one, other)
        again = Case(case.layers, one, case.residual)
        twice = encode(compressor, again, 3)[0]
        if name == "bfloat16":
            assert torch.equal(twice, one)


@settings(max_examples=60)
@given(
    elements=st.integers(0, 3000),
    parts=st.integers(1, 9),
    block=st.sampled_from([64, 100, 256, 512]),
    at_once=st.integers(1, 2000),
)
def test_pieces_are_a_partition(elements: int, parts: int, block: int, at_once: int) -> None:
    """Of elements, in whole blocks; rows have room for all, and blocks are no longer than asked for."""
    compressor = make_wire(CompressorSpec(name="wire", dtype="int8", block=block), parts)
    cut = compressor.cut(elements, parts, torch.float32)
    assert cut.share * parts >= elements
    assert 1 <= cut.width <= block
    assert cut.share - -(-elements // parts) < max(1, cut.share // cut.width)
    places = torch.arange(cut.share * parts).view(parts, cut.share)
    reached = []
    for piece in cut.pieces(elements, at_once):
        found = places[piece.rows, piece.codes]
        assert piece.shape[0] * piece.shape[1] * piece.shape[2] == found.numel() <= max(at_once, cut.width)
        assert piece.scales.stop - piece.scales.start == piece.shape[1]
        assert piece.scales.start * cut.width == piece.codes.start
        assert torch.equal(found.reshape(-1), torch.arange(piece.elements.start, piece.elements.stop))
        reached.append(found.reshape(-1))
    assert torch.equal(torch.cat([places[0, :0], *reached]), torch.arange(elements))


@pytest.mark.parametrize("name", ["int8", "float8_e4m3fn"])
def test_eight_bits_are_about_a_quarter_of_the_bytes(name: str) -> None:
    for elements, ranks in ((1_000_000, 4), (123_457, 3), (25_000_000, 64)):
        compressor = make_wire(CompressorSpec(name="wire", dtype=name), ranks)
        row_bytes = compressor.cut(elements, ranks, torch.float32).row_bytes
        assert row_bytes * ranks <= 0.26 * 4 * elements


def test_float8_is_decoded_as_torch_does() -> None:
    codes = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn)
    values = codes.to(torch.float32)
    scales, found = torch.ones(1, 1, 1), torch.empty(1, 1, 256)
    Scaled(torch.float8_e4m3fn, 256).decode(Coded(codes.view(1, 1, 256), scales), found, torch.empty(2, 1, 1, 256))
    assert torch.equal(found.view(-1)[values.isfinite()], values[values.isfinite()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("ranks", [1, 3])
def test_what_all_ranks_send_is_the_projected_sum(ranks: int, dtype: torch.dtype) -> None:
    """Nothing is lost but rounding; of a sum of no larger rank nothing is left, whatever its addends are."""
    factors = LowRankCompressor(3).factors([torch.empty(20, 30), torch.empty(7), torch.empty(40, 4, 5)])
    totals = [numbers("normal", 1407, seed, dtype) for seed in range(ranks)]
    for matrix, rest in zip(factors.matrices(totals[0]), factors.matrices(sum(totals[1:], 0 * totals[0])), strict=True):
        thin = numbers("normal", 3 * sum(matrix.shape), 9, dtype).view(3, -1)
        matrix.copy_(thin[:, : len(matrix)].t() @ thin[:, len(matrix) :] - rest)
    seeds = factors.seeds(["a", "b", "c"], totals[0])
    sent = send_factors(factors, totals, torch.zeros_like(seeds), seeds)
    near = 1e-5 if dtype == torch.float32 else 1e-9
    assert torch.allclose(sent.sums, sum(totals, 0 * totals[0]), rtol=0.0, atol=near)
    assert torch.allclose(sum(sent.rest, 0 * totals[0]), 0 * totals[0], rtol=0.0, atol=near)
    assert ranks == 1 or float(sent.rest[0].abs().max()) > 0.1


def test_low_rank_comes_to_the_best_there_is() -> None:
    """Of a matrix that stays the same, whatever its scale: each step begins with the factors of the last, if any."""
    factors = LowRankCompressor(4).factors([torch.empty(60, 50)])
    matrix = numbers("normal", 3000, 1, torch.float32).view(60, 50)
    one, values, other = torch.linalg.svd(matrix, full_matrices=False)
    total = ((one * (values * 0.8 ** torch.arange(50.0))) @ other).reshape(-1)
    least = float(torch.linalg.svdvals(total.view(60, 50))[4:].norm())
    seeds = factors.seeds(["a"], total)
    start = torch.zeros_like(seeds)
    left_behind = []
    for _ in range(25):
        sent = send_factors(factors, [total], start, seeds)
        start = sent.start
        left_behind.append(float(sent.rest[0].norm()))
    assert left_behind[0] > 1.2 * least
    assert left_behind[-1] == pytest.approx(least, rel=1e-3)
    tiny = send_factors(factors, [total * 2.0**-90], start * 2.0**-90, seeds)
    assert torch.equal(tiny.sums * 2.0**90, send_factors(factors, [total], start, seeds).sums)
    nothing = send_factors(factors, [torch.zeros_like(total)], start, seeds)
    assert not nothing.sums.any()
    again = send_factors(factors, [total], nothing.start, seeds)
    assert float(again.rest[0].norm()) == pytest.approx(left_behind[0])


@settings(max_examples=30)
@given(
    length=st.sampled_from([5, 70, 20_000, 40_001]),
    rank=st.sampled_from([1, 2, 4]),
    size=st.sampled_from([1e-38, 1e-20, 1.0, 1e20, 1e35]),
    dependent=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_factors_are_made_orthonormal(length: int, rank: int, size: float, dependent: bool, seed: int) -> None:
    """A row that depends on others is sent in part, or not at all; never too much of it."""
    stacks = Stacks(rank, [length, 3 + rank, length])
    vector = numbers("normal", stacks.elements, seed, torch.float32) * size
    before = [factor.clone() for factor in stacks.each(vector)]
    if dependent and rank > 1:
        stacks.each(vector)[2][-1] = 0.5 * stacks.each(vector)[2][0]
    orthonormalize(stacks, vector)
    one, other, third = (factor.double() for factor in stacks.each(vector))
    for found, given_one in zip((one, other), before, strict=False):
        assert torch.allclose(found @ found.t(), torch.eye(rank, dtype=torch.float64), atol=1e-5)
        if size >= 1e-20:  # below, float32 has few digits
            rest = given_one.double() - given_one.double() @ found.t() @ found
            assert float(rest.norm()) <= 1e-5 * float(given_one.double().norm())
    assert float(torch.linalg.matrix_norm(third, ord=2)) <= 1 + 1e-5


def test_factors_have_the_same_bits_on_any_number_of_threads() -> None:
    """Ranks may differ in it, and the backend's own thread from the one that trains."""
    before, found = torch.get_num_threads(), []
    long = LowRankCompressor(1).factors([torch.empty(200_003, 2)])
    several = LowRankCompressor(LARGEST_RANK).factors([torch.empty(3000, 300), torch.empty(3000, 301)])
    try:
        for threads in (1, 2, 3, 5):
            torch.set_num_threads(threads)
            vectors = []
            for factors, dtype in ((long, torch.float64), (several, torch.float32)):
                left, right = (numbers("normal", of.elements, 1, dtype) for of in (factors.left, factors.right))
                orthonormalize(factors.left, left)
                sums = torch.zeros(2_000_000, dtype=dtype)
                factors.multiply(left, right, sums)
                vectors += [left, sums]
            found.append(vectors)
    finally:
        torch.set_num_threads(before)
    for vectors in found:
        assert all(same_bits(one, other) for one, other in zip(vectors, found[0], strict=True))


def test_autocast_rounds_no_factors() -> None:
    """Backward may run inside it."""
    factors, total = LowRankCompressor(2).factors([torch.empty(50, 60)]), numbers("normal", 3000, 0, torch.float32)
    seeds = factors.seeds(["a"], total)
    expected = send_factors(factors, [total], seeds, seeds)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (torch.eye(2) @ torch.eye(2)).dtype == torch.bfloat16
        found = send_factors(factors, [total], seeds, seeds)
    assert same_bits(found.sums, expected.sums)
    assert same_bits(found.rest[0], expected.rest[0])


def test_matrices_are_what_lies_in_memory() -> None:
    assert matrix_shape(torch.empty(4, 3, 2)) == (4, 6)
    assert matrix_shape(torch.empty(4, 3, 2, 5).to(memory_format=torch.channels_last)) == (4, 30)
    assert matrix_shape(torch.empty(5, 7).t()) == (5, 7)
    assert matrix_shape(torch.empty(1, 6, 5)) == (6, 5)
    assert matrix_shape(torch.empty(9)) == (9, 1)
    assert matrix_shape(torch.empty(())) == (1, 1)
    assert matrix_shape(torch.empty(0, 3)) == (0, 0)
