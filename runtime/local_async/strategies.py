"""The ways to train that Algorithm 1 is compared with, by name, as what a plan says of local updaters. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from runtime.plan import LocalAsyncSpec, Plan

THEN_EVERY = 16
"""The paper's H."""

Blocks = Sequence[Sequence[str]]


def _mb_sgd(_updaters: int, _blocks: Blocks | None, _then_every: int) -> None:
    return None


def _l_sgd(_updaters: int, _blocks: Blocks | None, then_every: int) -> LocalAsyncSpec:
    return LocalAsyncSpec(updaters=1, synchronous=True, average_every=then_every, then_every=then_every)


def _pl_sgd(_updaters: int, _blocks: Blocks | None, then_every: int) -> LocalAsyncSpec:
    return LocalAsyncSpec(updaters=1, synchronous=True, then_every=then_every)


def _lap(updaters: int, _blocks: Blocks | None, then_every: int) -> LocalAsyncSpec:
    return LocalAsyncSpec(updaters=updaters, then_every=then_every)


def _lpp(updaters: int, blocks: Blocks | None, then_every: int) -> LocalAsyncSpec:
    assert blocks is not None, "LPP-SGD needs blocks"
    return LocalAsyncSpec(updaters=updaters, blocks=tuple(map(tuple, blocks)), then_every=then_every)


STRATEGIES: Mapping[str, Callable[[int, Blocks | None, int], LocalAsyncSpec | None]] = MappingProxyType(
    {"mb_sgd": _mb_sgd, "l_sgd": _l_sgd, "pl_sgd": _pl_sgd, "lap": _lap, "lpp": _lpp}
)
"""Name → (updaters, blocks, H) → `local_async` of a plan: minibatch SGD (None: the plan's own buckets), local SGD,
post-local SGD, and the two of Algorithm 1."""


def strategy_of(plan: Plan) -> str:
    """The name of what a plan does."""
    spec = plan.local_async
    if spec is None:
        return "mb_sgd"
    if spec.synchronous:
        return "l_sgd" if spec.average_every == spec.then_every else "pl_sgd"
    return "lap" if spec.blocks is None else "lpp"
