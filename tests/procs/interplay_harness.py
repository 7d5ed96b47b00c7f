"""One training loop run twice in the same processes, with DDP and with a plan, and what came out of both."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from session_checks import follow_rank_0, plan_of
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import runtime

TOLERANCE = 1e-12
"""With three ranks all is float64, and sums of three have several orders: max |Δ| / max(1, |w|) after some steps."""

LOW_PRECISION_TOLERANCE = 2e-2
"""The same where sums of three are rounded to bfloat16 (8 bits) in every step."""

SGD: Callable[..., torch.optim.Optimizer] = lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)  # noqa: E731
ADAM: Callable[..., torch.optim.Optimizer] = lambda p: torch.optim.AdamW(p, lr=1e-2)  # noqa: E731


@dataclass
class Side:
    """One of the two ways to train."""

    model: nn.Module
    """The bare module."""
    forward: nn.Module
    """What the loop calls."""
    optimizer: torch.optim.Optimizer
    session: runtime.Session | None

    @property
    def no_sync(self) -> Callable[[], Any]:
        """DDP's or the session's."""
        return self.forward.no_sync if self.session is None else self.session.no_sync

    def close(self) -> None:
        """Makes the model plain again."""
        if self.session is not None:
            self.session.detach()


class Chain(nn.Sequential):
    """Has a forward of its own: of `nn.Sequential` itself torch compiles nothing."""

    def forward(self, x: Tensor) -> Tensor:
        """One after the other."""
        for layer in self:
            x = layer(x)
        return x


def mlp() -> nn.Sequential:
    """Three linear layers, the same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def batch(step: int) -> tuple[Tensor, Tensor]:
    """This rank's inputs and labels, in the default dtype."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    return torch.randn(5, 6, generator=generator), torch.randint(0, 3, (5,), generator=generator)


def loss_of(side: Side, step: int) -> Tensor:
    """Of this rank's batch."""
    x, y = batch(step)
    return functional.cross_entropy(side.forward(x), y)


def steps(side: Side, numbers: Iterable[int]) -> None:
    """Ordinary steps."""
    for step in numbers:
        side.optimizer.zero_grad()
        loss_of(side, step).backward()
        side.optimizer.step()


def with_ddp(model: nn.Module, optimizer: Callable[..., torch.optim.Optimizer] = SGD, **options: Any) -> Side:
    """The reference."""
    made = optimizer(p for p in model.parameters() if p.requires_grad)
    return Side(model, DistributedDataParallel(model, **options), made, None)


def with_plan(model: nn.Module, optimizer: Callable[..., torch.optim.Optimizer] = SGD, group: int = 2) -> Side:
    """Buckets of `group` gradients."""
    made = optimizer(p for p in model.parameters() if p.requires_grad)
    return Side(model, model, made, runtime.attach(model, made, plan_of(model, group), timeout_s=60))


def like_ddp(
    loop: Callable[[Side], Any],
    make: Callable[[], nn.Module] = mlp,
    optimizer: Callable[..., torch.optim.Optimizer] = SGD,
    *,
    tolerance: float = TOLERANCE,
    **ddp_options: Any,
) -> dict[str, bool]:
    """Runs `loop` both ways and compares what it returned, parameters, buffers, gradients and the optimizer's state:
    bit for bit on two ranks, within `tolerance` on more. Also whether the ranks ended with the same weights.
    """
    outcomes = []
    for side in (with_ddp(make(), optimizer, **ddp_options), with_plan(make(), optimizer)):
        returned = loop(side)
        outcomes.append(outcome(side, returned))
        side.close()
    return compare(*outcomes, tolerance=tolerance)


def outcome(side: Side, returned: Any = None) -> dict[str, Any]:
    """All that training has changed, by kind, as plain values and copies; of DDP the buffers that its next forward
    would begin with.
    """
    if isinstance(side.forward, DistributedDataParallel):
        follow_rank_0(side.model)
    return {
        "parameters": clone(dict(side.model.named_parameters())),
        "buffers": clone(dict(side.model.named_buffers())),
        "gradients": clone({name: p.grad for name, p in side.model.named_parameters()}),
        "optimizer": clone(side.optimizer.state_dict()["state"]),
        "learning rates": [group["lr"] for group in side.optimizer.param_groups],
        "returned": clone(returned),
    }


def compare(expected: dict[str, Any], found: dict[str, Any], *, tolerance: float = TOLERANCE) -> dict[str, bool]:
    """By kind, whether both are the same; and whether all ranks found the same parameters and optimizer state."""
    exact = dist.get_world_size() == 2
    results = {kind: same(expected[kind], found[kind], 0.0 if exact else tolerance) for kind in expected}
    results["ranks agree"] = ranks_agree({kind: found[kind] for kind in ("parameters", "optimizer")})
    return results


def clone(value: Any) -> Any:
    """The same nested value with tensors of its own."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: clone(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [clone(inner) for inner in value]
    return value


def same(a: Any, b: Any, tolerance: float = 0.0) -> bool:
    """Equality of nested values; of tensors up to `tolerance` of the largest element or 1, dtypes included."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        if tolerance == 0.0 or a.numel() == 0 or not (a.is_floating_point() or a.is_complex()):
            return torch.equal(a, b)
        return bool((a - b).abs().max() <= tolerance * max(1.0, a.abs().max()))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key], tolerance) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(same(x, y, tolerance) for x, y in zip(a, b, strict=True))
    if isinstance(a, float) and isinstance(b, float):
        return a == b or abs(a - b) <= tolerance * abs(a)
    return type(a) is type(b) and bool(a == b)


def ranks_agree(value: Any) -> bool:
    """Whether every rank holds the same bits."""
    digest = hashlib.sha256()

    def add(inner: Any) -> None:
        if isinstance(inner, dict):
            for key, element in inner.items():
                digest.update(repr(key).encode())
                add(element)
        elif isinstance(inner, list | tuple):
            for element in inner:
                add(element)
        elif isinstance(inner, Tensor):
            digest.update(inner.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        else:
            digest.update(repr(inner).encode())

    add(value)
    everyone: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(everyone, digest.hexdigest())
    return len(set(everyone)) == 1


def told(message: str, words: list[str]) -> dict[str, bool]:
    """Whether a message holds all these words, and is the same on every rank."""
    results = {f"{word!r} in {message!r}": word in message for word in words}
    return results | {f"alike: {message!r}": ranks_agree(message)}


def guarded(check: Callable[[], Any]) -> Any:
    """What a check found, or the error that it ended with: one that fails on all ranks alike leaves the others be."""
    try:
        return check()
    except Exception as error:
        return {f"{type(error).__name__}: {error}": False}
