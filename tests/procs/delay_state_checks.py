"""What the ranks of the tests of plans with delay do: states that are saved and loaded where it is not usual."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from delay_checks import FEW, Net, attach, close, net_loss, plan_of, train
from step_checks import raised
from torch import Tensor, nn

import runtime
from runtime.plan import DelaySpec, PlanWorld
from runtime.session.session import Session

Started = tuple[nn.Module, torch.optim.Optimizer, Session]


class Normed(Net):
    """With buffers, which are each rank's own while it is delayed."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(7, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 5) → (batch, 3)."""
        scores: Tensor = self.two(torch.tanh(self.norm(self.one(x))))
        return scores


def _started(group: int = 2, spec: DelaySpec = FEW) -> Started:
    model = Normed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-3)
    return model, optimizer, attach(model, optimizer, spec, group)


def _saved(started: Started) -> Any:
    return copy.deepcopy(tuple(part.state_dict() for part in started))


def _load(started: Started, saved: Any) -> None:
    for part, state in zip(started, saved, strict=True):
        part.load_state_dict(state)


def buffers_resumed() -> dict[str, bool]:
    """A run goes on with each rank's own buffers, also where it was saved while the model had the global weights."""
    results = {}
    for at in (4, 5, 9, 10):
        straight = _started()
        train(*straight[:2], net_loss, range(16))
        straight[2].detach()
        for inside in (False, True):
            started = _started()
            train(*started[:2], net_loss, range(at))
            with started[2].global_weights() if inside else nullcontext():
                saved = _saved(started)
            started[2].detach()
            started = _started()
            _load(started, saved)
            train(*started[:2], net_loss, range(at, 16))
            found, expected = (one[0].state_dict().values() for one in (started, straight))
            results[f"at {at}, {'inside' if inside else 'outside'}"] = close(found, expected, 0.0)
            started[2].detach()
    return results


def other_groups() -> dict[str, bool]:
    """An optimizer with other groups of parameters does not go on."""
    started = _started()
    train(*started[:2], net_loss, range(9))
    saved = started[2].state_dict()
    started[2].detach()
    model = Normed()
    groups = [{"params": model.one.parameters()}, {"params": [*model.two.parameters(), *model.norm.parameters()]}]
    session = runtime.attach(model, torch.optim.SGD(groups, lr=0.02, momentum=0.9), plan_of(model, FEW, 2), drift=False)
    said = raised(lambda: session.load_state_dict(saved))
    session.detach()
    return {"refused": said.startswith("InputError") and "has 1 groups of parameters" in said}


def without_delay() -> dict[str, bool]:
    """One rank alone, which has no delay, and a plan without one say what they found."""
    started = _started()
    train(*started[:2], net_loss, range(9))
    saved = started[2].state_dict()
    started[2].detach()
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, saved)
    model = Normed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    group = dist.new_group([0])
    results = {}
    if dist.get_rank() == 0:
        plan = plan_of(model, FEW, 2, world=PlanWorld(ranks=1, nodes=1))
        session = runtime.attach(model, optimizer, plan, process_group=group, drift=False)
        said = raised(lambda: session.load_state_dict(everyone))
        results["alone"] = "state of a run with delay" in said and "end the delay there first" in said
        session.detach()
    exact = runtime.attach(model, optimizer, plan_of(model, None, 2), drift=False)
    results["without delay"] = "state of a run with delay" in raised(lambda: exact.load_state_dict(saved))
    exact.detach()
    return results


CHECKS: dict[str, Callable[[], dict[str, bool]]] = {
    check.__name__: check for check in (buffers_resumed, other_groups, without_delay)
}
