"""The models of random scripts, and optimizers, batches and plans for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from runtime.plan import (
    CompressorSpec,
    DelaySpec,
    ModelReference,
    OperatorPlan,
    OuterSpec,
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


class Together:
    """Several optimizers of one model, with the methods of one that scripts call."""

    def __init__(self, *each: Any) -> None:
        self.each = each

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Of all."""
        return [group for one in self.each for group in one.param_groups]

    def step(self, *arguments: Any) -> Any:
        """One after the other; the first gets a closure."""
        result = self.each[0].step(*arguments)
        for one in self.each[1:]:
            one.step()
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Of all."""
        for one in self.each:
            one.zero_grad(set_to_none)

    def add_param_group(self, group: dict[str, Any]) -> None:
        """To the last, which takes parameters of any shape."""
        self.each[-1].add_param_group(group)

    def state_dict(self) -> dict[str, Any]:
        """All states, with keys of their own."""
        states = [one.state_dict() for one in self.each]
        state = {f"{at}.{key}": value for at, one in enumerate(states) for key, value in one["state"].items()}
        return {"state": state, "each": states}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """What `state_dict` gave."""
        for one, own in zip(self.each, state["each"], strict=True):
            getattr(one, "optimizer", one).load_state_dict(own)


def each_of(optimizer: Any) -> tuple[Any, ...]:
    """One by one."""
    return optimizer.each if isinstance(optimizer, Together) else (optimizer,)


def _muon(parameters: Iterable[nn.Parameter]) -> Together:
    """Muon for matrices of hidden layers, AdamW for the rest."""
    listed = list(parameters)
    hidden = [p.ndim == 2 and len(p) != CLASSES for p in listed]
    matrices, rest = ([p for p, one in zip(listed, hidden, strict=True) if one is of] for of in (True, False))
    return Together(torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=0.01))


OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], Any]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "adamw_loop": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, foreach=False),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.01, momentum=0.5),
    "muon": _muon,
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


class Bank(nn.Module):
    """Remembers what it has seen, in buffers of two dtypes, and adds it."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.register_buffer("seen", torch.full((WIDTH,), 0.01 * rank))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """`x` and what was seen before; same shape."""
        if self.training:
            self.seen.lerp_(x.detach().mean(dim=0), 0.1)
            self.count.add_(1)
        return x + self.seen.clone()


class Growing(nn.Module):
    """As an observer of quantization: has statistics by channel from the first batch on, in a buffer that grows."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        """`x` within what was seen in training; same shape."""
        largest = x.detach().abs().amax(dim=0)
        if self.training and self.largest.numel() == 0:
            self.largest.resize_(largest.shape)
            self.largest.copy_(largest)
        elif self.training:
            self.largest.copy_(torch.maximum(self.largest, largest))
        return x if self.largest.numel() == 0 else x.clamp(-self.largest.clone(), self.largest.clone())


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
        if "bank" in self.features:  # each rank's own, as long as nothing brings them in line
            self.bank = Bank(dist.get_rank())
        if "growing" in self.features:
            self.growing = Growing()
        if "expert" in self.features:
            self.expert = nn.Linear(WIDTH, WIDTH)
            nn.init.constant_(self.expert.bias, 0.1 * dist.get_rank())
            ignored = [f"expert.{name}" for name, _ in self.expert.named_parameters()]
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self, ignored)
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
        for part in ("bank", "growing"):
            if part in self.features:
                hidden = getattr(self, part)(hidden)
        if "expert" in self.features:
            hidden = hidden + self.expert(hidden)
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


def _step(kind: str, buckets: int, matrices: Sequence[str], ranks: int) -> StepPlan:
    """Owners are assigned round robin; late gathers alternate between one bucket and two, the last buckets first."""
    if kind == "sharded":
        owners = {name: at % ranks for at, name in enumerate(matrices)}
        return StepPlan(sharded=True, owners=owners or None)
    left, groups = list(range(buckets)), list[tuple[int, ...]]()
    while left:
        groups.append(tuple(left.pop() for _ in range(min(len(left), 1 + len(groups) % 2))))
    return StepPlan(sharded=True, gather="forward", gathers=tuple(groups))


def _operators(matrices: Sequence[str], group: int, ranks: int) -> OperatorPlan | None:
    """Owners one after the other, results in messages of `group`, the first inside of the one node if that is large;
    every rank computes all where it is 2.
    """
    if not matrices or group == 2:
        return None
    messages = tuple(tuple(matrices[i : i + group]) for i in range(0, len(matrices), group))
    owners = {name: (at + group) % ranks for at, name in enumerate(matrices)}
    return OperatorPlan(owners=owners, gathers=messages, inside=(0,) if group > 2 else None)


def _outer(buckets: Sequence[PlanBucket], group: int) -> OuterSpec:
    """The first bucket is a fragment, others are one; one step late, and mixed, with an odd number in each."""
    rest = tuple(name for bucket in buckets[1:] for name in bucket.gradients)
    fragments = (buckets[0].gradients, rest) if rest else None
    return OuterSpec(every=2, fragments=fragments, delay_steps=group % 2, mix=group % 2 / 2, warmup_steps=2)


def plan_of(parameters: Sequence[str], kind: str, group: int, ranks: int, matrices: Sequence[str] = ()) -> Plan:
    """Buckets of `group` gradients in reverse order of registration; `matrices`: parameters of Muon."""
    names = list(reversed(parameters))
    sparse = {
        "collective": "sparse",
        "algorithm": "flat",
        "compressor": CompressorSpec(name="topk", selector="exact", density=DENSITY),
    }
    how: dict[str, Any] = sparse if kind == "sparse" or (kind, group) == ("outer", 2) else {}
    buckets = tuple(PlanBucket(gradients=tuple(names[i : i + group]), **how) for i in range(0, len(names), group))
    return Plan(
        model=ModelReference(name="script"),
        world=PlanWorld(ranks=ranks, nodes={"delayed": ranks, "outer": None}.get(kind, 1)),
        accuracy={"sparse": "bounded", "delayed": "relaxed", "outer": "relaxed"}.get(kind, "exact"),
        buckets=buckets,
        delay=DELAY if kind == "delayed" else None,
        outer=_outer(buckets, group) if kind == "outer" else None,
        updates=UpdatePlan(
            step=_step(kind, len(buckets), matrices, ranks) if kind in INTERFACES else None,
            operator=None if kind in (*INTERFACES, "outer") else _operators(matrices, group, ranks),
        ),
        interface=INTERFACES.get(kind),
    )
