"""What a session costs a step beside DDP, where nothing is waited for: hooks, copies into buckets, launches, marks.

Both train in one process, by turns, with the same buckets, in a group of one rank, whose messages its backend carries
to itself. With one rank a session sends nothing; it is told of another one that is not there, and sends as DDP does.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.nn.parallel import DistributedDataParallel

from benchmarks.gpu.models import MODELS
from benchmarks.gpu.plans import FORMS, ddp_buckets, plan_of, readiness
from benchmarks.gpu.setting import Found, Setting, table
from benchmarks.gpu.timing import Times
from planner.jobs.world import choose_backend
from planner.profile.bench import synchronize
from runtime.comm.world import World
from runtime.core.options import AttachOptions
from runtime.session.session import Session

RANKS = 2
"""That sessions are told of."""
LIMIT = 1.00
"""Of DDP's step, for an exact plan."""
WARM_UPS, FEWEST, MOST = 5, 10, 200


@dataclass(frozen=True)
class Row:
    """One model with one batch."""

    model: str
    batch: int
    ddp: Times
    planned: Times
    ratio: Times
    """Of whole steps, in pairs."""
    host_ratio: float
    """Of the time that the host takes to queue a step, the median over pairs."""


def run(setting: Setting) -> Found:
    """Models by batches, each for an even share of the time."""
    torch.manual_seed(0)
    cells = [
        (name, batch) for name, model in MODELS.items() for batch in (model.batches if setting.on_device else (1,))
    ]
    rows: list[Row] = []
    failures: list[str] = []
    backend = choose_backend(None, setting.device.type, 1)
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    try:
        for place, (name, batch) in enumerate(cells):
            budget_s = setting.left_s / (len(cells) - place)
            try:
                rows.append(_measure(name, batch, setting, budget_s))
            except torch.OutOfMemoryError:
                failures.append(f"{name}, batch {batch}: no memory on the device")
            if setting.on_device:
                torch.cuda.empty_cache()
    finally:
        dist.destroy_process_group()
    head = ("model", "batch", "DDP ms", "plan ms", "plan / DDP (95 % interval)", "host alone", f"at most {LIMIT:.2f}")
    lines = [
        (row.model, row.batch, f"{row.ddp.median_us / 1e3:.2f}", f"{row.planned.median_us / 1e3:.2f}",
         f"{row.ratio.median_us:.3f} ({row.ratio.low_us:.3f} to {row.ratio.high_us:.3f})", f"{row.host_ratio:.3f}",
         "yes" if row.ratio.low_us <= LIMIT else "**no**")
        for row in rows
    ]  # fmt: skip
    text = f"An exact plan with DDP's own buckets, one rank over {backend}, SGD with momentum, float32."
    return Found(f"{text}\n\n{table(head, lines)}", tuple(failures))


class _AloneInWorld(World):
    """A rank that is told of others, which hold what it holds."""

    def gather(self, value: Any, what: str) -> list[Any]:
        """Answer for the ranks that are not there."""
        return [value] * self.ranks

    def gather_parts(self, part: Tensor, what: str, out: Tensor | None = None) -> Tensor:
        """Repeat this rank's part: NCCL refuses to gather more parts than there are ranks."""
        whole = part.new_empty(self.ranks * part.numel()) if out is None else out
        whole.view(self.ranks, -1).copy_(part.expand(self.ranks, -1))
        return whole


class _Side:
    """One copy of a model that trains."""

    def __init__(self, name: str, given: Sequence[Tensor], setting: Setting, *, planned: bool) -> None:
        torch.manual_seed(0)
        self.device, self._given = setting.device, given
        self.model = MODELS[name].make(not setting.on_device).to(setting.device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)
        self._forward: nn.Module = self.model
        self.session: Session | None = None
        if planned:
            order = readiness(self.model, lambda: self.model(*given).backward())
            plan = plan_of(self.model, FORMS["exact"], RANKS, ddp_buckets(self.model, order))
            group, backend = dist.group.WORLD, dist.get_backend()
            world = _AloneInWorld(rank=0, ranks=RANKS, group=group, backend=backend, timeout_s=60.0)
            self.session = Session(self.model, self.optimizer, plan, world, AttachOptions(drift=False, guard=False))
        else:
            self._forward = DistributedDataParallel(self.model)

    def step(self) -> tuple[float, float]:
        """(until the device was through, until the host had queued everything) of one step, in µs."""
        synchronize(self.device)
        begin = time.perf_counter()
        self.optimizer.zero_grad()
        self._forward(*self._given).backward()
        self.optimizer.step()
        queued = time.perf_counter()
        synchronize(self.device)
        return (time.perf_counter() - begin) * 1e6, (queued - begin) * 1e6


def _measure(name: str, batch: int, setting: Setting, budget_s: float) -> Row:
    end_s = time.monotonic() + budget_s
    given = [one.to(setting.device) for one in MODELS[name].batch(not setting.on_device, batch, 0)]
    sides = _Side(name, given, setting, planned=False), _Side(name, given, setting, planned=True)
    for _ in range(WARM_UPS):
        for side in sides:
            side.step()
    pairs: list[tuple[tuple[float, float], tuple[float, float]]] = []
    least, most = setting.pick((FEWEST, MOST), (3, 5))
    while len(pairs) < least or (len(pairs) < most and time.monotonic() < end_s):
        if len(pairs) % 2:
            planned = sides[1].step()
            pairs.append((sides[0].step(), planned))
        else:
            ddp = sides[0].step()
            pairs.append((ddp, sides[1].step()))
    if sides[1].session is not None:
        sides[1].session.detach(leave=False)
    return Row(
        name, batch, Times.of([ddp[0] for ddp, _ in pairs]), Times.of([planned[0] for _, planned in pairs]),
        Times.of([planned[0] / ddp[0] for ddp, planned in pairs]),
        statistics.median(planned[1] / ddp[1] for ddp, planned in pairs),
    )  # fmt: skip
