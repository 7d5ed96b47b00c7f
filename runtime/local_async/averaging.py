"""Averaging of the models of all ranks while updaters continue (Algorithm 1, lines 9 to 16).

An averaging takes a snapshot of this rank's model, averages the snapshots of all ranks, and adds what that changes to
the shared model. With the snapshot each rank sends its status: so ranks see at the same averaging that all are done,
that one was asked to stop, or that one has failed, and none ever waits for one that has left.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from runtime.comm.waits import GRACE_S
from runtime.comm.world import World
from runtime.errors import CommunicationError
from runtime.local_async.report import Averaging, Averagings
from runtime.plan import LocalAsyncSpec
from runtime.torch_compat import wait_for

RUNNING, DONE, STOPPING, FAILED = 0, 1, 2, 3
"""Status of a rank: its updaters are at work; they have ended; all shall end; it has failed."""

SHORTEST_LOOK_S, LONGEST_LOOK_S = 0.0005, 0.02
"""Bounds of the time between two checks for an average, in seconds: an eighth of what it has taken so far."""


def every(spec: LocalAsyncSpec, begun: int, steps: int) -> int:
    """Return K: after how many updates of this rank models are averaged next; post-local SGD's scheme."""
    return spec.average_every if begun < spec.switch_fraction * steps else spec.then_every


class Averager:
    """This rank's part in the averagings."""

    def __init__(self, world: World, flats: Sequence[Tensor]) -> None:
        """Allocate messages for `flats` of the shared model: 1-D, one for each dtype, the same on every rank."""
        self.world = world
        self._flats = [torch.view_as_real(flat).view(-1) if flat.is_complex() else flat for flat in flats]
        self._snapshots = [torch.empty_like(flat) for flat in self._flats]
        # The statuses are sent with the first flat that can hold them exactly; without one, alone.
        wide = [flat.dtype in (torch.float32, torch.float64) for flat in self._flats]
        self._carrier = wide.index(True) if True in wide else len(self._flats)
        self._messages = [
            flat.new_empty(flat.numel() + (world.ranks if index == self._carrier else 0))
            for index, flat in enumerate(self._flats)
        ]
        if self._carrier == len(self._flats):
            self._messages.append(torch.empty(world.ranks, device=flats[0].device if flats else None))
        self.record = Averagings()

    @torch.no_grad()
    def average(
        self, status: int, updates: int, meanwhile: Callable[[float], object], *, alone: bool = False
    ) -> list[int]:
        """Average with all ranks. If all are done, they have equal models then.

        Args:
            status: status of this rank.
            updates: updates of this rank since the averaging before, for the record.
            meanwhile: called repeatedly while messages are in flight with a time in seconds, within which it returns.
            alone: whether no updater changes this rank's model meanwhile, so that it may be overwritten.

        Returns:
            The statuses of all ranks.

        Raises:
            CommunicationError: a rank died or missed the deadline.
        """
        start_s = time.perf_counter()
        for flat, snapshot, message in zip(self._flats, self._snapshots, self._messages, strict=False):
            snapshot.copy_(flat)
            message[: flat.numel()] = snapshot
        statuses = self._messages[self._carrier][-self.world.ranks :]
        statuses.zero_()
        statuses[self.world.rank] = status
        sent_s = time.perf_counter()
        self._exchange(meanwhile)
        found = [round(value) for value in statuses.tolist()]
        distance = self._take_average(overwrite=alone or all(one == DONE for one in found))
        self.record.add(
            Averaging(start_s=start_s, sent_s=sent_s, end_s=time.perf_counter(), updates=updates, distance=distance)
        )
        return found

    def _exchange(self, meanwhile: Callable[[float], object]) -> None:
        what = f"averaging {self.record.rounds} of models"
        with self.world.error_context(what):
            works = [dist.all_reduce(message, group=self.world.group, async_op=True) for message in self._messages]
            started = time.monotonic()
            for work in works:
                while not work.is_completed():
                    waited_s = time.monotonic() - started
                    if waited_s > self.world.timeout_s + GRACE_S:
                        raise CommunicationError(
                            f"rank {self.world.rank}: {what}: {self.world.others} died or did not answer within "
                            f"{self.world.timeout_s:g} s"
                        )
                    meanwhile(min(max(waited_s / 8, SHORTEST_LOOK_S), LONGEST_LOOK_S))
                wait_for(work)
        self.world.last = what

    def _take_average(self, *, overwrite: bool) -> float:
        """Move the model to the average; return `Averaging.distance`."""
        apart, size = 0.0, 0.0
        for flat, snapshot, message in zip(self._flats, self._snapshots, self._messages, strict=False):
            average = message[: flat.numel()].div_(self.world.ranks)
            size += _square(average)
            change = torch.sub(average, snapshot, out=snapshot)
            if overwrite:
                flat.copy_(average)
            else:
                # In place and without a lock: updaters have changed the model since the snapshot.
                flat.add_(change)
            apart += _square(change)
        return math.sqrt(apart / size) if size > 0.0 else 0.0


def _square(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) ** 2 if tensor.numel() else 0.0
