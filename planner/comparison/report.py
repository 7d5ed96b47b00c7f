"""What `planner compare` prints: a record for each contestant, a table, and verdicts that respect the noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from planner.comparison.contestants import BARE, BEST_DDP, DDP, PLAN
from planner.comparison.statistics import (
    hidden_share,
    median_interval,
    ratio_interval,
    step_values,
    verdict,
)

if TYPE_CHECKING:
    from rich.table import Table

    from planner.comparison.measure import Measured

LOSS_TOLERANCE = 1e-3
"""Relative."""
SURE_STEPS = 3
"""Sums of more than two ranks may be taken in another order, and training multiplies what they differ by: there no more
than the first losses say whether it is the same training. DDP itself, with other buckets, ends with others."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One contestant."""

    name: str
    median_us: float | None
    ci95_us: tuple[float, float] | None
    exposed_us: float | None
    """What its step takes longer than the bare loop's."""
    hidden_share: float | None
    """Of the communication that could be hidden; None where its messages could not be sent alone."""
    predicted_us: float | None
    error: float | None
    """predicted / measured − 1."""
    alone_us: float | None
    """All its messages with nothing else going on."""
    buckets: int | None
    failure: str | None = None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All of one run."""

    rows: tuple[Row, ...]
    verdicts: tuple[str, ...]
    rounds: int
    steps: int
    """Measured ones of each contestant."""
    ranks: int

    def to_document(self) -> list[dict[str, Any]]:
        """The records as plain JSON types."""
        return [asdict(row) for row in self.rows]


def summarize(measured: Sequence[Measured]) -> Comparison:
    """From what each rank saw, in order of rank."""
    first = measured[0]
    values = values_by_name(measured)
    bare_us = float(np.median(values[BARE]))
    rows = []
    for record in first.records:
        name, plan = record.contestant.name, record.contestant.plan
        interval = median_interval(values[name]) if name in values else None
        exposed_us = None if interval is None else interval.value - bare_us
        predicted_us = record.contestant.predicted_us
        rows.append(
            Row(
                name=name,
                median_us=interval.value if interval else None,
                ci95_us=(interval.low, interval.high) if interval else None,
                exposed_us=exposed_us,
                hidden_share=_hidden(exposed_us, record.alone_us, first.backward_us),
                predicted_us=predicted_us,
                error=predicted_us / interval.value - 1.0 if predicted_us and interval else None,
                alone_us=record.alone_us,
                buckets=len(plan.buckets) if plan else None,
                failure=record.failure,
            )
        )
    rounds, steps = next(iter(values.values())).shape
    return Comparison(
        rows=tuple(rows),
        verdicts=tuple(_verdicts(values, measured)),
        rounds=rounds,
        steps=rounds * steps,
        ranks=len(measured),
    )


def values_by_name(measured: Sequence[Measured]) -> dict[str, NDArray[np.float64]]:
    """What each step of each contestant that works took, from what each rank saw. Shapes (rounds, steps)."""
    values = {}
    for index, record in enumerate(measured[0].records):
        if record.failure is None:
            seen = np.array([rank.records[index].step_us for rank in measured])
            values[record.contestant.name] = step_values(seen, together=record.contestant.kind != "bare")
    return values


def _hidden(exposed_us: float | None, alone_us: float | None, backward_us: float) -> float | None:
    return None if exposed_us is None or alone_us is None else hidden_share(exposed_us, alone_us, backward_us)


def _verdicts(values: dict[str, NDArray[np.float64]], measured: Sequence[Measured]) -> list[str]:
    tuned = [name for name in values if name == DDP or name.startswith(BEST_DDP)]
    best = min(tuned, key=lambda name: float(np.median(values[name])))
    lines = [verdict(ratio_interval(values[PLAN], values[best]), "the plan", f"the best DDP, {best}")]
    lossy = [name for name in values if name.startswith("ddp:") and name not in tuned]
    if lossy:
        fastest = min(lossy, key=lambda name: float(np.median(values[name])))
        lines.append(
            verdict(ratio_interval(values[PLAN], values[fastest]), "the plan", f"{fastest}, which is not exact")
        )
    return lines + _loss_lines(measured)


def _loss_lines(measured: Sequence[Measured]) -> list[str]:
    """Exact contestants start from the same weights and see the same batches: their losses are DDP's."""
    sure = SURE_STEPS if len(measured) > 2 else None
    reference = next(r for r in measured[0].records if r.contestant.name == DDP).losses[-1][:sure]
    lines = []
    for record in measured[0].records:
        if record.contestant.kind != "plan" or not record.contestant.exact or not record.losses:
            continue
        pairs = enumerate(zip(record.losses[-1], reference, strict=False), start=1)
        odd = [(step, *pair) for step, pair in pairs if not np.isclose(*pair, rtol=LOSS_TOLERANCE, equal_nan=True)]
        if odd:
            step, found, expected = odd[0]
            lines.append(
                f"NOT THE SAME TRAINING: {record.contestant.name} had the loss {found:.6g} in step {step} of its "
                f"block, DDP {expected:.6g}"
            )
    return lines


def comparison_table(comparison: Comparison) -> Table:
    """For the terminal."""
    from rich.table import Table

    from planner.explain import milliseconds

    table = Table(
        title=f"{comparison.steps} steps each on {comparison.ranks} ranks, in {comparison.rounds} rounds by turns",
        title_justify="left",
    )
    table.add_column("")
    for column in ("step (ms)", "95 % interval", "exposed (ms)", "hidden", "predicted (ms)", "error", "buckets"):
        table.add_column(column, justify="right")
    for row in comparison.rows:
        if row.failure is not None or row.ci95_us is None:
            table.add_row(row.name, "does not work here", *[""] * 6)
            continue
        table.add_row(
            row.name,
            milliseconds(row.median_us),
            f"{milliseconds(row.ci95_us[0])} to {milliseconds(row.ci95_us[1])}",
            "" if row.name == BARE else milliseconds(row.exposed_us),
            "" if row.hidden_share is None or row.name == BARE else f"{row.hidden_share:.0%}",
            milliseconds(row.predicted_us),
            "" if row.error is None else f"{row.error:+.1%}",
            "" if row.buckets is None else str(row.buckets),
        )
    return table


def failures(comparison: Comparison) -> list[str]:
    """Why what does not work does not."""
    return [f"{row.name} does not work here: {row.failure}" for row in comparison.rows if row.failure is not None]
