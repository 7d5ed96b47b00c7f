"""Rehearses wrappings for FSDP2 of four models under three limits of memory, and writes docs/results/fsdp2.md.

    python -m benchmarks.fsdp2 --write                   # what benchmarks/results/fsdp2.jsonl lacks
    python -m benchmarks.fsdp2 --results new.jsonl --only gpt2 --minutes 3

Needs root, and a machine that does nothing else. Each cell is one `planner rehearse --parallel fsdp2`.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.figures import Figures
from benchmarks.marked import parser_of, tabulate
from benchmarks.rehearsal import INTER_LATENCY_US, kendall
from planner.comparison.variants import PLAN
from planner.fsdp2.decide import MARGIN, plan_for
from planner.fsdp2.inputs import PER_BLOCK
from planner.fsdp2.search import Wrappings, least_memory
from planner.rehearse.asked import AskedWrappings, ask_wrappings, find_target
from planner.rehearse.rehearsal import rehearse

DOCUMENT, RESULTS = Path("docs/results/fsdp2.md"), Path("benchmarks/results/fsdp2.jsonl")
HOSTS = 8
GBIT_PER_S = {"gpt2": 15.0, "bert-large": 50.0, "llama-1b": 100.0, "olmoe-1b-7b": 400.0}
"""By model, the links with which messages take about twice as long as computation."""
LEVELS = {"tight": 0.0, "middle": 0.5, "loose": 1.0}
"""Between the least that a wrapping takes, and what the fastest one does."""
ABOVE_LEAST = 1.02
"""The tight limit over the least: that is met by one wrapping alone."""


@dataclass(frozen=True)
class Cell:
    """One rehearsal."""

    model: str
    level: str
    hosts: int = HOSTS

    @property
    def key(self) -> str:
        """Return the cell's name."""
        return f"{self.model}@{self.hosts}x1@{GBIT_PER_S[self.model]:g}gbit {self.level}"

    def asked(self, minutes: float) -> AskedWrappings:
        """Return what is rehearsed, with its limit, which is set by the cluster's constants."""
        inter = {"alpha_us": INTER_LATENCY_US, "bandwidth": f"{GBIT_PER_S[self.model]:g}gbit"}
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "cluster.json"
            document = {"schema": "planner.cluster/1", "nodes": self.hosts, "inter": inter}
            file.write_text(json.dumps(document), encoding="utf-8")

            def asked(max_memory_mib: float | None) -> AskedWrappings:
                return ask_wrappings(find_target(self.model, str(file), None, minutes), max_memory_mib)

            free = asked(None)
            setting = free.setting(free.cluster)
            fastest = plan_for(setting).fsdp2
            assert fastest is not None
            assert fastest.peak_bytes is not None
            _, least = least_memory(Wrappings(setting.shape, setting.costs(None), setting.executor))
            low, high = ABOVE_LEAST * least.peak_bytes, 1.0 * fastest.peak_bytes
            return asked((low + LEVELS[self.level] * max(0.0, high - low)) / (1.0 - MARGIN) / 2**20 + 1.0)


CELLS = tuple(Cell(model, level) for model in GBIT_PER_S for level in LEVELS)


def main() -> int:
    """Measures what is missing, prints, writes."""
    parser = parser_of(__doc__, DOCUMENT, RESULTS)
    parser.add_argument("--minutes", type=float, default=3.0, help="of each cell")
    parser.add_argument("--hosts", type=int, default=HOSTS, help="other than these: to try it out")
    options = parser.parse_args()
    cells = [Cell(cell.model, cell.level, options.hosts) for cell in CELLS]
    wanted = {cell.key: partial(measure, cell, options.minutes) for cell in cells}
    return tabulate(DOCUMENT, {"cells": (wanted, lambda records: [*summary(records), "", *table(records)])}, options)


def measure(cell: Cell, minutes: float) -> dict[str, Any]:
    """Rehearse one cell; return what `planner rehearse --parallel fsdp2 --json` prints."""
    return rehearse(cell.asked(minutes), show_progress=True).to_document()


def summary(records: list[dict[str, Any]]) -> list[str]:
    """Return what all cells say together, a line for each figure: what was measured, and the target."""
    figures = Figures(f"{len(records)} of {len(CELLS)} cells.")
    add = figures.add
    ratios = [ratio_of(record) for record in records]
    mean = float(np.mean(ratios))
    add("plan / a group for each block, mean", f"{mean:.3f}", "≤ 0.95", mean <= 0.95)
    add("plan / a group for each block, worst", f"{max(ratios):.3f}", "≤ 1.01", max(ratios) <= 1.01)
    rows = [row for record in records for row in record["rows"]]
    figures.add_errors("step time", rows, 0.03, 0.08)
    taus = [value for record in records if (value := kendall(record["rows"])) is not None]
    if taus:
        add("Kendall's τ beyond the noise, mean", f"{np.mean(taus):.3f}", "≥ 0.9", bool(np.mean(taus) >= 0.9))
    over = max(plan_of(record)["counted_bytes"] / record["limit_bytes"] for record in records)
    add("counted peak of the plan / its limit, worst", f"{over:.3f}", "≤ 1", over <= 1.0)
    off = max(abs(row["peak_bytes"] / row["counted_bytes"] - 1.0) for row in rows)
    add("predicted peak against the counted one, worst", f"{off:.1%}", "≤ 5 %", off <= 0.05)
    return figures.lines


def plan_of(record: dict[str, Any]) -> dict[str, Any]:
    """The plan's row."""
    return next(row for row in record["rows"] if row["name"] == PLAN)


def ratio_of(record: dict[str, Any]) -> float:
    """How many times as long as with a group for each block the plan's step is."""
    default = next(row for row in record["rows"] if row["name"] == PER_BLOCK)
    return float(plan_of(record)["median_us"] / default["median_us"])


def table(records: list[dict[str, Any]]) -> list[str]:
    """Return a row for each wrapping of each cell."""
    columns = "cell, D and S, wrapping, groups, step ms, 95 % interval, predicted, error, peak MiB, counted, limit"
    lines = [f"| {columns.replace(', ', ' | ')} |"]
    lines.append("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for record in records:
        for row in sorted(record["rows"], key=lambda row: row["median_us"]):
            low, high = (end / 1e3 for end in row["ci95_us"])
            peak, counted, limit = (
                size_bytes / 2**20 for size_bytes in (row["peak_bytes"], row["counted_bytes"], record["limit_bytes"])
            )
            above = " (above)" if counted > limit else ""
            lines.append(
                f"| {record['cell']} | {record['dilate']:g}, {record['shrink']:g} | {row['name']} | {row['groups']} | "
                f"{row['median_us'] / 1e3:.4g} | {low:.4g} to {high:.4g} | {row['predicted_us'] / 1e3:.4g} | "
                f"{row['error']:+.1%} | {peak:.0f} | {counted:.0f}{above} | {limit:.0f} |"
            )
    return lines


if __name__ == "__main__":
    sys.exit(main())
