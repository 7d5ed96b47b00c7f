"""Features that go with each mode (way to synchronize), as data: planner's verifier and the runtime's checks read it.

Imports nothing but transports.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from runtime.plan.transports import Transport

SYNCHRONOUS, SHARDED, DELAY, OUTER, LOCAL_UPDATERS = "synchronous", "sharded", "delay", "outer", "local_updaters"

TOPOLOGY, SELECTION, LAYER_SELECTION, WIRE, LOW_RANK, FROM_STEP, SHARED_NORMS, SHARED_OPERATOR, SOLVER = (
    "topology", "selection", "layer_selection", "wire", "low_rank", "from_step", "shared_norms", "shared_operator",
    "solver",
)  # fmt: skip

FEATURES: Mapping[str, str] = {
    TOPOLOGY: "hierarchical collectives: 2D-torus, trees, HiTopKComm",
    SELECTION: "sparse buckets, with error feedback (top-k, random-k)",
    LAYER_SELECTION: "sparse buckets with a k for each layer",
    WIRE: "quantized buckets",
    LOW_RANK: "low-rank buckets (PowerSGD)",
    FROM_STEP: "exact first steps (`from_step`)",
    SHARED_NORMS: "distributed layer norms (LARS, LAMB)",
    SHARED_OPERATOR: "distributed operators (Muon)",
    SOLVER: "a CP-SAT certificate of an exact schedule (`--solver cpsat`)",
}

_ONLY_DENSE = (TOPOLOGY, SELECTION, LAYER_SELECTION, WIRE, LOW_RANK)

COMBINATIONS: Mapping[str, Mapping[str, str]] = {
    SYNCHRONOUS: {},
    SHARDED: {
        **dict.fromkeys((*_ONLY_DENSE, FROM_STEP), "a sharded step reduce-scatters uncompressed gradients"),
        SHARED_NORMS: "norms need whole layers, and of a sharded step each rank has a part",
        SHARED_OPERATOR: "operators need whole matrices, and of a sharded step each rank has a part",
        SOLVER: "the constraint program models all-reduces, not the sharded optimizer step "
        "(leave out --allow sharded-step)",
    },
    DELAY: {
        **dict.fromkeys((TOPOLOGY, WIRE, LOW_RANK), "with delay, buckets are pushed whole or selected from"),
        LAYER_SELECTION: "with delay, nothing is selected by layer: owners' parts do not follow layers",
        FROM_STEP: "delay has warmup_steps",
        SHARED_NORMS: "delay needs torch.optim.SGD, which needs no norms",
        SHARED_OPERATOR: "delay needs torch.optim.SGD, which has no operator",
        SOLVER: "the constraint program models synchronous steps",
    },
    OUTER: {
        TOPOLOGY: "outer steps send weights between workers, on flat collectives",
        FROM_STEP: "outer steps have warmup_steps",
        SHARED_NORMS: "workers have weights of their own between outer steps: each computes all norms itself",
        SHARED_OPERATOR: "workers have momenta of their own between outer steps: each computes all operators itself",
        SOLVER: "the constraint program models synchronous steps",
    },
    LOCAL_UPDATERS: {
        **dict.fromkeys((*_ONLY_DENSE, FROM_STEP), "models are averaged uncompressed"),
        SHARED_NORMS: "each local updater computes all norms itself",
        SHARED_OPERATOR: "each local updater computes all operators itself",
        SOLVER: "the constraint program models synchronous steps",
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
