"""The request for a profile, and the phases that measure what it lacks. Torch-free.

Exact plans need the step, all-reduces (with several ranks on several nodes their phases, too), both halves of one if
the optimizer's step can be sharded, and contention. Bounded plans also need gathers, and the costs of selecting
elements; relaxed ones both halves, and the costs of delayed updates.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, get_args

from planner.documents.profile import Cluster, Profile, load_profile
from runtime.errors import InputError
from runtime.plan import Accuracy
from runtime.plan.transports import NATIVE, TWO_SHOT

if TYPE_CHECKING:
    from runtime.comm.world import World

LOGGER = logging.getLogger("planner.profile")

BUDGET_S = 60.0
"""Default seconds that a profile may take beyond its first steps and compiling."""
SHORTEST_S, LONGEST_S = 5.0, 24 * 3600.0
"""Bounds of that budget."""
LEAST_S = 2.0
"""Seconds that each phase may take in any case, however long the ones before it took."""

ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER = "all_reduce", "reduce_scatter", "all_gather"
NARROW_SUMS = (TWO_SHOT.algorithm, NATIVE.algorithm)

REPEATS = "steps again, where they differ much"
CUTS = "cuts of a compiled graph"
LAYERS = "layers of the model"
NORMS = "norms of layers"
OPERATORS = "operators of matrices"
FLAT = "collectives over all ranks"
APART = "collectives inside nodes and between them"
CONTENTION = "steps beside messages"
SELECTION = "selecting and encoding elements"
DELAY = "delayed updates"

CURVE_S = 4.0
"""Seconds that one collective may take."""
CONTENTION_S = {1: 20.0, 2: 30.0}
"""Seconds by number of kinds of messages."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """The content that a profile is to have; see `planner.profile_step`."""

    accuracy: Accuracy = "exact"
    add_to: Profile | None = None
    budget_s: float = BUDGET_S
    units: bool = False
    """Whether modules are measured as well, which FSDP2 could gather together."""

    def __post_init__(self) -> None:
        """Raise InputError if the class or the budget is none."""
        if self.accuracy not in get_args(Accuracy):
            raise InputError(
                f"found a profile for {self.accuracy!r} plans, expected one of: {', '.join(get_args(Accuracy))}"
            )
        if not SHORTEST_S <= self.budget_s <= LONGEST_S:
            raise InputError(
                f"found a budget of {self.budget_s:g} seconds beyond the first steps, expected {SHORTEST_S:g} to "
                f"{LONGEST_S:.0f}; correct it"
            )


def make_request(
    accuracy: str | None, add_to: str | None, budget_s: float | None, updaters: int | None = None, units: bool = False
) -> Request:
    """Make a request from the options of `planner profile`.

    Raises:
        InputError: an option is wrong, or they contradict each other.
    """
    if updaters is not None and accuracy not in (None, "relaxed"):
        raise InputError(
            f"--for {accuracy}: found --updaters {updaters}, which are for relaxed plans; add --for relaxed, or leave "
            f"--updaters out"
        )
    return Request(
        accuracy=accuracy or ("exact" if updaters is None else "relaxed"),  # type: ignore[arg-type]
        add_to=None if add_to is None else load_profile(add_to),
        budget_s=BUDGET_S if budget_s is None else budget_s,
        units=units,
    )


@dataclass(frozen=True)
class Phase:
    """One part of a profile."""

    name: str
    most_s: float
    """Seconds that it may take; if time is short, phases share what is left in proportion."""


def curves(flat: Sequence[str]) -> int:
    """Count the curves that are measured over all ranks: what buckets are sent by is also timed back to back."""
    return len(flat) + sum(name in (ALL_REDUCE, ALL_GATHER, *NARROW_SUMS) for name in flat)


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """The measurements of a profile; each rank has rank 0's."""

    step: bool = True
    """The step itself and its layers."""
    cuts: bool = False
    """Cuts of a compiled graph."""
    norms: bool = False
    operator: bool = False
    flat: tuple[str, ...] = ()
    """Collectives over all ranks."""
    inside: tuple[str, ...] = ()
    """Collectives over the ranks of a node."""
    between: tuple[str, ...] = ()
    """Collectives between nodes."""
    beside: tuple[str, ...] = ()
    """Kinds of messages during backward."""
    selection: bool = False
    delay: bool = False

    @classmethod
    def of(
        cls, accuracy: Accuracy, ranks: int, *, two_links: bool, halves: bool, norms: bool, known: Cluster | None = None
    ) -> Wanted:
        """Return what plans of a class need.

        Args:
            accuracy: the class.
            ranks: number of ranks.
            two_links: whether intra-node and inter-node links are measured apart.
            halves: whether the optimizer's step can be sharded.
            norms: whether the optimizer needs the norms of layers.
            known: the cluster of a profile that is added to.
        """
        first = known is None
        if ranks == 1:
            return cls(step=first, norms=first and norms)
        bounded, relaxed = accuracy != "exact", accuracy == "relaxed"
        have = set((known.samples if known else None) or {})
        flat = [ALL_REDUCE] + [REDUCE_SCATTER] * (halves or relaxed) + [ALL_GATHER] * (halves or bounded)
        flat += NARROW_SUMS * bounded
        inside = [ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER] if two_links else []
        between = ([ALL_REDUCE] + [ALL_GATHER] * bounded + [REDUCE_SCATTER] * relaxed) if two_links else []
        contention = known.contention if known else None
        beside = [ALL_REDUCE] * first
        if bounded and (first or (contention is not None and contention.by_size and not contention.gathers_by_size)):
            beside.append(ALL_GATHER)
        return cls(
            step=first,
            norms=first and norms,
            flat=tuple(name for name in flat if name not in have),
            inside=tuple(name for name in inside if f"intra/{name}" not in have),
            between=tuple(name for name in between if f"inter/{name}" not in have),
            beside=tuple(beside),
            selection=bounded and (known is None or None in (known.sparsify, known.encode, known.low_rank)),
            delay=relaxed and (known is None or known.local_update is None),
        )

    def with_operator(self, ranks: int) -> Wanted:
        """Return what plans need where the optimizer has an operator without state: its times, and gathers' times."""
        gathers = (ALL_GATHER,) if self.step and ranks > 1 and ALL_GATHER not in self.flat else ()
        return replace(self, operator=self.step, flat=(*self.flat, *gathers))

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Return the phases in their order."""
        flat, apart = curves(self.flat), len(self.inside) + len(self.between)
        phases = [
            (self.step, REPEATS, 15.0),
            (self.cuts, CUTS, 25.0),
            (self.norms, NORMS, 3.0),
            (self.operator, OPERATORS, 5.0),
            (flat, FLAT, CURVE_S * flat),
            (apart, APART, CURVE_S * apart),
            (self.step, LAYERS, 8.0),
            (self.beside, CONTENTION, CONTENTION_S.get(len(self.beside), 0.0)),
            (self.selection, SELECTION, 20.0),
            (self.delay, DELAY, 6.0),
        ]
        return tuple(Phase(name, most_s) for wanted, name, most_s in phases if wanted)


class Phases:
    """Shares a budget out among phases, alike on all ranks; the first rank reports which one begins.

    The budget counts from the beginning of the first phase.
    """

    def __init__(self, phases: Sequence[Phase], budget_s: float, *, first: bool) -> None:
        self._phases, self._budget_s, self._first = tuple(phases), budget_s, first
        self._began_s: float | None = None
        self._done = 0

    def begin(self, name: str, world: World) -> float:
        """Return the seconds that the next phase, which has this name, may take; every rank of the world calls it."""
        phase, rest = self._phases[self._done], self._phases[self._done :]
        assert phase.name == name, f"{phase.name!r} comes next, not {name!r}"
        self._done += 1
        now_s = time.perf_counter()
        self._began_s = now_s if self._began_s is None else self._began_s
        # The rank with the least time left counts.
        spent_s: list[float] = world.gather(now_s - self._began_s, "comparing clocks")
        share = min(1.0, max(0.0, self._budget_s - max(spent_s)) / sum(each.most_s for each in rest))
        allowed_s = max(LEAST_S, share * phase.most_s)
        text = f"{self._done}/{len(self._phases)} {name}: up to {allowed_s:.0f} s"
        all_s = sum(max(LEAST_S, share * each.most_s) for each in rest)
        self.say(f"{text}; {all_s:.0f} s with all that follows" if len(rest) > 1 else text)
        return allowed_s

    def leave_out(self, seconds: float) -> None:
        """Let time that was spent since the first phase began not count; every rank of the world calls it alike."""
        if self._began_s is not None:
            self._began_s += seconds

    def say(self, text: str) -> None:
        """Log a line on the first rank."""
        if self._first:
            LOGGER.info("profile: %s", text)


@contextmanager
def heard() -> Iterator[None]:
    """Show the logger's lines on standard error while this lasts, unless `logging` is configured."""
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
