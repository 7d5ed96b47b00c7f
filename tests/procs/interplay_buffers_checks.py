"""Buffers that follow rank 0, whatever a script does with them, and calls of `forward` that pass the model by."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from interplay_harness import SGD, Side, batch, clone, compare, like_ddp, mlp, outcome, ranks_agree, told, with_ddp
from session_checks import plan_of
from step_checks import raised
from torch import Tensor, nn
from torch.ao.quantization import FakeQuantize, PerChannelMinMaxObserver
from torch.nn import functional
from torch.optim.swa_utils import update_bn

import runtime

STEPS = 4


class Codebook(nn.Module):
    """Its outputs depend on a buffer, which is moved where one layer is in training mode."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.drop, self.last = nn.Linear(6, 6), nn.Dropout(0.0), nn.Linear(6, 3)
        self.register_buffer("code", torch.zeros(6))
        self.register_buffer("moved", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 6) → (batch, 3)."""
        x = self.first(x)
        if self.drop.training:
            self.move(x.detach().mean(0))
        return self.last(x - self.code[:6])

    def move(self, mean: Tensor) -> None:
        """Takes a mean of the batch in."""
        self.code.lerp_(mean, 0.3)
        self.moved += 1


class Growing(Codebook):
    """Its buffers get other sizes in place, are replaced by others of another dtype, and appear late."""

    def move(self, mean: Tensor) -> None:
        """Adds a row."""
        self.moved = self.moved.to(torch.int32) + 1
        rows = int(self.moved)
        self.code.resize_(rows, 6)[rows - 1] = mean
        self.code = self.code.view(-1)
        if rows == 2:
            self.register_buffer("late", mean.clone())
        elif rows > 2:
            self.code[:6] += self.late


def _quantized() -> nn.Module:
    class Quantized(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            layer, fake, last = self
            return last(functional.linear(x, fake(layer.weight), layer.bias))

    torch.manual_seed(0)
    fake = FakeQuantize(PerChannelMinMaxObserver, quant_min=-128, quant_max=127, dtype=torch.qint8, ch_axis=0)
    return Quantized(nn.Linear(6, 8), fake, nn.Linear(8, 3))


def _step(side: Side, step: int, forward: Callable[[Tensor], Tensor] | None = None) -> None:
    side.optimizer.zero_grad()
    x, y = batch(step)
    functional.cross_entropy((forward or side.forward)(x), y).backward()
    side.optimizer.step()


def _evaluated(side: Side) -> list[Tensor]:
    """Each rank its share."""
    found = []
    for step in range(STEPS):
        _step(side, step)
        side.model.eval()
        with torch.no_grad():
            found += [side.forward(batch(10 + step)[0]), side.forward(batch(20 + step)[0])]
        side.model.train()
    return clone(found)


def _part_trained(side: Side) -> None:
    side.model.eval()
    side.model.drop.train()
    for step in range(STEPS):
        _step(side, step)


def _grown(side: Side) -> None:
    for step in range(STEPS):
        _step(side, step)


def _changed(side: Side) -> None:
    """On one rank, on another, on all; in place, by a replacement, by a loaded state, by forwards."""
    rank = dist.get_rank()
    before = clone(side.model.state_dict())
    for step in range(9):
        _step(side, step)
        if step == rank:
            side.model.code.fill_(step + 3.0)
        elif step == 2 + rank:
            side.model.code = side.model.code + 1.0
        elif step == 4 and rank == 0:
            side.model.load_state_dict({**side.model.state_dict(), "code": before["code"] + 0.5})
        elif step == 5:
            side.model.code.add_(rank)
        elif step == 6 and rank == 0:
            update_bn([batch(30)[0]], side.model)
            with torch.no_grad():
                side.model(batch(31)[0])
        elif step == 7 and rank > 0:
            side.model.moved = side.model.moved.short()
            side.model.moved = side.model.moved.long()


def _direct(side: Side) -> list[Any]:
    """Steps, accumulation, an error and an evaluation, all by `forward`."""
    for step in range(2):
        _step(side, step, side.forward.forward)
    if side.session is not None:  # DDP's reducer waits for a backward
        with suppress(RuntimeError):
            side.model.forward(torch.ones(2, 5))
    with side.no_sync():
        loss = side.forward.forward(batch(2)[0]).sum()
    loss.backward()
    found = clone([p.grad for p in side.model.parameters()])
    _step(side, 3, side.forward.forward)
    side.model.eval()
    with torch.no_grad():
        found.append(clone(side.forward.forward(batch(4)[0])))
    if side.session is not None:
        found.append(side.session.report().forward_us > 0.0)
    else:
        found.append(True)
    return found


def left_alone() -> dict[str, bool]:
    """With `broadcast_buffers=False` each rank keeps its own, from the beginning."""

    def make() -> nn.Module:
        model = Codebook()
        model.code.fill_(float(dist.get_rank()))
        return model

    outcomes = []
    for planned in (False, True):
        if planned:
            model = make()
            optimizer = SGD(model.parameters())
            session = runtime.attach(model, optimizer, plan_of(model, 2), timeout_s=60, broadcast_buffers=False)
            side = Side(model, model, optimizer, session)
        else:
            side = with_ddp(make(), broadcast_buffers=False)
        _grown(side)
        outcomes.append(outcome(side, clone(list(side.model.buffers()))))
        if not planned:
            outcomes[0]["buffers"] = dict(zip(outcomes[0]["buffers"], outcomes[0]["returned"], strict=True))
        side.close()
    return compare(*outcomes)


def different() -> dict[str, bool]:
    """Ranks' buffers get other sizes on each."""
    model = Codebook()
    session = runtime.attach(model, None, plan_of(model, 2), timeout_s=3)
    x, _ = batch(0)
    model(x).sum().backward()
    rank = dist.get_rank()
    model.code = torch.zeros(7 + rank)
    message = raised(lambda: model(x).sum().backward())
    words = ["InputError: buffers follow those of rank 0", "code of float", "(7,) on rank 0", "(8,) on rank 1"]
    results = told(message, words)
    session.detach()
    return results


