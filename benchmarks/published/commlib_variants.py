"""The models of CommLib's testbed among which one was chosen with Table 3 in view: how well each does there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from benchmarks.make_clusters import GBIT
from benchmarks.published import commlib
from benchmarks.published.common import Comparison
from benchmarks.published.report import swaps, table_line
from benchmarks.traces import in_dtype
from planner.documents.profile import Cluster, Contention

TORUS, TOPK = "2DTAR-SGD", "MSTopK-SGD"


@dataclass(frozen=True, kw_only=True)
class Variant:
    """What the paper leaves open."""

    dtype: str
    """Of the gradients on the wire."""
    overlap: bool
    """Whether 2DTAR-SGD runs during backward."""
    line_rate: bool
    """25 Gbit/s between nodes, and not the link that was fitted for TCP elsewhere."""
    slow_down: float = 1.0
    """Contention of compute and network."""

    @property
    def chosen(self) -> bool:
        return self == Variant(dtype="float32", overlap=True, line_rate=False)


def variants() -> list[Variant]:
    """All that were tried; contention only where there is overlap, 1.15 and 1.3 by hand, 1.46 as fitted on 16 V100."""
    plain = [
        Variant(dtype=dtype, overlap=overlap, line_rate=line_rate)
        for dtype, overlap, line_rate in product(("float16", "float32"), (False, True), (True, False))
        if line_rate or (dtype, overlap) == ("float32", True)
    ]
    slowed = [
        Variant(dtype=dtype, overlap=True, line_rate=True, slow_down=factor)
        for dtype, factor in product(("float16", "float32"), (1.15, 1.3, 1.46))
    ]
    return [*plain, *slowed]


def machines(variant: Variant) -> Cluster:
    """The testbed as a variant has it."""
    known, factor = commlib.cluster(), variant.slow_down
    inter = known.inter
    if variant.line_rate and inter is not None:
        inter = replace(inter, beta_us_per_byte=GBIT / 25)
    contention = Contention(compute=factor, network=factor) if factor != 1.0 else None
    return replace(known, inter=inter, contention=contention)


def rows(variant: Variant) -> list[Comparison]:
    """2DTAR-SGD and MSTopK-SGD of Table 3."""
    torus = commlib.torus_s if variant.overlap else commlib.torus_after_backward_s
    exposed = {TORUS: torus, TOPK: commlib.hitopk_s}
    result = []
    for row in commlib.comparisons(3):
        if row.method not in exposed:
            continue
        name, batch, _ = commlib.CELLS[row.what]
        profile = in_dtype(commlib.profile_of(row.what), variant.dtype)
        update_s = commlib.LARS_S[row.method] if name.startswith("resnet50") else 0.0
        step_s = commlib.compute_s(profile) + exposed[row.method](profile, machines(variant)) + update_s
        result.append(replace(row, ours=batch * commlib.GPUS / step_s))
    return result


def variant_lines() -> Iterator[str]:
    """A table in Markdown."""
    yield table_line("wire", "2DTAR-SGD", "between nodes", "contention", "largest error", "cells in order")
    yield table_line("---", "---", "---", "--:", "--:", "--:")
    for variant in variants():
        found = rows(variant)
        order = len(commlib.CELLS) - len({swap.first.what for swap in swaps(found)})
        yield table_line(
            "FP16" if variant.dtype == "float16" else "FP32",
            "during backward" if variant.overlap else "after backward",
            "line rate" if variant.line_rate else "TCP" + (" (used)" if variant.chosen else ""),
            f"{variant.slow_down:.2f}",
            f"{max(row.error for row in found):.1%}",
            f"{order} of {len(commlib.CELLS)}",
        )
