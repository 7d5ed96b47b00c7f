"""The phases of a profile: what each may take, and a line for each as it begins, with an estimate of the rest."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from runtime.comm.world import World

LOGGER = logging.getLogger("planner.profile")

LEAST_S = 2.0
"""What each phase may take in any case, however long the ones before it took."""


@dataclass(frozen=True)
class Phase:
    """One part of a profile."""

    name: str
    most_s: float
    """What it may take where nothing is short of time; else phases share what is left in proportion."""


class Phases:
    """Shares a budget out among phases, alike on all ranks; the first rank says which one begins.

    The budget counts from the beginning of the first phase.
    """

    def __init__(self, phases: Sequence[Phase], budget_s: float, *, first: bool) -> None:
        self._phases, self._budget_s, self._first = tuple(phases), budget_s, first
        self._began_s: float | None = None
        self._done = 0

    def begin(self, name: str, world: World) -> float:
        """Return the seconds that the next phase may take, which has this name; every rank of the world calls it."""
        phase, rest = self._phases[self._done], self._phases[self._done :]
        assert phase.name == name, f"{phase.name!r} comes next, not {name!r}"
        self._done += 1
        now_s = time.perf_counter()
        self._began_s = now_s if self._began_s is None else self._began_s
        # Of the rank where the least is left.
        spent_s: list[float] = world.gather(now_s - self._began_s, "comparing clocks")
        share = min(1.0, max(0.0, self._budget_s - max(spent_s)) / sum(each.most_s for each in rest))
        allowed_s = max(LEAST_S, share * phase.most_s)
        text = f"{self._done}/{len(self._phases)} {name}: up to {allowed_s:.0f} s"
        all_s = sum(max(LEAST_S, share * each.most_s) for each in rest)
        self.say(f"{text}; {all_s:.0f} s with all that follows" if len(rest) > 1 else text)
        return allowed_s

    def say(self, text: str) -> None:
        """Log a line on the first rank."""
        if self._first:
            LOGGER.info("profile: %s", text)


@contextmanager
def heard() -> Iterator[None]:
    """Let lines be seen on standard error while this lasts, where nobody has configured `logging`."""
    if LOGGER.hasHandlers():
        yield
        return
    handler, level = logging.StreamHandler(sys.stderr), LOGGER.level
    handler.setFormatter(logging.Formatter("%(message)s"))
    LOGGER.addHandler(handler)
    LOGGER.setLevel(logging.INFO)
    try:
        yield
    finally:
        LOGGER.setLevel(level)
        LOGGER.removeHandler(handler)
