"""Final metrics of dense and lossy training after the same number of steps, and δ of Eq. 21 on the way."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.learning import Outcome, Task, learn
from runtime.checks.plan import trainable_parameters
from runtime.plan import CompressorSpec, ModelReference, Plan, PlanBucket, PlanWorld
from runtime.plan.names import layer_of
from runtime.sparse.samples import SelectionSample

TASKS = ("digits, ResNet-20", "characters, GPT", "characters, LSTM")


@dataclass(frozen=True)
class Way:
    """How much of the weights' gradients travels; norms and biases always travel whole."""

    density: float | None
    """None: everything."""
    dense: float = 0.0
    """Share of the steps before it in which everything travels."""


DENSE = "dense"
WAYS = {
    DENSE: Way(None),
    **{f"{share:g} %": Way(share / 100) for share in (25, 10, 3, 1, 0.1)},
}
FIRST_DENSE = {
    DENSE: WAYS[DENSE],
    "25 % after a third": Way(0.25, dense=1 / 3),
    "10 % after a half": Way(0.1, dense=1 / 2),
    "1 % after two thirds": Way(0.01, dense=2 / 3),
}
"""Everything travels at first."""
FEWEST_ELEMENTS = 1000
"""Smaller gradients travel whole."""


def plan_of(model: nn.Module, way: Way = WAYS[DENSE]) -> Plan:
    """One bucket for each layer's weights, with so many of their elements, and the rest in whole."""
    names = list(reversed(trainable_parameters(model)))
    return Plan(
        model=ModelReference(name=type(model).__name__),
        world=PlanWorld(ranks=dist.get_world_size()),
        accuracy="exact" if way.density is None else "bounded",
        buckets=tuple(_buckets(model, names, way.density)),
    )


def _buckets(model: nn.Module, names: list[str], density: float | None) -> Iterator[PlanBucket]:
    parameters = trainable_parameters(model)
    whole: list[str] = []
    for name in names:
        if density is None or parameters[name].dim() < 2 or parameters[name].numel() < FEWEST_ELEMENTS:
            whole.append(name)
            continue
        if whole:
            yield PlanBucket(gradients=tuple(whole))
            whole = []
        k = max(1, round(density * parameters[name].numel()))
        spec = CompressorSpec(name="topk", selector="exact", k={layer_of(name): k})
        yield PlanBucket(gradients=(name,), collective="sparse", algorithm="flat", compressor=spec)
    if whole:
        yield PlanBucket(gradients=tuple(whole))


@dataclass(frozen=True)
class Sampled(Outcome):
    """One run, and δ."""

    deltas: Sequence[float]
    """Every sampled δ, of all buckets."""


def train(task: Task, seed: int, way: str) -> Sampled:
    """One run on this rank."""
    chosen = {**WAYS, **FIRST_DENSE}[way]

    def make_plan(model: nn.Module, _: torch.optim.Optimizer) -> Plan:
        return plan_of(model) if chosen.dense else plan_of(model, chosen)

    then = (chosen.dense, lambda model: plan_of(model, chosen)) if chosen.dense else None
    model, session = learn(task, seed, make_plan, then)
    deltas = tuple(one.figure for of in session.samples.values() for one in of if isinstance(one, SelectionSample))
    session.detach()
    return Sampled(task.name, seed, way, task.metric(model), deltas)


def lines(outcomes: list[Sampled]) -> Iterator[str]:
    """One row per task and way; the dense one first."""
    yield "| task | sent | metric, mean over seeds | against dense | δ, median | δ, largest | samples above 1 |"
    yield "| --- " * 7 + "|"
    for name in dict.fromkeys(outcome.task for outcome in outcomes):
        dense = statistics.fmean(o.metric for o in outcomes if o.task == name and o.way == DENSE)
        for way in dict.fromkeys(outcome.way for outcome in outcomes):
            found = [o for o in outcomes if o.task == name and o.way == way]
            mean = statistics.fmean(o.metric for o in found)
            deltas = [delta for o in found for delta in o.deltas]
            sampled = (
                f"{statistics.median(deltas):.2f} | {max(deltas):.2f} | {sum(d > 1.0 for d in deltas)} of {len(deltas)}"
                if deltas
                else " | | "
            )
            spread = f"{min(o.metric for o in found):.4f} to {max(o.metric for o in found):.4f}"
            yield f"| {name} | {way} | {mean:.4f} ({spread}) | {mean / dense - 1.0:+.2%} | {sampled} |"
