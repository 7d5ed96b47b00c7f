"""The times of a sharded optimizer step, as measured on one rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class GatherReport:
    """One gather that overlaps the next forward: medians in microseconds from the end of the step that launched it."""

    buckets: tuple[int, ...]
    start_us: float
    end_us: float


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """The sharded step of one rank: medians in microseconds, and the plan's prediction."""

    gather_us: float
    """All-gathers of weights, a part of the update."""
    gathers_us: tuple[float, ...]
    late: tuple[GatherReport, ...] = ()
    """Gathers that overlap the next forward and are no part of an update."""
    waited_us: float = 0.0
    """Time for which that forward, or an earlier reader, waited for them."""
    predicted_gather_us: float | None
    state_bytes: int
    """Size of this rank's part of the optimizer's state."""

    def __str__(self) -> str:
        predicted = "" if self.predicted_gather_us is None else f", predicted {self.predicted_gather_us / 1e3:.2f}"
        taken_us = self.gather_us + sum(one.end_us - one.start_us for one in self.late)
        waited = f" beside the next forward, which waited {self.waited_us / 1e3:.2f} ms" if self.late else ""
        return (
            f"step shared by ranks: weights gathered in {taken_us / 1e3:.2f}{predicted} ms{waited}, "
            f"{self.state_bytes / 2**20:.1f} MiB of the optimizer's state here"
        )


def sum_of(reports: Sequence[StepReport]) -> StepReport:
    """Return the report of the steps of several optimizers, one after the other, with gathers of the same buckets."""
    return replace(
        reports[0],
        gather_us=sum(one.gather_us for one in reports),
        gathers_us=tuple(map(sum, zip(*(one.gathers_us for one in reports), strict=True))),
        late=tuple(gather for one in reports for gather in one.late),
        waited_us=sum(one.waited_us for one in reports),
        state_bytes=sum(one.state_bytes for one in reports),
    )
