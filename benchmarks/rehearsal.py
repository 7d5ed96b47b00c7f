"""Rehearses a fixed matrix of models, hosts and links, and writes docs/results/rehearsal.md.

    python -m benchmarks.rehearsal --results cells.jsonl            # resumes where an earlier run was stopped
    python -m benchmarks.rehearsal --results cells.jsonl --only gpt2 --minutes 3
    python -m benchmarks.rehearsal --scales                         # one case at three dilations

Needs root, and a machine that does nothing else. Each cell is one `planner rehearse`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.marked import replace_part
from planner.comparison.variants import DDP, NO_COMMUNICATION, PLAN
from planner.rehearse.rehearsal import make_asked, rehearse
from runtime.errors import PlannerError

DOCUMENT = Path("docs/results/rehearsal.md")
EXACT = "wfbp,single,mg_wfbp"
INTRA = {"latency": "3us", "bandwidth": "100gbit"}
"""Inside hosts of several ranks."""
INTER_LATENCY_US = 30.0


@dataclass(frozen=True)
class Cell:
    """One rehearsal."""

    model: str
    hosts: str
    gbit_per_s: float
    strategies: str = EXACT
    accuracy: str = "exact"
    allow: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """Return the cell's name."""
        kind = "" if (self.accuracy, self.allow) == ("exact", ()) else f" {','.join((self.accuracy, *self.allow))}"
        return f"{self.model}@{self.hosts}@{self.gbit_per_s:g}gbit{kind}"

    def cluster(self) -> dict[str, Any]:
        """Return its cluster.json."""
        nodes, each = map(int, self.hosts.split("x"))
        inter = {"alpha_us": INTER_LATENCY_US, "bandwidth": f"{self.gbit_per_s:g}gbit"}
        document = {"schema": "planner.cluster/1", "nodes": nodes, "ranks_per_node": each, "inter": inter}
        return document | ({"intra": INTRA} if each > 1 else {})


SCALES = {1.0: 1.5, 4.0: 2.5, 16.0: 7.0}
"""Dilations of one case, and the minutes that each gets."""
SCALED = Cell("resnet50", "2x1", 5.0, "single")
SCALED_SHRINK, SAME = 40.0, 0.03
SAME_AT_ANY_SCALE = ("none", "ddp", "single")
"""Ways to train that do not depend on what was measured."""

K80, P102 = "resnet50-k80-b32", "resnet50-96px-v100-amp-b256"
CELLS = (
    *(Cell("resnet50", hosts, rate) for hosts, rate in (("2x1", 5.0), ("4x1", 10.0), ("8x1", 25.0))),
    *(Cell("vgg16", hosts, rate) for hosts, rate in (("2x1", 10.0), ("4x1", 25.0), ("8x1", 25.0))),
    *(Cell("bert-base", hosts, rate) for hosts, rate in (("2x1", 25.0), ("4x1", 25.0), ("8x1", 25.0))),
    *(Cell("gpt2", hosts, rate) for hosts, rate in (("2x1", 10.0), ("4x1", 10.0), ("8x1", 25.0))),
    *(Cell("googlenet", hosts, rate) for hosts, rate in (("2x1", 1.0), ("4x1", 1.0), ("8x1", 10.0))),
    *(Cell(K80, hosts, rate) for hosts, rate in (("2x1", 1.0), ("4x1", 1.0), ("8x1", 10.0))),
    Cell(P102, "4x1", 25.0),
    *(Cell(model, "4x2", 10.0, f"{EXACT},torus_2d") for model in ("resnet50", "vgg16", "bert-base", "gpt2")),
    *(Cell(model, "8x1", 1.0, "slgs:0.001,lags:1000", "bounded") for model in ("gpt2", "vgg16", K80)),
    Cell("vgg16", "4x2", 10.0, "hitopk:0.01", "bounded"),
    *(Cell(model, "4x1", 1.0, "ssd:2,ssd:4", "relaxed") for model in ("resnet50", "vgg16")),
    *(Cell(model, "4x1", 10.0, "single", "exact", ("sharded-step",)) for model in ("bert-base", "gpt2")),
)  # fmt: skip


