"""CommLib (MLSys 2021): Tables 3, 4 and 5; 16 nodes of 8 V100, NVLink inside and one 25 Gbit/s card for each node.

No number was fitted to these tables, but what the paper leaves open was chosen with them in view; a table below shows
every variant that was tried. So they are no independent check. Gradients are sent in FP16, as in the paper's Fig. 7,
at the line rate of its Table 1, and no method overlaps with backward. The reasons: TreeAR comes out within 11 % in
FP16, and at half of its speed in FP32. In Table 4, 2DTAR-SGD exposes 36, 42 and 44 ms after 85, 206 and 180 ms of
computation, so that longer computation hides no more; in FP32 it would expose 76 ms, with LARS. Against it: in Table 3,
with 1150 images/s on one GPU, 2DTAR-SGD exposes 46 ms at 96x96 and 21 ms at 224x224; with the 1240 images/s of Table 4,
near the 204 ms of Fig. 1, it is 37 ms.

So TreeAR is one message after backward, a binary tree over all ranks; 2DTAR is one 2D-torus all-reduce; MSTopK-SGD is
one HiTopKComm with 1 % of the elements (Sec. 5.3), without the time of the selection, which is not printed. For
ResNet-50 the step includes LARS as Sec. 5.4 prints it: 11 ms, and 7 ms with PTO, which MSTopK-SGD uses.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

from benchmarks.make_clusters import GBIT
from benchmarks.published.common import DATA, Comparison, model, predict_s, table
from benchmarks.traces import in_dtype, with_step
from planner.cost.sparse import sparse_us
from planner.documents.catalog import find_cluster
from planner.documents.profile import Cluster, Contention, LayerNorm, NormProfile, Profile
from planner.ir import Schedule
from planner.model.modes import simulate_schedule
from planner.model.norms import shared_us
from planner.model.problem import make_problem
from runtime.plan.lpt import longest_first
from runtime.plan.transports import HITOPK, TORUS_2D

GPUS = 128
DENSITY = 0.01
LARS_S = {"Dense-SGD (TreeAR)": 0.011, "2DTAR-SGD": 0.011, "MSTopK-SGD": 0.007}
METHODS = ("Dense-SGD (TreeAR)", "2DTAR-SGD", "MSTopK-SGD")

CELLS = {
    "ResNet-50 (224x224)": ("resnet50-224px-v100-amp-b256", 256, 1150.0),
    "ResNet-50 (96x96)": ("resnet50-96px-v100-amp-b256", 256, 4400.0),
    "VGG-19": ("vgg19-v100-amp-b256", 256, 560.0),
}
"""Table 3: model → (document, batch, images per second on one GPU). The Transformer's batch and size are not known."""

