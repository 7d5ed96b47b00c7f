"""Ways to train that have a document of their own, rehearsed; docs/results/lags.md, muon.md and outer.md.

    python -m benchmarks.rehearsed_ways lags --write     # rehearsals that benchmarks/results/rehearsed_ways.jsonl lacks
    python -m benchmarks.rehearsed_ways muon --only 50%
    python -m benchmarks.rehearsed_ways outer --minutes 8 --dilate 1.5 --write   # more rounds, of steps less dilated

Needs root, and a machine that does nothing else. Each cell is one `planner rehearse`.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.figures import Figures
from benchmarks.marked import parser_of, tabulate
from benchmarks.rehearsal import Cell, judged, measure, table
from planner.comparison.variants import DDP, NO_COMMUNICATION, PLAN

RESULTS = Path("benchmarks/results/rehearsed_ways.jsonl")
MOST_MEAN, MOST_HIGH = 0.03, 0.08
"""Errors of predictions: the mean, and the 95th percentile."""
SLGS, ALONE, BUFFERED = "slgs:0.001", "lags:1000:0", "lags:1000"
EVERY_RANK, LONGEST_FIRST = "operators:every_rank", "operators:longest_first"
NARROW, WHOLE, FRAGMENTS = "wire:int8", "diloco:8", "outer:8"


@dataclass(frozen=True, kw_only=True)
class Limit:
    """The most that steps of one way may take of another's."""

    way: str
    over: str
    mean: float = math.inf
    worst: float = math.inf
    within: str = ""
    """Part of the names of cells that count."""
    bound: float = math.inf
    """Most that the lower bound may be of the other's predicted step, for a cell to count."""

    def ratios(self, records: Sequence[Mapping[str, Any]]) -> list[float]:
        """Return the ratios of measured steps in the cells that count."""
        found = []
        for record in records:
            rows = {row["name"]: row for row in record["rows"]}
            promised = 0.0 if math.isinf(self.bound) else record["bound_us"] / rows[self.over]["predicted_us"]
            if self.within in record["cell"] and promised <= self.bound:
                found.append(rows[self.way]["median_us"] / rows[self.over]["median_us"])
        return found

    def figures(self, records: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str, str, bool]]:
        """Yield figure, what was measured, target, and whether it is met."""
        if not (ratios := self.ratios(records)):
            return
        which = "" if math.isinf(self.bound) else f" whose bound is {self.bound:g} of it or less"
        what = f"{self.way} / {self.over} in {len(ratios)} cells{which}"
        for name, value, most in (
            ("mean", statistics.fmean(ratios), self.mean), ("worst", max(ratios), self.worst)
        ):  # fmt: skip
            if math.isfinite(most):
                yield f"{what}, {name}", f"{value:.3f}", f"≤ {most:.2f}", value <= most


@dataclass(frozen=True, kw_only=True)
class Kind:
    """The cells of a document, and its limits."""

    cells: Sequence[Cell]
    limits: Sequence[Limit]

    def lines(self, records: list[dict[str, Any]]) -> list[str]:
        """Return the limits, and a row for each way to train of each cell."""
        figures = Figures(f"{len(records)} of {len(self.cells)} cells.")
        for limit in self.limits:
            for figure in limit.figures(records):
                figures.add(*figure)
        figures.add_errors("predictions", [row for one in records for row in judged(one)], MOST_MEAN, MOST_HIGH)
        return [*figures.lines, "", *table(records)]


KINDS = {
    "lags": Kind(
        cells=[
            Cell(model, "4x1", 1.0, f"{SLGS},{ALONE},{BUFFERED}", "bounded", only_default=True)
            for model in ("resnet50", "vgg16", "inception-v4")
        ],
        limits=(
            Limit(way=SLGS, over=DDP, worst=1.0), Limit(way=BUFFERED, over=SLGS, worst=1.0),
            Limit(way=BUFFERED, over=ALONE, worst=1.0),
        ),
    ),
    "muon": Kind(
        cells=[
            Cell(model, hosts, rate, f"{EVERY_RANK},{LONGEST_FIRST}", newton_schulz=share, only_default=True)
            for share in (0.5, 0.3, 0.7)
            for model in ("gpt2", "bert-large")
            for hosts in ("4x1", "8x1")
            for rate in (10.0, 25.0)
        ],
        limits=(
            Limit(way=PLAN, over=EVERY_RANK, mean=0.60, bound=0.55),
            Limit(way=PLAN, over=LONGEST_FIRST, mean=0.93, worst=1.01),
        ),
    ),
    "outer": Kind(
        cells=[
            Cell(model, "8x1", rate, f"{NARROW},{WHOLE},{FRAGMENTS}", "relaxed", ("outer",), only_default=True)
            for model in ("gpt2", "bert-base")
            for rate in (1.0, 10.0)
        ],
        limits=(
            Limit(way=PLAN, over=NO_COMMUNICATION, worst=1.03),
            Limit(way=PLAN, over=NARROW, worst=0.5, within="@1gbit"),
            Limit(way=FRAGMENTS, over=WHOLE, worst=1.0),
            Limit(way=FRAGMENTS, over=WHOLE, mean=0.93, within="@1gbit"),
        ),
    ),
}  # fmt: skip


def main() -> int:
    """Rehearse what is missing, print, and write; 0 even where a limit is passed: the document says so."""
    parser = parser_of(__doc__, Path("docs/results/KIND.md"), RESULTS)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--minutes", type=float, default=3.0, help="of each cell")
    parser.add_argument("--dilate", type=float, help="factor of times; default: as much as the minutes allow")
    options = parser.parse_args()
    kind, document = KINDS[options.kind], Path(f"docs/results/{options.kind}.md")
    cells = {cell.key: partial(measure, cell, options.minutes, options.dilate) for cell in kind.cells}
    parts = {"rehearsed": (cells, kind.lines)}
    return tabulate(document, parts, options)


if __name__ == "__main__":
    sys.exit(main())
