"""What a pass is, what it answers, and by how much a riskier choice has to win."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from planner.ir import TIE, Schedule
from planner.model.codecs import CodecModel, Form
from planner.model.problem import Problem
from planner.search.tables import BucketTables
from runtime.plan import Accuracy
from runtime.plan.predicted import Certificate

GAIN = 0.02
"""Share of the step that a riskier class has to save."""


@dataclass(frozen=True, kw_only=True)
class Bound:
    """What no schedule of a class takes less than."""

    step_us: float
    method: str
    note: str | None = None

    def certificate(self, iteration_us: float) -> Certificate:
        """How far a step of the class is from it."""
        gap = max(0.0, iteration_us / self.step_us - 1.0) if self.step_us > 0.0 else 0.0
        lower_us = min(self.step_us, iteration_us)
        return Certificate(method=self.method, lower_bound_us=lower_us, gap=gap, note=self.note)


@dataclass(frozen=True, kw_only=True)
class Point:
    """The best found with forms up to one."""

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
    """What the last point was decided on, where every place between gradients was looked at and nothing contends."""

    @property
    def best(self) -> Point:
        """The shortest step; of equal ones the least compression."""
        limit_us = self.points[-1].iteration_us * (1.0 + TIE)
        return next(point for point in self.points if point.iteration_us <= limit_us)

    @property
    def chosen(self) -> Point:
        """The least compression that is within 2 % of the shortest step, and wins 2 % over none; else the shortest."""
        limit_us = min(self.points[-1].iteration_us * (1.0 + GAIN), self.points[0].iteration_us * (1.0 - GAIN))
        return next((point for point in self.points if point.iteration_us <= limit_us), self.best)


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a pass answers: a schedule, and what a plan says of it."""

    schedule: Schedule
    notes: tuple[str, ...] = ()
    """What the reader of a plan with this schedule should know."""
    plan_fields: Mapping[str, Any] = field(default_factory=dict)
    """Fields of any plan of this step: what the other choices would have given."""
    bound: Bound | None = None
    frontier: Frontier | None = None
    """Of bounded passes."""
    batch_prep_us: float = 0.0
    """Of its step, what steps of other classes leave out: making the minibatch."""
    judged_us: float | None = None
    """What the schedule is judged by in place of its step."""
    why_not: str = ""
    """Why the schedule is as it was, where it is not that nothing makes the step shorter."""
    measured: bool = True
    """Whether what the pass decides on was measured; it is, where nobody asked for that by name, not missed."""


class Pass:
    """Made a frozen dataclass by every pass; the fields are its options on the command line.

    `str` gives the text that `--passes` reads, with the options that are not as by default: `merge{labels=4}`.
    """

    name: ClassVar[str]
    accuracy: ClassVar[Accuracy] = "exact"
    """The class of its results."""
    what: ClassVar[str] = ""
    """What a relaxed one does, in a word or two."""
    interface: ClassVar[str] = ""
    """What its results ask of the script (`runtime.plan.interfaces`), where it runs only if that is allowed."""
    required: ClassVar[bool] = False
    """Whether its schedule is the plan's, however long its step is."""
    decides_update: ClassVar[bool] = False
    """Whether it decides what ranks share of the update; the others do not see that."""

    @property
    def codecs(self) -> frozenset[type[CodecModel]]:
        """The lossy codecs that it may choose."""
        return frozenset()

    def __str__(self) -> str:
        values = {each.name: (getattr(self, each.name), each.default) for each in fields(self)}  # type: ignore[arg-type]
        # A comma ends an option of the text; what lists names of several kinds also takes `|`.
        given = [f"{name}={value}".replace(",", "|") for name, (value, usual) in values.items() if value != usual]
        return f"{self.name}{{{','.join(given)}}}" if given else self.name

    def apply(self, schedule: Schedule, problem: Problem) -> Result:
        """A new schedule; never worse in predicted step time than the one given."""
        raise NotImplementedError


class Pipeline(tuple[Pass, ...]):
    """Passes in the order in which they run; `str` gives the text that `--passes` reads."""

    __slots__ = ()

    def __str__(self) -> str:
        return ",".join(map(str, self))
