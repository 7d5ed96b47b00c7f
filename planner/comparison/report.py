"""The output of `planner compare`: a record for each variant, a table, and verdicts that respect the noise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from planner.comparison.same import judge_training
from planner.comparison.statistics import (
    Interval,
    exposed_noise,
    hidden_share,
    median_interval,
    ratio_interval,
    step_values,
    verdict,
)
from planner.comparison.variants import BEST_DDP, DDP, EQUAL_SHARES, NO_COMMUNICATION, PLAN, Variant
from planner.documents.text import milliseconds
from planner.report.listing import Listing, make_console, print_tables
from planner.report.who_waits import arrival_tables
from runtime.monitor.verdict import cause_of_error
from runtime.plan.last_ranks import MessageArrival, RankArrival, rank_arrivals

if TYPE_CHECKING:
    from planner.comparison.measure import Measured


STEP, INTERVAL, PREDICTED, ERROR = "step (ms)", "95 % interval (ms)", "predicted (ms)", "error"
MAX_NOISE = 0.25
"""Uncertainty of a hidden share above which it is not shown."""


def timing(variant: Variant, interval: Interval | None, predicted_us: float | None) -> dict[str, Any]:
    """Return the fields that rows of every kind have."""
    return {
        "name": variant.name,
        "median_us": interval.value if interval else None,
        "ci95_us": (interval.low, interval.high) if interval else None,
        "predicted_us": predicted_us,
        "error": predicted_us / interval.value - 1.0 if predicted_us and interval else None,
    }


def timing_cells(row: AnyRow, to: str) -> dict[str, str]:
    """Return the cells that rows of every kind have; `to` separates the ends of an interval."""
    return {
        "": row.name,
        STEP: milliseconds(row.median_us),
        INTERVAL: to.join(map(milliseconds, row.ci95_us or ())),
        PREDICTED: milliseconds(row.predicted_us),
        ERROR: "" if row.error is None else f"{row.error:+.1%}",
    }


@dataclass(frozen=True, kw_only=True)
class Row:
    """A variant with buckets, or without communication."""

    COLUMNS: ClassVar[tuple[str, ...]] = ("", STEP, INTERVAL, "exposed (ms)", "hidden", PREDICTED, ERROR, "buckets")
    LEFT: ClassVar[tuple[str, ...]] = ("",)
    HEADING: ClassVar[str] = "{steps} steps each on {ranks} ranks, in {rounds} interleaved rounds"
    place: ClassVar[float] = 0.0
    """Sort key in tables, which keep the order of the variants."""
    name: str
    median_us: float | None
    ci95_us: tuple[float, float] | None
    exposed_us: float | None
    """Time of its step beyond the no-communication baseline's."""
    hidden_share: float | None
    """Hidden share of the communication that could be hidden; None if its messages could not be sent alone."""
    predicted_us: float | None
    error: float | None
    """Prediction over measurement, minus 1."""
    alone_us: float | None
    """Time of all its messages without a backward."""
    buckets: int | None
    failure: str | None = None
    same_training: bool | None = None
    """Whether weights and losses of an exact plan are DDP's; None if that cannot be told."""
    equal_to: str | None = None
    """Name of a row that this one is no better than: no bucket size is faster than DDP's default."""
    hidden_noise: float | None = None
    """Half of the 95 % interval of `hidden_share`, at most 1."""
    arrivals: tuple[RankArrival, ...] = ()
    """Each rank at the messages of a step; empty where they are not known, as of DDP."""
    messages: tuple[MessageArrival, ...] = ()
    """All ranks at each message."""

    @property
    def hidden_text(self) -> str:
        """Hidden share as text, or that noise leaves it unknown."""
        if self.hidden_share is None or self.name == NO_COMMUNICATION:
            return ""
        return "noise" if (self.hidden_noise or 0.0) > MAX_NOISE else f"{self.hidden_share:.0%}"

    def cells(self) -> dict[str, str]:
        """Return texts by column; those of some columns may be absent."""
        if self.equal_to is not None:
            return {"": BEST_DDP, STEP: f"equal to {self.equal_to}"}
        if self.failure is not None or self.ci95_us is None:
            return {"": self.name, STEP: "does not work here"}
        baseline = self.name == NO_COMMUNICATION
        return timing_cells(self, " to ") | {
            "exposed (ms)": "" if baseline else milliseconds(self.exposed_us),
            "hidden": self.hidden_text,
            "buckets": "" if self.buckets is None else str(self.buckets),
        }


