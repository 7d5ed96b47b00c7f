"""The base of passes, and the candidates that they make."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from planner.ir import GAIN, TIE, Mode, Schedule
from planner.model.codecs import CodecModel, Form
from planner.model.modes import step_us
from planner.model.problem import Problem
from planner.search.tables import BucketTables
from runtime.errors import InputError
from runtime.plan import Accuracy, Plan
from runtime.plan.predicted import Certificate


@dataclass(frozen=True, kw_only=True)
class Bound:
    """A lower bound on the steps of a class of schedules."""

    step_us: float
    method: str
    note: str | None = None

    def certificate(self, iteration_us: float) -> Certificate:
        """Return how far a step of the class is from the bound."""
        gap = max(0.0, iteration_us / self.step_us - 1.0) if self.step_us > 0.0 else 0.0
        lower_us = min(self.step_us, iteration_us)
        return Certificate(method=self.method, lower_bound_us=lower_us, gap=gap, note=self.note)


@dataclass(frozen=True, kw_only=True)
class Point:
    """The best schedule found with forms up to one."""

    form: Form
    schedule: Schedule
    iteration_us: float
    exact: bool


@dataclass(frozen=True, kw_only=True)
class Frontier:
    """Speed over compression: points from no compression to the most that is allowed, none slower than the one before.

    `bound_us`: no choice on the grid of forms has a shorter step. `limits`: the largest ratio of each gradient.
    """

    points: tuple[Point, ...]
    bound_us: float
    limits: NDArray[np.float64]
    tables: BucketTables | None = None
    """Tables that the last point was decided on, if they have all places between gradients and nothing contends."""

    @property
    def best(self) -> Point:
        """Return the point of the shortest step; of equal ones that of the least compression."""
        limit_us = self.points[-1].iteration_us * (1.0 + TIE)
        return next(point for point in self.points if point.iteration_us <= limit_us)

    @property
    def chosen(self) -> Point:
        """Return the point of least compression that is within 2 % of the shortest step and wins 2 % over no
        compression; if there is none, that of the shortest step.
        """
        limit_us = min(self.points[-1].iteration_us * (1.0 + GAIN), self.points[0].iteration_us * (1.0 - GAIN))
        return next((point for point in self.points if point.iteration_us <= limit_us), self.best)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A schedule that a plan may have, with all that it is judged by and that the plan reports of it."""

    schedule: Schedule
    what: str = ""
    """Name in notes: `compression`, `delay`."""
    notes: tuple[str, ...] = ()
    """Notes for readers of a plan with this schedule."""
    plan_fields: Mapping[str, Any] = field(default_factory=dict)
    """Fields of every plan of this step: predictions of the other choices."""
    bound: Bound | None = None
    frontier: Frontier | None = None
    """The frontier that a bounded pass chose from."""
    batch_prep_us: float = 0.0
    """Part of its step that steps of other classes do not have: preparing the minibatch."""
    judged_us: float | None = None
    """Time that it is judged by in place of its step."""
    memory_bytes: int | None = None
    """Memory of a rank; None: not known."""
    measured: bool = True
    """Whether the costs of this decision were measured."""
    required: bool = False
    """Whether it is the plan's, however long its step is."""
    why_not: str = ""
    """Reason why the schedule is unchanged, if not for lack of improvement."""
    replicated: Schedule | None = None
    """The schedule that it replaces, in which each rank updates all weights."""
    plan: Plan | None = None
    """The plan of a lossy candidate; None: not made."""

    @property
    def kind(self) -> tuple[Accuracy, type[Mode]]:
        """Return what it does differently from candidates of other kinds."""
        return self.schedule.accuracy, type(self.schedule.mode)

    def step_us(self, problem: Problem) -> float:
        """Return the time that it is judged by."""
        return step_us(problem, self.schedule) if self.judged_us is None else self.judged_us

    def own_us(self, problem: Problem) -> float:
        """Return the part of that time that steps of other classes have, too."""
        return self.step_us(problem) - self.batch_prep_us


class Pass:
    """A decision on schedules. Every pass is a frozen dataclass; its fields are its options on the command line.

    `str` gives the text that `--passes` reads, with the options that are not as by default: `merge{labels=4}`.
    """

    name: ClassVar[str]
    accuracy: ClassVar[Accuracy] = "exact"
    """The class of its results."""
    what: ClassVar[str] = ""
    """The name of what a relaxed pass decides on, in notes."""
    interface: ClassVar[str] = ""
    """The interface (`runtime.plan.interfaces`) that has to be allowed for the pass to run; empty: none."""
    decides_update: ClassVar[bool] = False
    """Whether it decides how the update is sharded; other passes do not see that."""
    known_values: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """The values of options that are names, by option."""

    def __post_init__(self) -> None:
        for option, known in self.known_values.items():
            if (value := getattr(self, option)) not in known:
                raise InputError(
                    f"--passes: {self.name}{{{option}={value}}}: expected one of: {', '.join(known)}; correct it"
                )

    @property
    def codecs(self) -> frozenset[type[CodecModel]]:
        """Return the lossy codecs that it may choose."""
        return frozenset()

    def __str__(self) -> str:
        values = {each.name: (getattr(self, each.name), each.default) for each in fields(self)}  # type: ignore[arg-type]
        # A comma ends an option of the text; what lists names of several kinds also takes `|`.
        given = [f"{name}={value}".replace(",", "|") for name, (value, usual) in values.items() if value != usual]
        return f"{self.name}{{{','.join(given)}}}" if given else self.name

    def apply(self, schedule: Schedule, problem: Problem) -> Candidate:
        """Return a new schedule that is never worse in predicted step time than the one given."""
        raise NotImplementedError


class Pipeline(tuple[Pass, ...]):
    """Passes in the order in which they run; `str` gives the text that `--passes` reads."""

    __slots__ = ()

    def __str__(self) -> str:
        return ",".join(map(str, self))


def check_count(value: object, where: str, unit: str, at_most: int) -> int:
    """Return a whole number from 1 to `at_most`.

    Raises:
        InputError: the value is none; programs may pass anything.
    """
    if not (isinstance(value, int) and 1 <= value <= at_most):
        raise InputError(
            f"{where}: found {value!r}, expected a whole number of {unit} from 1 to {at_most}, such as 4; correct it"
        )
    return value