CELLS_OF_TABLE_4 = {
    "ResNet-50 (96x96)": ("resnet50-96px-v100-amp-b256", 256, 4400.0),
    "ResNet-50 (128x128)": ("resnet50-128px-v100-amp-b256", 256, 3010.0),
    "ResNet-50 (224x224)": ("resnet50-224px-v100-amp-b256", 256, 1240.0),
    "ResNet-50 (288x288)": ("resnet50-224px-v100-amp-b256", 128, 710.0),
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


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What the paper leaves open; the defaults are used."""

    dtype: str = "float16"
    """Of the gradients on the wire."""
    overlap: bool = False
    """Whether 2DTAR-SGD runs during backward."""
    line_rate: bool = True
    """25 Gbit/s between nodes, and not the link that was fitted for TCP elsewhere."""
    slow_down: float = 1.0
    """Contention of compute and network."""


USED = Reading()


def cluster(reading: Reading = USED, *, shared_cards: bool = True) -> Cluster:
    """The testbed; without sharing, every GPU has a network card of its own."""
    known, factor = find_cluster("v100-16x8-25gbe"), reading.slow_down
    if reading.line_rate and known.inter is not None:
        known = replace(known, inter=replace(known.inter, beta_us_per_byte=GBIT / 25))
    contention = Contention(compute=factor, network=factor) if factor != 1.0 else None
    cards = known.nics_per_node if shared_cards else known.ranks_per_node
    return replace(known, contention=contention, nics_per_node=cards)


def compute_s(profile: Profile) -> float:
    """Seconds of forward and backward."""
    return (profile.compute.forward_us + sum(gradient.backward_us for gradient in profile.compute.gradients)) / 1e6


def torus_s(profile: Profile, machines: Cluster) -> float:
    """Exposed seconds of 2D-torus all-reduces, merged, during backward."""
    return predict_s(profile, machines, "torus_2d") - compute_s(profile)


def torus_after_backward_s(profile: Profile, machines: Cluster) -> float:
    """Exposed seconds of one 2D-torus all-reduce of all gradients after backward."""
    problem = make_problem(profile, machines)
    schedule = Schedule.from_boundaries([problem.count], TORUS_2D)
    return (simulate_schedule(problem, schedule).iteration_us - problem.compute_end_us) / 1e6


def tree_s(profile: Profile, machines: Cluster) -> float:
    """Exposed seconds of one flat binary-tree all-reduce after backward."""
    flat = replace(machines, all_reduce_algorithm="binary_tree")
    return predict_s(profile, flat, "single") - compute_s(profile)


def hitopk_s(profile: Profile, machines: Cluster) -> float:
    """Exposed seconds of one HiTopKComm of all gradients after backward, selection left out."""
    gradients = profile.compute.gradients
    element_bytes = gradients[0].size_bytes // gradients[0].numel
    numel = sum(gradient.numel for gradient in gradients)
    return sum(time_us for _, time_us in sparse_us(HITOPK, machines, numel, DENSITY, element_bytes)) / 1e6


def exposed_s(method: str, profile: Profile, reading: Reading = USED) -> float:
    """Exposed seconds of a method's messages."""
    profile, machines = in_dtype(profile, reading.dtype), cluster(reading)
    if method == "2DTAR-SGD":
        return (torus_s if reading.overlap else torus_after_backward_s)(profile, machines)
    return {"Dense-SGD (TreeAR)": tree_s, "MSTopK-SGD": hitopk_s}[method](profile, machines)


def throughput(name: str, batch: int, rate: float, method: str, reading: Reading = USED) -> float:
    """Predicted images per second of all GPUs."""
    profile = with_step(model(name), batch / rate * 1e6)
    update_s = LARS_S[method] if name.startswith("resnet50") else 0.0
    return batch * GPUS / (batch / rate + exposed_s(method, profile, reading) + update_s)


def comparisons(number: int = 3, reading: Reading = USED) -> list[Comparison]:
    """Table 3 or 4."""
    cells = CELLS if number == 3 else CELLS_OF_TABLE_4
    return [
        Comparison(
            what=str(record["model"]),
            method=str(record["method"]),
            published=float(str(record["value"])),
            ours=throughput(*cells[str(record["model"])], str(record["method"]), reading),
            unit="images/s",
        )
        for record in records()
        if record["table_or_figure"] == f"Table {number}"
        and record["metric"] == "throughput, 128 GPUs"
        and record["model"] in cells
    ]


def transformer_exposed_s() -> dict[str, float]:
    """Exposed seconds of each method for the base Transformer; whatever the batch, this decides their order."""
    return {method: exposed_s(method, model("transformer")) for method in METHODS}


def vgg_with_half_the_batch() -> float:
    """Ratio of 2DTAR-SGD's throughput with VGG-19, were its batch 128 and not 256."""
    name, batch, rate = CELLS["VGG-19"]
    [row] = [row for row in comparisons(3) if (row.what, row.method) == ("VGG-19", "2DTAR-SGD")]
    return throughput(name, batch // 2, rate, row.method) / row.published


def times_to_accuracy() -> list[Comparison]:
    """Table 5 beside the entries of DAWNBench that it cites."""
    entries = {line["entry"]: float(line["seconds_to_93_top5"]) for line in table("dawnbench/imagenet_train.csv")}
    values = {str(record["id"]): float(str(record["value"])) for record in records() if record["id"] in _cited()}
    return [
        Comparison(
            what=f"{team}, time to 93 % top-5", published=values[record], ours=entries[entry], by_construction=True
        )
        for team, (record, entry) in TABLE_5.items()
    ]


EPOCHS = {
    "ResNet-50 (96x96)": 13, "ResNet-50 (128x128)": 11, "ResNet-50 (224x224)": 3, "ResNet-50 (288x288)": 1
}  # fmt: skip
"""Table 4: epochs of each resolution."""
IMAGES = 1_281_167
"""Images of an epoch of ImageNet."""


def epochs_s(rates: Mapping[str, float]) -> float:
    """Seconds of Table 4's epochs, at the published number of images per second; evaluation and start left out."""
    return sum(EPOCHS[cell] * IMAGES / rate for cell, rate in rates.items())


def published_rates() -> dict[str, float]:
    """Images per second by cell of Table 4, as published."""
    return {row.what: row.published for row in comparisons(4)}


def record_comparison(reading: Reading = USED) -> Comparison:
    """The paper's own record, from the throughputs that we predict for the epochs of Table 4."""
    [published] = [float(str(record["value"])) for record in records() if record["id"] == "commlib-060"]
    ours = epochs_s({row.what: row.ours for row in comparisons(4, reading)})
    return Comparison(what="CommLib, time to 93 % top-5 in 28 epochs", published=published, ours=ours)


PTO_CELLS = {
    "ResNet-50": ("resnet50", "commlib-061", "commlib-062"),
    "Transformer": ("transformer", "commlib-063", "commlib-064"),
}
"""Sec. 5.4: model → (document, record of the time by every rank, record with PTO)."""


def pto_comparisons() -> list[Comparison]:
    """LARS by PTO on 128 GPUs, from its time by every rank."""
    values = {str(record["id"]): record["value"] for record in records()}
    return [
        Comparison(
            what=f"{name}: LARS with PTO",
            published=float(str(values[shared])),
            ours=pto_ms(model(document), float(str(values[alone]))),
            unit="ms",
        )
        for name, (document, alone, shared) in PTO_CELLS.items()
    ]


def pto_ms(profile: Profile, alone_ms: float) -> float:
    """Milliseconds of LARS's norms, each layer's computed by one rank, and of their all-gather.

    A layer's share of the time is its share of the elements; layers are given out by LPT.
    """
    numel = sum(gradient.numel for gradient in profile.compute.gradients)
    layers = tuple(
        LayerNorm(name=gradient.name, norm_us=alone_ms * 1e3 * gradient.numel / numel)
        for gradient in profile.compute.gradients
    )
    norms = NormProfile(optimizer="LARS", layers=layers)
    problem = make_problem(replace(profile, compute=replace(profile.compute, norms=norms)), cluster())
    owners = longest_first([layer.norm_us for layer in layers], problem.ranks)
    return shared_us(problem, owners) / 1e3


def _cited() -> set[str]:
    return {record for record, _ in TABLE_5.values()}
