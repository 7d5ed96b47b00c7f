"""Batches of cases in starts of ranks: the first that fails, and the smallest on the way down that still does."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from planner.jobs.launch import LocalWorld, run_ranks
from runtime.errors import PlannerError

SHRINKING_S = 300.0
"""How long a failing case is made smaller."""


class Replayable(Protocol):
    """A case that a line of text stands for."""

    def line(self) -> str:
        """The case as text."""
        ...


C = TypeVar("C", bound=Replayable)


@dataclass(frozen=True)
class Failure(Generic[C]):
    """A case that failed."""

    case: C
    said: str

    def __str__(self) -> str:
        return f"{self.said}\npython -m pytest tests/fuzz --fuzz-replay '{self.case.line()}'"


def first_failure(check: Callable[[list[str], str], Any], cases: Sequence[C], ranks: int) -> Failure[C] | None:
    """Runs the cases in one start of ranks, up to the first that fails.

    Args:
        check: takes the cases' lines and a folder, in which each rank notes a verdict per case in `rank-N`.
        cases: what to run.
        ranks: how many.
    """
    with tempfile.TemporaryDirectory() as folder:
        died = ""
        try:
            run_ranks(LocalWorld(ranks=ranks), check, [case.line() for case in cases], folder)
        except PlannerError as error:
            died = f"{type(error).__name__}: {error}"
        told = [_verdicts(Path(folder, f"rank-{rank}")) for rank in range(ranks)]
    for index, case in enumerate(cases):
        said = [_said(rank, verdicts, index) for rank, verdicts in enumerate(told)]
        if any(said):
            return Failure(case, "\n".join([*filter(None, said), *filter(None, [died])]))
    assert not died, died  # after the last case
    return None


def _said(rank: int, verdicts: list[str | None], index: int) -> str | None:
    if index >= len(verdicts):
        return f"rank {rank}: hung or died"
    return verdicts[index] and f"rank {rank}: {verdicts[index]}"


def _verdicts(path: Path) -> list[str | None]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def shrunk(
    failure: Failure[C], first: Callable[[list[C]], Failure[C] | None], simpler: Callable[[C], list[C]]
) -> Failure[C]:
    """The smallest case on the way down that still fails; each start of ranks tries all smaller ones in turn."""
    deadline = time.monotonic() + SHRINKING_S
    while time.monotonic() < deadline:
        smaller = first(simpler(failure.case))
        if smaller is None:
            break
        failure = smaller
    return failure
