"""Final metrics of dense and lossy training after the same number of steps, and δ of Eq. 21 on the way."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.lags.ratios import MAX_RATIO, eq19
from benchmarks.learning import Outcome, Task, learn
from runtime.checks.plan import trainable_parameters
from runtime.core.options import ResidualUnit
from runtime.plan import CompressorSpec, ModelReference, Plan, PlanBucket, PlanWorld
from runtime.plan.names import layer_of
from runtime.sparse import guard
from runtime.sparse.compressors import selectors
from runtime.sparse.samples import SelectionSample

TASKS = ("digits, ResNet-20", "characters, GPT", "characters, LSTM")


LAYERS, SLGS, EQ19, AS_EQ19 = "layers", "slgs", "eq19", "as_eq19"
"""The density in each layer; in one bucket of all layers; ratios by Eq. 19, up to its inverse; as many elements as
those, in one bucket.
"""


@dataclass(frozen=True)
class Way:
    """How much of the weights' gradients travels; norms and biases always travel whole."""

    density: float | None
    """None: everything."""
    dense: float = 0.0
    """Share of the steps before it in which everything travels."""
    rule: str = LAYERS
    selector: str = "exact"
    searches: int = selectors.SEARCHES
    """Searches of MSTopK for a threshold, by default the paper's."""
    unit: ResidualUnit = "gradient"


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
METHODS = {
    DENSE: WAYS[DENSE],
    "SLGS": Way(1 / MAX_RATIO, rule=SLGS),
    "SLGS, as many as LAGS": Way(1 / MAX_RATIO, rule=AS_EQ19),
    "LAGS, Eq. 19": Way(1 / MAX_RATIO, rule=EQ19),
    "LAGS, residuals α·g": Way(1 / MAX_RATIO, rule=EQ19, unit="update"),
}
"""As the paper trains them."""
SELECTORS = {
    DENSE: WAYS[DENSE],
    "top-k, one bucket": Way(0.01, rule=SLGS),
    "sampled": Way(0.01, rule=SLGS, selector="sampled"),
    **{
        f"mstopk, {count} searches": Way(0.01, rule=SLGS, selector="mstopk", searches=count)
        for count in (selectors.SEARCHES, 10, 5, 3)
    },
}
"""Selections against the exact one, of all layers together."""
ALL = {**WAYS, **FIRST_DENSE, **METHODS, **SELECTORS}
SAMPLED_STEPS = 5
"""Steps from one sampled bucket to the next, for δ by layer."""
PARTS = 5
"""Equal parts of the steps in a curve of δ."""
FEWEST_ELEMENTS = 1000
"""Smaller gradients travel whole."""


def plan_of(model: nn.Module, way: Way = WAYS[DENSE], ratios: Mapping[str, int] | None = None) -> Plan:
    """Return one bucket for each layer of selected elements, of SLGS one for all layers; the rest whole.

    Args:
        model: what is trained.
        way: how.
        ratios: k by gradient in place of the density; those that are not named are sent whole.
    """
    names = list(reversed(trainable_parameters(model)))
    return Plan(
        model=ModelReference(name=type(model).__name__),
        world=PlanWorld(ranks=dist.get_world_size()),
        accuracy="exact" if way.density is None else "bounded",
        buckets=tuple(_buckets(names, way, selected(model, way) if ratios is None else ratios)),
    )


def selected(model: nn.Module, way: Way) -> dict[str, int]:
    """k of each gradient that is not sent whole, at the way's density: of matrices that are not small."""
    if way.density is None:
        return {}
    found = {name: parameter.numel() for name, parameter in matrices(model).items()}
    return {name: max(1, round(way.density * numel)) for name, numel in found.items()}


def matrices(model: nn.Module) -> dict[str, nn.Parameter]:
    """Weights of which elements are selected."""
    found = trainable_parameters(model)
    return {name: p for name, p in found.items() if p.dim() >= 2 and p.numel() >= FEWEST_ELEMENTS}


