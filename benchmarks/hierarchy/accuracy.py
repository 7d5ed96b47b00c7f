"""Final metrics of dense training, of flat top-k and of HiTopKComm at the same density, as two nodes of two ranks."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from benchmarks.lags.accuracy import Way, plan_of
from benchmarks.learning import Outcome, Task, learn
from runtime.checks.plan import trainable_parameters
from runtime.plan import CompressorSpec, Plan, PlanBucket

NODES, RANKS = 2, 4
WAYS = {
    "dense": (None, "flat"), "flat, 1 %": (0.01, "flat"), "hitopk, 1 %": (0.01, "hitopk"),
    "flat, 0.1 %": (0.001, "flat"), "hitopk, 0.1 %": (0.001, "hitopk"),
}  # fmt: skip
"""Name → density and algorithm; norms, biases and small gradients always travel whole."""


def _plan(model: torch.nn.Module, way: str) -> Plan:
    density, algorithm = WAYS[way]
    plan = plan_of(model, Way(density))
    parameters = trainable_parameters(model)

    def form(bucket: PlanBucket) -> PlanBucket:
        if bucket.collective != "sparse" or density is None:
            return bucket
        numel = sum(parameters[name].numel() for name in bucket.gradients)
        spec = CompressorSpec(name="topk", selector="exact", density=max(density, 2.0 / numel))
        return replace(bucket, algorithm=algorithm, compressor=spec)

    return replace(plan, buckets=tuple(form(bucket) for bucket in plan.buckets))


def train(task: Task, seed: int, way: str) -> Outcome:
    """One run on this rank."""
    ranks_per_node = dist.get_world_size() // NODES
    os.environ.update(GROUP_RANK=str(dist.get_rank() // ranks_per_node), LOCAL_WORLD_SIZE=str(ranks_per_node))
    model, session = learn(task, seed, lambda model, _: _plan(model, way))
    session.detach()
    return Outcome(task.name, seed, way, task.metric(model))


def lines(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """One row per task and way."""
    yield "| task | sent between nodes | metric, mean over seeds | least to largest |"
    yield "| --- | --- | --: | --- |"
    for name, way in dict.fromkeys((outcome.task, outcome.way) for outcome in outcomes):
        found = [outcome.metric for outcome in outcomes if (outcome.task, outcome.way) == (name, way)]
        yield f"| {name} | {way} | {statistics.fmean(found):.4f} | {min(found):.4f} to {max(found):.4f} |"
