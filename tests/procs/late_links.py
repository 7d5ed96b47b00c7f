"""Links on which weights come late enough for tests to see who does not wait for them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from runtime.comm.communicator import Communicator, Payload
from runtime.sharded.late_gather import Gather


class Held:
    """Starts nothing before somebody waits."""

    def __init__(self, inner: Communicator) -> None:
        self._inner = inner
        self._held: list[tuple[Payload, Any]] = []

    def launch(self, bucket: Payload, sent: Any, prepare: Any = None) -> None:
        """Later."""
        self._held.append((bucket, sent))

    def wait(self, until: Any = None) -> None:
        """Starts all of it."""
        held, self._held = self._held, []
        for bucket, sent in held:
            self._inner.launch(bucket, sent)
        self._inner.wait(until)

    def close(self) -> None:
        """The other's."""
        self._inner.close()


@contextmanager
def slow(seconds: float = 0.01) -> Iterator[None]:
    """Inside, all messages are packed, and weights are in place some time after they have come."""
    unpack, made_so = Gather._unpack, Gather.__init__

    def slowly(self: Gather, rows: Tensor) -> None:
        time.sleep(seconds)
        unpack(self, rows)

    def packing(self: Gather, index: int, buckets: Any, homes: Any, scratch: Any) -> None:
        made_so(self, index, buckets, homes, torch.empty(Gather.packed_bytes(homes), dtype=torch.uint8))

    Gather._unpack, Gather.__init__ = slowly, packing  # type: ignore[method-assign]
    try:
        yield
    finally:
        Gather._unpack, Gather.__init__ = unpack, made_so  # type: ignore[method-assign]
