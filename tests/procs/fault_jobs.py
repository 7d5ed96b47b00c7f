"""A job, and a script of a user's own, in which one rank fails at a chosen place.

FAULT=PHASE:FAULT:RANK in the environment says where, how and who; FAULT_MOMENT names the file that the rank writes the
time into just before. Run as a program, this file is the script: it knows `runtime.attach` and no command of ours.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import runtime
from planner import TrainingJob

PHASE, FAULT, RANK = os.environ.get("FAULT", "never:none:0").split(":")
STEPS = 5
AT_STEP = 3
PROFILED_STEPS = 5
"""Steps of a profile before the one that fails; the first three are its warm-up."""
TIMED_MESSAGES = 20
"""Collectives that are timed before the one that fails."""
WIDTH = 400
BUCKETS = [["4.bias", "4.weight"], ["2.bias", "2.weight"], ["0.bias", "0.weight"]]
"""Of the plan: one to a layer; the fault in backward comes when the first is on its way."""


def fail_in(phase: str) -> None:
    """Fails if this is the place, in a rank's first life."""
    again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    if again or phase != PHASE or os.environ.get("RANK", "0") != RANK:
        return
    Path(os.environ["FAULT_MOMENT"]).write_text(repr(time.time()))
    if FAULT == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif FAULT == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        raise ArithmeticError("on purpose")


class FailingBackward(torch.autograd.Function):
    """The identity; its backward is one of the places."""

    @staticmethod
    def forward(_context: Any, x: Tensor) -> Tensor:
        """As it came."""
        return x.clone()

    @staticmethod
    def backward(_context: Any, gradient: Tensor) -> Tensor:
        """As it came."""
        fail_in("backward")
        return gradient


class Failing(nn.Module):
    """The identity; fails in the backward of a step that was asked for."""

    steps = 0

    def forward(self, x: Tensor) -> Tensor:
        """As it came."""
        Failing.steps += 1
        return FailingBackward.apply(x) if Failing.steps > AT_STEP else x  # type: ignore[no-any-return]


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    """A mean; forward is one of the places."""
    if Failing.steps >= PROFILED_STEPS:
        fail_in("compute")
    if Failing.steps >= AT_STEP:
        fail_in("forward")
    return model(batch).square().mean()  # type: ignore[no-any-return]


class FailingSGD(torch.optim.SGD):
    """SGD; fails after the last update."""

    updates = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """As ever."""
        super().step(closure)
        FailingSGD.updates += 1
        if FailingSGD.updates == STEPS:
            fail_in("end")


def make_model() -> nn.Sequential:
    """Three layers of 640 KB."""
    torch.manual_seed(0)
    layers = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
    return nn.Sequential(next(layers), nn.Tanh(), next(layers), Failing(), next(layers))


def job() -> TrainingJob:
    """The job; what fails outside of a user's functions is put in place here, on the rank that fails."""
    if os.environ.get("RANK", "0") == RANK:
        _fail_in_attach()
        _fail_in_links()
    return TrainingJob(
        model=make_model(),
        loss=loss,
        batch=lambda step, rank: torch.ones(4, WIDTH),
        optimizer=lambda parameters: FailingSGD(parameters, lr=0.1),
    )


def _fail_in_attach() -> None:
    from runtime.comm.world import World

    broadcast = World.broadcast

    def failing(self: World, tensors: Any) -> None:
        fail_in("attach")
        broadcast(self, tensors)

    World.broadcast = failing  # type: ignore[method-assign]


def _fail_in_links() -> None:
    if PHASE != "links":
        return
    from planner.profile import links

    timed, calls = links._timed_us, []

    def failing(*arguments: Any) -> float:
        calls.append(1)
        if len(calls) > TIMED_MESSAGES:
            fail_in("links")
        return timed(*arguments)

    links._timed_us = failing


def main() -> None:
    """The script: trains with the plan that is its argument; takes no care of errors."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    if os.environ["RANK"] == RANK:
        _fail_in_attach()
    model = make_model()
    optimizer = FailingSGD(model.parameters(), lr=0.1)
    runtime.attach(model, optimizer, sys.argv[1], timeout_s=float(sys.argv[2]))
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss(model, torch.ones(4, WIDTH)).backward()
        optimizer.step()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
