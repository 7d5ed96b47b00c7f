"""What the ranks of the fault and collective tests do."""

from __future__ import annotations

import os
import signal
import time

import torch
import torch.distributed as dist
from session_checks import Weighted, plan_of
from torch import Tensor

import runtime
from runtime.comm.collectives import COLLECTIVES, Collective
from runtime.comm.collectives.direct import Narrowed, Packed, narrowed_all_reduce
from runtime.comm.world import World
from runtime.core.buckets import Message
from runtime.errors import CommunicationError, EnvironmentFailure


def sums_are_exact() -> dict[str, bool]:
    """Every registered collective carries integers exactly, for sizes that ranks do not divide."""
    world = World.join(timeout_s=30)
    assert world.group is not None
    results = {}
    for numel in (1, 2, 3, 7, 1000, 4097):
        expected = world.ranks * (torch.arange(numel) % 11) + sum(range(world.ranks))
        for name, collective in COLLECTIVES.items():
            for dtype in (torch.float32, torch.float64, torch.bfloat16):
                flat = (torch.arange(numel) % 11 + world.rank).to(dtype)
                summed = carry(collective, name[0], flat, world)
                results[f"{'/'.join(name)} {dtype} {numel}"] = torch.equal(summed, expected.to(dtype))
        message = Narrowed(numel, world.ranks, torch.bfloat16, torch.float32, torch.device("cpu"))
        message.flat[:numel] = torch.arange(numel) % 11 + world.rank
        run_phases(narrowed_all_reduce, message, world)
        results[f"narrowed {numel}"] = torch.equal(message.gathered[:numel], expected.bfloat16())
        results[f"narrowed {numel} loses nothing"] = not bool(message.total.any())
    world.leave()
    return results


def carry(collective: Collective, kind: str, flat: Tensor, world: World) -> Tensor:
    """The sum over ranks of `flat`, by any collective of the registry."""
    if kind == "all_reduce":
        message = Message(flat, [])
        run_phases(collective, message, world)
        return message.flat
    gathered = torch.zeros(world.ranks * flat.nbytes, dtype=torch.uint8)
    words = Packed(flat.view(torch.uint8), gathered, value_words=flat.nbytes // 2)
    run_phases(collective, words, world)
    return words.gathered.view(flat.dtype).view(world.ranks, -1).sum(dim=0)


def run_phases(collective: Collective, message: object, world: World) -> None:
    """One message, one phase after the other."""
    assert world.group is not None
    for work in collective(message, world.group):
        work.wait()


def late_rank() -> tuple[str, float]:
    """Rank 1 never comes to the second step: (what rank 0 is told, after how many seconds)."""
    model = Weighted()
    session = runtime.attach(model, None, plan_of(model, 2), timeout_s=3)
    model([torch.ones_like(w) for w in model.weights]).backward()
    if dist.get_rank() == 1:
        time.sleep(8)
        return "", 0.0
    started = time.monotonic()
    try:
        model([torch.ones_like(w) for w in model.weights]).backward()
    except CommunicationError as error:
        return str(error), time.monotonic() - started
    session.detach()
    return "no error", 0.0


def missing_rank() -> tuple[str, float]:
    """Rank 1 never attaches: (what rank 0 is told, after how many seconds)."""
    model = Weighted()
    if dist.get_rank() == 1:
        time.sleep(8)
        return "", 0.0
    started = time.monotonic()
    try:
        runtime.attach(model, None, plan_of(model, 2), timeout_s=3)
    except EnvironmentFailure as error:
        return str(error), time.monotonic() - started
    return "no error", 0.0


def killed_rank() -> None:
    """Rank 1 is killed while rank 0 waits for it in backward."""
    model = Weighted()
    runtime.attach(model, None, plan_of(model, 2), timeout_s=20)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    model([torch.ones_like(w) for w in model.weights]).backward()


def raising_rank() -> None:
    """Rank 1 raises something of its own."""
    if dist.get_rank() == 1:
        raise LookupError("on purpose")
    time.sleep(30)


def alone() -> tuple[int, float, bool]:
    """One rank: (steps in the report, measured µs, weights equal to a bare loop's)."""
    from session_checks import OPTIMIZERS, convnet, digest, train

    bare, model = convnet(), convnet()
    train(bare, OPTIMIZERS["sgd"](bare.parameters()), bare, steps=4)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    session = runtime.attach(model, optimizer, plan_of(model, 3))
    train(model, optimizer, model, steps=4)
    report = session.report()
    session.detach()
    return report.steps, report.iteration_us, digest(bare) == digest(model)
