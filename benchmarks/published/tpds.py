"""MG-WFBP, TPDS version: iteration times of convolutional networks on 4 nodes of 4 V100 (plotting data of the authors).

Constants: α of the all-reduce on 16 ranks from the authors' own table; β from the rows with one message (SyncEASGD),
since the table's was fitted on small messages and is below what the link can do; one contention factor for
the testbed, the same for compute and network and on both networks, from the rows of WFBP and MG-WFBP. To predict a
model, β and the factor are fitted on the other models only. MG-WFBP merges as its authors' code did: by the table's α
and β, and without contention.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from benchmarks.published.common import (
    Comparison,
    authors_line,
    descend,
    factor,
    mean_log_error,
    model,
    predict_s,
    schedule_of,
    simulate_s,
    table,
)
from benchmarks.traces import in_dtype, with_step
from planner.documents.profile import Cluster, Contention, Line, Profile
from planner.ir import Schedule

NETWORKS = ("10GbE", "56GbIB")
MODELS = {"ResNet-152": "resnet152", "DenseNet-161": "densenet161", "Inception-v4": "inception-v4"}
METHODS = ("WFBP", "SyncEASGD", "MG-WFBP")
DTYPES = {"fp32": "float32", "fp16": "float16"}
RANKS = 16

Row = dict[str, str]


def rows(network: str, models: Sequence[str] = tuple(MODELS), methods: Sequence[str] = METHODS) -> list[Row]:
    """The measured rows of a network."""
    wanted = (row for row in table("mgwfbp_tpds/measured_iteration_16xV100.csv") if row["network"] == network)
    return [row for row in wanted if row["model"] in models and row["method"] in methods]


@cache
def profile_of(name: str, precision: str, compute_s: str) -> Profile:
    """A model with the compute time and precision of a row."""
    return in_dtype(with_step(model(MODELS[name]), float(compute_s) * 1e6), DTYPES[precision])


def row_profile(row: Row) -> Profile:
    """The model of a row with the row's compute time and precision."""
    return profile_of(row["model"], row["precision"], row["compute_s"])


@cache
def _schedule(name: str, precision: str, compute_s: str, network: str, method: str) -> Schedule:
    believed = cluster_of(network, authors_line(network, RANKS).beta_us_per_byte)
    return schedule_of(profile_of(name, precision, compute_s), method, believed)


def fit_beta(network: str, models: Sequence[str]) -> float:
    """β in µs per byte from the rows with one message, by least squares of the relative error of the step."""
    moment = weight = 0.0
    for row in rows(network, models, ["SyncEASGD"]):
        size_bytes = sum(gradient.size_bytes for gradient in row_profile(row).compute.gradients)
        step_us = float(row["iteration_s"]) * 1e6
        sent_us = step_us - float(row["compute_s"]) * 1e6 - authors_line(network, RANKS).alpha_us
        moment += size_bytes * sent_us / step_us**2
        weight += size_bytes**2 / step_us**2
    return float(f"{moment / weight:.4g}")


def cluster_of(network: str, beta_us_per_byte: float, slow_down: float = 1.0) -> Cluster:
    """The 16 V100 on a network."""
    alpha_us = authors_line(network, RANKS).alpha_us
    return Cluster(
        name=f"v100-4x4-{network.lower()}",
        nodes=4,
        ranks_per_node=4,
        collectives={"all_reduce": Line(alpha_us=alpha_us, beta_us_per_byte=beta_us_per_byte)},
        contention=Contention(compute=slow_down, network=slow_down),
    )


@cache
def fit_contention(models: tuple[str, ...]) -> float:
    """The factor from the rows with overlap, on both networks."""
    betas = {network: fit_beta(network, models) for network in NETWORKS}

    def loss(step: int) -> float:
        return mean_log_error(
            compare(row, cluster_of(network, betas[network], factor(step)))
            for network in NETWORKS
            for row in rows(network, models, ["WFBP", "MG-WFBP"])
        )

    return factor(descend(loss, 1)[0])


@cache
def fitted_cluster(network: str, models: tuple[str, ...]) -> Cluster:
    """β and contention factor fitted on `models`."""
    return cluster_of(network, fit_beta(network, models), fit_contention(models))


def others(name: str) -> tuple[str, ...]:
    """The models on which constants for `name` may be fitted."""
    return tuple(other for other in MODELS if other != name)


def compare(row: Row, cluster: Cluster) -> Comparison:
    """One row beside its prediction on a cluster."""
    schedule = _schedule(row["model"], row["precision"], row["compute_s"], row["network"], row["method"])
    return Comparison(
        what=f"{row['model']} {row['precision']} {row['network']}",
        method=row["method"],
        published=float(row["iteration_s"]),
        ours=simulate_s(row_profile(row), cluster, schedule),
    )


def without_contention() -> list[Comparison]:
    """The rows with overlap as they would be if compute and network did not slow each other down."""
    return [
        compare(row, cluster_of(network, fit_beta(network, others(name))))
        for network in NETWORKS
        for name in MODELS
        for row in rows(network, [name], ["WFBP", "MG-WFBP"])
    ]


def by_tensor_instead(network: str) -> list[Comparison]:
    """WFBP's rows with one message per tensor and not per layer, all constants as they are."""
    result = []
    for name in MODELS:
        cluster = fitted_cluster(network, others(name))
        for row in rows(network, [name], ["WFBP"]):
            ours = predict_s(row_profile(row), cluster, "wfbp")
            result.append(Comparison(what=name, published=float(row["iteration_s"]), ours=ours))
    return result


def comparisons(network: str, name: str) -> list[Comparison]:
    """The rows of a model, with constants that were fitted on the other models."""
    cluster = fitted_cluster(network, others(name))
    return [compare(row, cluster) for row in rows(network, [name])]
