"""Rehearses a fixed matrix of models, hosts and links, and writes docs/results/rehearsal.md.

    python -m benchmarks.rehearsal                              # what benchmarks/results/rehearsal.jsonl lacks
    python -m benchmarks.rehearsal --results new.jsonl --only gpt2 --minutes 3
    python -m benchmarks.rehearsal --scales                     # one case at three dilations

Needs root, and a machine that does nothing else. Each cell is one `planner rehearse`.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.figures import Figures
from benchmarks.marked import parser_of, tabulate
from planner.comparison.variants import DDP, NO_COMMUNICATION, PLAN
from planner.documents.newton_schulz import with_newton_schulz
from planner.rehearse.asked import Target, ask_plan, find_target
from planner.rehearse.rehearsal import rehearse
from runtime.plan.interfaces import LATE_GATHER

DOCUMENT, RESULTS = Path("docs/results/rehearsal.md"), Path("benchmarks/results/rehearsal.jsonl")
EXACT = "wfbp,single,mg_wfbp,random"
INTRA = {"latency": "3us", "bandwidth": "100gbit"}
"""Inside hosts of several ranks."""
INTER_LATENCY_US = 30.0
AT_LEAST = {PLAN: 2.4, "ssd:4": 1.5}
"""Times as fast as DDP, of bounded and relaxed cells on the slowest links."""
EXACT_PLAN, DEAR = "optimal", "dear"
LATE_STRATEGIES = f"{EXACT_PLAN},{DEAR}"
"""What gathers beside the next forward are held against."""
NARROW = {"wire:bfloat16": 1.4, "wire:int8": 2.0}
"""Times as fast as the best-tuned DDP, of cells with narrow buckets."""


@dataclass(frozen=True)
class Cell:
    """One rehearsal."""

    model: str
    hosts: str
    gbit_per_s: float
    strategies: str = EXACT
    accuracy: str = "exact"
    allow: tuple[str, ...] = ()
    compress: str | None = None
    newton_schulz: float | None = None
    """Share of the step's compute that Muon takes, see `with_newton_schulz`; None: the profile's own optimizer."""
    only_default: bool = False
    """See `AskedPlan`."""

    @property
    def key(self) -> str:
        """Return the cell's name."""
        asked = [self.accuracy, *self.allow, *([] if self.compress is None else [self.compress])]
        kind = "" if asked == ["exact"] else f" {','.join(asked)}"
        if self.newton_schulz is not None:
            kind += f" {self.newton_schulz:.0%} Newton–Schulz"
        return f"{self.model}@{self.hosts}@{self.gbit_per_s:g}gbit{kind}"

    def cluster(self) -> dict[str, Any]:
        """Return its cluster.json."""
        nodes, each = map(int, self.hosts.split("x"))
        inter = {"alpha_us": INTER_LATENCY_US, "bandwidth": f"{self.gbit_per_s:g}gbit"}
        document = {"nodes": nodes, "ranks_per_node": each, "inter": inter}
        return document | ({"intra": INTRA} if each > 1 else {})


EXACTLY = "exact plans"
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
    *(Cell(model, "8x1", 10.0, ",".join((*NARROW, "wire:native")), "bounded", compress="wire")
      for model in ("bert-base", "gpt2")),
    *(Cell(model, hosts, rate, LATE_STRATEGIES, allow=(LATE_GATHER,)) for model, hosts, rate in (
        ("resnet50", "2x1", 5.0), ("resnet50", "4x1", 10.0), ("resnet50", "8x1", 10.0), ("vgg16", "2x1", 25.0),
        ("googlenet", "2x1", 1.0), (K80, "8x1", 2.5))),
)  # fmt: skip


