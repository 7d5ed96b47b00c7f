"""Results that are kept as they come, so that an interrupted benchmark goes on where it was."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from runtime.errors import PlannerError


def kept(path: Path, wanted: Mapping[str, Callable[[], dict[str, Any]]], only: str = "") -> list[dict[str, Any]]:
    """Return what is known of `wanted`, in its order: records of a file of JSON lines, and what is measured now.

    Args:
        path: the file; each line has the name of what it is of in `cell`. What comes is appended at once.
        wanted: by name, what measures it. Where it raises PlannerError, that is printed, and the next one follows.
        only: a part of the names of those that may be measured now.
    """
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    known = {record["cell"]: record for record in map(json.loads, lines)}
    for name, measure in wanted.items():
        if name in known or only not in name:
            continue
        started_s = time.monotonic()
        try:
            known[name] = {"cell": name} | measure()
        except PlannerError as error:
            print(f"{name}: {error}", file=sys.stderr)
            continue
        print(f"{name}: {time.monotonic() - started_s:.0f} s", file=sys.stderr)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(known[name]) + "\n")
    return [known[name] for name in wanted if name in known]
