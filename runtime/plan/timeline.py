"""One record for predicted and measured time, so that both can be laid side by side. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, Protocol

UPDATER = "updater "
"""Prefix of the resources that are local updaters; their number follows."""


def computes(resource: str) -> bool:
    """Return whether a resource computes; else it is a network, or one of several links."""
    return resource == "compute" or resource.startswith(UPDATER)


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """One task on one resource, in microseconds from the start of the step's forward."""

    task: str
    resource: str
    """`compute` (or `updater 0`, …), or the network that carries it: `network`, or one of several links."""
    start_us: float
    end_us: float
    bucket: int | None = None
    ready_us: float | None = None

    @property
    def duration_us(self) -> float:
        return self.end_us - self.start_us

    @property
    def task_fields(self) -> dict[str, Any]:
        """Return the fields that tasks of every kind have, by name."""
        return {each.name: getattr(self, each.name) for each in fields(Span)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """All spans of one step, ordered by start, and its length (see the sums in `planner.model.modes`)."""

    spans: tuple[Span, ...]
    iteration_us: float
    forward_us: float
    backward_us: float
    update_us: float

    @property
    def exposed_us(self) -> float:
        """Time that the step spends on nothing but communication."""
        return max(0.0, self.iteration_us - (self.forward_us + self.backward_us + self.update_us))

    def on(self, resource: str) -> tuple[Span, ...]:
        return tuple(span for span in self.spans if span.resource == resource)


class Interval(Protocol):
    """Anything with a start and an end."""

    @property
    def start_us(self) -> float: ...
    @property
    def end_us(self) -> float: ...


def busy_us(spans: Iterable[Interval]) -> float:
    """Length of the union of the spans."""
    total, reached = 0.0, float("-inf")
    for span in sorted(spans, key=lambda s: s.start_us):
        total += max(0.0, span.end_us - max(span.start_us, reached))
        reached = max(reached, span.end_us)
    return total