def main() -> int:
    """Measures what is missing, prints, writes."""
    parser = parser_of(__doc__, DOCUMENT, RESULTS)
    parser.add_argument("--minutes", type=float, default=4.0, help="of each cell")
    parser.add_argument("--scales", action="store_true", help="one case at three dilations, which have to agree")
    options = parser.parse_args()
    if options.scales:
        return _scales()
    wanted = {cell.key: partial(measure, cell, options.minutes) for cell in CELLS}
    return tabulate(DOCUMENT, {"cells": (wanted, lambda records: [*summary(records), "", *table(records)])}, options)


def measure(cell: Cell, minutes: float, dilate: float | None = None, shrink: float | None = None) -> dict[str, Any]:
    """Rehearse one cell; return what `planner rehearse --json` prints."""
    target = target_on(cell.cluster(), cell.model, minutes=minutes, dilate=dilate, shrink=shrink)
    if cell.newton_schulz is not None:
        target = replace(target, profile=with_newton_schulz(target.profile, cell.newton_schulz))
    return rehearsed(
        target, only_default=cell.only_default, strategies=cell.strategies.split(","), accuracy=cell.accuracy,
        allow=cell.allow, compress=cell.compress,
    )  # fmt: skip


def rehearsed(target: Target, *, only_default: bool = False, **asked: Any) -> dict[str, Any]:
    """Rehearse a target; `only_default` as in `AskedPlan`, `asked` as in `ask_plan`."""
    found = rehearse(replace(ask_plan(target, **asked), only_default=only_default), show_progress=True)
    return found.to_document()


def target_on(cluster: Mapping[str, Any], model: str, **options: Any) -> Target:
    """Return a model on machines that a cluster.json describes so; `options` as with `find_target`."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "cluster.json"
        file.write_text(json.dumps({"schema": "planner.cluster/1"} | dict(cluster)), encoding="utf-8")
        return find_target(model, str(file), None, **options)


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
    """Return what all cells say together, a line for each figure: what was measured, and the target."""
    figures = Figures(f"{len(records)} of {len(CELLS)} cells.")
    add = figures.add
    for what, most_mean, most_high in (
        (EXACTLY, 0.02, 0.05), ("late gathers", 0.03, 0.08), ("other plans", 0.03, 0.08)
    ):  # fmt: skip
        rows = [row for record in records for row in judged(record) if _kind(record, row) == what]
        figures.add_errors(what, rows, most_mean, most_high)
    taus = [value for record in records if (value := kendall(judged(record))) is not None]
    if taus:
        add("Kendall's τ beyond the noise, mean", f"{np.mean(taus):.3f}", "≥ 0.95", bool(np.mean(taus) >= 0.95))
    lost = [_lost(judged(record)) for record in records]
    add("lost by trusting the prediction, mean", f"{np.mean(lost):.1%}", "≤ 1 %", bool(np.mean(lost) <= 0.01))
    exact = [{row["name"]: row for row in _measured(record)} for record in records if _only_exact(record)]
    hidden = [rows[PLAN]["hidden_share"] for rows in exact if rows[PLAN]["hidden_share"] is not None]
    if hidden:
        add("hidden by exact plans, mean", f"{np.mean(hidden):.0%}", "≥ 85 %", bool(np.mean(hidden) >= 0.85))
    if exact:
        ratios = [rows[PLAN]["median_us"] / _best_ddp_us(rows) for rows in exact]
        add("exact plan / best-tuned DDP, worst", f"{max(ratios):.3f}", "≤ 1.01", max(ratios) <= 1.01)
        add("exact plan / best-tuned DDP, median", f"{np.median(ratios):.3f}", "", True)
        promised = [rows[PLAN]["predicted_us"] / _best_ddp_us(rows, "predicted_us") for rows in exact]
        kept_to = [ratio for ratio, said in zip(ratios, promised, strict=True) if said <= 0.96]
        if kept_to:
            what = "exact plan / best-tuned DDP where 0.96 or less is predicted, worst"
            add(what, f"{max(kept_to):.3f}", "≤ 0.97", max(kept_to) <= 0.97)
    for line in _late(records):
        add(*line)
    for record in records:
        at_leasts = NARROW if record["cell"].endswith("wire") else AT_LEAST if "1gbit" in record["cell"] else {}
        if _only_exact(record) or _gathers_late(record):
            continue
        ways = {row["name"]: row for row in _measured(record)}
        for name in sorted(at_leasts.keys() & ways.keys()):
            gain, at_least = _best_ddp_us(ways) / ways[name]["median_us"], at_leasts[name]
            add(f"{record['cell']}: {name}, times as fast as DDP", f"{gain:.2f}", f"≥ {at_least}", gain >= at_least)
    return figures.lines


def _measured(record: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for row in record["rows"] if row["median_us"]]


def judged(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of a cell that communicate and have a prediction."""
    return [row for row in _measured(record) if row["error"] is not None and row["name"] != NO_COMMUNICATION]


