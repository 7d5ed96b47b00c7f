"""Published training throughputs on A100 and H100, each predicted from the smallest run of the same model.

MPT with FSDP (MosaicML's llm-foundry): compute is what the smallest run of a model leaves when its messages are taken
off, and larger runs are predicted from it, where a micro-batch is at most 1.5 times as large and at least half. Weights
are sent in bfloat16, gradients in what the run's precision says. A100 with 1600 Gbit/s a node; for H100 the network is
not named, and taken as 3200 Gbit/s. The one constant, how much messages slow computation down, was set on the rows of
A100; those of H100 were held back. BERT-Large with DDP (NVIDIA DeepLearningExamples): compute is what one node takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import groupby

from benchmarks.published.common import Comparison, model, predict_s, table
from benchmarks.traces import in_dtype, with_step
from planner.cost.model import resize
from planner.documents.accelerators import ACCELERATORS
from planner.documents.catalog import find_cluster, find_profile
from planner.documents.units import Unit, Units, UnitWeight
from planner.fsdp2.costs import SLOWDOWN, message_costs
from planner.fsdp2.inputs import units_of_gradients
from planner.fsdp2.program import Shape
from planner.fsdp2.simulator import Costs, simulate
from planner.model.problem import make_problem
from runtime.plan import FullyShardPlan

SHAPES = {
    "125m": (768, 12), "350m": (1024, 24), "760m": (1536, 24), "1b": (2048, 24), "3b": (2560, 32), "7b": (4096, 32),
    "13b": (5120, 40), "30b": (7168, 48), "70b": (8192, 80),
}  # fmt: skip
"""Width and layers: llm-foundry, scripts/train/yamls/pretrain."""
VOCABULARY = 50368
MACHINES = {"a100_40gb": "dgx-a100", "a100_80gb": "dgx-a100", "h100_80gb": "dgx-h100"}
UPDATE_BYTES, UPDATE_SHARE = 28.0, 0.7
MOST, LEAST = 1.5, 0.5
"""Micro-batch over that of the smallest run: beyond, kernels reach another share of the peak."""

Line = dict[str, str]


@cache
def _costs(machine: str, ranks: int) -> Costs:
    return message_costs(resize(find_cluster(machine), ranks))


def _gpu(line: Line) -> str:
    return line["gpu"].partition("_")[0]


def shape(line: Line, share: float) -> Shape:
    """An MPT model in blocks, at a share of the accelerator's peak."""
    width, layers = SHAPES[line["model"]]
    tokens = int(line["micro_batch"]) * int(line["sequence_length"])
    rate = ACCELERATORS[_gpu(line)].dense_flops * share / 1e6
    embedding = VOCABULARY * width
    weights = round((float(line["parameters"]) - embedding) / layers)
    layer_us = (2.0 * weights * tokens + 4.0 * int(line["sequence_length"]) * width * tokens) / rate
    head_us = 2.0 * embedding * tokens / rate
    times = {"embedding": 0.0, **{f"layer{at}": layer_us for at in range(layers - 1)}, "head": layer_us + head_us}
    backward = 3.0 if line["checkpointing"] == "True" else 2.0  # blocks are then computed once more
    units = Units(
        units=tuple(
            Unit(module=name, forward_us=time_us, backward_us=backward * time_us) for name, time_us in times.items()
        ),
        weights=tuple(
            UnitWeight(modules=(name,), shape=(embedding if name == "embedding" else weights,)) for name in times
        ),
        element_bytes=2,
    )  # fmt: skip
    return Shape(units, int(line["gpus"]), reduce_bytes=2 if line["precision"] == "bf16" else 4)


def throughput(line: Line, share: float, slowdown: float = SLOWDOWN) -> float:
    """Predicted tokens per second of one GPU."""
    ranks, gpu = int(line["gpus"]), ACCELERATORS[_gpu(line)]
    update_us = UPDATE_BYTES * float(line["parameters"]) / ranks / (UPDATE_SHARE * gpu.memory_bytes_per_s) * 1e6
    model_shape = shape(line, share)
    groups = tuple((leaf.module,) for leaf in model_shape.leaves)
    kept: dict[str, bool | int] = {name: False for (name,) in groups} if line["sharding"] == "SHARD_GRAD_OP" else {}
    costs = replace(
        _costs(MACHINES[line["gpu"]], ranks), compute_factor=slowdown,
        update_us=update_us / int(line["accumulation_steps"]),
    )  # fmt: skip
    plan = FullyShardPlan(groups=groups, reshard_after_forward=kept)
    step = simulate(model_shape, plan, costs, bars=False)
    return int(line["micro_batch"]) * int(line["sequence_length"]) / step.iteration_us * 1e6


def share_of(line: Line, slowdown: float = SLOWDOWN) -> float:
    """The share of the peak with which a run comes out as published; four digits."""
    low, high = 0.01, 1.5
    for _ in range(40):
        middle = (low + high) / 2.0
        slow = throughput(line, middle, slowdown) < float(line["tokens_per_s_per_gpu"])
        low, high = (middle, high) if slow else (low, middle)
    return float(f"{high:.4g}")


