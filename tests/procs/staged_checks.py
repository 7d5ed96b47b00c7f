"""What ranks of the tests of staged messages do: sessions whose messages a thread carries, as on a shared device."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import delay_checks
import lossy_checks
import session_checks
import sharded_checks
import step_checks
import torch
import torch.distributed as dist

from runtime.comm.collectives.direct import library_all_reduce
from runtime.comm.communicator import CommTiming, NullCommunicator, Payload
from runtime.comm.staged_communicator import StagedCommunicator
from runtime.comm.world import World
from runtime.core.buckets import Message
from runtime.errors import CommunicationError

MAKERS = ("runtime.modes.base", "runtime.sharded.exchange", "runtime.delay.nodes")


class HostLane:
    """A `Lane` of a CPU, where what is called is done when the call returns."""

    mark = staticmethod(time.perf_counter)

    def after(self, mark: float) -> AbstractContextManager[None]:
        return nullcontext()

    def join(self, mark: float) -> None: ...


def make(world: World, collectives: Any, device: torch.device, whole: World | None = None, **_: Any) -> Any:
    """In the place of `runtime.comm.by_device.make_communicator`."""
    if world.group is None:
        return NullCommunicator()
    return StagedCommunicator(world, collectives, HostLane(), HostLane(), whole)


@contextmanager
def staged() -> Iterator[None]:
    """Inside, every flat bucket is staged."""
    with ExitStack() as stack:
        for module in MAKERS:
            stack.enter_context(patch(f"{module}.make_communicator", make))
        yield


def sessions() -> dict[str, Any]:
    """The checks of other tests, which hold sessions against DDP and against references."""
    with staged():
        return {
            "weights like DDP": all(session_checks.weights_like_ddp().values()),
            "accumulation like DDP": session_checks.accumulation_like_ddp(),
            "unused parameters": all(step_checks.unused_like_ddp().values()),
            "an exception": step_checks.after_an_exception(),
            "lossy": all(lossy_checks.against_reference().values()),
            "sharded": all(sharded_checks.optimizers().values()),
            "delayed": delay_checks.variants() | delay_checks.warm_up_is_synchronous(),
            "threads that are left": _left(),
        }


def _left() -> int:
    return sum(thread.name == "planner staged" for thread in threading.enumerate())


def in_order() -> dict[str, Any]:
    """Several messages, waited for one by one and together; rank 1 comes when rank 0 has launched them."""
    world = World.join(None, 30)
    communicator = StagedCommunicator(world, [library_all_reduce] * 3, HostLane(), HostLane())
    flats = [torch.full((1000,), float(index + 1)) for index in range(4)]
    payloads = [Payload(i, f"bucket {i}", [Message(flat, [])]) for i, flat in enumerate(flats[:2])]
    payloads.append(Payload(2, "bucket 2", [Message(flat, []) for flat in flats[2:]]))
    sent = [CommTiming() for _ in payloads]
    store = dist.distributed_c10d._get_default_store()
    if world.rank == 1:
        store.wait(["rank 0 has launched everything"])  # for ever, if that waited for this rank
    for bucket, timing in zip(payloads, sent, strict=True):
        communicator.launch(bucket, timing)
    if world.rank == 0:
        store.set("rank 0 has launched everything", "")
    communicator.wait(sent[0])
    first = float(flats[0][0])
    communicator.wait()
    communicator.wait()
    found = {
        "first": first,
        "all": [float(flat.sum()) / 1000 for flat in flats],
        "in order": all(a.end <= b.start for a, b in pairwise(sent)),
    }
    communicator.close()
    world.leave()
    return found


def lost() -> str:
    """Rank 1 sends nothing: what rank 0 is told, by every wait alike."""
    world = World.join(None, 2)
    if world.rank == 1:
        time.sleep(4)
        return ""
    communicator = StagedCommunicator(world, [library_all_reduce], HostLane(), HostLane())
    communicator.launch(Payload(0, "bucket 0 (a … b)", [Message(torch.ones(4), [])]), CommTiming())
    told = []
    for _ in range(2):
        try:
            communicator.wait()
        except CommunicationError as error:
            told.append(str(error))
    communicator.close()
    assert len(told) == 2, told
    assert told[0] == told[1]
    return told[0]


def checks() -> dict[str, Any]:
    """All of them; the last one leaves the ranks without each other."""
    assert dist.get_world_size() == 2
    return {"sessions": sessions(), "in order": in_order(), "lost": lost()}
