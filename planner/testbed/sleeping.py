"""A process group that sleeps: gloo moves the bytes, then each collective is held back by α + β·bytes.

It stands for an emulated cluster where network namespaces cannot be had; results are marked `emulated: sleep`. Times
come from the published formulas for rings. A rank's messages queue for its host's link one after the other; those of
other ranks of the host do not slow them down. Not held back: collectives inside a host, point-to-point messages,
gather, scatter and all-to-all.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, ProcessGroup, ProcessGroupGloo, Work

from planner.cost.collectives import COLLECTIVE_COSTS
from planner.documents.profile import Link
from planner.testbed.emulation import Emulation

NAME = "sleeping"
"""The backend's name in torch."""
ALPHA_US = 50.0
"""Start-up time of a message between hosts, as of a switched Ethernet."""
FORMULAS = {"all_reduce": "all_reduce/ring", "reduce_scatter": "reduce_scatter/ring", "all_gather": "all_gather/ring"}


def held_us(emulation: Emulation, collective: str, size_bytes: float, ranks: int) -> float:
    """How long a collective between hosts is held back; bytes of the full tensor that a rank holds or gets."""
    if ranks == 1:
        return 0.0
    link = Link(alpha_us=ALPHA_US, beta_us_per_byte=emulation.us_per_byte)
    if collective in FORMULAS:
        cost = COLLECTIVE_COSTS[FORMULAS[collective]](ranks, link)
        return cost.start_up_us + cost.per_byte_us * size_bytes
    return math.ceil(math.log2(ranks)) * link.alpha_us + link.beta_us_per_byte * size_bytes


def register(emulation: Emulation) -> str:
    """Makes the process group known to torch in this process; the name to ask for."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, partial(_create, emulation), extended_api=True, devices=["cpu"])
    return NAME


def _create(emulation: Emulation, options: Any, _backend_options: Any) -> SleepingGroup:
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    between_hosts = len({emulation.host_of(rank) for rank in ranks}) > 1
    inner = ProcessGroupGloo(options.store, options.group_rank, options.group_size, timeout=options.timeout)
    return SleepingGroup(inner, emulation if between_hosts else None)


class HeldWork(Work):
    """A collective on its way, until it has slept."""

    def __init__(self) -> None:
        super().__init__()
        self.future: torch.futures.Future[Any] = torch.futures.Future()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Returns when it is over; the deadline is the backend's. Raises RuntimeError where it failed."""
        self.future.wait()
        return True

    def is_completed(self) -> bool:
        """Whether it is over."""
        return bool(self.future.done())

    def get_future(self) -> torch.futures.Future[Any]:
        """Of the tensors."""
        return self.future


_Job = tuple[Work, float, Any, HeldWork]


def _hold(jobs: queue.SimpleQueue[_Job | None]) -> None:
    """Lets each collective end after its bytes have moved and its time has passed; in order, as on one link."""
    while (job := jobs.get()) is not None:
        inner, wait_us, result, held = job
        try:
            inner.wait()
        except RuntimeError as error:
            held.future.set_exception(error)
        else:
            time.sleep(wait_us / 1e6)
            held.future.set_result(result)


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class SleepingGroup(ProcessGroup):
    """gloo, held back where its ranks are on several hosts (`emulation` is None where they are on one)."""

    def __init__(self, inner: Any, emulation: Emulation | None) -> None:
        super().__init__(inner.rank(), inner.size())  # type: ignore[call-arg]
        self._inner, self._emulation = inner, emulation
        # What is not among the methods below goes straight to gloo, and is not held back.
        self._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, inner)
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        threading.Thread(target=_hold, args=(self._jobs,), daemon=True).start()

    def _held(self, inner: Work, collective: str, size_bytes: int, result: Any) -> HeldWork:
        held = HeldWork()
        wait_us = held_us(self._emulation, collective, size_bytes, self.size()) if self._emulation else 0.0
        self._jobs.put((inner, wait_us, result, held))
        return held

    def allreduce(self, tensors: Any, opts: Any = None) -> Work:  # type: ignore[override]
        """See torch."""
        inner = self._inner.allreduce(tensors, opts or dist.AllreduceOptions())
        return self._held(inner, "all_reduce", _bytes(tensors), tensors)

    def broadcast(self, tensors: Any, opts: Any = None) -> Work:  # type: ignore[override]
        """See torch."""
        inner = self._inner.broadcast(tensors, opts or dist.BroadcastOptions())
        return self._held(inner, "broadcast", _bytes(tensors), tensors)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        """See torch."""
        inner = self._inner.allgather(outputs, inputs, opts or AllgatherOptions())
        return self._held(inner, "all_gather", sum(map(_bytes, outputs)), outputs)

    def all_gather_single(self, output: Any, given: Any, opts: Any = None) -> Work:
        """See torch."""
        inner = self._inner._allgather_base(output, given, opts or AllgatherOptions())
        return self._held(inner, "all_gather", _bytes([output]), output)

    _allgather_base = all_gather_single  # type: ignore[assignment]  # its name before torch 2.13

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:  # type: ignore[override]
        """See torch."""
        inner = self._inner.reduce_scatter(outputs, inputs, opts or dist.ReduceScatterOptions())
        return self._held(inner, "reduce_scatter", sum(map(_bytes, inputs)), outputs)

    def reduce_scatter_single(self, output: Any, given: Any, opts: Any = None) -> Work:
        """See torch."""
        inner = self._inner._reduce_scatter_base(output, given, opts or dist.ReduceScatterOptions())
        return self._held(inner, "reduce_scatter", _bytes([given]), output)

    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]  # its name before torch 2.13

    def all_to_all_single(self, output: Any, given: Any, received: Any, sent: Any, opts: Any = None) -> Work:
        """See torch. The bytes that cross the link are a reduce-scatter's."""
        inner = self._inner.alltoall_base(output, given, received, sent, opts or dist.AllToAllOptions())
        return self._held(inner, "reduce_scatter", _bytes([given]), output)

    alltoall_base = all_to_all_single  # type: ignore[assignment]  # its name before torch 2.13

    def getBackendName(self) -> str:
        """See torch, which asks from C++ too."""
        return NAME

    def shutdown(self) -> None:
        """Ends the thread that sleeps."""
        self._jobs.put(None)
