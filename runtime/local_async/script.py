"""A rank's script, which its updaters import: it must not train there, too. Torch-free."""

from __future__ import annotations

import multiprocessing
import sys
from contextlib import suppress
from pathlib import Path
from types import ModuleType

from runtime.errors import InputError

GUARD = 'each updater imports the script: what trains has to stand under `if __name__ == "__main__":`'


ASKS = ("_main__", "parent_process", "current_process")
"""Words of scripts that tell the process that was started first from those that import it."""


def check_not_imported() -> None:
    """Raises InputError in a process that has come here while it imports the script that has started it."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # as multiprocessing itself asks
        raise InputError(
            f"run_local_async: found a call by a process that imports the script of its parent, and {GUARD}"
        )


def find_unguarded_script() -> str | None:
    """Why updaters that are started now would come here as well, or None, also where that is not certain.

    Certain it is of a script that is running now and nowhere asks which process it is in.
    """
    script = sys.modules["__main__"]
    path, spec = getattr(script, "__file__", None), script.__spec__
    package = spec is not None and f".{spec.name}".endswith(".__main__")  # multiprocessing does not import these
    if path is None or package or not _is_running(script):
        return None
    with suppress(OSError):
        text = Path(path).read_text(encoding="utf-8", errors="replace")
        if not any(word in text for word in ASKS):
            return f"{path}: found run_local_async called whenever the script is run, and {GUARD}"
    return None


def _is_running(script: ModuleType) -> bool:
    """Whether what runs now was called, in the end, by the top level of the script."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_name == "<module>" and frame.f_globals is vars(script):
            return True
    return False
