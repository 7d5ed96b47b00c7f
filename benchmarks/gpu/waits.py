"""What makes the host wait for the device, and whether messages travel beside computation, on one rank alone.

The messages of one rank go through its backend all the same. A whole session needs two ranks: it gets a group of
torch's that sends nothing (`fake`), so that what is counted is the runtime's own.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

import runtime
from benchmarks.gpu.plans import FORMS, plan_of
from benchmarks.gpu.setting import Found, Setting, table
from planner.jobs.launch import LocalWorld, run_ranks
from planner.jobs.world import choose_backend
from planner.profile.bench import synchronize
from runtime.comm.by_device import make_communicator
from runtime.comm.collectives import collective_of
from runtime.comm.communicator import CommTiming
from runtime.comm.world import World
from runtime.core.buckets import BucketBuffer, Slot, lay_out
from runtime.monitor.clock import make_clock
from runtime.plan import PlanBucket
from runtime.sparse.layout import make_lossy

WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy", "cudaStreamWaitValue")
"""Calls of the runtime of CUDA that make the host wait."""
MARK = "planner: what is counted"
RANKS = 2
ALONE = ("exact", "wire bfloat16", "wire int8", "wire float8_e4m3fn", "wire float16", "topk 1 %, exact")
SESSIONS = ("exact", "sharded step", "wire int8", "topk 1 %, exact", "powersgd, rank 2")
NOT_ON_CPU = ("wire int8",)
"""Of the sessions: the host looks at what has come, which a group that sends nothing leaves as it was."""


@contextmanager
def fake_group(ranks: int) -> Iterator[None]:
    """A group of ranks of which the others do not exist: every collective is done at once."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def host_waits(work: Callable[[], object], device: torch.device) -> Counter[str]:
    """Count, by name, the calls that made the host wait while some work ran."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=activities) as found:
        with record_function(MARK):
            work()
        synchronize(device)
    events: Any = found.events()
    spans = [e.time_range for e in events if e.name == MARK and e.device_type == DeviceType.CPU]
    if len(spans) != 1:
        raise AssertionError(f"the profiler's trace has {len(spans)} marks of what is counted, expected one")
    inside = [e.name for e in events if e.name in WAITS and spans[0].start <= e.time_range.start <= spans[0].end]
    return Counter(inside)


class Net(nn.Module):
    """Linear layers, of which backward takes a while."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, width) → scalar."""
        loss: torch.Tensor = self.layers(x).square().mean()
        return loss


def run(setting: Setting) -> Found:
    """Messages alone in a process that has a group of one rank, then sessions here."""
    backend = choose_backend(None, setting.device.type, 1)
    world = LocalWorld(ranks=1, device=setting.device.type, backend=backend)
    (alone,) = run_ranks(world, messages_alone, setting.device.type, setting.pick(1 << 24, 1 << 14))
    failures = [f"{row[0]}: {problem}" for row in alone for problem in row[-1]]
    rows = [(*row[:-1], "; ".join(row[-1]) or "yes") for row in alone]
    head = ("message", "elements", "host, to launch (µs)", "message ends (µs)", "computation ends (µs)", "right")
    text = f"Messages of one rank over {backend}, launched before a computation; times from the launch.\n\n"
    text += table(head, rows)
    counted, wrong = count_waits(setting)
    text += "\n\nCalls in one backward that made the host wait, from a profiler's trace:\n\n"
    return Found(text + table(("training", "calls"), counted), tuple(failures + wrong))


def messages_alone(device_type: str, elements: int) -> list[tuple[str, str, str, str, str, list[str]]]:
    """On the only rank: a message of each form beside a computation."""
    device = torch.device("cuda", torch.cuda.current_device()) if device_type == "cuda" else torch.device("cpu")
    world = World(rank=0, ranks=1, group=dist.group.WORLD, backend=dist.get_backend(), timeout_s=60.0)
    return [(name, *_message(name, device, world, elements)) for name in ALONE]


def _message(name: str, device: torch.device, world: World, elements: int) -> tuple[str, str, str, str, list[str]]:
    torch.manual_seed(0)
    planned = PlanBucket(gradients=("parameter",), **FORMS[name].bucket)
    slots = [Slot("parameter", 0, nn.Parameter(torch.zeros(elements, device=device)))]
    bucket = BucketBuffer(0, slots, lay_out(slots), f"a bucket of {name}")
    lossy = make_lossy(bucket, planned.compressor, 1) if planned.compressor.name != "none" else None
    gradient, clock = torch.randn(elements, device=device), make_clock(device)
    communicator = make_communicator(world, [collective_of(planned)], device)
    factor, sent, launch_us = torch.randn(512, 512, device=device), CommTiming(), 0.0
    problems: list[str] = []
    for step in range(3):  # the first ones load kernels, and warm up
        before = None if lossy is None else lossy.feedback.unsent()
        bucket.messages[0].flat.copy_(gradient)
        sent = CommTiming()
        synchronize(device)
        begin, started = clock.mark(), time.perf_counter()
        communicator.launch(bucket.payload, sent, (lambda: lossy.pack(step)) if lossy else lambda: None)  # noqa: B023
        launch_us = (time.perf_counter() - started) * 1e6
        for _ in range(200 if device.type == "cuda" else 2):
            factor = (factor @ factor).clamp_(-1.0, 1.0)
        computed = clock.mark()
        communicator.wait()
        if lossy is not None:
            finite = lossy.unpack()
            lossy.feedback.commit(finite)
        synchronize(device)
        # What was sent and what is kept are what there was.
        total = bucket.messages[0].flat + (0.0 if lossy is None else lossy.feedback.unsent())
        expected = gradient if before is None else gradient + before
        if not torch.allclose(total, expected, rtol=1e-5, atol=1e-5):
            problems.append(f"step {step}: sent and kept differ from what there was by up to "
                            f"{float((total - expected).abs().max()):.2g}")  # fmt: skip
    ends_us = clock.between_us(begin, sent.end), clock.between_us(begin, computed)
    communicator.close()
    return f"{elements:,}", f"{launch_us:.0f}", f"{ends_us[0]:.0f}", f"{ends_us[1]:.0f}", problems


def count_waits(setting: Setting) -> tuple[list[tuple[str, str]], list[str]]:
    """Return rows, and what of it must not be: a backward that makes the host wait at all."""
    rows: list[tuple[str, str]] = []
    failures: list[str] = []
    width, layers, batch = setting.pick((1024, 24, 256), (16, 3, 4))
    with fake_group(RANKS):
        for name in SESSIONS:
            if name in NOT_ON_CPU and not setting.on_device:
                continue
            torch.manual_seed(0)
            model = Net(width, layers).to(setting.device)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            session = runtime.attach(model, optimizer, plan_of(model, FORMS[name], RANKS), guard=False)
            x = torch.randn(batch, width, device=setting.device)
            for _ in range(3):
                optimizer.zero_grad()
                model(x).backward()
                optimizer.step()
            optimizer.zero_grad()
            loss = model(x)
            counted = host_waits(loss.backward, setting.device)
            optimizer.step()
            session.detach()
            rows.append((name, ", ".join(f"{call} {count}" for call, count in counted.items()) or "none"))
            if counted:
                failures.append(f"{name}: backward makes the host wait: {rows[-1][1]}")
    return rows, failures
