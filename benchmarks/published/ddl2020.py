"""HKBU ddl-benchmarks of 2020-05-29: throughput of three models on 8 nodes of 4 GPUs, three networks.

The flat all-reduce is a ring over all ranks: α per hop and β of the link between nodes are fitted per network on the
rows with one message (BSP) and one per tensor (WFBP) of other models than the predicted one. MG-WFBP's rows are never
fitted to. Overlap is taken as free: a contention factor fitted on the two BERTs (1.4 on 10GbE) makes ResNet-50 up to
22 % too slow, and one fitted on ResNet-50 is 1, so it is no property of this cluster. MG-WFBP merges as its authors'
code did: by the lines in that code, which for 32 workers on 10GbE has a start-up of 4 ms (their constants for
InfiniBand stand for both 100 Gbit/s networks).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from benchmarks.published.common import (
    Comparison,
    authors_line,
    descend,
    geometric,
    mean_log_error,
    model,
    schedule_of,
    simulate_s,
    table,
)
from benchmarks.traces import with_step
from planner.documents.profile import Cluster, Link, Profile
from planner.ir import Schedule

NETWORKS = {"10gbe": "10GbE with TCP/IP", "100gbe": "100GbE with TCP/IP", "100gbib": "100GbIB with RDMA"}
MODELS = {"ResNet-50": "resnet50", "BERT-Base": "bert-base", "BERT-Large": "bert-large"}
METHODS = ("BSP-A2A", "WFBP-A2A", "MG-WFBP")
RANKS_PER_NODE = 4
BELIEVED = {"10gbe": "10GbE", "100gbe": "56GbIB", "100gbib": "56GbIB"}
"""Network → whose line in the authors' code decides what MG-WFBP merges."""

Row = dict[str, str]


def rows(network: str, models: Sequence[str] = tuple(MODELS), methods: Sequence[str] = METHODS) -> list[Row]:
    """The rows of a network that used it (more than one node)."""
    return [
        row
        for row in table("ddl_benchmarks_2020/throughput.csv")
        if row["network"] == NETWORKS[network]
        and row["model"] in models
        and row["method"] in methods
        and int(row["gpus"]) > RANKS_PER_NODE
    ]


@cache
def profile_of(name: str) -> Profile:
    """A model whose step takes what it takes on one GPU there."""
    [single, *_] = [
        row for row in table("ddl_benchmarks_2020/throughput.csv") if row["model"] == name and row["gpus"] == "1"
    ]
    return with_step(model(MODELS[name]), int(single["batch_per_gpu"]) / float(single["samples_per_s"]) * 1e6)


def cluster_of(network: str, alpha_us: float, beta_us_per_byte: float) -> Cluster:
    """8 nodes of 4 GPUs with a ring between them."""
    return Cluster(
        name=f"hkbu-8x4-{network}",
        nodes=8,
        ranks_per_node=RANKS_PER_NODE,
        inter=Link(alpha_us=alpha_us, beta_us_per_byte=beta_us_per_byte),
    )


@cache
def _schedule(name: str, network: str, method: str, ranks: int) -> Schedule:
    line = authors_line(BELIEVED[network], ranks)
    nodes = ranks // RANKS_PER_NODE
    believed = Cluster(nodes=nodes, ranks_per_node=RANKS_PER_NODE, collectives={"all_reduce": line})
    return schedule_of(profile_of(name), method, believed)


def compare(row: Row, network: str, cluster: Cluster) -> Comparison:
    """One row, in samples per second, beside its prediction."""
    ranks = int(row["gpus"])
    schedule = _schedule(row["model"], network, row["method"], ranks)
    step_s = simulate_s(profile_of(row["model"]), cluster, schedule, ranks)
    return Comparison(
        what=f"{row['model']} {NETWORKS[network]} {ranks} GPUs",
        method=row["method"],
        published=float(row["samples_per_s"]),
        ours=int(row["batch_per_gpu"]) * ranks / step_s,
        unit="samples/s",
    )


@cache
def fitted_cluster(network: str, models: tuple[str, ...]) -> Cluster:
    """α and β, on the rows of `models` without merging."""
    wanted = rows(network, models, ["BSP-A2A", "WFBP-A2A"])

    def at(*steps: int) -> Cluster:
        return cluster_of(network, geometric(20.0, steps[0]), geometric(4e-4, steps[1]))

    def loss(*steps: int) -> float:
        return mean_log_error(compare(row, network, at(*steps)) for row in wanted)

    return at(*descend(loss, 2))


def others(name: str) -> tuple[str, ...]:
    """The models on which constants for `name` may be fitted."""
    return tuple(other for other in MODELS if other != name)


def comparisons(network: str, name: str) -> list[Comparison]:
    """The rows of a model, with constants that were fitted on the other models."""
    cluster = fitted_cluster(network, others(name))
    return [compare(row, network, cluster) for row in rows(network, [name])]
