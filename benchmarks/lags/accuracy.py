"""Final metrics of dense and lossy training after the same number of steps, and δ of Eq. 21 on the way."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import Parameter

import runtime
from examples import charlm
from planner.demo_job import ResNet20, batch, loss, test_accuracy
from runtime.fit import trainable_parameters
from runtime.names import layer_of
from runtime.plan import CompressorSpec, ModelReference, MomentumSpec, Plan, PlanBucket, PlanWorld

SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class Way:
    """How much of the weights' gradients travels; norms and biases always travel whole."""

    name: str
    density: float | None
    """None: everything."""
    dgc: bool = False
    """With density warm-up over a sixth of the steps, and momentum correction where the optimizer has momentum."""


WAYS = (Way("dense", None), Way("1 %", 0.01), Way("0.1 %", 0.001), Way("0.1 %, DGC", 0.001, dgc=True))
FEWEST_ELEMENTS = 1000
"""Smaller gradients travel whole."""
CHECKED = 40
"""Batches of held-out text."""


@dataclass(frozen=True)
class Task:
    """What is learnt."""

    name: str
    model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Any], Tensor]
    batch: Callable[[int, int], Any]
    optimizer: Callable[[Iterable[Parameter]], torch.optim.Optimizer]
    metric: Callable[[nn.Module], float]
    better: str
    """`higher` or `lower`."""
    steps: int
    momentum: float = 0.0
    """Of its SGD."""


class CharLstm(nn.Module):
    """Two LSTM layers over characters."""

    def __init__(self, characters: int, width: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.output = nn.Linear(width, characters)

    def forward(self, characters: Tensor) -> Tensor:
        """(batch, length) → (batch, length, characters known)."""
        scores: Tensor = self.output(self.lstm(self.embedding(characters))[0])
        return scores


def _known() -> int:
    return charlm.text()[1]


@torch.no_grad()
def _held_out_loss(model: nn.Module) -> float:
    """On batches that no rank has drawn: of ranks that do not exist."""
    model.eval()
    losses = [float(charlm.loss(model, charlm.batch(10**6 + step, 999))) for step in range(CHECKED)]
    model.train()
    return statistics.fmean(losses)


def tasks(scale: float = 1.0) -> list[Task]:
    """The three tasks; `scale` times their steps."""
    return [
        Task(
            "digits, ResNet-20", ResNet20, loss, batch,
            lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9), test_accuracy, "higher", round(360 * scale), 0.9,
        ),
        Task(
            "characters, GPT", lambda: charlm.CharLM(_known()), charlm.loss, charlm.batch,
            lambda p: torch.optim.AdamW(p, lr=2e-3), _held_out_loss, "lower", round(600 * scale),
        ),
        Task(
            "characters, LSTM", lambda: CharLstm(_known()), charlm.loss, charlm.batch,
            lambda p: torch.optim.SGD(p, lr=1.0, momentum=0.9), _held_out_loss, "lower", round(600 * scale), 0.9,
        ),
    ]  # fmt: skip


def plan_of(model: nn.Module, way: Way = WAYS[0], warmup_steps: int | None = None, momentum: float = 0.0) -> Plan:
    """One bucket for each layer's weights, with so many of their elements, and the rest in whole."""
    names = list(reversed(trainable_parameters(model)))
    return Plan(
        model=ModelReference(name=type(model).__name__),
        world=PlanWorld(ranks=dist.get_world_size()),
        accuracy="exact" if way.density is None else "bounded",
        buckets=tuple(_buckets(model, names, way.density, warmup_steps)),
        momentum_correction=MomentumSpec(momentum=momentum) if momentum else None,
    )


def _buckets(
    model: nn.Module, names: list[str], density: float | None, warmup_steps: int | None
) -> Iterator[PlanBucket]:
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
        spec = CompressorSpec(name="topk", selector="exact", k={layer_of(name): k}, warmup_steps=warmup_steps)
        yield PlanBucket(gradients=(name,), collective="sparse", algorithm="flat", compressor=spec)
    if whole:
        yield PlanBucket(gradients=tuple(whole))


@dataclass(frozen=True)
class Outcome:
    """One run."""

    task: str
    seed: int
    way: str
    metric: float
    deltas: tuple[float, ...]
    """Every sampled δ, of all buckets."""


def run_rank(scale: float) -> list[Outcome]:
    """All tasks, seeds and ways, on this rank."""
    return [_train(task, seed, way) for task in tasks(scale) for seed in SEEDS for way in WAYS]


def _train(task: Task, seed: int, way: Way) -> Outcome:
    torch.manual_seed(seed)
    model = task.model()
    optimizer = task.optimizer(model.parameters())
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, task.steps)
    plan = plan_of(model, way)
    if way.dgc:
        plan = plan_of(model, way, max(1, task.steps // 6), task.momentum)
        for group in optimizer.param_groups if task.momentum else ():
            group["momentum"] = 0.0  # the plan's takes its place
    session = runtime.attach(model, optimizer, plan, drift=False)
    for step in range(task.steps):
        optimizer.zero_grad()
        task.loss(model, task.batch(step + 10_000 * seed, dist.get_rank())).backward()
        optimizer.step()
        schedule.step()
    deltas = tuple(sample.delta for samples in session.samples.values() for sample in samples)
    session.detach()
    return Outcome(task.name, seed, way.name, task.metric(model), deltas)


def lines(outcomes: list[Outcome]) -> Iterator[str]:
    """One row per task and way."""
    yield "| task | sent | metric, mean over seeds | against dense | δ, median | δ, largest | samples above 1 |"
    yield "| --- " * 7 + "|"
    for name in dict.fromkeys(outcome.task for outcome in outcomes):
        dense = statistics.fmean(o.metric for o in outcomes if o.task == name and o.way == WAYS[0].name)
        for way in WAYS:
            found = [o for o in outcomes if o.task == name and o.way == way.name]
            mean = statistics.fmean(o.metric for o in found)
            deltas = [delta for o in found for delta in o.deltas]
            sampled = (
                f"{statistics.median(deltas):.2f} | {max(deltas):.2f} | {sum(d > 1.0 for d in deltas)} of {len(deltas)}"
                if deltas
                else " | | "
            )
            spread = f"{min(o.metric for o in found):.4f} to {max(o.metric for o in found):.4f}"
            yield f"| {name} | {way.name} | {mean:.4f} ({spread}) | {mean / dense - 1.0:+.2%} | {sampled} |"