def _only_exact(record: dict[str, Any]) -> bool:
    return " " not in str(record["cell"])


def _gathers_late(record: dict[str, Any]) -> bool:
    return LATE_GATHER in record["cell"]


def _kind(record: dict[str, Any], row: dict[str, Any]) -> str:
    if _only_exact(record) or row["name"].startswith((DDP, EXACT_PLAN)):
        return EXACTLY
    return "late gathers" if _gathers_late(record) else "other plans"


def _late(records: list[dict[str, Any]]) -> Iterator[tuple[str, str, str, bool]]:
    """Return what gathers beside the next forward gain: figure, what was measured, target, whether it is met."""
    over_exact, over_dear, reached = [], [], []
    for record in filter(_gathers_late, records):
        rows = {row["name"]: row for row in _measured(record)}
        exact_us, plan_us, bound_us = rows[EXACT_PLAN]["median_us"], rows[PLAN]["median_us"], record["bound_us"]
        over_exact.append((plan_us / exact_us, bound_us / rows[EXACT_PLAN]["predicted_us"]))
        over_dear.append(plan_us / rows[DEAR]["median_us"])
        reached.append((exact_us - plan_us) / (exact_us - bound_us))
    if not over_exact:
        return
    promising = [ratio for ratio, of_bound in over_exact if of_bound <= 0.85]
    mean, what = float(np.mean(promising)), f"{len(promising)} cells whose bound is 0.85 of it or less"
    yield f"late gathers / best exact plan, mean of {what}", f"{mean:.3f}", "≤ 0.90", mean <= 0.90
    worst = max(ratio for ratio, _ in over_exact)
    yield "late gathers / best exact plan, worst", f"{worst:.3f}", "≤ 1.01", worst <= 1.01
    yield "late gathers: of the bound's gain, mean", f"{np.mean(reached):.0%}", "≥ 85 %", bool(np.mean(reached) >= 0.85)
    yield "late gathers / DeAR at its best threshold, worst", f"{max(over_dear):.3f}", "≤ 1.00", max(over_dear) <= 1.0
    mean = float(np.mean(over_dear))
    yield "late gathers / DeAR at its best threshold, mean", f"{mean:.3f}", "≤ 0.97", mean <= 0.97


def _best_ddp_us(rows: dict[str, dict[str, Any]], figure: str = "median_us") -> float:
    return min(float(row[figure]) for name, row in rows.items() if name == DDP or name.startswith("ddp:best"))


def kendall(rows: list[dict[str, Any]]) -> float | None:
    """Return Kendall's τ over the pairs whose intervals do not overlap; None where there is none."""
    signs = [
        np.sign(slower["predicted_us"] - faster["predicted_us"])
        for faster in rows
        for slower in rows
        if faster["ci95_us"][1] < slower["ci95_us"][0]
    ]
    return float(np.mean(signs)) if signs else None


def _lost(rows: list[dict[str, Any]]) -> float:
    """Return what trusting the prediction costs: the way predicted best against the one measured best."""
    chosen = min(rows, key=lambda row: float(row["predicted_us"]))
    return float(chosen["median_us"] / min(row["median_us"] for row in rows) - 1.0)


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
