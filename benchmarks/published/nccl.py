"""NCCL's cost model against published measurements of NCCL: fitted on a part of them, and described by machine alone.

H100 on AWS p5 is fitted on 2 and 4 nodes and predicted on 8. 8 A100 and 2 × 8 H100 (GCP A3 Mega) were measured on one
number of ranks each: fitted on every second size, predicted on the others. By machine alone nothing is fitted; NCCL's
constants of version 2.30.7 meet whatever version was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from benchmarks.published.collectives import (
    Samples,
    a100_collective,
    h100_efa,
    h100_efa_all_reduce,
    h100_gcp_all_reduce,
)
from benchmarks.published.common import Comparison
from planner.cost import nccl
from planner.cost.nccl import Shape
from planner.cost.nccl_fit import Measured, fit
from planner.documents.catalog import find_cluster
from planner.documents.nccl import Nccl

A100 = {"all_reduce": "allreduce", "reduce_scatter": "reducescatter", "all_gather": "allgather"}


def machine(name: str) -> Nccl:
    """The description of a cluster of the catalogue, without any fit."""
    described = find_cluster(name).nccl
    assert described is not None
    return replace(described, fit=None)


@cache
def fitted_p5() -> Nccl:
    """AWS p5, fitted on all-reduces on 2 and 4 nodes."""
    return fit(machine("aws-p5"), [_measured("all_reduce", nodes, h100_efa_all_reduce(nodes)) for nodes in (2, 4)])


@cache
def fitted_a100() -> Nccl:
    """8 A100, fitted on every second size of three collectives."""
    return fit(machine("dgx-a100"), [_measured(key, 1, a100_collective(name)[::2]) for key, name in A100.items()])


@cache
def fitted_a3() -> Nccl:
    """2 × 8 H100 on A3 Mega, fitted on every second size."""
    return fit(machine("gcp-a3-mega"), [_measured("all_reduce", 2, h100_gcp_all_reduce()[::2])])


def _measured(collective: str, nodes: int, samples: Samples) -> Measured:
    return Measured(collective, nodes, 8, tuple(samples))


def compare(described: Nccl, collective: str, nodes: int, samples: Samples, where: str) -> list[Comparison]:
    """Measured times beside the model's."""
    times = nccl.times_us(collective, Shape(described, nodes, 8), [size for size, _ in samples])
    name = collective.replace("_", "-")
    return [
        Comparison(what=f"{name} of {_size(size)} on {where}", published=measured, ours=float(ours), unit="µs")
        for (size, measured), ours in zip(samples, times, strict=True)
    ]


def _size(size_bytes: float) -> str:
    for unit, scale in (("MiB", 2**20), ("KiB", 2**10)):
        if size_bytes >= scale:
            return f"{size_bytes / scale:g} {unit}"
    return f"{size_bytes:g} B"


def p5_rows() -> list[Comparison]:
    """8 nodes, from 2 and 4."""
    return compare(fitted_p5(), "all_reduce", 8, h100_efa_all_reduce(8), "8 nodes of 8 H100 (AWS p5)")


def a100_rows() -> list[Comparison]:
    """The sizes that were not fitted on."""
    return [
        row
        for key, name in A100.items()
        for row in compare(fitted_a100(), key, 1, a100_collective(name)[1::2], "8 A100")
    ]


def a3_rows() -> list[Comparison]:
    """Likewise."""
    return compare(fitted_a3(), "all_reduce", 2, h100_gcp_all_reduce()[1::2], "2 nodes of 8 H100 (A3 Mega)")


def described_tables() -> dict[str, list[Comparison]]:
    """By machine description alone, every published row, by table."""
    p5 = machine("aws-p5")
    tables = {
        f"all-reduce, {nodes} nodes of 8 H100 (AWS p5)": compare(
            p5, "all_reduce", nodes, h100_efa_all_reduce(nodes), f"{nodes} nodes of 8 H100 (AWS p5)"
        )
        for nodes in (2, 4, 8)
    }
    for nodes in (2, 4, 8, 16, 32):
        where = f"{nodes} nodes of 8 H100 (AWS p5)"
        tables[f"all-gather, {where}"] = compare(p5, "all_gather", nodes, h100_efa("all_gather", nodes), where)
    for key, name in A100.items():
        rows = compare(machine("dgx-a100"), key, 1, a100_collective(name), "8 A100")
        tables[f"{key.replace('_', '-')}, 8 A100"] = rows
    where = "2 nodes of 8 H100 (A3 Mega)"
    tables[f"all-reduce, {where}"] = compare(machine("gcp-a3-mega"), "all_reduce", 2, h100_gcp_all_reduce(), where)
    return tables


def quantile_lines(tables: dict[str, Sequence[Comparison]]) -> list[str]:
    """A table of median and largest error."""
    lines = ["| rows | number | median error | 9 of 10 within | largest |", "| --- | --: | --: | --: | --: |"]
    for name, rows in tables.items():
        errors = sorted(row.error for row in rows)
        nine = errors[min(len(errors) - 1, int(0.9 * len(errors)))]
        lines.append(f"| {name} | {len(errors)} | {middle(rows):.1%} | {nine:.1%} | {errors[-1]:.1%} |")
    return lines


def middle(rows: Sequence[Comparison]) -> float:
    """The median error."""
    errors = sorted(row.error for row in rows)
    half = len(errors) // 2
    return errors[half] if len(errors) % 2 else (errors[half - 1] + errors[half]) / 2.0