def pairs(kind: str, most: float = MOST, least: float = LEAST) -> Iterator[tuple[Line, Line]]:
    """(smallest run, larger run) of each model of a kind of accelerator."""
    lines = [
        line
        for line in table("llm_foundry/throughput.csv")
        if _gpu(line) == kind and line["precision"] in ("bf16", "amp_bf16")
    ]

    def key(line: Line) -> tuple[str, str, str]:
        return line["gpu"], line["model"], line["checkpointing"]

    for _, same in groupby(sorted(lines, key=lambda line: (key(line), int(line["gpus"]))), key=key):
        first, *others = same
        for other in others:
            ratio = int(other["micro_batch"]) / int(first["micro_batch"])
            if int(other["gpus"]) > int(first["gpus"]) and least <= ratio <= most:
                yield first, other


def mpt_rows(kind: str, slowdown: float = SLOWDOWN, most: float = MOST, least: float = LEAST) -> list[Comparison]:
    """Larger runs, each from the smallest of its model."""
    return [
        Comparison(
            what=(
                f"MPT-{line['model']} on {line['gpus']} {line['gpu'].upper().replace('_', ' ')} "
                f"(from {first['gpus']}), micro-batch {line['micro_batch']}"
            ),
            published=float(line["tokens_per_s_per_gpu"]),
            ours=throughput(line, share_of(first, slowdown), slowdown),
            unit="tokens/s/GPU",
        )
        for first, line in pairs(kind, most, least)
    ]


def unchanged_error(kind: str) -> float:
    """Mean error of taking a larger run to be as fast as the smallest: what a prediction has to beat."""
    errors = [
        abs(float(first["tokens_per_s_per_gpu"]) / float(line["tokens_per_s_per_gpu"]) - 1.0)
        for first, line in pairs(kind)
    ]
    return sum(errors) / len(errors)


def torchtitan_rows() -> list[Comparison]:
    """Llama 3.1 8B with FSDP2 on 128 H100, from 8; gradients are reduced in FP32."""
    cluster = find_cluster("dgx-h100")
    units = units_of_gradients(make_problem(find_profile("llama-8b"), cluster))
    plan = FullyShardPlan(groups=tuple((unit.module,) for unit in units.units))
    lines = table("torchtitan/llama31_8b_h100.csv")
    rows = []
    for line in lines:
        if line["gpus"] == "8":
            continue
        [first] = [one for one in lines if one["technique"] == line["technique"] and one["gpus"] == "8"]

        def rate(run: Line, factor: float) -> float:
            longer = tuple(
                replace(unit, forward_us=factor * unit.forward_us, backward_us=factor * unit.backward_us)
                for unit in units.units
            )
            found = replace(Shape.of(replace(units, units=longer), int(run["gpus"])), reduce_bytes=4)
            costs = replace(_costs("dgx-h100", int(run["gpus"])), compute_factor=SLOWDOWN)
            step = simulate(found, plan, costs, bars=False)
            return int(run["local_batch"]) * int(run["sequence_length"]) / step.iteration_us * 1e6

        low, high = 0.1, 100.0
        for _ in range(60):
            middle = (low + high) / 2.0
            fast = rate(first, middle) > float(first["tokens_per_s_per_gpu"])
            low, high = (middle, high) if fast else (low, middle)
        rows.append(
            Comparison(
                what=f"Llama 3.1 8B, {line['technique']}, {line['gpus']} H100 (from 8)",
                published=float(line["tokens_per_s_per_gpu"]),
                ours=rate(line, high),
                unit="tokens/s/GPU",
            )
        )
    return rows


def bert_rows() -> list[Comparison]:
    """BERT-Large on DGX A100 and DDP's default buckets: TF32 and long sequences, which nothing was set on."""
    lines = [
        line
        for line in table("deeplearningexamples/multinode_throughput.csv")
        if line["model"] == "PyTorch BERT-Large" and (line["precision"], line["sequence_length"]) != ("mixed", "128")
    ]
    single = {(line["precision"], line["sequence_length"]): line for line in lines if line["nodes"] == "1"}
    rows = []
    for line in lines:
        nodes = int(line["nodes"])
        if nodes == 1:
            continue
        base = single[line["precision"], line["sequence_length"]]
        samples = int(line["batch_per_gpu"]) * int(line["accumulation_steps"]) * 8
        dtype = "float16" if line["precision"] == "mixed" else "float32"
        profile = in_dtype(with_step(model("bert-large"), samples / float(base["throughput"]) * 1e6, "a100"), dtype)
        step_s = predict_s(profile, find_cluster("dgx-a100"), "ddp", nodes * 8)
        rows.append(
            Comparison(
                what=f"BERT-Large, {line['precision']}, {line['sequence_length']} tokens, {nodes} nodes of 8 A100",
                published=float(line["throughput"]),
                ours=nodes * samples / step_s,
                unit="sequences/s",
            )
        )
    return rows
