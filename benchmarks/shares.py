"""Ranks of unlike speeds: a plan with shares of the batch against the plan for equal shares; docs/results/shares.md.

    python -m benchmarks.shares --write                      # rehearsals that benchmarks/results/shares.jsonl lacks
    python -m benchmarks.shares --only vgg16 --minutes 3
    python -m benchmarks.shares --busy --minutes 4 --write   # real training on two hosts, one with a busy core

Needs root, and a machine that does nothing else. Each cell is one `planner rehearse --global-batch`, whose blocks are
interleaved. Profiles of the catalogue do not say their batch: it is taken to have `BATCH` samples, all of whose time
grows with them. Batches are of that size on average, and several times as large, for which links are faster.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import busy_host
from benchmarks.figures import Figures
from benchmarks.marked import write_part
from benchmarks.rehearsal import Cell, rehearsed, target_on
from benchmarks.resumable import kept
from planner.comparison.variants import DDP, EQUAL_SHARES, NO_COMMUNICATION, PLAN

DOCUMENT, RESULTS = Path("docs/results/shares.md"), Path("benchmarks/results/shares.jsonl")
BATCH, LARGER = 32, (1, 8)
"""Samples of the profiled step, and sizes of batches over it."""
MODELS, SPEEDS, GBIT_PER_S = ("vgg16", "bert-base"), ((1.0, 1.0, 0.5, 0.5), (1.0, 0.75, 0.5)), 10.0
PROMISED, MOST, MOST_ERROR = 0.67, 0.70, 0.03
"""Ratio of the bound to equal shares from which the plan has to be at most `MOST` of them; error of predictions."""


@dataclass(frozen=True, kw_only=True)
class Unequal:
    """One rehearsal."""

    model: str
    speed: tuple[float, ...]
    larger: int

    @property
    def key(self) -> str:
        """Return the cell's name."""
        return f"{self.model}@{':'.join(f'{one:g}' for one in self.speed)}@{self.larger}x{BATCH}"

    def measure(self, minutes: float) -> dict[str, Any]:
        """Return what `planner rehearse --global-batch --json` prints."""
        ranks = len(self.speed)
        cluster = Cell(self.model, f"{ranks}x1", GBIT_PER_S).cluster() | {"speed": list(self.speed)}
        target = target_on(cluster, self.model, minutes=minutes)
        profile = replace(target.profile, world=replace(target.profile.world, batch_per_rank=BATCH))
        batch = self.larger * BATCH * ranks
        # Neither DDP's hooks nor its bucket sizes; until the ratio of both plans is known well enough.
        return rehearsed(replace(target, profile=profile), only_default=True, strategies=(), global_batch=batch)


CELLS = tuple(
    Unequal(model=model, speed=speed, larger=larger) for larger in LARGER for model in MODELS for speed in SPEEDS
)


BUSY = f"busy@{busy_host.HOSTS}@{busy_host.BATCH}"
MOST_BUSY, MOST_APART = 0.85, 1e-9
"""Ratio of steps, and difference of losses in float64, of real training."""


def main() -> int:
    """Measures what is missing, prints, writes; 1 where a target is missed."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--results", type=Path, default=RESULTS, help=f"JSON lines: not measured again; {RESULTS}")
    parser.add_argument("--only", default="", help="cells with this in their names")
    parser.add_argument("--minutes", type=float, default=2.5, help="of each cell")
    parser.add_argument("--busy", action="store_true", help="real training in place of the rehearsals")
    parser.add_argument("--write", action="store_true", help=f"put what is known into {DOCUMENT}")
    options = parser.parse_args()
    cells = {BUSY: busy_host.measure} if options.busy else {cell.key: cell.measure for cell in CELLS}
    wanted = {key: partial(measure, options.minutes) for key, measure in cells.items()}
    records = kept(options.results, wanted, options.only)
    if not records:
        return 3
    text = "\n".join(busy(records[0]) if options.busy else [*summary(records), "", *table(records)])
    print(text)
    if options.write:
        write_part(DOCUMENT, "busy" if options.busy else "cells", text)
    return int("**no**" in text)


def rows_of(record: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the measured rows of a cell by name."""
    return {row["name"]: row for row in record["rows"] if row["median_us"]}


