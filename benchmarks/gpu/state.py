"""What is finished, in a file of JSON lines: the first says where it was measured, others are begun and done parts."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Result:
    """A part that has been run."""

    text: str
    failures: tuple[str, ...]
    took_s: float
    date: str
    source: str
    """Of the files that it was run from; see `source_digest`."""
    left_out: tuple[str, ...] = ()


def append(path: Path, record: dict[str, Any]) -> None:
    """Add a line, whole: a process may be ended between any two."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def records(path: Path) -> Iterable[dict[str, Any]]:
    """Yield the lines, but for one that was cut off."""
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            record: dict[str, Any] = json.loads(line)
        except ValueError:
            continue
        yield record


def source_digest() -> str:
    """Of all that results depend on in this repository."""
    digest = hashlib.sha256()
    for folder in ("runtime", "planner", "benchmarks/gpu"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".cu"):
                digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


class State:
    """The results of one environment; those of another one are left behind in a file of their own."""

    def __init__(self, path: Path, environment: dict[str, Any], *, anew: bool = False) -> None:
        self.path, self.environment, self.source = path, environment, source_digest()
        path.parent.mkdir(parents=True, exist_ok=True)
        known = next(iter(records(path)), None)
        if path.exists() and (anew or known is None or known.get("environment") != environment):
            path.replace(path.with_suffix(f".{time.strftime('%Y%m%d-%H%M%S')}.jsonl"))
            known = None
        if known is None:
            append(path, {"environment": environment})

    def results(self) -> dict[str, Result]:
        """By part, the last one of each."""
        found: dict[str, Result] = {}
        for record in records(self.path):
            if "part" in record:
                found[record["part"]] = Result(
                    record["text"], tuple(record["failures"]), record["took_s"], record.get("date", ""),
                    record.get("source", ""), tuple(record.get("left_out", ())),
                )  # fmt: skip
        return found

    def begun(self, known: int) -> tuple[str, float, float] | None:
        """Return (name, when, its seconds) of the part that is on its way, if any, by the records behind the first
        `known` ones: those of an earlier worker may end with a part that it was ended in.
        """
        last: tuple[str, float, float] | None = None
        for record in list(records(self.path))[known:]:
            if "begun" in record:
                last = record["begun"], record["time"], record["seconds"]
            elif "part" in record:
                last = None
        return last
