"""Processes of a rank: they end with it, however it ends, and import its script, which must not train there, too.

Torch-free.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from runtime.errors import InputError

_PR_SET_PDEATHSIG = 1

GUARD = 'each updater imports the script: what trains has to stand under `if __name__ == "__main__":`'


ASKS = ("_main__", "parent_process", "current_process")
"""Words of scripts that tell the process that was started first from those that import it."""


def end_with_parent() -> None:
    """End this process when its parent ends; on Linux the kernel does it, also while this process is stopped."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


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


def check_not_imported() -> None:
    """Raise InputError in a process that has come here while it imports the script that has started it."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # as multiprocessing itself asks
        raise InputError(
            f"run_local_async: found a call by a process that imports the script of its parent, and {GUARD}"
        )


def find_unguarded_script() -> str | None:
    """Return why updaters started now would certainly come here as well, or None: the script runs, and asks nowhere
    where.
    """
    script = sys.modules["__main__"]
    path, spec = getattr(script, "__file__", None), script.__spec__
    package = spec is not None and f".{spec.name}".endswith(".__main__")  # multiprocessing does not import these
    frame: FrameType | None = sys._getframe()  # what runs now was called, in the end, by the script's top level, or not
    while frame is not None and not (frame.f_code.co_name == "<module>" and frame.f_globals is vars(script)):
        frame = frame.f_back
    if path is None or package or frame is None:
        return None
    with suppress(OSError):
        text = Path(path).read_text(encoding="utf-8", errors="replace")
        if not any(word in text for word in ASKS):
            return f"{path}: found run_local_async called whenever the script is run, and {GUARD}"
    return None


def status_bytes(field: str) -> int | None:
    """Read a field of this process's memory, such as `RssAnon` (not shared with others), where the system tells it."""
    with suppress(OSError, ValueError):
        for line in Path("/proc/self/status").read_text("ascii", "replace").splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    return None