def bound(record: dict[str, Any]) -> float:
    """Return the least step of any shares and buckets over the predicted one with equal shares."""
    return float(record["bound_us"] / rows_of(record)[EQUAL_SHARES]["predicted_us"])


def ratio(record: dict[str, Any]) -> float:
    """Return the measured step with shares over that with equal ones."""
    rows = rows_of(record)
    return float(rows[PLAN]["median_us"] / rows[EQUAL_SHARES]["median_us"])


def summary(records: list[dict[str, Any]]) -> list[str]:
    """Return a line for each figure: what was measured, and the target."""
    figures = Figures(f"{len(records)} of {len(CELLS)} cells.")
    promised = [ratio(record) for record in records if round(bound(record), 2) <= PROMISED]
    if promised:
        what = f"plan with shares / equal shares, worst of {len(promised)} cells whose bound is {PROMISED} or less"
        figures.add(what, f"{max(promised):.3f}", f"≤ {MOST:.2f}", max(promised) <= MOST)
    worst = max(map(ratio, records))
    figures.add("plan with shares / equal shares, worst", f"{worst:.3f}", "≤ 1.01", worst <= 1.01)
    rows = [rows_of(record)[name] for record in records for name in (EQUAL_SHARES, PLAN)]
    error = float(np.mean([abs(row["error"]) for row in rows]))
    figures.add("prediction, mean error", f"{error:.1%}", f"≤ {MOST_ERROR:.0%}", error <= MOST_ERROR)
    return figures.lines


def table(records: list[dict[str, Any]]) -> list[str]:
    """Return a row for each cell."""
    lines = ["| cell | equal shares ms | shares ms | ratio | bound | predicted ms | errors | no communication ms |"]
    lines.append("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for record in records:
        rows = rows_of(record)
        equal, plan = rows[EQUAL_SHARES], rows[PLAN]
        times = [row["median_us"] / 1e3 for row in (equal, plan, rows[NO_COMMUNICATION])]
        lines.append(
            f"| {record['cell']} | {times[0]:.4g} | {times[1]:.4g} | {ratio(record):.3f} | {bound(record):.3f} | "
            f"{equal['predicted_us'] / 1e3:.4g}, {plan['predicted_us'] / 1e3:.4g} | {equal['error']:+.1%}, "
            f"{plan['error']:+.1%} | {times[2]:.4g} |"
        )
    return lines


def busy(record: dict[str, Any]) -> list[str]:
    """Return the figures of real training, and its steps."""
    low, high = record["ci95"]
    steps_ms = {name: us / 1e3 for name, us in record["steps_us"].items() if us}
    figures = Figures(f"Shares {record['shares']}, {record['rounds']} rounds.")
    measured = f"{record['ratio']:.3f} (95 %: {low:.3f} to {high:.3f})"
    figures.add("planned shares / equal shares", measured, f"≤ {MOST_BUSY:.2f}", record["ratio"] <= MOST_BUSY)
    what = f"largest relative difference of losses in {busy_host.LOSS_STEPS} steps, float64"
    figures.add(what, f"{record['apart']:.1e}", f"≤ {MOST_APART:g}", record["apart"] <= MOST_APART)
    names = {DDP: "DDP", EQUAL_SHARES: "equal shares", PLAN: "planned shares", NO_COMMUNICATION: "no communication"}
    row = " | ".join(f"{steps_ms[name]:.4g}" for name in names)
    predicted_ms, (first, last) = record["predicted_us"] / 1e3, record["losses"]
    return [
        *figures.lines, "", f"| {' ms | '.join(names.values())} ms | predicted ms | loss |", "| --- " * 6 + "|",
        f"| {row} | {predicted_ms:.4g} | {first:.3f} → {last:.3f} |",
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
