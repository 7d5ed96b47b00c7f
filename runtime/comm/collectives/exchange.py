"""All-to-all, and what two ranks gather, over gloo: sends and receives, receives first.

A sender over gloo learns that its receiver is ready on the connection that carries data the other way. Gloo's own
all-to-all begins to send before all its receives are known, so that some of these words wait behind data and links
idle: of the 25 MB/s of four hosts at 200 Mbit/s it reaches 19, and this 24. So do large gathers of two ranks, which are
each other's neighbours on both sides: they take half as long again.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from runtime.torch_compat import all_gather_on, all_to_all_single, backend_of, receive, send, wait_for

LEAST_BYTES = 2**18
"""Bytes of the largest part from which on this is used. Smaller ones are soon under way, and the thread that waits for
ours costs half a millisecond.
"""


def exchange(
    received: Tensor, given: Tensor, gets: Sequence[int], gives: Sequence[int], group: dist.ProcessGroup
) -> Any:
    """Begin to give every rank its part and to get this one's from each; return what a backend's collective would.

    Args:
        received: 1-D, bytes (uint8): what ranks give, in their order; `gets` of each.
        given: 1-D, bytes (uint8): the ranks' parts, in their order; `gives` to each.
        gets: lengths by rank.
        gives: lengths by rank, the same on all ranks: what is large is decided by them.
        group: the ranks.
    """
    if _pays(max(gives), given, group):
        return _Exchange(received.split(list(gets)), given.split(list(gives)), group)
    uneven = (list(gets), list(gives)) if len(set(gives)) > 1 else ()
    return all_to_all_single(received, given, *uneven, group=group, async_op=True)


def all_gather(whole: Tensor, part: Tensor, group: dist.ProcessGroup) -> Any:
    """Begin to gather every rank's part, one after the other, as bytes; return what a backend's collective would.

    Args:
        whole: 1-D, ranks · n; `part` may be this rank's part of it.
        part: 1-D, n.
        group: the ranks. More than two are left to the backend, whose ring takes the links between nodes fewer times.
    """
    whole, part = whole.view(torch.uint8), part.view(torch.uint8)
    if group.size() == 2 and _pays(part.numel(), part, group):
        return _Exchange(whole.split(part.numel()), (part, part), group)
    return all_gather_on(group, whole, part)


def all_gather_parts(whole: Tensor, part: Tensor, sizes: Sequence[int], group: dist.ProcessGroup) -> Any:
    """Begin to gather parts of any lengths, one after the other; return what a backend's collective would.

    Args:
        whole: 1-D, as long as all parts; `part` may be this rank's part of it.
        part: 1-D, with `sizes[rank]` elements.
        sizes: elements by rank, the same on all ranks.
        group: the ranks.
    """
    if len(set(sizes)) == 1:
        return all_gather(whole, part, group)
    gets = [size * part.itemsize for size in sizes]
    whole, part = whole.view(torch.uint8), part.view(torch.uint8)
    if _pays(max(gets), part, group):
        return _Exchange(whole.split(gets), (part,) * len(sizes), group)
    gives = [part.numel()] * len(sizes)
    return all_to_all_single(whole, part.repeat(len(sizes)), gets, gives, group=group, async_op=True)


def _pays(size_bytes: int, sent: Tensor, group: dist.ProcessGroup) -> bool:
    return size_bytes >= LEAST_BYTES and sent.device.type == "cpu" and backend_of(group, sent.device) == "gloo"


class _Exchange:
    """Sends and receives that have begun. Gloo has no callback for their end, so a thread waits if one is needed.

    A thread of its own: waiting for one exchange must not hold up another.
    """

    def __init__(self, received: Sequence[Tensor], given: Sequence[Tensor], group: dist.ProcessGroup) -> None:
        ranks, rank = group.size(), group.rank()
        self._works = []
        for one, rows, begin in ((-1, received, receive), (1, given, send)):
            peers = [(rank + one * distance) % ranks for distance in range(1, ranks)]
            self._works += [begin(group, rows[peer], peer) for peer in peers if rows[peer].numel()]
        received[rank].copy_(given[rank])
        self._future: torch.futures.Future[Any] | None = None
        self._over = threading.Event()

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future, as `dist.Work` does; called before `wait`, if at all."""
        if self._future is None:
            self._future = torch.futures.Future()
            threading.Thread(target=self._carry, args=(self._future,), name="planner exchange", daemon=True).start()
        return self._future

    def _carry(self, future: torch.futures.Future[Any]) -> None:
        try:
            self._wait()  # no longer than the group's own deadline
        except Exception as error:  # no caller sees it on this thread
            future.set_exception(error)
        else:
            future.set_result(None)
        self._over.set()

    def _wait(self, limit: timedelta | None = None) -> None:
        for work in self._works:
            wait_for(work, limit)

    def is_completed(self) -> bool:
        """Return whether all of it has ended, as `dist.Work` does whose future was asked for."""
        return self._over.is_set()

    def wait(self, limit: timedelta | None = None) -> bool:
        """Block until all of it has ended, as `dist.Work` does. Raises DistBackendError: it did not end in time."""
        if self._future is None:
            self._wait(limit)
            return True
        if not self._over.wait(None if limit is None else limit.total_seconds()):
            raise dist.DistBackendError("an exchange did not end in time")
        self._future.value()
        return True
