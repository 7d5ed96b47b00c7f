"""The readings of CommLib's tables among which one was chosen with them in view: how well each does there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from benchmarks.published import commlib
from benchmarks.published.commlib import USED, Reading
from benchmarks.published.common import Comparison
from benchmarks.published.report import swaps, table_line


def readings() -> list[Reading]:
    """All that were tried; contention only where there is overlap, 1.15 and 1.3 by hand, 1.46 as fitted on 16 V100."""
    dtypes = ("float16", "float32")
    plain = [
        Reading(dtype=dtype, overlap=overlap, line_rate=line_rate)
        for dtype, overlap, line_rate in product(dtypes, (False, True), (True, False))
    ]
    slowed = [
        Reading(dtype=dtype, overlap=True, slow_down=factor) for dtype, factor in product(dtypes, (1.15, 1.3, 1.46))
    ]
    return [*plain, *slowed]


def variant_lines() -> Iterator[str]:
    """A table in Markdown: means of both tables, and seconds of the record."""
    heads = ("wire", "2DTAR-SGD", "between nodes", "contention", "Table 3", "cells in order", "Tables 4 and 5", "151 s")
    yield table_line(*heads)
    yield table_line("---", "---", "---", *["--:"] * 5)
    for reading in readings():
        found, record = commlib.comparisons(3, reading), commlib.record_comparison(reading)
        order = len(commlib.CELLS) - len({swap.first.what for swap in swaps(found)})
        yield table_line(
            "FP16" if reading.dtype == "float16" else "FP32",
            "during backward" if reading.overlap else "after backward",
            ("line rate" if reading.line_rate else "TCP") + (" (used)" if reading == USED else ""),
            f"{reading.slow_down:.2f}",
            _mean(found),
            f"{order} of {len(commlib.CELLS)}",
            _mean([*commlib.comparisons(4, reading), record]),
            f"{record.ours:.1f} s",
        )


def _mean(rows: Sequence[Comparison]) -> str:
    return f"{sum(row.error for row in rows) / len(rows):.1%}"