@dataclass(frozen=True, kw_only=True)
class WrappingRow:
    """A wrapping for FSDP2."""

    COLUMNS: ClassVar[tuple[str, ...]] = ("", STEP, INTERVAL, PREDICTED, ERROR, "groups", "weights")
    LEFT: ClassVar[tuple[str, ...]] = ("", "weights")
    HEADING: ClassVar[str] = "FSDP2, {steps} steps each in {rounds} interleaved rounds"
    failure: ClassVar[None] = None
    equal_to: ClassVar[None] = None
    name: str
    median_us: float
    ci95_us: tuple[float, float]
    predicted_us: float | None
    error: float | None
    """Prediction over measurement, minus 1."""
    groups: int
    difference: float
    """Difference of weights; 0: bit for bit those of a group for each block."""

    @property
    def place(self) -> float:
        """Sort key in tables, which have the fastest first."""
        return self.median_us

    def cells(self) -> dict[str, str]:
        """Return texts by column."""
        same = "bit for bit" if self.difference == 0.0 else f"differ by {self.difference:.1g}"
        return timing_cells(self, " – ") | {"groups": str(self.groups), "weights": same}


AnyRow = Row | WrappingRow
"""A dataclass, whose fields `--json` prints."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The results of one comparison; `print` it."""

    rows: tuple[AnyRow, ...]
    """Results of each variant: median, interval, exposed and predicted time, in µs."""
    verdicts: tuple[str, ...]
    """Sentences on which variant is faster, and by how much."""
    rounds: int
    """Number of rounds, in each of which every variant trains one block of steps."""
    steps: int
    """Number of measured steps of each variant."""
    ranks: int
    """Number of ranks."""
    cause: str | None = None
    """Reason why predictions are off, if they are."""
    differences: tuple[str, ...] = ()
    """Sentences about exact plans that do not train as DDP does: the comparison does not hold."""

    @property
    def heading(self) -> str:
        """Return the number of ranks, steps and rounds, in words."""
        return self.rows[0].HEADING.format(steps=self.steps, ranks=self.ranks, rounds=self.rounds)

    @property
    def closing(self) -> tuple[str, ...]:
        """Return sentences that end the printed comparison."""
        return ()

    def to_document(self) -> list[dict[str, Any]]:
        """Return the records as plain JSON types."""
        return [asdict(row) for row in self.rows]

    def __str__(self) -> str:
        """Return the first verdict, the cause of wrong predictions, the table, and further lines."""
        console = make_console(colors=False)
        with console.capture() as table:
            print_tables(comparison_table(self), *arrival_listings(self), console=console)
        lines = [line.rstrip() for line in table.get().splitlines()]
        return "\n".join([*first_lines(self), *lines, *last_lines(self), *self.differences])


def summarize(measured: Sequence[Measured]) -> Comparison:
    """Compare from what each rank saw, in order of rank."""
    first = measured[0]
    values = values_by_name(measured)
    baseline_us = float(np.median(values[NO_COMMUNICATION]))
    training = judge_training(measured)
    said = next((record.variant.predicted for record in first.records if record.variant.name == PLAN), None)
    rows = []
    for index, record in enumerate(first.records):
        variant, seen = record.variant, values.get(record.variant.name)
        predicted_us = variant.predicted_us
        if predicted_us is not None and said is not None:  # all have the plan's forward, backward and update
            predicted_us = said.accumulated_us(*first.micro_batches, predicted_us)
        interval = None if seen is None else median_interval(seen)
        exposed_us = None if interval is None else interval.value - baseline_us
        hidden: float | None = None
        noise: float | None = None
        if seen is not None and exposed_us is not None and record.alone_us is not None:
            hidden = hidden_share(exposed_us, record.alone_us, first.backward_us)
            could_us = max(min(record.alone_us, first.backward_us), 1e-9)
            noise = min(exposed_noise(seen, values[NO_COMMUNICATION]) / could_us, 1.0)
        figures = [rank.records[index].figures for rank in measured]
        arrivals, messages = rank_arrivals(figures) if all(figures) else ((), ())
        rows.append(
            Row(
                **timing(variant, interval, predicted_us),
                exposed_us=exposed_us,
                hidden_share=hidden,
                hidden_noise=noise,
                alone_us=record.alone_us,
                buckets=variant.parts,
                failure=record.failure,
                same_training=training.same.get(variant.name),
                arrivals=arrivals,
                messages=messages,
            )
        )
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


