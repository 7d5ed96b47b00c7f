"""Compressors choose or encode what a bucket sends. `COMPRESSORS` is the only list of them.

A compressor works on one flat buffer of a bucket with error feedback: what it adds up is residual + gradient, and what
of that is not sent goes to a second buffer, the new residual. The caller commits it by exchanging the two buffers, or
discards it by not doing so. Sent + new residual = residual + gradient, bit for bit, unless rounding is stochastic; of
products of matrices up to their rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from runtime.plan import CompressorSpec
from runtime.plan.transports import (
    FLAT,
    HITOPK,
    LIBRARY,
    NAIVE_ALL_GATHER,
    NATIVE,
    TORUS_2D,
    TRANSPORTS,
    TWO_SHOT,
    Transport,
)
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
    transports: frozenset[Transport]
    """Transports that carry its buckets."""
    make: Callable[[CompressorSpec, Sequence[Layer], int, bool], Compressor | None]
    """(specification, layers, ranks, whether the backend adds up in the wire's dtype) → compressor."""
    between: frozenset[Transport] = frozenset()
    """Transports that carry its buckets with `links` "inter": compressed on inter-node links alone."""

    @property
    def selects(self) -> bool:
        """True if it sends a part of the elements."""
        return any(transport.sparse for transport in self.transports)


def _make_topk(spec: CompressorSpec, layers: Sequence[Layer], *_: object) -> Compressor:
    name = "exact" if spec.selector is None else spec.selector
    return SparseCompressor(kept_elements(spec, layers), choose("topk: selector", name, SELECTORS))


_SELECTION = frozenset({"k", "density", "scope"})

COMPRESSORS: Mapping[str, Family] = {
    "none": Family(
        options=frozenset(),
        transports=frozenset(transport for transport in TRANSPORTS.values() if transport.exact),
        make=lambda *_: None,
    ),
    "powersgd": Family(
        options=frozenset({"rank"}), transports=frozenset({LIBRARY}), make=lambda spec, *_: make_low_rank(spec)
    ),
    "randomk": Family(
        options=_SELECTION,
        transports=frozenset({FLAT, NAIVE_ALL_GATHER}),
        make=lambda spec, layers, *_: SparseCompressor(kept_elements(spec, layers), select_random),
    ),
    "topk": Family(
        options=_SELECTION | {"selector"},
        transports=frozenset({FLAT, NAIVE_ALL_GATHER, HITOPK}),
        make=_make_topk,
    ),
    "wire": Family(
        options=frozenset({"dtype", "block", "error_feedback", "rounding", "links"}),
        transports=frozenset({LIBRARY, TWO_SHOT, NATIVE}),
        between=frozenset({TORUS_2D}),
        make=lambda spec, _, ranks, native: make_wire(spec, ranks, native=native),
    ),
}
"""Registry: compressor, as a plan names it → family. Add one here and the contract test covers it."""


def make_compressor(
    spec: CompressorSpec, layers: Sequence[Layer], *, ranks: int, native: bool = False
) -> Compressor | None:
    """Make the compressor of one flat buffer; None where every element is sent as it is. `layers`: (name, elements) of
    each run of gradients of one layer, which in order fill the buffer; `ranks`: how many ranks' messages are summed,
    by the backend in the wire's dtype if `native`.

    Raises InputError: an unknown name, or options that do not fit the compressor or these layers.
    """
    family = choose("compressor", spec.name, COMPRESSORS)
    check_options(spec, family.options)
    return family.make(spec, layers, ranks, native)
