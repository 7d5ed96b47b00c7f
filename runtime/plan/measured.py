"""A measured step as a file (`"schema": "planner.timeline/1"`), written by a session, read by `planner explain`.

Torch-free, as reading is part of explaining.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from runtime.errors import InputError
from runtime.plan.document import ModelReference, Plan
from runtime.plan.last_ranks import MessageArrival, RankArrival
from runtime.plan.strict_json import MAX_RANKS, Count, Document, Name, PositiveCount, Record, TimeUs
from runtime.plan.timeline import Span, Timeline, busy_us

TIMELINE_SCHEMA: Literal["planner.timeline/1"] = "planner.timeline/1"


@dataclass(frozen=True, kw_only=True)
class MeasuredTask(Record):
    """One task as measured; times from the start of forward."""

    task: str
    resource: Name
    start_us: TimeUs
    end_us: TimeUs
    bucket: Count | None = None
    ready_us: TimeUs | None = None

    @classmethod
    def of(cls, span: Span) -> MeasuredTask:
        """Return a task of a timeline; marks of a bucket may be missing in some steps, so that it ends too early."""
        return cls(**span.task_fields | {"end_us": max(span.start_us, span.end_us)})

    def problem(self, path: str) -> str | None:
        """Return what is wrong if the task ends before it starts."""
        if self.end_us >= self.start_us:
            return None
        return f"{path}.end_us: found {self.end_us}, expected at least start_us, {self.start_us}"


@dataclass(frozen=True, kw_only=True)
class MeasuredStep(Document):
    """Means over the middle half of some steps of one rank."""

    hint: ClassVar[str] = "save the step again with session.report().save(…)"
    schema: Literal["planner.timeline/1"] = TIMELINE_SCHEMA
    model: ModelReference
    rank: Annotated[int, Field(ge=0, lt=MAX_RANKS)]
    ranks: Annotated[int, Field(ge=1, le=MAX_RANKS)]
    steps: Count
    iteration_us: TimeUs
    forward_us: TimeUs
    backward_us: TimeUs
    update_us: TimeUs
    micro_batches: PositiveCount | None = None
    """Number of micro-batches of one step of the optimizer; absent: one."""
    exchanged: PositiveCount | None = None
    """Number of them that exchanged gradients; absent: the last one."""
    arrivals: tuple[RankArrival, ...] | None = None
    """Each rank at the messages; absent: ranks have not compared."""
    messages: tuple[MessageArrival, ...] | None = None
    """All ranks at each message."""
    timeline: Annotated[tuple[MeasuredTask, ...], Field(min_length=1)]

    def problem(self, path: str) -> str | None:
        """Return what is wrong if arrivals are not those of all ranks."""
        listed: dict[str, Sequence[object] | None] = {"arrivals": self.arrivals}
        listed |= {f"messages[{index}].late_us": one.late_us for index, one in enumerate(self.messages or ())}
        for field, found in listed.items():
            if found is not None and len(found) != self.ranks:
                return f"{path}.{field}: found {len(found)}, expected one of each of {self.ranks} ranks; {self.hint}"
        return None

    @classmethod
    def of(cls, timeline: Timeline, **about: Any) -> MeasuredStep:
        """Return the step with this timeline; `about` has the other fields."""
        times = {name: getattr(timeline, name) for name in ("iteration_us", "forward_us", "backward_us", "update_us")}
        return cls(**about, **times, timeline=tuple(map(MeasuredTask.of, timeline.spans)))

    @property
    def exposed_us(self) -> float:
        """Time that the step spent on nothing but communication.

        From the tasks of compute as they are drawn. What comes after them, gathers of weights that ranks have updated,
        is a part of the update, as in predictions.
        """
        compute = [task for task in self.timeline if task.resource == "compute"]
        quiet_us = self.forward_us + self.backward_us + self.update_us
        if compute:
            quiet_us = busy_us(compute) + self.iteration_us - max(task.end_us for task in compute)
        return max(0.0, self.iteration_us - quiet_us)


def load_measured(path: str | Path, plan: Plan) -> MeasuredStep:
    """Read a measured step of `plan`. Raises InputError for another schema, model, number of ranks or buckets."""
    where, step = str(path), MeasuredStep.load(path)
    for index, task in enumerate(step.timeline):
        if task.bucket is not None and task.bucket >= len(plan.buckets):
            raise InputError(
                f"{where}: $.timeline[{index}].bucket: found {task.bucket}, expected less than "
                f"{len(plan.buckets)}, the plan's number of buckets; use the plan that was measured"
            )
    pairs: list[tuple[str, Any, Any]] = [("model.name", step.model.name, plan.model.name)]
    if step.model.fingerprint and plan.model.fingerprint:
        pairs.append(("model.fingerprint", step.model.fingerprint, plan.model.fingerprint))
    pairs.append(("ranks", step.ranks, plan.world.ranks))
    for field, found, expected in pairs:
        if found != expected:
            raise InputError(
                f"{where}: $.{field}: found {found!r}, the plan has {expected!r}; expected a step that was measured "
                f"with this plan"
            )
    return step