def _with_best_ddp(rows: list[Row], values: Mapping[str, NDArray[np.float64]]) -> list[Row]:
    """Return rows in which DDP's best bucket size differs from its default only if that is beyond the noise."""
    default = next(row for row in rows if row.name == DDP)
    for index, row in enumerate(rows):
        if row.name.startswith(BEST_DDP):
            faster = ratio_interval(values[row.name], values[DDP]).high < 1.0
            return rows if faster else [*rows[:index], replace(row, equal_to=DDP), *rows[index + 1 :]]
    after = rows.index(default) + 1
    return [*rows[:after], replace(default, name=BEST_DDP, equal_to=DDP), *rows[after:]]


def _cause(rows: Mapping[str, Row]) -> str | None:
    baseline, plan = rows[NO_COMMUNICATION], rows[PLAN]
    if not (baseline.median_us and baseline.predicted_us and plan.median_us and plan.predicted_us and plan.ci95_us):
        return None
    if plan.ci95_us[0] <= plan.predicted_us <= plan.ci95_us[1]:
        return None
    return cause_of_error(
        computed_us=baseline.median_us,
        predicted_computed_us=baseline.predicted_us,
        step_us=plan.median_us,
        predicted_step_us=plan.predicted_us,
    )


def values_by_name(measured: Sequence[Measured]) -> dict[str, NDArray[np.float64]]:
    """Return the times of steps, in µs, of each variant that works, from all ranks' records. Shapes (rounds, steps)."""
    values = {}
    for index, record in enumerate(measured[0].records):
        if record.failure is None:
            seen = np.array([rank.records[index].step_us for rank in measured])
            values[record.variant.name] = step_values(seen, together=record.variant.together)
    return values


def _verdicts(values: Mapping[str, NDArray[np.float64]], rows: Sequence[Row]) -> list[str]:
    best = next((row.name for row in rows if row.name.startswith(BEST_DDP) and row.equal_to is None), DDP)
    steps = values[PLAN].shape[1]
    lines = [verdict(ratio_interval(values[PLAN], values[best]), "the plan", f"the best DDP, {best}", steps)]
    lossy = [name for name in values if name.startswith("ddp:") and not name.startswith(BEST_DDP)]
    if lossy:
        fastest = min(lossy, key=lambda name: float(np.median(values[name])))
        ratio = ratio_interval(values[PLAN], values[fastest])
        lines.append(verdict(ratio, "the plan", f"{fastest}, which is not exact", steps))
    if EQUAL_SHARES in values:
        ratio = ratio_interval(values[PLAN], values[EQUAL_SHARES])
        lines.append(verdict(ratio, "the plan", "the same with equal shares", steps))
    return lines


def comparison_table(comparison: Comparison) -> Listing:
    """Return the table for the terminal."""
    kind = comparison.rows[0]
    ordered = [row.cells() for row in sorted(comparison.rows, key=lambda row: row.place)]
    rows = [[cells.get(column, "") for column in kind.COLUMNS] for cells in ordered]
    return Listing(comparison.heading, kind.COLUMNS, rows, kind.LEFT)


def arrival_listings(comparison: Comparison) -> list[Listing]:
    """Return tables of who waits for whom in the plan's steps, and in those with equal shares."""
    rows = [row for row in comparison.rows if isinstance(row, Row) and row.name in (EQUAL_SHARES, PLAN)]
    return [one for row in rows for one in arrival_tables(row.arrivals, row.messages, row.name)]


def first_lines(comparison: Comparison) -> list[str]:
    """Return the comparison in a sentence, and the cause of wrong predictions."""
    return [*comparison.verdicts[:1], *([] if comparison.cause is None else [comparison.cause])]


def last_lines(comparison: Comparison) -> list[str]:
    """Return the other verdicts, what does not work, and what "noise" in the table means."""
    noisy = any(row.cells().get("hidden") == "noise" for row in comparison.rows)
    why = f"noise: steps vary too much for the hidden share (± {MAX_NOISE:.0%} or more); measure more rounds"
    return [*comparison.verdicts[1:], *failures(comparison), *([why] if noisy else []), *comparison.closing]


def failures(comparison: Comparison) -> list[str]:
    """Return a sentence for each variant that does not work, with the reason."""
    return [f"{row.name} does not work here: {row.failure}" for row in comparison.rows if row.failure is not None]
