"""Ranks with unlike numbers of batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar, cast

from runtime.core.weights import Weights
from runtime.errors import InputError

T = TypeVar("T")

_NONE = object()


def even_batches(weights: Weights, loader: Iterable[T]) -> Iterator[T]:
    """Yield this rank's batches, then the last of them with a weight of 0, until no rank has another one.

    Args:
        weights: of this rank's backwards.
        loader: its batches.

    Raises:
        InputError: on all ranks alike, where a rank has no batch at all.
    """
    source, last = iter(loader), cast(T, _NONE)
    weights.default = 1.0
    try:
        while True:
            following = next(source, _NONE)
            weights.idle = following is _NONE
            last = last if weights.idle else cast(T, following)
            found = weights.gather([float(not weights.idle), float(last is not _NONE)])
            if not any(more for more, _ in found):
                return
            if empty := [rank for rank, (_, any_batch) in enumerate(found) if not any_batch]:
                raise InputError(
                    f"session.batches: found no batch at all on rank {', '.join(map(str, empty))} of {len(found)}; "
                    f"expected at least one on each: give every rank a sample (fewer samples than ranks?)"
                )
            yield last
    finally:
        weights.default, weights.idle = None, False
