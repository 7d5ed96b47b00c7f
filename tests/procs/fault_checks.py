"""What the ranks of the fault and collective tests do."""

from __future__ import annotations

import gc
import os
import signal
import time
import warnings
from dataclasses import replace

import torch
import torch.distributed as dist
from session_checks import Weighted, plan_of
from torch import Tensor

import runtime
from runtime.comm.collectives import COLLECTIVES, Collective
from runtime.comm.collectives.direct import Packed, by_message
from runtime.comm.world import World
from runtime.core.buckets import BucketBuffer, Message, Slot, lay_out
from runtime.errors import CommunicationError, EnvironmentFailure
from runtime.plan import CompressorSpec
from runtime.plan.transports import TWO_SHOT
from runtime.sparse.compressors.wire import WIRE_DTYPES
from runtime.sparse.layout import make_lossy


def sums_are_exact() -> dict[str, bool]:
    """Every registered collective carries integers exactly, for sizes that ranks do not divide."""
    world = World.join(timeout_s=30)
    assert world.group is not None
    results = {}
    for numel in (1, 2, 3, 7, 1000, 4097):
        expected = world.ranks * (torch.arange(numel) % 11) + sum(range(world.ranks))
        for name, collective in COLLECTIVES.items():
            for dtype in (torch.float32, torch.float64, torch.bfloat16) if name != TWO_SHOT else ():
                flat = (torch.arange(numel) % 11 + world.rank).to(dtype)
                summed = carry(collective, name.collective, flat, world)
                results[f"{name} {dtype} {numel}"] = torch.equal(summed, expected.to(dtype))
        for spec in FORMATS:
            for what, good in narrowed(spec, numel, world).items():
                results[f"{spec.dtype} {spec.rounding} {numel}: {what}"] = good
    world.leave()
    return results


FORMATS = [
    *(CompressorSpec(name="wire", dtype=dtype) for dtype in WIRE_DTYPES),
    CompressorSpec(name="wire", dtype="int8", block=64, rounding="stochastic"),
    CompressorSpec(name="wire", dtype="float8_e4m3fn", block=64),
]


def narrowed(spec: CompressorSpec, numel: int, world: World) -> dict[str, bool]:
    """Some steps of one bucket: all ranks have the same bits, and what has not come is in the residuals."""
    gradient = torch.nn.Parameter(torch.zeros(numel))
    slots = [Slot("only", 0, gradient)]
    bucket, tail = BucketBuffer(0, slots, lay_out(slots), "a bucket"), torch.zeros(5)
    lossy = make_lossy(bucket, spec, world.ranks, tail, rank=world.rank)
    came, sent = torch.zeros(numel), torch.zeros(numel)
    same, flags = True, True
    for step in range(4):
        generator = torch.Generator().manual_seed(10 * step + world.rank)
        own = torch.randn(numel, generator=generator) * 10.0 ** torch.randint(-4, 4, (numel,), generator=generator)
        bucket.messages[0].flat.copy_(own)
        tail.copy_(torch.arange(5) + world.rank)
        lossy.pack(step)
        run_phases(by_message, lossy.packed, world)
        good = lossy.unpack()
        lossy.feedback.commit(good)
        found = bucket.messages[0].flat
        everyone = world.gather(found.numpy().tobytes(), "comparing")
        same &= bool(good) and all(one == everyone[0] for one in everyone)
        flags &= torch.equal(tail, world.ranks * torch.arange(5) + sum(range(world.ranks)))
        came, sent = came + own, sent + found
    dist.all_reduce(came)
    left = lossy.feedback.unsent()
    dist.all_reduce(left)
    size = float(came.abs().max())
    close = torch.allclose(sent + left, came, rtol=1e-5, atol=1e-5 * size)
    off = float((sent - came).abs().max()) <= 0.2 * size
    return {"same bits": same, "flags": flags, "nothing is lost": close, "little is left": off}


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


def busy_rank() -> list[str]:
    """Rank 1 is busy outside of two steps for longer than a wait is long, without a deadline that was given: what is
    said.
    """
    model = Weighted()
    session = runtime.attach(model, None, plan_of(model, 2))
    model([torch.ones_like(w) for w in model.weights]).backward()  # in the first step ranks also agree on weights
    session._world.notice_s = 1.5
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            if dist.get_rank() == 1:
                time.sleep(2.5)
            model.zero_grad()
            model([torch.ones_like(w) for w in model.weights]).backward()
            assert all(w.grad is not None and bool((w.grad == 1.0).all()) for w in model.weights)
    session.detach()
    return [str(one.message) for one in said if one.category is runtime.LongWaitWarning]


def stopped_rank(algorithm: str) -> str:
    """Rank 1 is stopped in the same place: what rank 0 is told, which can take its group down before rank 1 is back."""
    model = Weighted()
    plan = plan_of(model, 2)
    plan = replace(plan, buckets=tuple(replace(bucket, algorithm=algorithm) for bucket in plan.buckets))
    session = runtime.attach(model, None, plan)
    session._world.notice_s = 1.5
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    try:
        model([torch.ones_like(w) for w in model.weights]).backward()
    except CommunicationError as error:
        if dist.get_rank() == 0:
            [other] = session._world.neighbours
            session._exchange.close()
            session._world.leave()
            os.kill(other.pid, signal.SIGCONT)
        return str(error)
    return "no error"


def forked_behind_a_session() -> bool:
    """Whether a forked process ends whose garbage collector finds the group of a session that its parent dropped."""
    model = Weighted()
    gc.collect()
    gc.disable()
    session = runtime.attach(model, None, plan_of(model, 2))
    model([torch.ones_like(w) for w in model.weights]).backward()
    session.detach()
    del session
    worker = os.fork()
    if worker == 0:
        gc.collect()
        os._exit(0)
    until = time.monotonic() + 20
    while os.waitpid(worker, os.WNOHANG) == (0, 0):
        if time.monotonic() > until:
            os.kill(worker, signal.SIGKILL)
            os.waitpid(worker, 0)
            return False
        time.sleep(0.01)
    return True


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
