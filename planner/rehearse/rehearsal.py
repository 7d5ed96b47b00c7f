"""`planner rehearse`: a model on a scaled emulated cluster, predicted and measured.

One launch of ranks does it all: they measure the machine as it is, agree on the scale, hold their links to the scaled
rates, time messages alone, predict, and only then run what is compared.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from planner.comparison.report import ERROR, INTERVAL, PREDICTED, STEP, Comparison
from planner.documents.text import mebibytes, milliseconds
from planner.jobs.launch import LocalWorld, run_ranks
from planner.rehearse.asked import Asked, AskedPlan, AskedWrappings, Bounds, Figures
from planner.rehearse.bucketed_ranks import BucketRehearser
from planner.rehearse.ranks import Rehearsed, Rehearser, rehearse_rank
from planner.rehearse.scale import Scale
from planner.rehearse.wrapped_ranks import WrappingRehearser
from planner.report.listing import Listing
from planner.testbed.hosts import check_namespaces

REHEARSERS: Mapping[type[Asked], type[Rehearser[Any, Any]]] = {
    AskedPlan: BucketRehearser, AskedWrappings: WrappingRehearser
}  # fmt: skip
PLACE, CONSTANTS = "predicted place", "by constants (ms)"
COLUMNS = ("", STEP, INTERVAL, PREDICTED, ERROR, PLACE, CONSTANTS)


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """Everything undilated and unshrunk."""

    asked: Asked
    scale: Scale
    comparison: Comparison
    figures: Figures
    """`from_constants_us`: a step as the cluster's constants alone predict it; `late_us`: time of hooks and updates of
    a step beyond the waits above them, on the rank where it is the most; of wrappings `peak_bytes`, predicted, and
    `counted_bytes`, on the rank where it is the most."""
    bounds: Bounds
    """`bound_us`: no plan of the asked kind takes less, by the measured times of messages alone; of wrappings
    `limit_bytes`, the memory of a rank."""

    @property
    def title(self) -> str:
        """Model, hosts and scale, in words."""
        return (
            f"{self.asked.name} on {self.asked.hosts} hosts{self.asked.UNDER}, rehearsed: times were "
            f"{self.scale.dilate:g} times longer and bytes {self.scale.shrink:g} times fewer"
        )

    @property
    def notes(self) -> list[str]:
        """Notes about the rehearsal itself."""
        steps_us = {row.name: row.median_us for row in self.comparison.rows if row.median_us is not None}
        return self.asked.notes(steps_us, self.figures, self.bounds)

    def to_document(self) -> dict[str, Any]:
        """Return plain JSON types: rows as `planner compare --json` has them, with the figures."""
        rows = [
            asdict(row) | {field: of.get(row.name) for field, of in self.figures.items()}
            for row in self.comparison.rows
        ]
        return {
            "name": self.asked.name, "dilate": self.scale.dilate, "shrink": self.scale.shrink,
            "hosts": self.asked.hosts, **self.bounds, "rows": rows,
        }  # fmt: skip


def rehearse(asked: Asked, *, started_s: float | None = None, show_progress: bool = False) -> Rehearsal:
    """Rehearse on emulated hosts of this machine, and return what was measured.

    Args:
        asked: made by `ask_plan` or `ask_wrappings` of `planner.rehearse.asked`.
        started_s: time (`time.time`) at which the minutes began; default: now.
        show_progress: whether lines are written on standard error.

    Raises:
        EnvironmentFailure: hosts cannot be emulated here, with a hint.
        InputError: the minutes are too few, the model does not fit at the scale asked for, or no wrapping does into the
            memory.
    """
    check_namespaces()
    world = LocalWorld(ranks=asked.cluster.ranks, emulation=asked.emulation)
    started_s = time.time() if started_s is None else started_s
    ranks = run_ranks(world, rehearse_rank, REHEARSERS[type(asked)], asked, started_s, show_progress)
    return summarize_rehearsal(asked, ranks)


def summarize_rehearsal(asked: Asked, ranks: Sequence[Rehearsed]) -> Rehearsal:
    """Return all ranks' measurements."""
    first = ranks[0]
    of_ranks = {
        field: {name: max(rank.figures[field].get(name, 0.0) for rank in ranks) for name in of}
        for field, of in first.figures.items()
    }
    return Rehearsal(
        asked=asked, scale=first.scale, comparison=asked.summarize([rank.measured for rank in ranks]),
        figures=of_ranks, bounds=first.bounds,
    )  # fmt: skip


def rehearsal_table(found: Rehearsal) -> Listing:
    """Return the table for the terminal, fastest first."""
    title = f"{found.title}; {found.comparison.steps} steps each in {found.comparison.rounds} interleaved rounds"
    columns = (*COLUMNS, *found.asked.COLUMNS)
    rows = [row for row in found.comparison.rows if row.median_us is not None and row.equal_to is None]
    by_prediction = sorted((row.predicted_us, row.name) for row in rows if row.predicted_us is not None)
    places = {name: str(place) for place, (_, name) in enumerate(by_prediction, start=1)}
    figures: Mapping[str, Mapping[str, Any]] = found.figures
    texts = []
    for row in sorted(rows, key=lambda row: row.median_us or 0.0):
        cells = row.cells() | {
            PLACE: places.get(row.name, ""),
            CONSTANTS: milliseconds(figures["from_constants_us"].get(row.name)),
            "peak predicted": mebibytes(figures.get("peak_bytes", {}).get(row.name)),
            "peak counted": mebibytes(figures.get("counted_bytes", {}).get(row.name)),
        }
        texts.append([cells.get(column, "") for column in columns])
    return Listing(title, columns, texts, found.asked.LEFT)