def main() -> int:
    """Measures what is missing, prints, writes; 0 even where a prediction is off: the document says so."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--results", type=Path, help="JSON lines: not measured again")
    parser.add_argument("--only", help="cells with this in their names")
    parser.add_argument("--minutes", type=float, default=4.0, help="of each cell")
    parser.add_argument("--scales", action="store_true", help="one case at three dilations, which have to agree")
    parser.add_argument("--write", action="store_true", help=f"put what is known into {DOCUMENT}")
    options = parser.parse_args()
    if options.scales:
        return _scales()
    if options.results is None:
        parser.error("found no --results, expected a file to resume from, which may be new: --results cells.jsonl")
    lines = options.results.read_text(encoding="utf-8").splitlines() if options.results.exists() else []
    done = {record["cell"]: record for record in map(json.loads, lines)}
    for cell in CELLS:
        if cell.key in done or (options.only and options.only not in cell.key):
            continue
        started = time.monotonic()
        try:
            done[cell.key] = {"cell": cell.key} | measure(cell, options.minutes)
        except PlannerError as error:
            print(f"{cell.key}: {error}", file=sys.stderr)
            continue
        print(f"{cell.key}: {time.monotonic() - started:.0f} s", file=sys.stderr)
        with options.results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(done[cell.key]) + "\n")
    records = [done[cell.key] for cell in CELLS if cell.key in done]
    if not records:
        return 3
    text = "\n".join([*summary(records), "", *table(records)])
    print(text)
    if options.write:
        document = replace_part(DOCUMENT.read_text(encoding="utf-8"), "cells", text)
        DOCUMENT.write_text(document, encoding="utf-8")
    return 0


def measure(cell: Cell, minutes: float, dilate: float | None = None, shrink: float | None = None) -> dict[str, Any]:
    """Rehearse one cell; return what `planner rehearse --json` prints."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "cluster.json"
        file.write_text(json.dumps(cell.cluster()), encoding="utf-8")
        asked = make_asked(
            cell.model, str(file), None, strategies=cell.strategies.split(","), accuracy=cell.accuracy,
            allow=cell.allow, minutes=minutes, dilate=dilate, shrink=shrink,
        )  # fmt: skip
        return rehearse(asked, show_progress=True).to_document()


def _scales() -> int:
    """Print one case at each dilation; 1 where a row of one is too far from that of another."""
    found = {}
    for dilate, minutes in SCALES.items():
        rows = {row["name"]: row for row in measure(SCALED, minutes, dilate, SCALED_SHRINK)["rows"]}
        found[dilate] = [rows[name]["median_us"] / 1e3 for name in SAME_AT_ANY_SCALE]
    print(f"| {SCALED.key} | {' | '.join(f'D = {dilate:g}' for dilate in SCALES)} | apart |")
    worst = 0.0
    for name, times_ms in zip(SAME_AT_ANY_SCALE, zip(*found.values(), strict=True), strict=True):
        apart = max(times_ms) / min(times_ms) - 1.0
        worst = max(worst, apart)
        print(f"| {name} | {' | '.join(f'{time_ms:.2f} ms' for time_ms in times_ms)} | {apart:.1%} |")
    return int(worst > SAME)


def summary(records: list[dict[str, Any]]) -> list[str]:
    """Return what all cells say together."""
    judged = [row for record in records for row in record["rows"] if row["median_us"] and row["error"] is not None]
    errors = np.array([abs(row["error"]) for row in judged if row["name"] != NO_COMMUNICATION])
    hidden, ratios, gains = [], [], []
    for record in records:
        rows = {row["name"]: row for row in record["rows"] if row["median_us"]}
        plan = rows[PLAN]
        if plan["hidden_share"] is not None:
            hidden.append(plan["hidden_share"])
        best = min(row["median_us"] for name, row in rows.items() if name == DDP or name.startswith("ddp:best"))
        ratios.append(plan["median_us"] / best)
        gains.append(plan["median_us"] / rows[DDP]["median_us"])
    return [
        f"{len(records)} cells, {len(errors)} rows with communication: mean error {errors.mean():.1%}, 95th percentile "
        f"{np.quantile(errors, 0.95):.1%}. The plan hides {np.mean(hidden):.0%} of what could be hidden; its step is "
        f"{np.median(ratios):.3f} of the best-tuned DDP's in the median ({min(ratios):.3f} to {max(ratios):.3f}), and "
        f"{np.median(gains):.3f} of DDP's with default buckets ({min(gains):.3f} to {max(gains):.3f})."
    ]


def table(records: list[dict[str, Any]]) -> list[str]:
    """Return a row for each way to train of each cell."""
    lines = ["| cell | D, S | way | step ms | 95 % interval | predicted | error | by constants | hidden |"]
    lines.append("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for record in records:
        for row in sorted((row for row in record["rows"] if row["median_us"]), key=lambda row: row["median_us"]):
            low, high = (end / 1e3 for end in row["ci95_us"])
            predicted = "" if row["predicted_us"] is None else f"{row['predicted_us'] / 1e3:.4g}"
            error = "" if row["error"] is None else f"{row['error']:+.1%}"
            constants = "" if row["from_constants_us"] is None else f"{row['from_constants_us'] / 1e3:.4g}"
            hidden = "" if row["hidden_share"] is None else f"{row['hidden_share']:.0%}"
            lines.append(
                f"| {record['cell']} | {record['dilate']:g}, {record['shrink']:g} | {row['name']} | "
                f"{row['median_us'] / 1e3:.4g} | {low:.4g} to {high:.4g} | {predicted} | {error} | {constants} | "
                f"{hidden} |"
            )
    return lines


if __name__ == "__main__":
    sys.exit(main())
