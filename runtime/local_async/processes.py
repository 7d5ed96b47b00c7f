"""Processes that are to end with the one that started them, however it ends. Torch-free."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Ends this process when its parent ends; on Linux the kernel does it, also while this process is stopped."""
    threading.Thread(target=_await_parent, daemon=True).start()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _await_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


@contextmanager
def on_signal(number: int, action: Any) -> Iterator[None]:
    """Meanwhile a signal does this; in other threads than the main one, which gets the signals, as it did before."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(number, action)
    try:
        yield
    finally:
        signal.signal(number, signal.SIG_DFL if before is None else before)
