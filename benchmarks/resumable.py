"""Results that are kept as they come, so that an interrupted benchmark goes on where it was."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any

from runtime.errors import PlannerError


def kept(
    path: Path | None,
    wanted: Mapping[str, Callable[[], dict[str, Any]]],
    only: str = "",
    name_of: Callable[[dict[str, Any]], str] = itemgetter("cell"),
) -> list[dict[str, Any]]:
    """Return what is known of `wanted`, in its order: records of a file of JSON lines, and what is measured now.

    Args:
        path: the file, to which what comes is appended at once; None: nothing is kept.
        wanted: by name, what measures it. Where it raises PlannerError, that is printed, and the next one follows.
        only: a part of the names of those that may be measured now.
        name_of: the name of what a record is of; by default its `cell`, which is added to what is measured.
    """
    lines = path.read_text(encoding="utf-8").splitlines() if path is not None and path.exists() else []
    known = {name_of(record): record for record in map(json.loads, lines)}
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
        if path is not None:
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(known[name]) + "\n")
    return [known[name] for name in wanted if name in known]
