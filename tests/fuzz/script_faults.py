"""Deliberate faults of the runtime that the script fuzzer must find, each with the smallest script that does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from script_checks import Group, gather, prepare, run_script
from scripts import from_line
from torch import Tensor

from runtime.core.buffers import BufferSync
from runtime.core.closures import LossAveraging
from runtime.core.hooks import GradientHook
from runtime.core.usage import UsageFlags
from runtime.core.views import ViewGuard
from runtime.delay.server import Server
from runtime.optimizers.shared_operator import SharedOperator
from runtime.optimizers.units import Compute
from runtime.outer import local_steps
from runtime.session.session import Session
from runtime.sharded import awaited
from runtime.sharded import exchange as sharded
from runtime.sharded.step import ShardedStep
from runtime.sparse.residuals import ErrorFeedbackState


def _before_later_hooks(self: Any, node: Any) -> None:
    self._node = node
    after = self._after
    self._handles = [self._parameter.register_post_accumulate_grad_hook(lambda p: after(None, (p.grad,)))]


def _own_norms(parts: Any, order: float, *_: Any) -> Tensor:
    return torch.stack([torch.linalg.vector_norm(part.double(), order) for part in parts])


_update = Server.update


def _faster(self: Server, rates: Any, *arguments: Any) -> None:
    _update(self, [rate | {"lr": rate["lr"] * 1.01} for rate in rates], *arguments)


def _without_momentum(_self: SharedOperator, parameter: Tensor, group: Any, compute: Compute) -> Tensor:
    assert parameter.grad is not None
    return compute(parameter.grad, group)


@contextlib.contextmanager
def _nothing(_self: Any) -> Iterator[None]:
    yield


@dataclass(frozen=True)
class Fault:
    """What is broken, how, and a script that shows it."""

    owner: Any
    attribute: str
    broken: Any
    line: str


FAULTS = {
    "hooks registered later see averages": Fault(
        GradientHook, "_register", _before_later_hooks, "exact buckets=1: hook post clamp 1; train 1"
    ),
    "buffers stay apart": Fault(BufferSync, "_unpack", lambda _self, _source: None, "exact model=norm: train 2"),
    "kept gradients are written over": Fault(
        ViewGuard, "restore", lambda _self: None, "exact: train 2; keep detach; train 1"
    ),
    "a checkpoint forgets what is held back": Fault(
        ErrorFeedbackState, "state", lambda _self: {}, "sparse: train 1; checkpoint; train 1"
    ),
    "micro-batches are pushed as steps": Fault(
        Session, "no_sync", _nothing, "delayed dtype=float64: train 2; loop micro no_sync; train 2"
    ),
    "norms are of a rank's own part": Fault(
        sharded, "whole_norms", _own_norms, "sharded dtype=float64: loop clip norm; train 1"
    ),
    "unused parameters count as used": Fault(
        UsageFlags, "used_somewhere", lambda flags: set(range(flags._parameters)),
        "exact model=unused optimizer=adamw habit=find_unused: train 2",
    ),
    "weights changed by .data are not sent": Fault(
        ShardedStep, "_collect_weights", lambda _self: None, "sharded dtype=float64: train 1; exchange scaled; train 1"
    ),
    "weights are looked at before they have come": Fault(
        awaited, "_asks_nothing", lambda _: True, "late: loop ema copy; train 2"
    ),
    "owners go further than they should": Fault(Server, "update", _faster, "delayed dtype=float64: train 4"),
    "owners orthogonalize gradients without momentum": Fault(
        SharedOperator, "_result", _without_momentum, "exact optimizer=muon: train 3"
    ),
    "workers keep the state of their optimizers": Fault(
        local_steps, "average_optimizer", lambda *_: None, "outer optimizer=adamw: train 4; switch 1; train 2"
    ),
    "closures' losses are not averaged": Fault(
        LossAveraging, "install", lambda *_: [], "exact optimizer=lbfgs: train 2"
    ),
}  # fmt: skip


@contextlib.contextmanager
def broken(fault: Fault) -> Iterator[None]:
    """Inside, the runtime has the fault."""
    whole = getattr(fault.owner, fault.attribute)
    setattr(fault.owner, fault.attribute, fault.broken)
    try:
        yield
    finally:
        setattr(fault.owner, fault.attribute, whole)


def find_faults() -> dict[str, list[bool]]:
    """Of each fault, whether its script fails without it, and with it."""
    prepare([])
    group, found = Group(), dict[str, list[bool]]()
    for name, fault in FAULTS.items():
        before = any(gather(run_script(from_line(fault.line), group)))
        with broken(fault):
            found[name] = [before, any(gather(run_script(from_line(fault.line), group)))]
    return found
