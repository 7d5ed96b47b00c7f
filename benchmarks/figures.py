"""The table of what all cells of a benchmark say together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


class Figures:
    """A row for each figure: what was measured, its target, and whether that is met."""

    def __init__(self, cells: str) -> None:
        self.lines = [cells, "", "| figure | measured | target | met |", "| --- | --- | --- | --- |"]

    def add(self, what: str, measured: str, target: str, met: bool) -> None:
        """Add a figure."""
        self.lines.append(f"| {what} | {measured} | {target} | {'yes' if met else '**no**'} |")

    def add_errors(self, what: str, rows: Sequence[Mapping[str, Any]], most_mean: float, most_high: float) -> None:
        """Add by how much predicted steps are off: the mean, and the 95th percentile; nothing where there are none."""
        if not rows:
            return
        errors = np.abs([row["error"] for row in rows])
        mean, high = float(errors.mean()), float(np.quantile(errors, 0.95))
        self.add(f"{what}, {len(rows)} rows: mean error", f"{mean:.1%}", f"≤ {most_mean:.0%}", mean <= most_mean)
        self.add(f"{what}: 95th percentile", f"{high:.1%}", f"≤ {most_high:.0%}", high <= most_high)
