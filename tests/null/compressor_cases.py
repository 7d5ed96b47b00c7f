"""Compressors, gradients and residuals for tests of compressors, and what must hold of each."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from hypothesis import strategies as st
from torch import Tensor

from runtime.plan import CompressorSpec
from runtime.sparse.compressors import COMPRESSORS, Compressor, make_compressor
from runtime.sparse.compressors import magnitudes as magnitudes_module
from runtime.sparse.compressors import selectors as selectors_module
from runtime.sparse.compressors import wire as wire_module
from runtime.sparse.compressors.powersgd import Factors, LowRankCompressor
from runtime.sparse.compressors.sparse import SELECTORS, SparseCompressor
from runtime.sparse.compressors.wire import (
    EIGHT_BITS,
    NO_RESIDUAL,
    ROUNDINGS,
    WIRE_DTYPES,
    Rounded,
    StepResidual,
    WireCompressor,
)  # fmt: skip

Layers = Sequence[tuple[str, int]]

VALUES: dict[str, list[Any]] = {
    "selector": sorted(SELECTORS), "dtype": sorted(WIRE_DTYPES), "block": [None, 64, 512],
    "error_feedback": [None, False], "rounding": [None, *ROUNDINGS], "links": [None], "rank": [1, 4],
}  # fmt: skip
"""Every value of the options that are names; an option that is missing here fails the collection of these tests."""

SELECTIONS: list[dict[str, Any]] = [
    {"density": 0.001}, {"density": 0.03, "scope": "bucket"}, {"density": 0.3, "scope": "layer"}, {"density": 1.0},
    {"k": "half"}, {"k": "one"},
]  # fmt: skip


def variants() -> Iterator[dict[str, Any]]:
    """Every family with every value of its named options and several ways to say how much is sent."""
    for name, family in COMPRESSORS.items():
        named = sorted(family.options - {"k", "density", "scope"})
        for values in itertools.product(*(VALUES[option] for option in named)):
            given = dict(zip(named, values, strict=True))
            if given.get("block") and given["dtype"] not in EIGHT_BITS:
                continue
            for selection in SELECTIONS if "density" in family.options else [{}]:
                yield {"name": name, **given, **selection}


def make(variant: dict[str, Any], layers: Layers, ranks: int = 2) -> Compressor | None:
    """A compressor of a variant, whose k is a rule."""
    options = dict(variant)
    if options.get("k") == "half":
        options["k"] = {name: (elements + 1) // 2 for name, elements in layers if elements}
    elif options.get("k") == "one":
        options["k"] = {name: 1 for name, elements in layers if elements}
    return make_compressor(CompressorSpec(**options), layers, ranks=ranks)


def sparse(selector: str, layers: Layers, **options: Any) -> SparseCompressor:
    made = make({"name": "topk", "selector": selector, **options}, layers)
    assert isinstance(made, SparseCompressor)
    return made


KINDS = ("normal", "ties", "equal", "zeros", "few", "tiny", "huge", "clustered", "not finite", "all not finite")


def numbers(kind: str, elements: int, seed: int, dtype: torch.dtype) -> Tensor:
    """A gradient or residual of a kind that selections may trip over."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(elements, generator=generator, dtype=torch.float64)
    if kind == "ties":
        normal = normal.mul(1.5).round()
    elif kind == "equal":
        normal = torch.full_like(normal, 0.75) * normal.sign()
    elif kind == "zeros":
        normal = normal.sign() * 0.0
    elif kind == "few":
        normal[torch.rand(elements, generator=generator) < 0.98] = 0.0
    elif kind == "tiny":
        normal *= 1e-44
    elif kind == "huge":
        normal *= 2.0**29 * 10.0 ** torch.randint(0, 25, (elements,), generator=generator)
    elif kind == "clustered":
        normal[elements // 3 : elements // 2] *= 1e4
    elif "not finite" in kind:
        some = torch.rand(elements, generator=generator) < (0.02 if kind == "not finite" else 1.0)
        odd = torch.tensor([math.nan, math.inf, -math.inf], dtype=torch.float64)
        normal = torch.where(some, odd[torch.randint(3, (elements,), generator=generator)], normal)
    return normal.to(dtype)


@dataclass(frozen=True)
class Case:
    """Layers with a gradient and a residual."""

    layers: Layers
    gradient: Tensor
    residual: Tensor

    @property
    def total(self) -> Tensor:
        return self.residual + self.gradient.to(self.residual.dtype)


def make_case(sizes: list[int], kinds: tuple[str, str], seed: int, dtypes: tuple[torch.dtype, torch.dtype]) -> Case:
    layers = [(f"layer{index}", size) for index, size in enumerate(sizes)]
    gradient = numbers(kinds[0], sum(sizes), seed, dtypes[0])
    return Case(layers, gradient, numbers(kinds[1], sum(sizes), seed + 1, dtypes[1]))


DTYPES = (
    (torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.float16, torch.float32),
    (torch.float64, torch.float64),
)  # fmt: skip
cases = st.builds(
    make_case,
    st.lists(st.sampled_from([0, 1, 2, 31, 64, 129, 700, 3000]), min_size=1, max_size=4),
    st.tuples(st.sampled_from(KINDS), st.sampled_from(KINDS)),
    st.integers(0, 10_000),
    st.sampled_from(DTYPES),
)


@contextmanager
def small_chunks() -> Iterator[None]:
    """Makes buffers of a few hundred elements take the ways of large ones."""
    with (
        mock.patch.object(selectors_module, "SMALL", 0),
        mock.patch.object(selectors_module, "SMALL_SAMPLE", 60),
        mock.patch.object(selectors_module, "CHUNK", 256),
        mock.patch.object(magnitudes_module, "CHUNK", 256),
        mock.patch.object(wire_module, "CHUNK", 256),
    ):
        yield


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Equality that tells −0 from 0, and takes NaN for NaN."""
    one, other = (torch.where(values.isnan(), math.nan, values) for values in (one, other))
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
    return one.dtype == other.dtype and torch.equal(one.view(whole), other.view(whole))


def reference_topk(total: Tensor, k: int) -> Tensor:
    """Indices of the k largest: a stable sort by (−|x|, index), where NaN is as large as Inf."""
    magnitude = torch.where(total.isfinite(), total.abs(), math.inf)
    return torch.sort(magnitude, descending=True, stable=True).indices[:k].sort().values


def compress(compressor: Compressor, case: Case, step: int = 3) -> tuple[Any, Tensor]:
    """What is sent and the new residual; holds that nothing else changes and that a repetition gives the same bits."""
    gradient, residual = case.gradient.clone(), case.residual.clone()
    results = []
    for garbage in (math.nan, 7.0):
        new_residual = torch.full_like(residual, garbage)
        results.append((compressor.compress(gradient, residual, new_residual, step), new_residual))
    assert same_bits(gradient, case.gradient)
    assert same_bits(residual, case.residual)
    (sent, new_residual), (again, new_again) = results
    pairs = zip(sent, again, strict=True) if isinstance(sent, tuple) else [(sent, again)]
    for one, other in pairs:
        assert torch.equal(one, other) if one.dtype == torch.int32 else same_bits(one, other)
    assert same_bits(new_residual, new_again)
    return sent, new_residual


def check_sparse(compressor: SparseCompressor, case: Case) -> Tensor:
    """The contract; returns the indices."""
    (values, indices), new_residual = compress(compressor, case)
    assert values.dtype == case.residual.dtype
    assert indices.dtype == torch.int32
    assert len(values) == len(indices) == compressor.k
    assert bool((indices[1:] > indices[:-1]).all())
    for segment in compressor.segments:
        inside = (indices >= segment.start) & (indices < segment.start + segment.elements)
        assert int(inside.sum()) == segment.k
    assert not new_residual[indices].any()
    assert same_bits(new_residual.scatter(0, indices.long(), values), case.total)
    return indices


PARTS = 3
"""Owners of what the tests of the wire encode."""


def encode(compressor: WireCompressor, case: Case, seed: int = 3, parts: int = PARTS) -> tuple[Tensor, Tensor]:
    """What is sent, as every rank decodes it, and the new residual; holds that nothing else changes and that a
    repetition gives the same bits.
    """
    gradient, residual = case.gradient.clone(), case.residual.clone()
    results = []
    for garbage in (math.nan, 7.0):
        new_residual, sent = torch.full_like(residual, garbage), torch.full_like(residual, garbage)
        cut = compressor.cut(len(sent), parts, residual.dtype)
        rows = torch.zeros(parts, cut.row_bytes, dtype=torch.uint8)
        kept = StepResidual(residual, new_residual) if compressor.error_feedback else NO_RESIDUAL
        compressor.compress(gradient, kept, rows, cut, seed)
        compressor.decode(rows, sent, cut)
        results.append((sent, new_residual))
    assert same_bits(gradient, case.gradient)
    assert same_bits(residual, case.residual)
    assert same_bits(results[0][0], results[1][0])
    assert not compressor.error_feedback or same_bits(results[0][1], results[1][1])
    return results[0]


def reached(compressor: WireCompressor, total: Tensor, parts: int = PARTS) -> tuple[Tensor, Tensor]:
    """Of each element, the largest magnitude of its block, and whether all of this is finite; block by block, as plain
    as it goes.
    """
    largest, block = total.abs(), compressor.format.block
    if block is not None:
        share = -(-len(total) // parts)
        width = max(1, -(-share // max(1, -(-share // block))))
        share = -(-share // width) * width
        for part in range(0, len(total), max(1, share)):
            for start in range(part, min(len(total), part + share), width):
                inside = slice(start, min(start + width, part + share))
                largest[inside] = total[inside].abs().max()
    return largest, largest.isfinite()


def check_wire(compressor: WireCompressor, case: Case) -> Tensor:
    """The contract; returns what is sent."""
    total = case.total if compressor.error_feedback else case.gradient.to(case.residual.dtype)
    sent, new_residual = encode(compressor, case)
    largest, finite = reached(compressor, total)
    assert torch.equal(sent.isfinite(), finite)
    if isinstance(compressor.format, Rounded):
        assert torch.equal(sent[~finite].nan_to_num(), total[~finite].nan_to_num())
        step = total.abs() * torch.finfo(compressor.dtype).eps
        step = torch.where(total.abs() < compressor.format.limit, step, math.inf)
        least = torch.finfo(compressor.dtype).smallest_normal * torch.finfo(compressor.dtype).eps
    elif compressor.dtype == torch.int8:
        step, least = largest / 127, torch.finfo(total.dtype).tiny * 2.0**16
    else:
        limits = torch.finfo(compressor.dtype)
        # A power of two, so up to twice as large as need be.
        step = torch.maximum(total.abs(), 2 * (largest / limits.max) * limits.smallest_normal) * limits.eps
        reach = limits.max * 2.0 ** math.floor(math.log2(torch.finfo(total.dtype).max / limits.max))
        step = torch.where(total.abs() <= reach, step, math.inf)
        least = torch.finfo(total.dtype).tiny * 2.0**16
    lost = (total.double() - sent.double()).abs()[finite]
    allowed = (step[finite].double() + least) * (1.0 if compressor.stochastic else 0.5)
    assert bool((lost <= allowed * (1.0 + 2.0**-10)).all())
    if compressor.error_feedback:
        assert bool(new_residual.isfinite().all())
        assert not new_residual[~finite].any()
        assert torch.equal(new_residual[finite], (total - sent)[finite])
        if not compressor.stochastic:
            assert torch.equal((sent + new_residual)[finite], total[finite])
            exact = finite & (step < math.inf)
            assert torch.equal((sent.double() + new_residual.double())[exact], total.double()[exact])
    return sent


SHAPES = {64: (8, 8), 129: (3, 43), 700: (25, 28), 3000: (50, 60)}
"""By the elements of a layer, the matrix that it is; others are vectors."""


def factors_of(compressor: LowRankCompressor, layers: Layers) -> Factors:
    """Of layers in the shapes above."""
    return compressor.factors([torch.empty(SHAPES.get(size, (size,))) for _, size in layers])


@dataclass
class Sent:
    """What a step of low rank comes to on ranks that share a process."""

    sums: Tensor
    """Of what all ranks send."""
    rest: list[Tensor]
    """By rank, what is not sent."""
    start: Tensor
    """Of the next step."""


def send_factors(factors: Factors, totals: Sequence[Tensor], start: Tensor, seeds: Tensor) -> Sent:
    """One step; memory that is to be filled holds something else before."""
    rest, sums, own = [total.clone() for total in totals], torch.full_like(totals[0], math.nan), []
    left, right = torch.zeros(factors.left.elements, dtype=sums.dtype), torch.zeros_like(start)
    for total in rest:
        mine = torch.full_like(left, math.nan)
        factors.begin(total, start, seeds, mine)
        left += mine
    for total in rest:
        same_for_all = left.clone()
        own.append(torch.full_like(right, math.nan))
        factors.project(total, same_for_all, own[-1])
        right += own[-1]
    for total, mine in zip(rest, own, strict=True):
        factors.subtract(total, same_for_all, mine)
    factors.multiply(same_for_all, right, sums)
    for place in factors.whole:
        sums[place] = sum(total[place] for total in rest)
        for total in rest:
            total[place] = 0.0
    return Sent(sums, rest, right)


def check_low_rank(compressor: LowRankCompressor, case: Case) -> None:
    """The contract, of one rank, from seeds and once more from where that ends."""
    factors, total = factors_of(compressor, case.layers), case.total
    seeds = factors.seeds([name for name, _ in case.layers], total)
    limits, start = torch.finfo(total.dtype), torch.zeros_like(seeds)
    parts = [factors.matrices(total)]
    finite = [bool(matrix.isfinite().all()) for matrix in parts[0]]
    for _ in range(2):
        sent = send_factors(factors, [total], start, seeds)
        assert same_bits(sent.sums, send_factors(factors, [total], start, seeds).sums)
        for place in factors.whole:
            assert same_bits(sent.sums[place] + 0.0, total[place] + 0.0)
            assert not sent.rest[0][place].any()
        parts = [factors.matrices(vector) for vector in (total, sent.sums, sent.rest[0])]
        for good, whole, came, rest in zip(finite, *parts, strict=True):
            if not good:
                assert not came.isfinite().any()
                continue
            size = float(torch.linalg.vector_norm(whole.double()))
            allowed = 4 * compressor.rank * (limits.eps * size + limits.smallest_normal * limits.eps)
            assert float((came.double() + rest.double() - whole.double()).abs().max()) <= allowed
            assert float(torch.linalg.vector_norm(rest.double())) <= size * (1 + 1e-5) + 100 * allowed
        if all(finite):  # else the step does not count
            start = sent.start
