"""Features that go with each mode (way to synchronize), as data: planner's verifier and the runtime's checks read it.

Imports nothing but transports.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from runtime.plan.transports import Transport

SYNCHRONOUS, SHARDED, DELAY, LOCAL_UPDATERS = "synchronous", "sharded", "delay", "local_updaters"

TOPOLOGY, SELECTION, LAYER_SELECTION, WIRE, LOW_RANK, SHARED_NORMS, SOLVER = (
    "topology", "selection", "layer_selection", "wire", "low_rank", "shared_norms", "solver"
)  # fmt: skip

FEATURES: Mapping[str, str] = {
    TOPOLOGY: "collectives of several messages: 2D-torus, trees, HiTopKComm",
    SELECTION: "some elements of buckets, with error feedback (top-k, random-k)",
    LAYER_SELECTION: "a number of elements for each layer",
    WIRE: "a narrower dtype on the wire",
    LOW_RANK: "matrices as products of thin ones",
    SHARED_NORMS: "norms of layers that ranks compute for each other (LARS, LAMB)",
    SOLVER: "the constraint program's word on an exact schedule (`--solver cpsat`)",
}

_ONLY_DENSE = (TOPOLOGY, SELECTION, LAYER_SELECTION, WIRE, LOW_RANK)

COMBINATIONS: Mapping[str, Mapping[str, str]] = {
    SYNCHRONOUS: {},
    SHARDED: {
        **dict.fromkeys(_ONLY_DENSE, "the sharded optimizer step (ZeRO-1) reduce-scatters uncompressed gradients"),
        SHARED_NORMS: "norms need whole layers, and with the sharded optimizer step ranks have parts",
        SOLVER: "its model is of all-reduces, and here ranks share the optimizer's step "
        "(leave out --allow sharded-step)",
    },
    DELAY: {
        **dict.fromkeys((TOPOLOGY, WIRE, LOW_RANK), "with delay, buckets are pushed whole or selected from"),
        LAYER_SELECTION: "with delay, nothing is selected by layer: owners' parts of a bucket do not follow layers",
        SHARED_NORMS: "delay needs torch.optim.SGD, which needs no norms",
        SOLVER: "its model is of synchronous steps",
    },
    LOCAL_UPDATERS: {
        **dict.fromkeys(_ONLY_DENSE, "models are averaged dense"),
        SHARED_NORMS: "local updaters wait for no other rank: each computes its norms by itself",
        SOLVER: "its model is of synchronous steps",
    },
}
"""Mode → feature → why they do not go together; they do where nothing is said."""

ALSO_EXECUTED: Mapping[str, frozenset[str]] = {
    SHARDED: frozenset({WIRE}), DELAY: frozenset({WIRE}), LOCAL_UPDATERS: frozenset({TOPOLOGY})
}  # fmt: skip
"""Mode → features that the runtime executes with it all the same, or that mean nothing there; no pass asks for them."""


def reason_against(mode: str, feature: str) -> str | None:
    """Return why a mode and a feature do not go together; None where they do. Raises KeyError: no such mode."""
    return COMBINATIONS[mode].get(feature)


FEATURES_OF_CODECS: Mapping[str, tuple[str, ...]] = {
    "none": (), "topk": (SELECTION,), "randomk": (SELECTION,), "powersgd": (LOW_RANK,), "wire": (WIRE,)
}  # fmt: skip
"""Compressor, as a plan names it → features of its buckets."""


def features_of_bucket(transport: Transport, compressor: str, *, by_layer: bool = False) -> Iterator[str]:
    """Yield the features of a bucket that is sent so; none of a dense one that the library all-reduces."""
    if not transport.basic:
        yield TOPOLOGY
    yield from (SELECTION,) if transport.sparse else FEATURES_OF_CODECS.get(compressor, (WIRE,))
    if by_layer:
        yield LAYER_SELECTION
