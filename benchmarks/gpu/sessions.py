"""Two ranks that train by every kind of plan, beside DDP on the same ranks; on one device over gloo."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import runtime
from benchmarks.gpu.plans import FORMS, plan_of
from benchmarks.gpu.setting import Found, Setting, table
from benchmarks.gpu.waits import Net
from planner.jobs.launch import LocalWorld, run_ranks
from planner.jobs.training import weights_sha256
from planner.jobs.world import choose_backend
from planner.profile.bench import synchronize
from runtime.monitor.clock import Clock
from runtime.monitor.recorder import StepMarks

RANKS, MIB = 2, 1 << 20


@dataclass(frozen=True)
class Size:
    """Of the model and the run."""

    width: int
    layers: int
    batch: int
    steps: int


@dataclass(frozen=True)
class Trained:
    """What one rank saw of one way to train; plain, so that it can be sent to the parent."""

    weights_sha256: str
    finite: bool
    step_us: float
    peak_bytes: int
    """Beyond what was there before; 0 on a CPU, where nobody counts."""
    buckets: tuple[tuple[float, float], ...] = ()
    """Of the last step, (start, end) of each bucket's messages from the start of backward, in µs."""
    backward_us: float = 0.0

    @property
    def overlap(self) -> float | None:
        """The share of the time of messages that backward went on in."""
        sent_us = sum(end - start for start, end in self.buckets)
        beside_us = sum(max(0.0, min(end, self.backward_us) - start) for start, end in self.buckets)
        return beside_us / sent_us if sent_us > 0.0 else None


def run(setting: Setting) -> Found:
    """DDP and all forms in one start of processes."""
    backend = choose_backend(None, setting.device.type, RANKS)
    world = LocalWorld(ranks=RANKS, device=setting.device.type, backend=backend)
    size = setting.pick(Size(2048, 16, 512, 12), Size(32, 3, 4, 6))
    ranks = run_ranks(world, train_all, setting.device.type, size)
    failures: list[str] = []
    rows: list[tuple[object, ...]] = []
    for name, first in ranks[0].items():
        every = [one for rank in ranks if isinstance(one := rank[name], Trained)]
        if len(every) < RANKS or not isinstance(first, Trained):
            failures.append(f"{name}: {next(one for rank in ranks if isinstance(one := rank[name], str))}")
            rows.append((name, "**failed**", "", "", "", ""))
            continue
        equal, like = len({one.weights_sha256 for one in every}) == 1, ""
        problems = [] if equal else ["ranks end with different weights"]
        problems += [] if all(one.finite for one in every) else ["weights are not finite"]
        ddp = ranks[0]["DDP"]
        if name == "DDP" or (name in FORMS and FORMS[name].like_ddp):
            same = isinstance(ddp, Trained) and ddp.weights_sha256 == first.weights_sha256
            like = "yes" if same else "**no**"
            problems += [] if same else ["weights are not those of DDP"]
        failures += [f"{name}: {problem}" for problem in problems]
        overlap = "" if first.overlap is None else f"{first.overlap:.0%}"
        memory = f"{first.peak_bytes / MIB:.0f}" if setting.on_device else "not counted"
        rows.append((name, "yes" if equal else "**no**", like, f"{first.step_us / 1e3:.2f}", overlap, memory))
    head = ("training", "ranks equal", "as DDP, bit for bit", "step ms", "messages during backward", "peak MiB")
    text = f"{RANKS} ranks over {backend}{shared(setting, backend)}, {size}.\n\n{table(head, rows)}"
    exact = ranks[0].get("exact")
    if isinstance(exact, Trained) and exact.buckets:
        lines = ((i, f"{start:.0f}", f"{end:.0f}") for i, (start, end) in enumerate(exact.buckets))
        text += f"\n\nOne backward of the exact plan takes {exact.backward_us:.0f} µs; messages, in µs from its start:"
        text += f"\n\n{table(('bucket', 'start', 'end'), lines)}"
    return Found(text, tuple(failures))


def shared(setting: Setting, backend: str) -> str:
    """Say where ranks share a device."""
    return ", both on one device" if setting.on_device and backend == "gloo" else ""


def train_all(device_type: str, size: Size) -> dict[str, Trained | str]:
    """On each rank: every way to train, or what was wrong with it."""
    device = torch.device("cuda", torch.cuda.current_device()) if device_type == "cuda" else torch.device("cpu")
    names = ["DDP", *FORMS, *(["DDP, SyncBatchNorm", "exact, SyncBatchNorm"] if device_type == "cuda" else [])]
    found: dict[str, Trained | str] = {}
    for name in names:
        try:
            found[name] = _train(name, device, size)
        except Exception as error:
            lines = str(error).splitlines() or [""]
            found[name] = f"{type(error).__name__}: {lines[0]}"
            told: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(told, found[name])  # or ranks would go on with different trainings
            continue
        told = [None] * dist.get_world_size()
        dist.all_gather_object(told, None)
    pair = [found.get(name) for name in names[-2:]] if device_type == "cuda" else []
    if all(isinstance(one, Trained) for one in pair) and len({one.weights_sha256 for one in pair}) > 1:  # type: ignore[union-attr]
        found["exact, SyncBatchNorm"] = "weights are not those of DDP with SyncBatchNorm"
    return found


def _train(name: str, device: torch.device, size: Size) -> Trained:
    torch.manual_seed(0)
    model: nn.Module = Net(size.width, size.layers)
    way, synchronized = name.removesuffix(", SyncBatchNorm"), name.endswith("SyncBatchNorm")
    if synchronized:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(size.width), model))
    model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    forward, session = model, None
    if way == "DDP":
        forward = DistributedDataParallel(model)
    else:
        session = runtime.attach(model, optimizer, plan_of(model, FORMS[way], dist.get_world_size()), guard=False)
    generator = torch.Generator().manual_seed(dist.get_rank())
    times: list[float] = []
    clock = session._recorder.clock if session is not None else None
    for _ in range(size.steps):
        x = torch.randn(size.batch, size.width, generator=generator).to(device)
        synchronize(device)
        begin = time.perf_counter()
        optimizer.zero_grad()
        forward(x).backward()
        optimizer.step()
        synchronize(device)
        times.append(time.perf_counter() - begin)
    buckets, backward_us = (
        ((), 0.0) if session is None or clock is None else _timeline(session._recorder.steps[-1], clock)
    )
    peak = torch.cuda.max_memory_allocated(device) - before if device.type == "cuda" else 0
    if session is not None:
        with session.global_weights():
            weights = weights_sha256(model)
        session.detach()
    else:
        weights = weights_sha256(model)
    finite = all(bool(parameter.isfinite().all()) for parameter in model.parameters())
    return Trained(weights, finite, statistics.median(times[2:]) * 1e6, peak, buckets, backward_us)


def _timeline(step: StepMarks, clock: Clock) -> tuple[tuple[tuple[float, float], ...], float]:
    """Return (start, end) of each bucket's messages from the first gradient on, and how long backward took then."""
    sent = [one for one in step.sent if one.start is not None and one.end is not None]
    between = clock.between_us
    spans = tuple((between(step.backward, one.start), between(step.backward, one.end)) for one in sent)
    return spans, between(step.backward, step.backward_end)
