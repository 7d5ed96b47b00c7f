"""What four ranks of two nodes show of the data cache; run by test_datacache."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from runtime.datacache import CachedDataset
from runtime.errors import CommunicationError, PlannerError

SAMPLES = 96
ALL = -2
EPOCHS = 3


class Logged:
    """Raw samples; says in a file of each node what was read from the storage."""

    def __init__(self, log: str, samples: int = SAMPLES, broken: int = -1) -> None:
        self.log = log
        self.samples = samples
        self.broken = broken

    def __len__(self) -> int:
        return self.samples

    def read(self, index: int) -> bytes:
        """The raw sample."""
        if self.broken in (index, ALL):
            raise OSError("this sample is broken")
        handle = os.open(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(handle, f"{index}\n".encode())
        os.close(handle)
        return index.to_bytes(4, "little") * (50 + index)  # sizes differ

    def decode(self, raw: bytes) -> tuple[Tensor, int]:
        """The sample."""
        values = torch.frombuffer(bytearray(raw), dtype=torch.int32)
        return torch.nn.functional.pad(values, (0, 200 - len(values)), value=int(values[0])), int(values[0])


def node() -> str:
    """Ranks 0 and 1 are one node, ranks 2 and 3 another."""
    return f"node {dist.get_rank() // 2}"


def make(folder: str, **options: Any) -> CachedDataset:
    """The cache of this rank's node."""
    data = options.pop("data", None) or Logged(f"{folder}/log-{node()}")
    options = {"local_dir": f"{folder}/{node()}", "memory_bytes": 2**20, "probe": False, "timeout_s": 60.0} | options
    return CachedDataset(data, node=node(), **options)


def labels_of(loader: DataLoader[Any]) -> list[int]:
    """All labels of an epoch, whose values are checked."""
    labels = []
    for values, batch in loader:
        assert bool((values == batch[:, None]).all())
        labels += batch.tolist()
    return labels


def read_epochs(cached: CachedDataset, *, full: bool, workers: int, start: str | None = None) -> list[list[int]]:
    """Labels that this rank reads, by epoch."""
    sampler = cached.sampler(full=full, seed=4)
    loader = DataLoader(
        cached, batch_size=8, sampler=sampler, num_workers=workers, multiprocessing_context=start, pin_memory=False
    )
    epochs = []
    for epoch in range(1 if start == "spawn" else EPOCHS):  # starting takes seconds
        sampler.set_epoch(epoch)
        epochs.append(labels_of(loader))
        dist.barrier()  # as steps have it: else two ranks may read a sample at once, one of them an epoch ahead
    return epochs


def within_nodes(folder: str) -> dict[str, Any]:
    """Three epochs with workers, then one of a later run."""
    cached = make(folder)
    epochs = read_epochs(cached, full=False, workers=2, start="fork")
    dist.barrier()
    stats = cached.stats()
    read = read_lines(folder)
    cached.close()
    dist.barrier()
    later = make(folder, memory_bytes=0)
    again = labels_of(DataLoader(later, batch_size=8, sampler=later.sampler(seed=4)))
    dist.barrier()
    return {
        "epochs": epochs, "again": again, "read": read, "read_later": read_lines(folder)[len(read) :],
        "held": stats.samples_in_memory, "hits": stats.memory_hits, "later_hits": later.stats().disk_hits,
    }  # fmt: skip


def read_lines(folder: str) -> list[int]:
    """What this rank's node has read from the storage."""
    log = Path(f"{folder}/log-{node()}")
    return [int(line) for line in log.read_text().split()] if log.exists() else []


def over_all(folder: str) -> dict[str, Any]:
    """Full shuffling: in the training process, in forked workers, and in spawned ones."""
    cached = make(folder, fetch=True, local_dir=None)
    found = {
        "here": read_epochs(cached, full=True, workers=0),
        "fork": read_epochs(cached, full=True, workers=2, start="fork"),
        "spawn": read_epochs(cached, full=True, workers=1, start="spawn"),
    }
    dist.barrier()
    theirs: DistributedSampler[Any] = DistributedSampler(cached, seed=4)
    expected = []
    for epoch in range(EPOCHS):
        theirs.set_epoch(epoch)
        expected.append(list(theirs))
    return {"epochs": found, "expected": expected, "read": read_lines(folder), "fetched": cached.stats().fetched}


def said(make_it: Any) -> str:
    """What a rank is told."""
    try:
        make_it()
    except (PlannerError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def refusals(folder: str) -> dict[str, str]:
    """What one rank does wrong, or its dataset, is told to all."""
    rank = dist.get_rank()
    broken = make(f"{folder}", data=Logged(f"{folder}/log", broken=SAMPLES - 1), fetch=True, local_dir=None)
    loader = DataLoader(broken, batch_size=SAMPLES // 4, sampler=broken.sampler(full=True, shuffle=False))
    return {
        "lengths": said(lambda: make(folder, data=Logged("", samples=90 + rank))),
        "bounds": said(lambda: make(folder, memory_bytes=2**20 + rank)),
        "one": said(lambda: make(folder, memory_bytes=-rank)),
        "first read": said(
            lambda: make(folder, data=Logged(f"{folder}/log", broken=ALL if rank < 2 else -1), probe=True)
        ),
        "broken": said(lambda: labels_of(loader)),
    }


def a_rank_that_stays_away(folder: str) -> str:
    """The others are not held up for ever. Last, for what is left of the exchange is lost."""
    cached = make(folder, fetch=True, local_dir=None, timeout_s=2.0)
    loader = DataLoader(cached, batch_size=8, sampler=cached.sampler(full=True))
    if dist.get_rank() == 3:
        return "away"
    try:
        labels_of(loader)
    except CommunicationError as error:
        return str(error)
    return "nothing"


def all_checks(folder: str) -> dict[str, Any]:
    """Every check, in one start of processes."""
    torch.set_num_threads(1)
    found = {}
    for check in (within_nodes, over_all, refusals, a_rank_that_stays_away):
        own = f"{folder}/{check.__name__}"
        Path(own).mkdir(exist_ok=True)
        found[check.__name__] = check(own)
        dist.barrier()
    return found
