"""The models of random scripts, and optimizers, batches and plans for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from runtime.plan import (
    CompressorSpec,
    DelaySpec,
    ModelReference,
    Plan,
    PlanBucket,
    PlanWorld,
    StepPlan,
    UpdatePlan,
)

WIDTH, CLASSES, BATCH = 8, 3, 5
LARGE = 263
"""Rows of WIDTH outputs each: their weights are more than the 64 KiB from which gradients are moved one by one."""
DENSITY = 0.3
"""What sparse buckets send."""
DELAY = DelaySpec(steps=2, warmup_steps=2, alpha=1.0, beta=0.0, local_lr_scale=1.0)

OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "adamw_loop": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, foreach=False),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.01, momentum=0.5),
    "lbfgs": lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=3),
}


class _Trap(torch.autograd.Function):
    """The identity, whose backward raises."""

    @staticmethod
    def forward(_context: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_context: Any, _gradient: Tensor) -> Tensor:  # type: ignore[override]
        raise ArithmeticError("on purpose")


class Net(nn.Module):
    """A small classifier with some of `scripts.FEATURES`; the same on every rank."""

    def __init__(self, features: Iterable[str], dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.features = frozenset(features)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, CLASSES)
        if "tied" in self.features:
            self.twin = nn.Linear(WIDTH, WIDTH)
            self.twin.weight = self.middle.weight
        if "norm" in self.features:
            self.norm = nn.BatchNorm1d(WIDTH)
        if "large" in self.features:
            self.large = nn.Linear(WIDTH, WIDTH * LARGE)
        if "scale" in self.features:
            self.scale = nn.Parameter(torch.tensor(1.5))
        if self.features & {"unused", "apart"}:
            self.branch = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.2 if "dropout" in self.features else 0.0)
        self.uses_branch = True
        """Whether this forward goes through `branch`."""
        self.trap = ""
        """`forward` or `backward`: raises there."""
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, nn.Parameter]:
        """Logits, shape (batch, CLASSES); with `scale` that parameter, too."""
        hidden = torch.tanh(self.first(x))
        if "norm" in self.features:
            hidden = self.norm(hidden)
        if self.trap == "forward":
            raise ArithmeticError("on purpose")
        if self.trap == "backward":
            hidden = _Trap.apply(hidden)
        for _ in range(2 if "twice" in self.features else 1):
            if "checkpoint" in self.features:
                hidden = torch.tanh(checkpoint(self.middle, hidden, use_reentrant=False))
            else:
                hidden = torch.tanh(self.middle(hidden))
        if "tied" in self.features:
            hidden = torch.tanh(self.twin(hidden))
        if "large" in self.features:
            hidden = self.large(hidden).view(-1, LARGE, WIDTH).mean(dim=1)
        if self.features & {"unused", "apart"} and self.uses_branch:
            hidden = hidden + self.branch(hidden)
        logits: Tensor = self.last(self.dropout(hidden))
        return (logits * self.scale, self.scale) if "scale" in self.features else logits


def loss_of(output: Tensor | tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
    """The loss of what a `Net` returned."""
    logits, scale = output if isinstance(output, tuple) else (output, None)
    loss = nn.functional.cross_entropy(logits.float() if logits.dtype == torch.bfloat16 else logits, labels)
    return loss if scale is None else loss + 0.1 * scale**2


def batch(number: int, rank: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Inputs and labels of one rank; also seeds what dropout draws."""
    generator = torch.Generator().manual_seed(1000 * number + rank)
    torch.manual_seed(1000 * number + rank)
    x = torch.randn(BATCH, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    return x, torch.randint(0, CLASSES, (BATCH,), generator=generator)


INTERFACES = {"sharded": ("sharded-step",), "late": ("late-gather",)}


def _step(kind: str, buckets: int) -> StepPlan:
    """Late gathers are of one bucket or two, by turns, the last buckets first."""
    if kind == "sharded":
        return StepPlan(sharded=True)
    left, groups = list(range(buckets)), list[tuple[int, ...]]()
    while left:
        groups.append(tuple(left.pop() for _ in range(min(len(left), 1 + len(groups) % 2))))
    return StepPlan(sharded=True, gather="forward", gathers=tuple(groups))


def plan_of(parameters: Sequence[str], kind: str, group: int, ranks: int) -> Plan:
    """Buckets of `group` gradients in reverse order of registration."""
    names = list(reversed(parameters))
    sparse = {
        "collective": "sparse",
        "algorithm": "flat",
        "compressor": CompressorSpec(name="topk", selector="exact", density=DENSITY),
    }
    how: dict[str, Any] = sparse if kind == "sparse" else {}
    buckets = tuple(PlanBucket(gradients=tuple(names[i : i + group]), **how) for i in range(0, len(names), group))
    return Plan(
        model=ModelReference(name="script"),
        world=PlanWorld(ranks=ranks, nodes=ranks if kind == "delayed" else 1),
        accuracy={"sparse": "bounded", "delayed": "relaxed"}.get(kind, "exact"),
        buckets=buckets,
        delay=DELAY if kind == "delayed" else None,
        updates=UpdatePlan(step=_step(kind, len(buckets))) if kind in INTERFACES else None,
        interface=INTERFACES.get(kind),
    )
