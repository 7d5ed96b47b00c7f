"""What the ranks of the test of dropped sessions do: attach, train, and let go of everything without `detach`."""

from __future__ import annotations

import ctypes
import gc
import os
import warnings
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from interplay_harness import Side, like_ddp, steps
from session_checks import plan_of
from sharded_checks import LATE, SHARED
from torch import Tensor, nn

import runtime
from runtime.plan import CompressorSpec, DelaySpec, Plan, PlanWorld, StepPlan, UpdatePlan

ATTACHES = {"exact": 50, "topk": 14, "sharded": 14, "late": 14, "narrow": 14, "delayed": 14}
COUNTED = Path("/proc/self/fd").exists()
SETTLED = 8
"""Attaches before the first look."""
LARGEST_GROWTH_MIB = 8.0
"""For each attach, of some 4 MiB of weights and as much of momenta and of gradients each: torch and the allocator keep
something now and then."""


def _plans(model: nn.Module) -> dict[str, Plan]:
    ranks = dist.get_world_size()
    exact = plan_of(model, 2)
    half = CompressorSpec(name="topk", selector="exact", density=0.5)
    lossy = tuple(replace(one, collective="sparse", algorithm="flat", compressor=half) for one in exact.buckets)
    delay = DelaySpec(steps=1, warmup_steps=1)
    wire = CompressorSpec(name="wire", dtype="int8")
    narrow = plan_of(model, 2, updates=UpdatePlan(step=StepPlan(sharded=True, weights="bfloat16")), accuracy="bounded")
    narrow = replace(narrow, interface=("sharded-step", "bfloat16-weights"))
    return {
        "exact": exact,
        "topk": replace(exact, accuracy="bounded", buckets=lossy, fallback=exact),
        "sharded": plan_of(model, 2, updates=SHARED),
        "narrow": replace(narrow, buckets=tuple(replace(one, compressor=wire) for one in exact.buckets)),
        "late": plan_of(model, 2, updates=LATE),
        "delayed": replace(exact, accuracy="relaxed", delay=delay, world=PlanWorld(ranks=ranks, nodes=ranks)),
    }


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1000, 1000), nn.BatchNorm1d(1000), nn.Linear(1000, 10))


def _batch(step: int) -> Tensor:
    return torch.full((4, 1000), float(step + dist.get_rank())).mul_(torch.rand(4, 1000))


def _train_and_drop(kind: str, number: int) -> dict[str, weakref.ref[Any]]:
    """Of what is to be collected; every third session changes over to another plan, every fifth is detached."""
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    plans = _plans(model)
    session = runtime.attach(model, optimizer, plans[kind], timeout_s=60, guard=number % 2 == 0)
    for step in range(3):
        optimizer.zero_grad()
        model(_batch(step)).square().mean().backward()
        optimizer.step()
        if step == 1 and number % 3 == 0:
            session.switch(plans["exact"])
    if number % 5 == 0:
        session.detach()
    return {"model": weakref.ref(model), "session": weakref.ref(session), "optimizer": weakref.ref(optimizer)}


def _held() -> dict[str, float]:
    """What this process has now, when all ranks have collected garbage and met again; with a delay the last messages
    may have been on their way at first."""
    for _ in range(3):
        gc.collect()
        model = nn.Linear(2, 2)
        runtime.attach(model, None, plan_of(model, 1)).detach()
    ctypes.CDLL(None).malloc_trim(0)  # what was freed between memory in use
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    descriptors, threads = (len(os.listdir(f"/proc/self/{what}")) for what in ("fd", "task"))
    return {"descriptors": descriptors, "threads": threads, "MiB": resident}


def dropped(kind: str) -> dict[str, Any]:
    """Many attaches with one kind of plan, and nothing that stays of them; ranks collect garbage at different times."""
    before, alive = {}, []
    for number in range(ATTACHES[kind]):
        if number % (2 + dist.get_rank()) == 0:
            gc.collect()
        if number == SETTLED:
            before = _held()
        alive.append(_train_and_drop(kind, number))
    after = _held()
    left = sorted({what for one in alive for what, still in one.items() if still() is not None})
    growth_mib = (after["MiB"] - before["MiB"]) / (ATTACHES[kind] - SETTLED)
    return {
        f"nothing is left: {left}": not left,
        f"descriptors: {before['descriptors']}, {after['descriptors']}": after["descriptors"] <= before["descriptors"],
        f"threads: {before['threads']}, {after['threads']}": after["threads"] <= before["threads"],
        f"MiB for each attach: {growth_mib:.1f}": growth_mib < LARGEST_GROWTH_MIB,
    }


def session_alone() -> dict[str, bool]:
    """Who lets go of the session alone goes on training by the plan: the model keeps it."""

    def loop(side: Side) -> None:
        side.session = None
        gc.collect()
        steps(side, range(4))

    return like_ddp(loop)


def run() -> dict[str, dict[str, Any]]:
    """All checks; the last sessions are dropped, and one is not, when the process ends."""
    gc.disable()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = {kind: dropped(kind) for kind in ATTACHES} | {"session alone": session_alone()}
    _train_and_drop("delayed", 1)
    return results
