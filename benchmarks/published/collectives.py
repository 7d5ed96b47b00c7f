"""Measured collectives: fits and interpolations held against points that they have not seen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import numpy as np

from benchmarks.published.common import Comparison, descend, geometric, mean_log_error, table
from planner.cost.collectives import Coefficients, collective_cost, solve_link
from planner.cost.curve import CostCurve, fit_line
from planner.documents.profile import Link

Samples = list[tuple[float, float]]
"""(message_bytes, time_us)."""

Curve = Callable[[float], float]


def osu_all_reduce(nodes: int, least_bytes: int = 4) -> Samples:
    """OSU all-reduce over 10 Gbit/s Ethernet, one K80 node per rank (B-Caffe)."""
    return [
        (float(line["bytes"]), float(line["time_us"]))
        for line in table("bcaffe_infocom19/osu_allreduce_10gbe.csv")
        if int(line["nodes"]) == nodes and int(line["bytes"]) >= least_bytes
    ]


def a100_collective(name: str) -> Samples:
    """NCCL on 8 A100: `allreduce`, `allgather`, `reducescatter`, …"""
    return [
        (float(line["bytes"]), float(line["oop_time_us"]))
        for line in table("superbench_a100/nccl_tests.csv")
        if line["collective"] == name and int(line["bytes"]) > 0
    ]


def h100_gcp_all_reduce() -> Samples:
    """NCCL all-reduce on 2 × 8 H100, GCP A3 Mega."""
    return [
        (float(line["bytes"]), float(line["oop_time_us"])) for line in table("gcp_a3mega_h100/all_reduce_16gpu.csv")
    ]


def h100_efa(collective: str, nodes: int) -> Samples:
    """NCCL on nodes of 8 H100, AWS p5: `all_reduce` or `all_gather`."""
    return [
        (float(line["size_MiB"]) * 2**20, float(line["oop_time_us_derived"]))
        for line in table("aws_p5_h100/nccl_efa.csv")
        if line["collective"] == collective and int(line["nodes"]) == nodes
    ]


def h100_efa_all_reduce(nodes: int) -> Samples:
    """NCCL all-reduce on nodes of 8 H100, AWS p5."""
    return h100_efa("all_reduce", nodes)


def line_error(samples: Samples) -> float:
    """Mean relative error of one line, fitted by least squares, over the samples it was fitted to."""
    line = fit_line(samples)
    return float(np.mean([abs(line.start_up_us + line.per_byte_us * x - y) / y for x, y in samples]))


def leave_one_out_errors(samples: Samples) -> dict[float, float]:
    """Relative error of each inner sample as the curve through all the others sees it."""
    errors = {}
    for index in range(1, len(samples) - 1):
        size_bytes, time_us = samples[index]
        curve = CostCurve.from_samples([*samples[:index], *samples[index + 1 :]])
        errors[size_bytes] = abs(curve.at(size_bytes) - time_us) / time_us
    return errors


def thinned(samples: Samples, knots: int) -> Samples:
    """The `knots` samples whose joined lines are nearest to all samples, by squared relative error; exact.

    Measured points are kept, not averages, and the ends always; so a long log becomes a short document.
    """
    points = sorted(samples)
    x, y = (np.array(column) for column in zip(*points, strict=True))
    count = len(points)
    cost = np.full((count, count), np.inf)
    for i in range(count):
        for j in range(i + 1, count):
            inner = slice(i + 1, j)
            line = y[i] + (y[j] - y[i]) / (x[j] - x[i]) * (x[inner] - x[i])
            cost[i, j] = float(np.sum(((line - y[inner]) / y[inner]) ** 2))
    best = np.full((knots, count), np.inf)
    best[0, 0] = 0.0
    origin = np.zeros((knots, count), dtype=int)
    for used in range(1, knots):
        through = best[used - 1][:, None] + cost
        origin[used] = np.argmin(through, axis=0)
        best[used] = np.min(through, axis=0)
    chosen = [count - 1]
    for used in range(knots - 1, 0, -1):
        chosen.append(int(origin[used, chosen[-1]]))
    return [points[index] for index in reversed(chosen)]


def osu_knots(nodes: int, knots: int = 20) -> Samples:
    """The OSU log as a short curve; its last octave is one piece, for that piece stands for all larger messages."""
    samples = osu_all_reduce(nodes)
    last = max(samples)
    octave = min(sample for sample in samples if sample[0] >= last[0] / 2)
    return [*thinned([sample for sample in samples if sample <= octave], knots - 1), last]


@cache
def fit_ring(nodes: tuple[int, ...]) -> Link:
    """The link between nodes of 8 H100 (AWS p5) as a flat ring sees it, all cards of a node as one."""

    def at(*steps: int) -> Link:
        return Link(alpha_us=geometric(8.0, steps[0]), beta_us_per_byte=geometric(2.5e-6, steps[1]))

    def loss(*steps: int) -> float:
        return mean_log_error(comparison for count in nodes for comparison in ring_comparisons(at(*steps), count))

    return at(*descend(loss, 2))


def ring_comparisons(link: Link, nodes: int) -> list[Comparison]:
    """The measured all-reduces on `nodes` nodes of 8 H100 beside the ring formula."""
    cost = collective_cost("all_reduce/ring", 8 * nodes, link)
    return [
        Comparison(
            what=f"all-reduce of {size_bytes / 2**20:.0f} MiB on {nodes} nodes of 8 H100 (AWS p5)",
            published=time_us,
            ours=cost.start_up_us + cost.per_byte_us * size_bytes,
            unit="µs",
        )
        for size_bytes, time_us in h100_efa_all_reduce(nodes)
    ]


def relative_line(samples: Samples) -> Coefficients:
    """The line of least squared relative error, with intercept and slope ≥ 0."""
    x, y = (np.array(column) for column in zip(*samples, strict=True))
    (intercept, slope), *_ = np.linalg.lstsq(np.column_stack([1.0 / y, x / y]), np.ones_like(y), rcond=None)
    return Coefficients(max(0.0, float(intercept)), max(0.0, float(slope)))


def ring_link(collective: str, ranks: int, samples: Sequence[tuple[float, float]]) -> Link:
    """The link that makes a ring formula give the line through `samples`; four digits."""
    link = solve_link(f"{collective}/ring", ranks, relative_line(list(samples)))
    return Link(alpha_us=float(f"{link.alpha_us:.4g}"), beta_us_per_byte=float(f"{link.beta_us_per_byte:.4g}"))


def two_steps_over_one() -> list[Comparison]:
    """Time of reduce-scatter + all-gather over that of one all-reduce, 8 A100; expected ratios by the reference."""
    curves = {
        name: CostCurve.from_samples(a100_collective(name)) for name in ("allreduce", "reducescatter", "allgather")
    }
    published = {"1 MiB": (2**20, 1.94), "64 MiB": (2**26, 1.26), "256 MiB": (2**28, 1.09), "8 GiB": (2**33, 1.03)}
    return [
        Comparison(
            what=f"(reduce-scatter + all-gather) / all-reduce, {name}, 8 A100",
            published=expected,
            ours=(curves["reducescatter"].at(size) + curves["allgather"].at(size)) / curves["allreduce"].at(size),
            unit="×",
            by_construction=True,
        )
        for name, (size, expected) in published.items()
    ]
