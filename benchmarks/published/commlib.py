"""CommLib (MLSys 2021): Tables 3, 4 and 5; 16 nodes of 8 V100, NVLink inside and one 25 Gbit/s card for each node.

Nothing is fitted to these tables. The links are line rates (v100-16x8-25gbe). Each method sends one message after
backward: TreeAR as a binary tree over all ranks, 2DTAR as 2D-torus, MSTopK-SGD as HiTopKComm with 1 % of the elements
(Sec. 5.3), the time of MSTopK's selection left out, for it is not printed. For ResNet-50 the step includes LARS as
Sec. 5.4 prints it: 11 ms, and 7 ms with PTO, which MSTopK-SGD uses.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache

from benchmarks.published.common import DATA, Comparison, model, predict_s, table
from benchmarks.traces import with_step
from planner.catalog import find_cluster
from planner.cost.phases import sparse_hitopk_us
from planner.ir import Schedule
from planner.problem import make_problem
from planner.profile.document import Cluster, Profile
from planner.simulator import simulate_schedule

GPUS = 128
DENSITY = 0.01
LARS_S = {"Dense-SGD (TreeAR)": 0.011, "2DTAR-SGD": 0.011, "MSTopK-SGD": 0.007}
METHODS = ("Dense-SGD (TreeAR)", "2DTAR-SGD", "MSTopK-SGD")

CELLS = {
    "ResNet-50 (224x224)": ("resnet50-224px-v100-fp16-b256", 256, 1150.0),
    "ResNet-50 (96x96)": ("resnet50-96px-v100-fp16-b256", 256, 4400.0),
    "VGG-19": ("vgg19-v100-fp16-b256", 256, 560.0),
}
"""Table 3: model → (document, batch, images per second on one GPU). The Transformer's batch and size are not known."""

CELLS_OF_TABLE_4 = {
    "ResNet-50 (96x96)": ("resnet50-96px-v100-fp16-b256", 256, 4400.0),
    "ResNet-50 (128x128)": ("resnet50-128px-v100-fp16-b256", 256, 3010.0),
    "ResNet-50 (224x224)": ("resnet50-224px-v100-fp16-b256", 256, 1240.0),
    "ResNet-50 (288x288)": ("resnet50-224px-v100-fp16-b256", 128, 710.0),
}

TABLE_5 = {
    "FastAI": ("commlib-056", "fastai_resnet50_p3_16_machine_pytorch"),
    "Huawei 2018": ("commlib-057", "huaweicloud_resnet50_modelarts_16_machine_mxnet121"),
    "Huawei 2019": ("commlib-058", "huaweicloud_resnet50_modelarts_16_machine_tensorflow18"),
    "Alibaba": ("commlib-059", "alibabacloud_resnet50_gn6e_16_machine_tensorflow"),
}
"""Table 5: team → (record, DAWNBench entry)."""


@cache
def records() -> tuple[dict[str, object], ...]:
    """The records of this paper."""
    found = json.loads((DATA / "paper_tables.json").read_text(encoding="utf-8"))
    return tuple(record for record in found if record["id"].startswith("commlib-"))


def cluster(shared_cards: bool = True) -> Cluster:
    """The testbed; without sharing, every GPU has a network card of its own."""
    known = find_cluster("v100-16x8-25gbe")
    return known if shared_cards else replace(known, nics_per_node=known.ranks_per_node)


def torus_s(profile: Profile, machines: Cluster) -> float:
    """Exposed seconds of one 2D-torus all-reduce of all gradients after backward."""
    problem = make_problem(profile, machines)
    schedule = Schedule.from_boundaries([problem.count], "torus_2d")
    return (simulate_schedule(problem, schedule).iteration_us - problem.compute_end_us) / 1e6


def tree_s(profile: Profile, machines: Cluster) -> float:
    """Exposed seconds of one flat binary-tree all-reduce after backward."""
    flat = replace(machines, all_reduce_algorithm="binary_tree")
    compute_us = profile.compute.forward_us + sum(gradient.backward_us for gradient in profile.compute.gradients)
    return predict_s(profile, flat, "single") - compute_us / 1e6


def hitopk_s(profile: Profile, machines: Cluster) -> float:
    """Exposed seconds of one HiTopKComm of all gradients after backward, selection left out."""
    gradients = profile.compute.gradients
    element_bytes = gradients[0].size_bytes // gradients[0].numel
    phases = sparse_hitopk_us(machines, sum(gradient.numel for gradient in gradients), DENSITY, element_bytes)
    return sum(time_us for _, time_us in phases) / 1e6


EXPOSED: dict[str, Callable[[Profile, Cluster], float]] = {
    "Dense-SGD (TreeAR)": tree_s,
    "2DTAR-SGD": torus_s,
    "MSTopK-SGD": hitopk_s,
}


def throughput(name: str, batch: int, rate: float, method: str) -> float:
    """Predicted images per second of all GPUs."""
    compute_s = batch / rate
    profile = with_step(model(name), compute_s * 1e6)
    update_s = LARS_S[method] if name.startswith("resnet50") else 0.0
    return batch * GPUS / (compute_s + EXPOSED[method](profile, cluster()) + update_s)


def comparisons(number: int = 3) -> list[Comparison]:
    """Table 3 or 4."""
    cells = CELLS if number == 3 else CELLS_OF_TABLE_4
    return [
        Comparison(
            what=f"{record['model']} {record['method']}",
            published=float(str(record["value"])),
            ours=throughput(*cells[str(record["model"])], str(record["method"])),
            unit="images/s",
        )
        for record in records()
        if record["table_or_figure"] == f"Table {number}"
        and record["metric"] == "throughput, 128 GPUs"
        and record["model"] in cells
    ]


def transformer_exposed_s() -> dict[str, float]:
    """Exposed seconds of each method for the base Transformer; whatever the batch, this decides their order."""
    profile = model("transformer")
    return {method: exposed(profile, cluster()) for method, exposed in EXPOSED.items()}


def times_to_accuracy() -> list[Comparison]:
    """Table 5 beside the entries of DAWNBench that it cites."""
    entries = {line["entry"]: float(line["seconds_to_93_top5"]) for line in table("dawnbench/imagenet_train.csv")}
    values = {str(record["id"]): float(str(record["value"])) for record in records() if record["id"] in _cited()}
    return [
        Comparison(what=f"{team}, time to 93 % top-5", published=values[record], ours=entries[entry])
        for team, (record, entry) in TABLE_5.items()
    ]


def _cited() -> set[str]:
    return {record for record, _ in TABLE_5.values()}
