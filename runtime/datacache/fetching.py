"""Samples from the nodes that hold them: exchanged batch by batch between ranks, for shuffling over all samples.

Every rank reads a batch at the same step, as data-parallel training does. The same DataLoader worker of each rank makes
the same batches, so that the workers of one number form a process group of their own: they exchange during training,
and samples are augmented in parallel after that. Ranks that load in the training process form one, too.

An exchange has four messages in which every rank sends something to each other: how many samples it wants, which, how
large they are, and their bytes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from runtime.comm.world import first_line
from runtime.errors import CommunicationError
from runtime.torch_compat import all_to_all_uneven, is_of_backend, meet

_INHERITED: list[Any] = []
"""Groups of the process that this one was forked from: to end one would wait for threads that did not come along."""

FAILED = -1
"""Size of a sample that the rank that holds it could not read."""


class Fetcher:
    """The connection of this rank, or of one of its workers, to the same process of the other ranks."""

    def __init__(self, rank: int, ranks: int, address: tuple[str, int], key: str, timeout_s: float) -> None:
        """Form no group yet: that is done by the first exchange.

        Args:
            rank: this rank.
            ranks: how many there are.
            address: host and port of the TCP store at which groups form.
            key: tells this cache from others there; equal on all ranks.
            timeout_s: deadline of an exchange.
        """
        self.rank = rank
        self.ranks = ranks
        self.timeout_s = timeout_s
        self._address = address
        self._key = key
        self._process = 0
        self._group: Any = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Fetcher, (self.rank, self.ranks, self._address, self._key, self.timeout_s)

    def exchange(self, wanted: Sequence[Sequence[int]], load: Callable[[int], Tensor]) -> list[list[Tensor]]:
        """Exchange one batch; every rank calls this for the same one.

        Args:
            wanted: by rank, indices of the samples that it shall send.
            load: gives a flat sample (uint8) that this rank is asked for; what it raises is raised once the other
                ranks have been sent an answer.

        Returns:
            By rank, the flat samples that were wanted of it, in order.

        Raises:
            CommunicationError: a rank died, missed the deadline, or could not read a sample.
        """
        with self._error_context():
            if self._process != os.getpid():
                _INHERITED.append(self._group)
                worker = get_worker_info()
                key = f"{self._key}/{'rank' if worker is None else worker.id}"
                self._group = meet(self._address, key, self.rank, self.ranks, timedelta(seconds=self.timeout_s))
                self._process = os.getpid()
            lengths, ones = [len(indices) for indices in wanted], [1] * self.ranks
            counts = self._to_all(torch.tensor(lengths), ones, ones).tolist()
            wishes = torch.tensor([index for indices in wanted for index in indices], dtype=torch.int64)
            asked = self._to_all(wishes, lengths, counts)
        samples, trouble = [], None
        try:
            samples = [load(index) for index in asked.tolist()]
        except Exception as error:  # the others wait for an answer in any case
            trouble = error
        sizes = torch.tensor([sample.numel() for sample in samples] or [FAILED] * len(asked), dtype=torch.int64)
        with self._error_context():
            got = self._to_all(sizes, counts, lengths)
            gives, gets = (
                [int(part.clamp(min=0).sum()) for part in whole.split(parts)]
                for whole, parts in ((sizes, counts), (got, lengths))
            )
            given = torch.cat(samples) if samples else torch.empty(0, dtype=torch.uint8)
            flat = self._to_all(given, gives, gets)
        if trouble is not None:
            raise trouble
        for rank, (indices, sizes_bytes) in enumerate(zip(wanted, got.split(lengths), strict=True)):
            if indices and int(sizes_bytes[0]) == FAILED:
                raise CommunicationError(
                    f"rank {self.rank}: rank {rank} could not read one of the samples {list(indices)[:8]}, which its "
                    f"node holds; its own error says why"
                )
        # Copies: leaves begin at multiples of 64 bytes again.
        found = iter([sample.clone() for sample in flat.split(got.tolist())])
        return [[next(found) for _ in indices] for indices in wanted]

    def _to_all(self, given: Tensor, gives: list[int], gets: list[int]) -> Tensor:
        """Send parts of `given`, of these lengths, to ranks; return what came from them, one after the other."""
        output = torch.empty(sum(gets), dtype=given.dtype)
        all_to_all_uneven(self._group, output, given, gets, gives)
        return output

    @contextmanager
    def _error_context(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if not is_of_backend(error):
                raise
            worker = get_worker_info()
            who = f"rank {self.rank}" + (f", worker {worker.id}" if worker else "")
            raise CommunicationError(
                f"{who}: exchanging samples between nodes: another rank died, or did not read a batch within "
                f"{self.timeout_s:g} s; every rank has to read equally many batches, with equally many workers "
                f"({first_line(error)})"
            ) from error
