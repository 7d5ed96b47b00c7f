"""The dataset that is cached: how its raw samples are read, decoded and told from another dataset's."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from runtime.datacache.samples import FORMAT, STORABLE, from_bytes, pack
from runtime.datacache.unstorable import Unstorable
from runtime.errors import InputError

PROBED = 4
"""Samples that are read at the start: twice, to see that they are the same; and compared with what is on the disk."""


@runtime_checkable
class RawDataset(Protocol):
    """A dataset whose samples are bytes first. Then the disk holds these, which are several times smaller."""

    def __len__(self) -> int: ...

    def read(self, index: int) -> bytes:
        """Return the raw sample at `index` from slow storage, such as the bytes of a JPEG."""
        ...

    def decode(self, raw: bytes) -> Any:
        """Return the sample that `raw` holds, by computation alone; equal bytes give equal samples."""
        ...


class Source:
    """A map-style dataset, raw or not, with one interface."""

    def __init__(self, dataset: Any) -> None:
        """Raise InputError if the dataset is not map-style, or has no samples."""
        self.dataset = dataset
        self.raw = isinstance(dataset, RawDataset)
        indexed = callable(getattr(type(dataset), "__getitem__", None)) and not isinstance(dataset, IterableDataset)
        if not self.raw and not indexed:
            raise InputError(
                f"dataset: found a {type(dataset).__name__}, expected a map-style dataset: __getitem__(index), or "
                f"read(index) and decode(bytes); an iterable one cannot be cached by index"
            )
        self.samples = self.length()
        if self.samples == 0:
            raise InputError("dataset: found one without samples, expected at least one; check where it looks for them")

    def length(self) -> int:
        """Return the dataset's length now; `samples` is what it was at the start."""
        try:
            return len(self.dataset)
        except TypeError as error:
            raise InputError(
                f"dataset: {type(self.dataset).__name__} has no length ({error}), expected a map-style dataset; "
                f"give it a __len__"
            ) from None

    def read(self, index: int) -> bytes:
        """Read a sample's raw bytes, or those of the flat one. Raises Unstorable, and whatever the dataset raises."""
        if not self.raw:
            return pack(self.dataset[index]).numpy().tobytes()
        found = self.dataset.read(index)
        if not isinstance(found, bytes | bytearray | memoryview):
            raise InputError(
                f"dataset.read({index}): found a {type(found).__name__}, expected bytes; let decode make the sample"
            )
        return bytes(found)

    def sample(self, index: int) -> Any:
        """Read a sample."""
        return self.dataset.decode(self.read(index)) if self.raw else self.dataset[index]

    def decode(self, raw: bytes) -> Any:
        """Return the sample of raw bytes."""
        return self.dataset.decode(raw) if self.raw else from_bytes(raw)

    def flat(self, raw: bytes) -> Tensor:
        """Return the flat sample of raw bytes. Raises Unstorable."""
        return pack(self.dataset.decode(raw)) if self.raw else torch.frombuffer(bytearray(raw), dtype=torch.uint8)


def stored_as(name: str, *, raw: bool) -> str:
    """Return the name on the disk; of flat samples, with the versions, ours and Pillow's, that can read them."""
    if raw:
        return name
    try:
        return f"{name} flat {FORMAT} pillow {version('pillow')}"
    except PackageNotFoundError:
        return f"{name} flat {FORMAT}"


def identity(dataset: Any) -> str:
    """Digest everything that the dataset holds (paths, labels, options). Raises InputError unless it can be pickled."""
    from joblib import hash as digest

    kind = type(dataset)
    try:
        return f"{kind.__module__}.{kind.__qualname__} {digest(dataset, hash_name='sha1')}"
    except Exception as error:
        raise InputError(
            f"dataset: {kind.__name__} cannot be pickled ({type(error).__name__}: {error}), so that nothing tells it "
            f"from another one in local_dir; give CachedDataset a name=, and another one whenever the data changes"
        ) from error


@contextmanager
def generators_kept() -> Iterator[None]:
    """Restore the random states of Python, NumPy and torch at the end."""
    kept = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=()):
            yield
    finally:
        random.setstate(kept[0])
        np.random.set_state(kept[1])


def probe(source: Source, indices: Sequence[int], *, decoded: bool) -> tuple[dict[int, bytes], int, int]:
    """Read samples twice.

    Args:
        source: its dataset is copied first.
        indices: at least one.
        decoded: whether decoded samples will be stored; else sizes of those that cannot be are 0.

    Returns:
        Raw bytes by index, the size of the largest one, and of the largest one decoded and flat.

    Raises:
        InputError: two reads of one sample differ, so that augmentation is inside, or it cannot be stored.
    """
    found: dict[int, bytes] = {}
    flat_bytes = 0
    # Of a copy, if there can be one: files that a dataset opens when it is first read are not for forked workers.
    source = copy.copy(source)
    with suppress(Exception):
        source.dataset = copy.copy(source.dataset)
    with generators_kept():
        for index in indices:
            try:
                raw = found[index] = source.read(index)
                again = raw if source.raw else source.read(index)
                flat, flat_again = source.flat(raw), source.flat(again)
            except Unstorable as error:
                if source.raw and not decoded:
                    continue
                raise InputError(
                    f"dataset: sample {index}: {error}, which cannot be stored; expected {STORABLE}: convert it in the "
                    f"dataset, or, where it is made at random, in transform="
                ) from None
            flat_bytes = max(flat_bytes, flat.numel())
            if not torch.equal(flat, flat_again):
                raise InputError(
                    f"dataset: sample {index} differs between two reads, expected the same; a cache would repeat one "
                    f"of them for ever: move random augmentation to transform=, which runs after the cache"
                )
    return found, max(map(len, found.values())), flat_bytes
