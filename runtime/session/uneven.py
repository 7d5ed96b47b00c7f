"""Ranks with unlike numbers of batches."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable, Iterator, MutableMapping, MutableSequence
from contextlib import suppress
from typing import Any, TypeVar, cast

from torch.utils.data import DataLoader

from runtime.core.weights import BATCHES, Weights
from runtime.errors import InputError
from runtime.monitor.recorder import Recorder

T = TypeVar("T")

_NONE = object()


def even_batches(weights: Weights, loader: Iterable[T], recorder: Recorder) -> Iterator[T]:
    """Yield this rank's batches, then the last of them with a weight of 0, until no rank has another one.

    Where a rank has none, a DataLoader's first sample stands in for it. Lists and dicts are yielded as shallow copies:
    what a script takes out of one is there again.

    Args:
        weights: of this rank's backwards.
        loader: its batches.
        recorder: records how long this rank waits for others.

    Raises:
        InputError: on all ranks alike, where a rank has no batch at all, and no sample.
    """
    source, last = iter(loader), cast(T, _NONE)
    before, weights.default = (weights.default, weights.idle), 1.0
    try:
        while True:
            following = next(source, _NONE)
            weights.idle = following is _NONE
            last = last if weights.idle else cast(T, following)
            if last is _NONE:
                last = cast(T, _one_sample(loader))
            begun_s = time.perf_counter()
            found = weights.gather(BATCHES, [not weights.idle, last is not _NONE])
            recorder.gathered(1e6 * (time.perf_counter() - begun_s))
            if not any(more for more, _ in found):
                return
            if empty := [rank for rank, (_, any_batch) in enumerate(found) if not any_batch]:
                raise InputError(
                    f"session.batches: found no batch at all on rank {', '.join(map(str, empty))} of {len(found)}; "
                    f"expected at least one on each: give every rank a sample (fewer samples than ranks?)"
                )
            yield copy.copy(last) if isinstance(last, (MutableMapping, MutableSequence)) else last
    finally:
        weights.default, weights.idle = before


def _one_sample(loader: Iterable[Any]) -> Any:
    """Return a batch of a DataLoader's first sample, twice, for layers that normalize over a batch; or `_NONE`."""
    if isinstance(loader, DataLoader):
        with suppress(Exception):  # what has no first sample: an error on all ranks alike
            sample = loader.dataset[0]
            return loader.collate_fn(sample if loader.batch_sampler is None else 2 * [sample])
    return _NONE
