"""Logs messages as they are launched and waited for, where `PLANNER_DEBUG` asks for that."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, TypeVar, cast

from torch import Tensor

from runtime.debug import asked_events

LOGGER = logging.getLogger("runtime.comm")

KEPT = 10_000
"""Launched messages that a trace keeps until they are waited for, at most."""


C = TypeVar("C")
"""A `runtime.comm.communicator.Communicator`; that module imports this one."""


def traced(communicator: C, rank: int) -> C:
    """Return the communicator, in one that logs if `PLANNER_DEBUG` has `launch` or `wait`; else itself."""
    events = asked_events() & {"launch", "wait"}
    return cast("C", TracedCommunicator(communicator, rank, events)) if events else communicator


class TracedCommunicator:
    """Passes all calls on to a communicator, and logs them. See `runtime.comm.communicator.Communicator`."""

    def __init__(self, inner: Any, rank: int, events: frozenset[str]) -> None:
        self._inner, self._rank, self._events = inner, rank, events
        self._launched: list[tuple[Any, Any, float]] = []
        """(bucket, its times, launch on the clock `time.perf_counter` in seconds) of messages not yet waited for."""

    def launch(self, bucket: Any, sent: Any, prepare: Callable[[], None] = lambda: None) -> None:
        begun_s = time.perf_counter()
        self._inner.launch(bucket, sent, prepare)
        self._launched = [*self._launched[-KEPT:], (bucket, sent, begun_s)]
        if "launch" in self._events:
            size_bytes = sum(map(message_bytes, bucket.messages))
            LOGGER.debug(
                "rank %d: launch: %s: %s bytes, at %.3f ms", self._rank, bucket.label, f"{size_bytes:,}", begun_s * 1e3
            )

    def wait(self, until: Any = None) -> None:
        self._inner.wait(until)
        ended_s = time.perf_counter()
        ended = [entry for entry in self._launched if until is None or entry[1] is until]
        self._launched = [entry for entry in self._launched if not (until is None or entry[1] is until)]
        for entry in ended if "wait" in self._events else ():
            self._log_end(*entry, ended_s)

    def _log_end(self, bucket: Any, sent: Any, begun_s: float, ended_s: float) -> None:
        if isinstance(sent.end, float) and isinstance(sent.start, float):
            after_ms, sent_ms = (sent.end - begun_s) * 1e3, (sent.end - sent.start) * 1e3
            text = f"complete {after_ms:.3f} ms after its launch, {sent_ms:.3f} ms of it on the network"
        else:  # a device's clock is read much later
            text = f"the device waits for it {(ended_s - begun_s) * 1e3:.3f} ms after its launch"
        LOGGER.debug("rank %d: wait: %s: %s, at %.3f ms", self._rank, bucket.label, text, ended_s * 1e3)

    def close(self) -> None:
        self._launched.clear()
        self._inner.close()


def message_bytes(message: Any) -> int:
    """Return the bytes of what one rank gives to a collective: of the tensors that the kinds of message hold."""
    for names in (("flat",), ("rows",), ("left", "right")):
        tensors = [found for name in names if isinstance(found := getattr(message, name, None), Tensor)]
        if tensors:
            return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return 0
