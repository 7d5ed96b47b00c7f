"""What `planner compare` prints: a record for each contestant, a table, and verdicts that respect the noise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
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
from planner.comparison.training import judge_training
from runtime.monitor.causes import cause_of_error

if TYPE_CHECKING:
    from rich.table import Table

    from planner.comparison.measure import Measured, Record


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
    same_training: bool | None = None
    """Of exact plans, whether weights and losses are DDP's; None where that cannot be told."""
    equal_to: str | None = None
    """Another row that this one is no better than: there is no bucket size that is faster than DDP's default."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All of one run."""

    rows: tuple[Row, ...]
    verdicts: tuple[str, ...]
    rounds: int
    steps: int
    """Measured ones of each contestant."""
    ranks: int
    cause: str | None = None
    """Why predictions are off, where they are."""
    differences: tuple[str, ...] = ()
    """Of exact plans that do not train as DDP does: the comparison does not hold."""

    def to_document(self) -> list[dict[str, Any]]:
        """The records as plain JSON types."""
        return [asdict(row) for row in self.rows]

    def __str__(self) -> str:
        """The cause of wrong predictions, the table, verdicts, what does not work, and what trains otherwise."""
        from io import StringIO

        from rich.console import Console

        console = Console(file=StringIO(), width=160, markup=False, emoji=False)
        console.print(comparison_table(self))
        table = console.file.getvalue()  # type: ignore[attr-defined]
        lines = [line.rstrip() for line in table.splitlines()]
        cause = [] if self.cause is None else [self.cause]
        return "\n".join([*cause, *lines, *self.verdicts, *failures(self), *self.differences])


def summarize(measured: Sequence[Measured]) -> Comparison:
    """From what each rank saw, in order of rank."""
    first = measured[0]
    values = values_by_name(measured)
    bare_us = float(np.median(values[BARE]))
    training = judge_training(measured)
    rows = [
        _row(record, values.get(record.contestant.name), bare_us, first.backward_us, training.same)
        for record in first.records
    ]
    rows = _with_best_ddp(rows, values)
    rounds, steps = next(iter(values.values())).shape
    return Comparison(
        rows=tuple(rows),
        verdicts=(*_verdicts(values, rows), *training.doubts),
        rounds=rounds,
        steps=rounds * steps,
        ranks=len(measured),
        cause=_cause({row.name: row for row in rows}),
        differences=training.differences,
    )


def _row(
    record: Record,
    values: NDArray[np.float64] | None,
    bare_us: float,
    backward_us: float,
    same: Mapping[str, bool | None],
) -> Row:
    interval = None if values is None else median_interval(values)
    exposed_us = None if interval is None else interval.value - bare_us
    predicted_us, plan = record.contestant.predicted_us, record.contestant.plan
    return Row(
        name=record.contestant.name,
        median_us=interval.value if interval else None,
        ci95_us=(interval.low, interval.high) if interval else None,
        exposed_us=exposed_us,
        hidden_share=_hidden(exposed_us, record.alone_us, backward_us),
        predicted_us=predicted_us,
        error=predicted_us / interval.value - 1.0 if predicted_us and interval else None,
        alone_us=record.alone_us,
        buckets=len(plan.buckets) if plan else None,
        failure=record.failure,
        same_training=same.get(record.contestant.name),
    )


def _with_best_ddp(rows: list[Row], values: Mapping[str, NDArray[np.float64]]) -> list[Row]:
    """DDP's best bucket size is another than its default only where that is beyond the noise."""
    default = next(row for row in rows if row.name == DDP)
    for index, row in enumerate(rows):
        if row.name.startswith(BEST_DDP):
            faster = ratio_interval(values[row.name], values[DDP]).high < 1.0
            return rows if faster else [*rows[:index], replace(row, equal_to=DDP), *rows[index + 1 :]]
    after = rows.index(default) + 1
    return [*rows[:after], replace(default, name=BEST_DDP, equal_to=DDP), *rows[after:]]


def _cause(rows: Mapping[str, Row]) -> str | None:
    bare, plan = rows[BARE], rows[PLAN]
    if not (bare.median_us and bare.predicted_us and plan.median_us and plan.predicted_us and plan.ci95_us):
        return None
    if plan.ci95_us[0] <= plan.predicted_us <= plan.ci95_us[1]:
        return None
    return cause_of_error(
        computed_us=bare.median_us,
        predicted_computed_us=bare.predicted_us,
        step_us=plan.median_us,
        predicted_step_us=plan.predicted_us,
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


def _verdicts(values: Mapping[str, NDArray[np.float64]], rows: Sequence[Row]) -> list[str]:
    best = next((row.name for row in rows if row.name.startswith(BEST_DDP) and row.equal_to is None), DDP)
    lines = [verdict(ratio_interval(values[PLAN], values[best]), "the plan", f"the best DDP, {best}")]
    lossy = [name for name in values if name.startswith("ddp:") and not name.startswith(BEST_DDP)]
    if lossy:
        fastest = min(lossy, key=lambda name: float(np.median(values[name])))
        lines.append(
            verdict(ratio_interval(values[PLAN], values[fastest]), "the plan", f"{fastest}, which is not exact")
        )
    return lines


def comparison_table(comparison: Comparison) -> Table:
    """For the terminal."""
    from rich.table import Table

    from planner.emit.text import milliseconds

    table = Table(
        title=f"{comparison.steps} steps each on {comparison.ranks} ranks, in {comparison.rounds} rounds by turns",
        title_justify="left",
    )
    table.add_column("")
    for column in ("step (ms)", "95 % interval", "exposed (ms)", "hidden", "predicted (ms)", "error", "buckets"):
        table.add_column(column, justify="right")
    for row in comparison.rows:
        if row.equal_to is not None:
            table.add_row(BEST_DDP, f"equal to {row.equal_to}", *[""] * 6)
            continue
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