def _buckets(names: list[str], way: Way, ks: Mapping[str, int]) -> Iterator[PlanBucket]:
    if way.rule in (SLGS, AS_EQ19):
        yield PlanBucket(gradients=tuple(name for name in names if name not in ks))
        spec = CompressorSpec(name="topk", selector=way.selector, density=way.density)
        chosen = tuple(name for name in names if name in ks)
        yield PlanBucket(gradients=chosen, collective="sparse", algorithm="flat", compressor=spec)
        return
    whole: list[str] = []
    for name in names:
        if name not in ks:
            whole.append(name)
            continue
        if whole:
            yield PlanBucket(gradients=tuple(whole))
            whole = []
        spec = CompressorSpec(name="topk", selector=way.selector, k={layer_of(name): ks[name]})
        yield PlanBucket(gradients=(name,), collective="sparse", algorithm="flat", compressor=spec)
    if whole:
        yield PlanBucket(gradients=tuple(whole))


@dataclass(frozen=True)
class Sampled(Outcome):
    """One run, and δ."""

    deltas: Sequence[float]
    """Every sampled δ, of all buckets."""
    curve: Sequence[tuple[str, float, float]] = ()
    """(first gradient of a bucket, share of the steps, δ), where buckets are sampled often."""


def train(task: Task, seed: int, way: str) -> Sampled:
    """One run on this rank."""
    chosen = ALL[way]
    often = chosen.rule != LAYERS  # not for ways of other parts, whose rows have the usual number of samples
    if often:
        guard.FEWEST_STEPS, guard.COST = SAMPLED_STEPS, 1.0
    selectors.SEARCHES = chosen.searches

    def make_plan(model: nn.Module, _: torch.optim.Optimizer) -> Plan:
        if chosen.rule in (EQ19, AS_EQ19):
            candidates = matrices(model)
            ks = eq19(task, model, list(candidates))
            density = sum(ks.values()) / sum(candidates[name].numel() for name in ks)
            return plan_of(model, replace(chosen, density=density), ks)
        return plan_of(model) if chosen.dense else plan_of(model, chosen)

    then = (chosen.dense, lambda model: plan_of(model, chosen)) if chosen.dense else None
    model, session = learn(task, seed, make_plan, then, residual_unit=chosen.unit)
    curve = [
        (session.plan.buckets[index].gradients[0], one.step / task.steps, one.figure)
        for index, of in session.samples.items()
        for one in of
        if isinstance(one, SelectionSample)
    ]
    session.detach()
    deltas = tuple(figure for *_, figure in curve)
    return Sampled(task.name, seed, way, task.metric(model), deltas, tuple(curve) if often else ())


def lines(outcomes: list[Sampled]) -> Iterator[str]:
    """One row per task and way; the dense one first."""
    yield "| task | sent | metric, mean over seeds | against dense | δ, median | δ, largest | samples above 1 |"
    yield "| --- " * 7 + "|"
    for name in dict.fromkeys(outcome.task for outcome in outcomes):
        dense = {o.seed: o.metric for o in outcomes if o.task == name and o.way == DENSE}
        for way in dict.fromkeys(outcome.way for outcome in outcomes):
            found = [o for o in outcomes if o.task == name and o.way == way]
            if not found:
                continue
            mean = statistics.fmean(o.metric for o in found)
            against = mean / statistics.fmean(dense[o.seed] for o in found) - 1.0
            deltas = [delta for o in found for delta in o.deltas]
            sampled = (
                f"{statistics.median(deltas):.2f} | {max(deltas):.2f} | {sum(d > 1.0 for d in deltas)} of {len(deltas)}"
                if deltas
                else " | | "
            )
            spread = f"{min(o.metric for o in found):.4f} to {max(o.metric for o in found):.4f}"
            yield f"| {name} | {way} | {mean:.4f} ({spread}) | {against:+.2%} | {sampled} |"


def curve_lines(outcomes: list[Sampled], way: str) -> Iterator[str]:
    """One row per task and layer: the median of δ over seeds in each part of the steps."""
    yield f"| task, layer | {' | '.join(f'to {part / PARTS:.0%}' for part in range(1, PARTS + 1))} |"
    yield "| --- " + "| --: " * PARTS + "|"
    for name in dict.fromkeys(outcome.task for outcome in outcomes):
        points = [point for o in outcomes if (o.task, o.way) == (name, way) for point in o.curve]
        for layer in dict.fromkeys(point[0] for point in points):
            parts: list[list[float]] = [[] for _ in range(PARTS)]
            for of, share, figure in points:
                if of == layer:
                    parts[min(PARTS - 1, int(share * PARTS))].append(figure)
            cells = " | ".join(f"{statistics.median(part):.2f}" if part else "" for part in parts)
            yield f"| {name}: {layer.removesuffix('.weight')} | {cells} |"
