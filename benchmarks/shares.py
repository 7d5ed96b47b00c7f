"""Rehearses ranks of unlike speeds: a plan with shares of the batch against the plan for equal shares.

    python -m benchmarks.shares                              # what benchmarks/results/shares.jsonl lacks
    python -m benchmarks.shares --only vgg16 --minutes 3

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

from benchmarks.figures import Figures
from benchmarks.rehearsal import Cell, target_on
from benchmarks.resumable import kept
from planner.comparison.variants import EQUAL_SHARES, NO_COMMUNICATION, PLAN
from planner.rehearse.asked import ask_plan
from planner.rehearse.rehearsal import rehearse

RESULTS = Path("benchmarks/results/shares.jsonl")
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
        asked = ask_plan(replace(target, profile=profile), strategies=(), global_batch=batch)
        return rehearse(asked, show_progress=True).to_document()


CELLS = tuple(
    Unequal(model=model, speed=speed, larger=larger) for larger in LARGER for model in MODELS for speed in SPEEDS
)


def main() -> int:
    """Measures what is missing and prints; 1 where a target is missed."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--results", type=Path, default=RESULTS, help=f"JSON lines: not measured again; {RESULTS}")
    parser.add_argument("--only", default="", help="cells with this in their names")
    parser.add_argument("--minutes", type=float, default=4.0, help="of each cell")
    options = parser.parse_args()
    records = kept(options.results, {cell.key: partial(cell.measure, options.minutes) for cell in CELLS}, options.only)
    if not records:
        return 3
    text = "\n".join([*summary(records), "", *table(records)])
    print(text)
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


if __name__ == "__main__":
    sys.exit(main())
