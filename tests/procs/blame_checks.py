"""What ranks say where one of them fails by itself: it raises what it was, and the others say that they miss a rank."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from hierarchy_reference import on_grid
from matrix_cells import Cell, Given, gradients_of
from torch import Tensor

import runtime
from runtime.comm.collectives.direct import Narrowed
from runtime.core.buffers import BufferSync
from runtime.delay.pushes import WholePush
from runtime.errors import CommunicationError
from runtime.plan import NO_COMPRESSION, CompressorSpec, DelaySpec, PlanWorld, StepPlan, UpdatePlan
from runtime.plan.transports import HITOPK, LIBRARY, Transport
from runtime.sparse.shards import ShardBucket

FAULTY, DEADLINE_S = 1, 5.0
"""The rank that fails, and how long the others wait for it."""

TOPK = CompressorSpec(name="topk", selector="exact", density=0.3)


@dataclass(frozen=True)
class Fault:
    """Something of ours that raises, and a plan that comes by it."""

    owner: Any
    name: str
    error: Exception
    transport: Transport = LIBRARY
    spec: CompressorSpec = NO_COMPRESSION
    changes: tuple[tuple[str, Any], ...] = ()


FAULTS: dict[str, Fault] = {
    "on the backend's thread": Fault(
        Narrowed, "narrow", RuntimeError("injected"), LIBRARY, CompressorSpec(name="wire", dtype="bfloat16")
    ),
    "on a link's thread": Fault(ShardBucket, "fill", TypeError("injected"), HITOPK, TOPK),
    "in a shared step": Fault(
        "runtime.sharded.part", "reduce_scatter", RuntimeError("injected"),
        changes=(("updates", UpdatePlan(step=StepPlan(sharded=True))), ("interface", ("sharded-step",))),
    ),
    "in a push": Fault(
        WholePush, "add_up", ValueError("injected"),
        changes=(("delay", DelaySpec(steps=1, warmup_steps=0)), ("accuracy", "relaxed")),
    ),
    "before a forward": Fault(BufferSync, "_collect", RuntimeError("injected")),
}  # fmt: skip


def blamed() -> dict[str, tuple[str, str]]:
    """By fault, this rank's error, its class before it, and the notes that it has; also of a fault of the user's."""
    results = {}
    torch.set_num_threads(1)
    with on_grid(2, 2) as group:
        assert group is not None
        for what, fault in FAULTS.items():
            results[what] = _told(lambda fault=fault: _step(fault, group, _raising(fault)))
        results["in the user's hook"] = _told(lambda: _step(Fault(None, "", RuntimeError()), group, _hooked))
    return results


def _told(action: Callable[[], None]) -> tuple[str, str]:
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}", "\n".join(getattr(error, "__notes__", ()))
    return "", ""


@contextmanager
def _raising(fault: Fault) -> Iterator[Callable[[Given], None]]:
    owner = fault.owner
    target = f"{owner}.{fault.name}" if isinstance(owner, str) else f"{owner.__module__}.{owner.__name__}.{fault.name}"
    with mock.patch(target, side_effect=fault.error):
        yield lambda _: None


@contextmanager
def _hooked() -> Iterator[Callable[[Given], None]]:
    def fail(_: Tensor) -> None:
        raise RuntimeError("the user's own")

    def install(model: Given) -> None:
        model.get_parameter("vector").register_hook(fail)

    yield install


def _step(fault: Fault, group: dist.ProcessGroup, failing: Any) -> None:
    """Two steps of a model, where this rank may fail."""
    cell, rank, ranks = Cell(fault.transport, fault.spec, "float32", "several"), dist.get_rank(group), group.size()
    model = Given(cell.dtypes)
    model.register_buffer("buffer", torch.zeros(3))
    plan = replace(cell.plan(ranks), world=PlanWorld(ranks=ranks), **dict(fault.changes))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        session = runtime.attach(model, optimizer, plan, group, timeout_s=DEADLINE_S, guard=False)
    try:
        if rank != FAULTY:
            _train(model, optimizer, rank, ranks)
            return
        with failing if fault.owner is not None else failing() as install:
            install(model)
            _train(model, optimizer, rank, ranks)
    finally:
        dist.barrier()  # the rank that failed is neither dead nor gone while the others wait
        with suppress(CommunicationError):  # a shared step is given back by all ranks together
            session.detach()


def _train(model: Given, optimizer: torch.optim.Optimizer, rank: int, ranks: int) -> None:
    for step in range(3):
        optimizer.zero_grad()
        model(torch.zeros(1))
        model.backward(gradients_of((torch.float32,), rank, ranks, step))
        optimizer.step()
