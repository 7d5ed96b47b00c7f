"""A dataset whose samples come from slow storage once: then from the local disk, then from the memory of the node."""

from __future__ import annotations

import operator
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset

from runtime.comm.world import World, check_timeout_s
from runtime.datacache.disk import used_bytes
from runtime.datacache.fetching import Fetcher
from runtime.datacache.node import CacheRequest, agree, check_bytes, check_folder, node_name, share
from runtime.datacache.partition import Partition, numbered
from runtime.datacache.sampler import CachedSampler
from runtime.datacache.samples import STORABLE, unpack
from runtime.datacache.source import Source, identity, stored_as
from runtime.datacache.unstorable import Unstorable
from runtime.errors import CacheWarning, InputError, PlannerError
from runtime.torch_compat import store_address

TIMEOUT_S = 600.0
"""Deadline of an exchange between nodes, in seconds: a rank may evaluate or save meanwhile."""


@dataclass(frozen=True)
class CacheStats:
    """Counts of a node's caches so far, in all its ranks and workers."""

    memory_hits: int
    """Samples that came from memory."""
    disk_hits: int
    """Samples that came from the node's disk."""
    source_reads: int
    """Samples that came from slow storage."""
    fetched: int
    """Samples that came from other nodes."""
    corrupted: int
    """Samples on the disk whose bytes were not those that were stored."""
    not_stored: int
    """Samples that the disk did not take: its bound, a full or slow disk."""
    unstorable: int
    """Samples of a type that no cache can hold."""
    samples_in_memory: int
    """Samples that memory holds now."""
    memory_used_bytes: int
    """Bytes of memory in use now."""
    disk_used_bytes: int
    """Bytes of `local_dir` in use now."""


