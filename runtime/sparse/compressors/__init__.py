"""What a lossy bucket sends instead of all its elements. `COMPRESSORS` is the only list of what there is.

A compressor works on one flat buffer of a bucket with error feedback: what it adds up is residual + gradient, and what
of that is not sent goes to a second buffer, the new residual. The caller commits it by exchanging the two buffers, or
discards it by not doing so. Sent + new residual = residual + gradient, bit for bit, unless rounding is stochastic; of
products of matrices up to their rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from runtime.plan import CompressorSpec
from runtime.sparse.compressors.options import Layer, check_options, choose, kept_elements
from runtime.sparse.compressors.powersgd import LowRankCompressor, make_low_rank
from runtime.sparse.compressors.selectors import select_random
from runtime.sparse.compressors.sparse import SELECTORS, SparseCompressor
from runtime.sparse.compressors.wire import WireCompressor, make_wire

Compressor = SparseCompressor | WireCompressor | LowRankCompressor


@dataclass(frozen=True, kw_only=True)
class Family:
    """One entry of the registry."""

    options: frozenset[str]
    make: Callable[[CompressorSpec, Sequence[Layer], int], Compressor | None]
    """(specification, layers, ranks) → compressor."""


def _make_topk(spec: CompressorSpec, layers: Sequence[Layer], ranks: int) -> Compressor:
    name = "exact" if spec.selector is None else spec.selector
    return SparseCompressor(kept_elements(spec, layers), choose("topk: selector", name, SELECTORS))


_SELECTION = frozenset({"k", "density", "scope"})

COMPRESSORS: Mapping[str, Family] = {
    "none": Family(options=frozenset(), make=lambda *_: None),
    "powersgd": Family(options=frozenset({"rank"}), make=lambda spec, *_: make_low_rank(spec)),
    "randomk": Family(
        options=_SELECTION, make=lambda spec, layers, _: SparseCompressor(kept_elements(spec, layers), select_random)
    ),
    "topk": Family(options=_SELECTION | {"selector"}, make=_make_topk),
    "wire": Family(
        options=frozenset({"dtype", "block", "error_feedback", "rounding", "links"}),
        make=lambda spec, _, ranks: make_wire(spec, ranks),
    ),
}


def make_compressor(spec: CompressorSpec, layers: Sequence[Layer], *, ranks: int) -> Compressor | None:
    """Make the compressor of one flat buffer; None where every element is sent as it is. `layers`: (name, elements) of
    each run of gradients of one layer, which in order fill the buffer; `ranks`: how many ranks' messages are summed.

    Raises InputError: an unknown name, or options that do not fit the compressor or these layers.
    """
    family = choose("compressor", spec.name, COMPRESSORS)
    check_options(spec, family.options)
    return family.make(spec, layers, ranks)
