"""BERT-Large on DGX A100 (NVIDIA DeepLearningExamples): on a fast network there is nothing to compress.

Compute is what one node takes for a micro-batch; the network is a100-8x8-400gb, which is slower than a DGX A100's.
One all-reduce in FP16 for each accumulated batch.
"""

from __future__ import annotations

from benchmarks.published.common import Comparison, model, predict_s, table
from benchmarks.traces import in_dtype, with_step
from planner.documents.catalog import find_cluster
from planner.documents.profile import Cluster, Profile

MACHINE, SEQUENCE_LENGTH, GPUS_PER_NODE = "DGX A100 80GB", "128", 8


def rows() -> list[dict[str, str]]:
    """PyTorch BERT-Large, mixed precision, short sequences, by number of nodes."""
    return [
        line
        for line in table("deeplearningexamples/multinode_throughput.csv")
        if line["model"] == "PyTorch BERT-Large"
        and (line["machine"], line["sequence_length"], line["precision"]) == (MACHINE, SEQUENCE_LENGTH, "mixed")
    ]


def measured_efficiency(nodes: int) -> float:
    """Throughput over that of one node times the number of nodes."""
    rates = {int(line["nodes"]): float(line["throughput"]) for line in rows()}
    return rates[nodes] / (nodes * rates[1])


def profile_of(nodes: int) -> Profile:
    """The step between two updates on so many nodes; accumulation is longer compute before the one all-reduce."""
    [single] = [line for line in rows() if line["nodes"] == "1"]
    [line] = [line for line in rows() if int(line["nodes"]) == nodes]
    samples = int(line["batch_per_gpu"]) * int(line["accumulation_steps"]) * GPUS_PER_NODE
    return in_dtype(with_step(model("bert-large"), samples / float(single["throughput"]) * 1e6, "a100-40gb"), "float16")


def cluster() -> Cluster:
    """A slower network than the machine's: 400 instead of 1600 Gbit/s a node."""
    return find_cluster("a100-8x8-400gb")


def comparisons() -> list[Comparison]:
    """Scaling efficiency with the best merged schedule."""
    result = []
    for line in rows():
        nodes = int(line["nodes"])
        if nodes == 1:
            continue
        profile = profile_of(nodes)
        compute_us = profile.compute.forward_us + sum(gradient.backward_us for gradient in profile.compute.gradients)
        step_s = predict_s(profile, cluster(), "optimal", nodes * GPUS_PER_NODE)
        result.append(
            Comparison(
                what=f"BERT-Large, {nodes} nodes: scaling efficiency",
                published=measured_efficiency(nodes),
                ours=compute_us / 1e6 / step_s,
                unit="",
            )
        )
    return result
