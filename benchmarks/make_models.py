"""The models of the catalogue: traces where somebody published one, otherwise a published total split by a rule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from benchmarks import sources
from benchmarks.make_shapes import shapes
from benchmarks.published.common import DATA
from benchmarks.traces import (
    by_matrix_size,
    evenly_over_matrices,
    gap_rows,
    graph_rows,
    layer_log_rows,
    make_profile,
    parameter_rows,
    split_step,
    with_step,
)
from planner.documents.profile import Profile
from planner.documents.shapes import estimated_profile

FORWARD_RULE = "forward is not in the source; rule: half of backward"
STEP_RULE = "only forward + backward is in the source; rule: backward takes twice as long as forward"
EVEN_RULE = (
    "backward of each gradient is not in the source; rule: every convolution and linear layer takes the same time, all "
    "else none. Against the traces of ResNet-50 and ResNet-101 this rule's readiness is off by 7 % and 5 % of "
    "backward on average; a split by parameters would be off by 37 % and 25 %"
)
FIRST_GAP = "the time from the start of backward to the first gradient is not in the trace (0 here)"
MIXED = (
    "mixed precision: computed in FP16; assumed, for the paper does not say: variables, and so their gradients, are "
    "kept and sent in FP32"
)
NO_UPDATE = "the time of the update is not in the source (0 here)"

TRACED = {
    "resnet50": ("trace_resnet50.csv", "ResNet-50"),
    "resnet101": ("trace_resnet101.csv", "ResNet-101"),
    "vgg16": ("trace_vgg16.csv", "VGG-16"),
    "bert-base": ("trace_bert.csv", "BERT-base, question answering"),
    "bert-large": ("trace_bert_large.csv", "BERT-large, question answering"),
    "gpt2": ("trace_gpt2.csv", "GPT-2"),
}

TOTALS = {
    "resnet50-k80-b32": ("resnet50", 0.416396, "Tesla K80", 32, "measured_throughput: 76.85 images/s"),
    "resnet50-224px-v100-amp-b256": ("resnet50", 256 / 1240, "Tesla V100", 256, "Table 4: 1240 images/s"),
    "resnet50-128px-v100-amp-b256": ("resnet50", 256 / 3010, "Tesla V100", 256, "Table 4: 3010 images/s"),
    "resnet50-96px-v100-amp-b256": ("resnet50", 256 / 4400, "Tesla V100", 256, "Table 4: 4400 images/s"),
}
"""Name → (traced model, seconds of forward + backward, accelerator, batch, where the total is published)."""


def models() -> Iterator[Profile]:
    """Every model, traced ones first."""
    yield from _traced()
    yield _googlenet()
    yield _alexnet()
    yield from _split_totals()
    yield from map(estimated_profile, shapes())
    yield _transformer()
    yield from _rescaled()


def _traced() -> Iterator[Profile]:
    for name, (file, what) in TRACED.items():
        rows = gap_rows(DATA / "espresso" / file)
        yield make_profile(
            rows,
            name=name,
            forward_us=sum(row.backward_us for row in rows) / 2,
            accelerator="Tesla V100 32 GB",
            source=f"{sources.ESPRESSO.format(file=file)} ({what})",
            notes=[FORWARD_RULE, FIRST_GAP, NO_UPDATE, "the batch is not in the source"],
        )


def _googlenet() -> Profile:
    rows = layer_log_rows(DATA / "bcaffe_infocom19/googlenet_layers.csv", "tmp8comm_pass2")
    return make_profile(
        rows,
        name="googlenet",
        forward_us=sum(row.backward_us for row in rows) / 2,
        accelerator="Tesla K80",
        batch=64,
        source=sources.BCAFFE.format(what="layer log tmp8comm, second pass (GoogLeNet with auxiliary heads)"),
        notes=[
            "forward is not in the source; rule of the authors' simulator: half of backward",
            "weight and bias of a layer log one time and count as one gradient",
            "one iteration, not a mean; the whole step took 0.392 s on one node, longer than these layers' sum",
            NO_UPDATE,
        ],
    )


def _alexnet() -> Profile:
    rows = graph_rows(DATA / "pipedream/alexnet.csv")
    return make_profile(
        rows,
        name="alexnet",
        forward_us=sum(row.backward_us for row in rows) / 2,
        batch=128,
        source=sources.PIPEDREAM,
        notes=[
            "modules were timed one by one with synchronization, so their sum is longer than a step's backward",
            "the source's forward times hold the reading of the input; rule instead: half of backward",
            "weight and bias of a layer count as one gradient; the GPU is not named with the file",
            NO_UPDATE,
        ],
    )


def _split_totals() -> Iterator[Profile]:
    tpds = [
        ("resnet152", "resnet152.csv", 883118.444, 128, "torchvision 0.17.2"),
        ("densenet161", "densenet161.csv", 477654.81, 64, "torchvision 0.17.2"),
        ("inception-v4", "inception_v4.csv", 610822.06, 128, "timm 1.0.31"),
    ]
    for name, file, step_us, batch, package in tpds:
        forward_us, rows = split_step(parameter_rows(DATA / "layer_sizes" / file, evenly_over_matrices), step_us)
        yield make_profile(
            rows,
            name=name,
            forward_us=forward_us,
            accelerator="Tesla V100",
            batch=batch,
            source=f"total: {sources.TPDS}, compute on one GPU in FP32; {sources.SIZES.format(package=package)}",
            notes=[STEP_RULE, EVEN_RULE, NO_UPDATE],
        )
    densenet = parameter_rows(DATA / "layer_sizes/densenet201.csv", evenly_over_matrices)
    forward_us, rows = split_step(densenet, 219000.0)
    yield make_profile(
        rows,
        name="densenet201",
        forward_us=forward_us,
        source=(
            f"total: {sources.ASC}: forward 0.073 s, backward 0.146 s; "
            f"{sources.SIZES.format(package='torchvision 0.17.2')}"
        ),
        notes=[
            "the source gives backward as twice forward, which is a rule and not a measurement",
            EVEN_RULE,
            "GPU and batch are not in the source",
            NO_UPDATE,
        ],
    )
    vgg19 = parameter_rows(DATA / "layer_sizes/vgg19.csv", evenly_over_matrices)
    forward_us, rows = split_step(vgg19, 256 / 560 * 1e6)
    yield make_profile(
        rows,
        name="vgg19-v100-amp-b256",
        forward_us=forward_us,
        accelerator="Tesla V100",
        batch=256,
        source=(
            f"total: {sources.COMMLIB}, Sec. 5.5.2: 560 images/s on one GPU; "
            f"{sources.SIZES.format(package='torchvision 0.17.2')}"
        ),
        notes=[
            STEP_RULE,
            EVEN_RULE,
            "the batch is not in the records used here; assumed: 256, as for ResNet-50 there",
            NO_UPDATE,
            MIXED,
        ],
    )


def _transformer() -> Profile:
    rows = parameter_rows(
        DATA / "layer_sizes/transformer_wmt_base.csv", by_matrix_size, last=["shared_embedding.weight"]
    )
    forward_us, rows = split_step(rows, 1e6 / 32)
    return make_profile(
        rows,
        name="transformer",
        forward_us=forward_us,
        accelerator="Tesla V100",
        batch=1,
        source=(
            f"total: {sources.COMMLIB}, Sec. 5.5.2: 32 samples/s on one GPU; "
            f"{sources.SIZES.format(package='torch.nn.Transformer, 6 + 6 layers, vocabulary 37000, tied')}"
        ),
        notes=[
            "per sample: the batch of the measurement is not in the source; scale it to yours",
            "which size of Transformer was measured is not in the source; these are the base model's sizes",
            STEP_RULE,
            "backward of each gradient is not in the source; rule: a matrix takes time by its elements, all else "
            "none; the tied embedding's gradient comes last",
            NO_UPDATE,
            MIXED,
        ],
    )


def _rescaled() -> Iterator[Profile]:
    traced = {profile.model.name: profile for profile in _traced()}
    for name, (base, step_s, accelerator, batch, where) in TOTALS.items():
        origin = sources.COMMLIB if "Table" in where else sources.BCAFFE.format(what="throughput on one node")
        profile = with_step(traced[base], step_s * 1e6)
        gradients = tuple(
            replace(gradient, backward_us=round(gradient.backward_us, 3)) for gradient in profile.compute.gradients
        )
        yield replace(
            profile,
            model=replace(profile.model, name=name),
            world=replace(profile.world, accelerator=accelerator, batch_per_rank=batch),
            compute=replace(profile.compute, forward_us=round(profile.compute.forward_us, 3), gradients=gradients),
            source=f"total: {origin}, {where} on one GPU; shares of each gradient: {profile.source}",
            notes=(
                STEP_RULE,
                "the shares were traced on a V100 at another batch and precision",
                FIRST_GAP,
                NO_UPDATE,
                *([MIXED] if "-amp-" in name else []),
            ),
        )