class CachedDataset(Dataset[Any]):
    """A map-style dataset behind two caches. Every rank that shares it makes one, at the same place.

    Level 1 keeps raw samples in `local_dir`, for all ranks of the node and for later runs; level 2 keeps decoded ones
    in memory that the node's ranks and their DataLoader workers share, in the run. With several nodes each holds a part
    of the indices; `sampler()` keeps ranks to their node's part.

    What is cached is the dataset's sample: random augmentation has to come after it, in `transform`. The disk holds
    bytes as they come from the storage where the dataset has `read(index) -> bytes` and `decode(bytes) -> sample`
    (`datacache.RawDataset`), else decoded samples, which usually are larger.

    Nothing about the caches changes what a sample is, and nothing that goes wrong with them ends the run: then samples
    come from the storage, which is counted (`stats()`), with one warning (`runtime.CacheWarning`).
    """

    def __init__(
        self,
        dataset: Any,
        *,
        local_dir: str | Path | None = None,
        memory_bytes: int = 0,
        group: dist.ProcessGroup | None = None,
        transform: Callable[[Any], Any] | None = None,
        disk_bytes: int | None = None,
        name: str | None = None,
        node: str | None = None,
        seed: int = 0,
        fetch: bool = False,
        probe: bool = True,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """Make the caches, or share those of the node.

        Args:
            dataset: map-style; equal samples from equal indices.
            local_dir: a directory on a local disk, for level 1; None: none.
            memory_bytes: memory of each node, for level 2; 0: none.
            group: the ranks that read the dataset together; default: all of torch.distributed, or this process alone.
            transform: (sample) → what the DataLoader gets; runs for every access.
            disk_bytes: bound of everything in `local_dir`; default: what is there, and 90 % of what is free.
            name: name of the dataset in `local_dir`; default: a digest of everything that the object holds. Give one
                if it cannot be pickled, or holds what differs between runs; and another one when the data changes.
            node: name of this machine; default: torchrun's node number, the host, and its view of processes.
            seed: seed of the partition among nodes; equal on all ranks.
            fetch: whether samples that another node holds are asked of it, batch by batch over the process group;
                needed for a sampler with `full=True`. Then every rank has to read batches at the same steps.
            probe: whether to read some samples twice first, to find augmentation inside, types that cannot be stored,
                and data that has changed.
            timeout_s: deadline of waits for other ranks, in seconds.

        Raises:
            InputError: on all ranks alike: a dataset, directory or bound is no good, or ranks differ in them.
            EnvironmentFailure: a rank died or missed the deadline; memory cannot be shared.
        """
        self.transform = transform
        world = World.join(group, check_timeout_s(timeout_s), alone=True)
        try:
            mine: CacheRequest | PlannerError
            try:
                self._source = Source(dataset)
                check_bytes("memory_bytes", memory_bytes)
                if disk_bytes is not None:
                    check_bytes("disk_bytes", disk_bytes)
                folder = None if local_dir is None else check_folder(local_dir)
                known_as = "" if folder is None else stored_as(name or identity(dataset), raw=self._source.raw)
                mine = CacheRequest(folder, int(memory_bytes), disk_bytes, known_as, node_name(node),
                                    self._source.samples, seed, fetch, probe, os.urandom(8).hex())  # fmt: skip
            except PlannerError as error:
                mine = error
            everyone = agree(world, mine)
            assert isinstance(mine, CacheRequest)
            self.rank = world.rank
            self.partition = Partition(self._source.samples, numbered([one.node for one in everyone]), seed)
            self._node = self.partition.node_of_rank[self.rank]
            caches = share(world, mine, self._source, self.partition)
            self._memory, self._disk, self.raw_bytes = caches.memory, caches.disk, caches.raw_bytes
            self._fetcher: Fetcher | None = None
            if fetch and self.partition.nodes > 1:
                address = store_address()
                if address is None:  # on all ranks: they have formed one group
                    raise InputError(
                        "fetch=True: found a process group that was formed by a file, expected one formed over TCP, "
                        "where workers can meet too; use init_method='env://' or torchrun"
                    )
                self._fetcher = Fetcher(world.rank, world.ranks, address, f"datacache/{everyone[0].key}", timeout_s)
        finally:
            world.leave()

    def __len__(self) -> int:
        """Return the number of samples when this was made."""
        return self._source.samples

    def check_length(self) -> None:
        """Raise InputError if the dataset's length is not what it was when this was made."""
        now = self._source.length()
        if now != len(self):
            raise InputError(
                f"dataset: found {now} samples, expected {len(self)}, as when the cache was made: ranks would not "
                f"agree on who reads what; make a new CachedDataset, on all ranks, when the data has changed"
            )

    def __getitem__(self, index: int) -> Any:
        """Return a sample, transformed. Raises IndexError, and whatever the dataset raises."""
        return self._transformed(self._sample(self._checked(index)))

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return a batch of samples, transformed; with `fetch` every rank has to read one at the same time.

        Raises:
            CommunicationError: with `fetch`, a rank died or missed the deadline.
        """
        chosen = [self._checked(index) for index in indices]
        fetched = {} if self._fetcher is None else self._fetch(self._fetcher, chosen)
        return [
            self._transformed(fetched[place] if place in fetched else self._sample(index))
            for place, index in enumerate(chosen)
        ]

    def _fetch(self, fetcher: Fetcher, chosen: Sequence[int]) -> dict[int, Any]:
        """Return the samples that other nodes hold, by their place in the batch."""
        places: list[list[int]] = [[] for _ in range(fetcher.ranks)]
        for place, node in enumerate(self.partition.owners(chosen)):
            if node != self._node:
                there = self.partition.ranks_of(int(node))
                places[there[self.rank % len(there)]].append(place)
        found = fetcher.exchange([[chosen[place] for place in one] for one in places], self._flat)
        self._memory.count("fetched", sum(map(len, places)))
        return {place: unpack(flat) for place, flat in zip(chain(*places), chain(*found), strict=True)}

    def _checked(self, index: int) -> int:
        found = operator.index(index)
        if not -len(self) <= found < len(self):
            raise IndexError(f"index {found} of a dataset of {len(self)} samples")
        return found % len(self)

    def _transformed(self, sample: Any) -> Any:
        return sample if self.transform is None else self.transform(sample)

    def _slot(self, index: int) -> int:
        """Return the place of an index in this node's memory; negative if it has none."""
        return self.partition.slot(index, self._node) if self._memory.slots else -1

    def _sample(self, index: int) -> Any:
        if self._disk is None and not self._memory.slots:
            self._memory.count("source_reads")
            return self._source.sample(index)
        try:
            flat = self._held(index)
            if flat is None:
                raw = self._read(index)
                if not self._memory.slots:
                    return self._source.decode(raw)
                # Alike in all epochs: what decoding gives is taken apart and put together in the first one, too.
                flat = self._keep(index, raw)
            return unpack(flat)
        except Unstorable as error:
            self._memory.count("unstorable")
            if self._memory.first("unstorable"):
                warnings.warn(
                    f"dataset: sample {index}: {error}, which cannot be stored, so it is made anew every time. "
                    f"stats().unstorable counts such samples; expected {STORABLE}",
                    CacheWarning,
                    stacklevel=2,
                )
            return error.sample

    def _flat(self, index: int) -> Tensor:
        flat = self._held(index)
        try:
            return self._keep(index, self._read(index)) if flat is None else flat
        except Unstorable as error:
            raise InputError(f"dataset: sample {index}: {error}, which cannot be sent to another node; convert it in "
                             f"the dataset") from None  # fmt: skip

    def _held(self, index: int) -> Tensor | None:
        """Return a copy of the flat sample in this node's memory, or None."""
        slot = self._slot(index)
        flat = self._memory.get(slot) if slot >= 0 else None
        if flat is not None:
            self._memory.count("memory_hits")
        return flat

    def _read(self, index: int) -> bytes:
        """Read a raw sample from the disk, else from the storage, and store it."""
        raw = self._disk.get(index) if self._disk is not None else None
        if raw is not None:
            self._memory.count("disk_hits")
            return raw
        raw = self._source.read(index)
        self._memory.count("source_reads")
        if self._disk is not None:
            self._disk.put(index, raw)
        return raw

    def _keep(self, index: int, raw: bytes) -> Tensor:
        """Return the flat sample of raw bytes, and put it into the node's memory. Raises Unstorable."""
        flat = self._source.flat(raw)
        slot = self._slot(index)
        if slot >= 0:
            self._memory.put(slot, flat)
        return flat

    def sampler(
        self, *, shuffle: bool = True, full: bool = False, seed: int = 0, drop_last: bool = False
    ) -> CachedSampler:
        """Return the `CachedSampler` of this rank; it explains `shuffle`, `full`, `seed` and `drop_last`."""
        return CachedSampler(self, shuffle=shuffle, full=full, seed=seed, drop_last=drop_last)

    def stats(self) -> CacheStats:
        """Return the counts of this node's caches so far."""
        return CacheStats(
            **self._memory.counts(),
            samples_in_memory=self._memory.held,
            memory_used_bytes=self._memory.used_bytes,
            disk_used_bytes=0 if self._disk is None else used_bytes(self._disk.folder),
        )

    def flush(self, timeout_s: float = 60.0) -> bool:
        """Wait until what this process has read is on the disk, as workers do at their end.

        Args:
            timeout_s: seconds to wait.

        Returns:
            False after the timeout.
        """
        return self._disk is None or self._disk.flush(timeout_s)

    def close(self) -> None:
        """Write to the disk what waits for that; the dataset can still be read."""
        self.flush()
