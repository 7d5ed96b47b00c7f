"""ASC-WFBP (INFOCOM 2021): all-reduces that run at the same time; 32 GPUs on 10 Gbit/s Ethernet.

The iteration times are predicted with nothing fitted to them: the links are those of hkbu-8x4-10gbe (8 nodes of 4 GPUs
and 10 Gbit/s Ethernet too, fitted on other models and methods), and the gain of two all-reduces at once over one after
the other is the measured one on 7 nodes, the largest number of nodes for which both were measured.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np

from benchmarks.published import ddl2020
from benchmarks.published.common import Comparison, authors_line, model, predict_s, schedule_of, simulate_s, table
from benchmarks.traces import with_step
from planner.documents.profile import Cluster, Link, Profile

MODELS = {"ResNet-152": "resnet152", "DenseNet-201": "densenet201", "Inception-v4": "inception-v4"}
METHODS = ("WFBP", "MG-WFBP", "ASC-WFBP")
RANKS = 32


@cache
def latencies_us() -> dict[tuple[int, int], float]:
    """(nodes, jobs) → mean time of an all-reduce of 100 MiB while so many run at once."""
    return {
        (int(line["node_num"]), int(line["job_num"])): float(line["avg_latency"])
        for line in table("asc_wfbp_infocom21/contention_100mib_10gbe.csv")
    }


def measured_gain(nodes: int, jobs: int) -> float:
    """Bytes per second of `jobs` all-reduces at once over those of one, as measured."""
    return jobs * latencies_us()[nodes, 1] / latencies_us()[nodes, jobs]


def gain(nodes: int, jobs: int, without: int | None = None) -> float:
    """The same for any number of nodes: linear between measured ones, beyond them the nearest.

    Args:
        nodes: number of nodes.
        jobs: all-reduces that run at once.
        without: leave this number of nodes out, to see what the others say about it.
    """
    known = latencies_us()
    counts = sorted(n for n, j in known if j == jobs and (n, 1) in known and n != without)
    return float(np.interp(nodes, counts, [measured_gain(count, jobs) for count in counts]))


EXPECTED_GAINS = {2: 1.56, 4: 1.34, 7: 1.31}
"""Throughput of two jobs over one, as the reference to this data set puts it."""


def gain_comparisons() -> list[Comparison]:
    """Two jobs at once, by number of nodes."""
    return [
        Comparison(
            what=f"two all-reduces at once, {nodes} nodes",
            published=value,
            ours=gain(nodes, 2),
            unit="×",
            by_construction=True,
        )
        for nodes, value in EXPECTED_GAINS.items()
    ]


def left_out_comparisons() -> list[Comparison]:
    """Two jobs at once where the other numbers of nodes have to tell; the curve bends at 2 nodes, so not there."""
    return [
        Comparison(
            what=f"two all-reduces at once, {nodes} nodes, from the others",
            published=measured_gain(nodes, 2),
            ours=gain(nodes, 2, without=nodes),
            unit="×",
        )
        for nodes in (3, 4, 5, 7)
    ]


def cluster() -> Cluster:
    """8 nodes of 4 GPUs, one all-reduce after the other."""
    return ddl2020.fitted_cluster("10gbe", tuple(ddl2020.MODELS))


def cluster_with_two_at_once() -> Cluster:
    """The same with two all-reduces always in flight, as one link that is faster by the gain."""
    plain = cluster()
    link = plain.inter or Link(alpha_us=0.0, beta_us_per_byte=0.0)
    return replace(plain, inter=replace(link, beta_us_per_byte=link.beta_us_per_byte / gain(plain.nodes, 2)))


def profile_of(name: str) -> Profile:
    """A model with the compute time of its rows."""
    [first, *_] = [line for line in table("asc_wfbp_infocom21/measured_32gpu_10gbe.csv") if line["model"] == name]
    return with_step(model(MODELS[name]), float(first["compute_s"]) * 1e6)


def predicted_s(name: str, method: str) -> float:
    """Predicted seconds of one step. ASC-WFBP's merging is taken as the best for its faster link."""
    profile = profile_of(name)
    if method == "ASC-WFBP":
        return predict_s(profile, cluster_with_two_at_once(), "optimal")
    if method == "WFBP":  # per tensor, as in the runs that the links were fitted on
        return predict_s(profile, cluster(), "wfbp")
    believed = Cluster(nodes=8, ranks_per_node=4, collectives={"all_reduce": authors_line("10GbE", RANKS)})
    return simulate_s(profile, cluster(), schedule_of(profile, method, believed))


def comparisons(name: str) -> list[Comparison]:
    """The rows of a model."""
    return [
        Comparison(
            what=name,
            method=line["method"],
            published=float(line["iteration_s_sum"]),
            ours=predicted_s(name, line["method"]),
        )
        for line in table("asc_wfbp_infocom21/measured_32gpu_10gbe.csv")
        if line["model"] == name
    ]
