"""Dense > SLGS > LAGS, rehearsed on four hosts at 1 Gbit/s, with the buffer of the paper and without it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.rehearsal import Cell, measure
from benchmarks.resumable import kept
from planner.comparison.variants import DDP

MODELS = ("resnet50", "vgg16", "inception-v4")
SLGS, ALONE, BUFFERED = "slgs:0.001", "lags:1000:0", "lags:1000"
MINUTES = 4.0


def records(results: Path | None) -> list[dict[str, Any]]:
    """Rehearse the cells that are not known yet; four minutes each, as root."""
    cells = [Cell(model, "4x1", 1.0, f"{SLGS},{ALONE},{BUFFERED}", "bounded") for model in MODELS]
    return kept(results, {cell.key: partial(measure, cell, MINUTES) for cell in cells})


def lines(found: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """One row per model: steps in milliseconds."""
    yield (
        "| cell | D, S | DDP | SLGS | Eq. 19, a message a layer | Eq. 19 with the buffer | buffer / SLGS | predicted |"
    )
    yield "| --- | --- " + "| --: " * 6 + "|"
    for record in found:
        rows = {row["name"]: row for row in record["rows"]}
        times = [f"{rows[name]['median_us'] / 1e3:,.1f}" for name in (DDP, SLGS, ALONE, BUFFERED)]
        ratios = [f"{rows[BUFFERED][field] / rows[SLGS][field]:.2f}" for field in ("median_us", "predicted_us")]
        scale = f"{record['dilate']:g}, {record['shrink']:g}"
        yield f"| {' | '.join([record['cell'], scale, *times, *ratios])} |"