def method() -> dict[str, bool]:
    """What takes the place of `forward` is gone after detach; copies call their own, and libraries may wrap it."""
    results = {}
    model, other = mlp(), mlp()
    other.forward = functional.relu  # type: ignore[assignment]
    for which, one in (("plain", model), ("own", other)):
        before = one.__dict__.get("forward")
        session = runtime.attach(one, None, plan_of(one, 2), timeout_s=20)
        session.detach()
        results[f"{which}: as before"] = one.__dict__.get("forward") is before
    session = runtime.attach(model, None, plan_of(model, 2), timeout_s=20)
    attached, calls = model.forward, list[int]()

    def around(x: Tensor) -> Tensor:
        calls.append(1)
        return attached(x)

    model.forward = around  # type: ignore[method-assign]
    model.forward(batch(0)[0]).sum().backward()
    results["wrapped: averaged"] = ranks_agree([p.grad for p in model.parameters()])
    session.detach()
    results["wrapped: stays"] = model.forward is around and len(calls) == 2
    results["wrapped: works"] = bool(model(batch(0)[0]).sum().isfinite())
    return results


BUFFER_CHECKS: dict[str, Callable[[], dict[str, bool]]] = {
    "evaluated": partial(like_ddp, _evaluated, Codebook),
    "part in training mode": partial(like_ddp, _part_trained, Codebook),
    "changed": partial(like_ddp, _changed, Codebook),
    "growing": partial(like_ddp, _grown, Growing),
    "quantization-aware": partial(like_ddp, _grown, _quantized),
    "direct forward": partial(like_ddp, _direct, Codebook),
    "left alone": left_alone,
    "different": different,
    "method": method,
}
