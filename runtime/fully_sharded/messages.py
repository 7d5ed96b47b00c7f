"""Gathers and reduce-scatters among hosts, one after the other on a thread of their own, as on a communicator of NCCL.

Both are rings, as NCCL's are, and send what those send: of n ranks each gives n - 1 parts to the next one. Gloo's own
reduce-scatter is an all-reduce of a copy, which sends twice that.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from itertools import product
from queue import SimpleQueue

import torch
import torch.distributed as dist
from torch import Tensor

from runtime.comm.communicator import to_settle
from runtime.comm.world import check_timeout_s
from runtime.errors import CommunicationError
from runtime.torch_compat import receive, send, wait_for

TAG = 0x5D0000
"""Tells these messages from what else ranks of a group send one another."""
PIECE_BYTES = 2**18
"""Bytes that are received before they are added up: one piece is received while another one is added."""
_Ring = Callable[[Tensor, Tensor, dist.ProcessGroup], None]
"""(result, own part, ranks) → sends and receives of one message."""
_Calls = SimpleQueue[Callable[[], None] | None]
"""Calls of a thread, one after the other; None ends it."""


def _work(calls: _Calls) -> None:
    while (call := calls.get()) is not None:
        call()
        del call  # and with it tensors and the group, before the next one comes


class SerialMessages:
    """Messages among ranks that all begin the same ones in the same order; none begins before the one before is over.

    What fails ends all that follow: ranks no longer agree on which message is next. No wait for another rank is longer
    than `timeout_s`, so that every message ends. Memory is free when the wait for its message returns.
    """

    def __init__(self, timeout_s: float, number: int = 0) -> None:
        """`number`: the same on all ranks, and another one than that of others with messages on the same group."""
        check_timeout_s(timeout_s)
        self._limit, self._tag = timedelta(seconds=timeout_s), TAG + number
        self._calls: _Calls = SimpleQueue()
        # A daemon: a script that raises ends, though other ranks never answer what is under way.
        self._thread = threading.Thread(target=_work, args=(self._calls,), name="planner fsdp2", daemon=True)
        self._thread.start()
        weakref.finalize(self, self._calls.put, None)
        to_settle.add(self)
        self._pieces = torch.empty(2, PIECE_BYTES, dtype=torch.uint8)
        self._failure: BaseException | None = None

    def gather(self, whole: Tensor, part: Tensor, group: dist.ProcessGroup) -> Future[None]:
        """Begin to gather every rank's part (1-D, n), one after the other (ranks · n), of which it may be one."""
        return self._begin(self._gather, whole, part, group)

    def reduce_scatter(
        self, own: Tensor, given: Tensor, group: dist.ProcessGroup, *, average: bool = False,
        factor: float | Tensor | None = None,
    ) -> Future[None]:  # fmt: skip
        """Begin to add up, or average, what ranks give (1-D, ranks · n; destroyed), of which this one gets n. With a
        factor (a number, or a tensor of one element) each rank's is multiplied by it before it is added up.
        """
        ring = self._average if average else self._sum if factor is None else partial(self._scaled_sum, factor)
        return self._begin(ring, own, given, group)

    def _begin(self, ring: _Ring, to: Tensor, of: Tensor, group: dist.ProcessGroup) -> Future[None]:
        message: Future[None] = Future()
        # The thread keeps what it was given until after it has reported that the call is over.
        self._calls.put(partial(self._carry, message, ring, [of, to], group))
        return message

    def _carry(self, message: Future[None], ring: _Ring, lent: list[Tensor], group: dist.ProcessGroup) -> None:
        try:
            if self._failure is None:
                ring(lent.pop(), lent.pop(), group)
        except BaseException as error:
            self._failure = error
        if self._failure is None:
            message.set_result(None)
        else:
            message.set_exception(self._failure)

    def settle(self, deadline: float) -> None:
        """Begin nothing more, and give the thread until `deadline` (monotonic) for what is under way."""
        self._failure = self._failure or CommunicationError("the script has ended")
        self._calls.put(None)
        self._thread.join(max(0.0, deadline - time.monotonic()))

    def _gather(self, whole: Tensor, part: Tensor, group: dist.ProcessGroup) -> None:
        rank, ranks = group.rank(), group.size()
        rows = whole.view(ranks, -1).view(torch.uint8)
        if rows[rank].data_ptr() != part.data_ptr():
            rows[rank].copy_(part.view(torch.uint8))
        before, after = (rank - 1) % ranks, (rank + 1) % ranks
        coming = [receive(group, rows[(rank - 1 - step) % ranks], before, self._tag) for step in range(ranks - 1)]
        going = []
        for step, row in enumerate(coming):
            going.append(send(group, rows[(rank - step) % ranks], after, self._tag))
            wait_for(row, self._limit)
        for one in going:
            wait_for(one, self._limit)

    def _average(self, own: Tensor, given: Tensor, group: dist.ProcessGroup) -> None:
        self._sum(own, given, group)
        own.div_(group.size())

    def _scaled_sum(self, factor: float | Tensor, own: Tensor, given: Tensor, group: dist.ProcessGroup) -> None:
        self._sum(own, given.mul_(factor), group)

    def _sum(self, own: Tensor, given: Tensor, group: dist.ProcessGroup) -> None:
        rank, ranks = group.rank(), group.size()
        rows = given.view(ranks, -1)
        if ranks == 1:
            own.copy_(rows[0])
            return
        before, after = (rank - 1) % ranks, (rank + 1) % ranks
        each = PIECE_BYTES // own.itemsize
        pieces = [slice(start, min(start + each, own.numel())) for start in range(0, own.numel(), each)]
        # The sum of a row begins with the rank after its own, and comes to its own at last.
        turns = [((rank - 2 - step) % ranks, piece) for step, piece in product(range(ranks - 1), pieces)]
        buffers = self._pieces.view(own.dtype)

        def begin(turn: int) -> tuple[Tensor, dist.Work]:
            _, piece = turns[turn]
            got = buffers[turn % 2, : piece.stop - piece.start]
            return got, receive(group, got.view(torch.uint8), before, self._tag)

        coming = deque(begin(turn) for turn in range(min(2, len(turns))))
        going = [send(group, rows[(rank - 1) % ranks, piece].view(torch.uint8), after, self._tag) for piece in pieces]
        for turn, (row, piece) in enumerate(turns):
            got, work = coming.popleft()
            wait_for(work, self._limit)
            if row == rank:
                torch.add(got, rows[row, piece], out=own[piece])
            else:
                going.append(send(group, rows[row, piece].add_(got).view(torch.uint8), after, self._tag))
            if turn + 2 < len(turns):
                coming.append(begin(turn + 2))
        for one in going:
            wait_for(one, self._limit)
