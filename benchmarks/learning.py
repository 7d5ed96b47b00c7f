"""Tasks that are learnt again and again with one thing changed, and what comes out of each run.

Runs are kept as JSON lines where a file for them is given, so that a table goes on where it was stopped.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import Parameter

import runtime
from benchmarks.resumable import kept
from examples import charlm
from examples.digits import ResNet20, batch, loss, test_accuracy
from planner.jobs.launch import LocalWorld, run_ranks
from runtime.core.options import ResidualUnit
from runtime.plan import Plan

RANKS = 2
SEEDS = (0, 1, 2)
CHECKED = 40
"""Batches of held-out text."""
MUON_GPT = "characters, GPT, Muon"
"""A task with two optimizers, which `tasks` does not return."""
TIMEOUT_S = 300.0
"""Machines that are busy otherwise may leave a rank waiting."""


@dataclass(frozen=True)
class Task:
    """What is learnt."""

    name: str
    model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Any], Tensor]
    batch: Callable[[int, int], Any]
    optimizer: Callable[[Iterable[Parameter]], Any]
    """Returns an optimizer, or several."""
    metric: Callable[[nn.Module], float]
    better: str
    """`higher` or `lower`."""
    steps: int


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


class DigitViT(nn.Module):
    """A vision transformer on 16 patches of 4×4 pixels: two encoder layers, mean over patches."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 4, stride=4)
        self.places = nn.Parameter(torch.randn(16, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.output = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """(batch, 1, 16, 16) → class scores (batch, 10)."""
        x = self.patches(images).flatten(2).transpose(1, 2) + self.places
        scores: Tensor = self.output(self.encoder(x).mean(dim=1))
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
    """The tasks; `scale` times their steps."""
    return [
        Task(
            "digits, ResNet-20", ResNet20, loss, batch,
            lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9), test_accuracy, "higher", round(360 * scale),
        ),
        Task(
            "digits, ViT", DigitViT, loss, batch,
            lambda p: torch.optim.AdamW(p, lr=1e-3), test_accuracy, "higher", round(600 * scale),
        ),
        Task(
            "characters, GPT", lambda: charlm.CharLM(_known()), charlm.loss, charlm.batch,
            lambda p: torch.optim.AdamW(p, lr=2e-3), _held_out_loss, "lower", round(600 * scale),
        ),
        Task(
            "characters, LSTM", lambda: CharLstm(_known()), charlm.loss, charlm.batch,
            lambda p: torch.optim.SGD(p, lr=1.0, momentum=0.9), _held_out_loss, "lower", round(600 * scale),
        ),
    ]  # fmt: skip


def _muon(parameters: Iterable[Parameter]) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices of CharLM that are no embeddings, which come first, and AdamW for the rest."""
    embedding, position, *others = parameters
    matrices = [p for p in others if p.ndim == 2]
    rest = [embedding, position, *(p for p in others if p.ndim != 2)]
    return [torch.optim.Muon(matrices, lr=0.02, weight_decay=0.0), torch.optim.AdamW(rest, lr=2e-3)]


def task_of(name: str, scale: float = 1.0) -> Task:
    """Return a task by its name."""
    found = {task.name: task for task in tasks(scale)}
    found[MUON_GPT] = replace(found["characters, GPT"], name=MUON_GPT, optimizer=_muon)
    return found[name]


def learn(
    task: Task,
    seed: int,
    make_plan: Callable[[nn.Module, torch.optim.Optimizer], Plan],
    then: tuple[float, Callable[[nn.Module], Plan]] | None = None,
    losses: list[float] | None = None,
    residual_unit: ResidualUnit = "gradient",
) -> tuple[nn.Module, runtime.Session]:
    """Trains once on this rank, with a cosine schedule; the session is still attached.

    Args:
        task: what.
        seed: of the first weights, and of where in the data training begins.
        make_plan: may also change the optimizer to what the plan needs.
        then: after this share of the steps, another plan.
        losses: gets this rank's loss of every step.
        residual_unit: as for `attach`.
    """
    torch.manual_seed(seed)
    model = task.model()
    optimizer = task.optimizer(model.parameters())
    optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(one, task.steps) for one in optimizers]
    plan = make_plan(model, optimizers[0])
    session = runtime.attach(
        model, optimizer, plan, drift=False, timeout_s=TIMEOUT_S, residual_unit=residual_unit
    )  # fmt: skip
    if then is not None:
        session.switch(then[1](model), at_step=round(then[0] * task.steps))
    for step in range(task.steps):
        for one in optimizers:
            one.zero_grad()
        here = task.loss(model, task.batch(step + 10_000 * seed, dist.get_rank()))
        here.backward()
        if losses is not None:
            losses.append(float(here.detach()))
        for one in optimizers:
            one.step()
        for schedule in schedules:
            schedule.step()
    return model, session


@dataclass(frozen=True)
class Outcome:
    """One run. What else a benchmark wants to know of it, in plain JSON types, its own record adds."""

    task: str
    seed: int
    way: str
    metric: float


Run = TypeVar("Run", bound=Outcome)


def outcomes(
    train: Callable[[Task, int, str], Run],
    record: type[Run],
    names: Sequence[str],
    ways: Sequence[str],
    seeds: Sequence[int],
    scale: float,
    results: Path | None,
    ranks: int = RANKS,
    only: str = "",
) -> list[Run]:
    """All tasks, seeds and ways; those that the file holds are not run again.

    Args:
        train: one run on a rank; a module's function, as ranks are processes of their own.
        record: what it returns.
        names: of tasks.
        ways: names of what is changed.
        seeds: of the runs.
        scale: times the tasks' steps.
        results: JSON lines of runs with this scale.
        ranks: that train together.
        only: a part of the names (task, seed, way) of runs that may be trained now; others are left out if not known.
    """
    runs = [(name, seed, way) for name in names for seed in seeds for way in ways]
    wanted = {str(run): partial(_run, train, ranks, scale, *run) for run in runs}
    rows = kept(results, wanted, only, lambda row: str((row["task"], row["seed"], row["way"])))
    return [record(**{field: value for field, value in row.items() if field != "cell"}) for row in rows]


def _run(
    train: Callable[[Task, int, str], Run], ranks: int, scale: float, name: str, seed: int, way: str
) -> dict[str, Any]:
    return asdict(run_ranks(LocalWorld(ranks=ranks), _rank, train, scale, name, seed, way)[0])


def _rank(train: Callable[[Task, int, str], Run], scale: float, name: str, seed: int, way: str) -> Run:
    return train(task_of(name, scale), seed, way)
