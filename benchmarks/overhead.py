"""What the runtime costs beside DDP, and beside a bare loop on one rank, in one run.

    python -m benchmarks.overhead              # prints a table; exit code 1 where a limit is passed
    python -m benchmarks.overhead --pairs 400

Two copies of each model train in the same processes, step by step in turn: one under DDP, one attached with a plan of
exactly DDP's buckets (checked against what DDP says of itself). A model that waits trains with equal weights of ranks
(`session.weight`) and without. A pair of neighbouring steps gives one ratio, so that a machine that changes its speed
from second to second changes both sides alike. Of two equal copies the one that was made last is up to 1 % faster: so
each row is measured with the copies made in either order. A ratio is the geometric mean of one pair of each; the table
has their median with its 95 % interval. Memory is the peak of resident bytes of fresh processes, DDP's with
gradient_as_bucket_view.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import pairwise

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import runtime
from benchmarks.gpu.plans import ddp_buckets
from examples import digits
from planner.jobs.launch import LocalWorld, run_ranks
from runtime.checks.plan import trainable_parameters
from runtime.plan import ModelReference, Plan, PlanBucket, PlanWorld

RANKS = 2
MEMORY_STEPS = 3
WARM_UP_PAIRS = 5
STEP_S = 0.05
"""Step of the model that waits, on which weights are measured against the same plan without."""
LIMITS = {"ddp": 1.02, "bare": 1.01, "plan": 1.001}


def resnet20() -> nn.Module:
    """0.27 million parameters in 65 gradients: hardly any work per gradient, so the most that hooks can cost."""
    return digits.ResNet20()


def convolutions() -> nn.Module:
    """4.7 million parameters, a few of them large."""
    widths, layers = (1, 64, 128, 256, 512), []
    for before, width in pairwise(widths):
        layers += [nn.Conv2d(before, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
        layers += [nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(512, 10))


def encoder() -> nn.Module:
    """A transformer over the rows of an image; 6.3 million parameters, no buffers."""
    layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    stack = nn.TransformerEncoder(layer, 8, enable_nested_tensor=False)
    return nn.Sequential(nn.Flatten(1, 2), nn.Linear(16, 256), stack, nn.Flatten(), nn.Linear(16 * 256, 10))


def wide() -> nn.Module:
    """33.6 million parameters, so that gradients outweigh all else in memory."""
    return nn.Sequential(nn.Flatten(), nn.Linear(256, 2048), *(nn.Linear(2048, 2048) for _ in range(8)))


class Waiting(nn.Module):
    """40 small layers behind a wait, whose steps differ by microseconds."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(256, 16), *(nn.Linear(16, 16) for _ in range(39)))

    def forward(self, images: Tensor) -> Tensor:
        """Images (batch, 1, 16, 16) → (batch, 16)."""
        time.sleep(STEP_S)
        scores: Tensor = self.layers(images)
        return scores


WAITING, WEIGHTED = "waiting", "weighted"
MODELS: dict[str, Callable[[], nn.Module]] = {"resnet20": resnet20, "convolutions": convolutions, "encoder": encoder}


def ddp_plan(model: nn.Module, ready: list[str], ranks: int) -> Plan:
    """DDP's own buckets, as a plan."""
    planned = tuple(PlanBucket(gradients=tuple(names)) for names in ddp_buckets(model, ready))
    return Plan(model=ModelReference(name="overhead"), world=PlanWorld(ranks=ranks), accuracy="exact", buckets=planned)


def readiness(model: nn.Module) -> list[str]:
    """Names in the order in which gradients become ready."""
    order: list[str] = []
    handles = [
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
        for name, parameter in trainable_parameters(model).items()
    ]
    _loss(model, 0).backward()
    for handle in handles:
        handle.remove()
    model.zero_grad()
    return order


def _loss(model: nn.Module, step: int) -> Tensor:
    images, labels = digits.batch(step, dist.get_rank() if dist.is_initialized() else 0)
    loss: Tensor = functional.cross_entropy(model(images), labels)
    return loss


class Side:
    """One copy of a model that trains."""

    def __init__(self, name: str, way: str) -> None:
        torch.manual_seed(0)
        self.model = (MODELS | {WAITING: Waiting})[name]()
        ready = readiness(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.forward: nn.Module = self.model
        self.session: runtime.Session | None = None
        if way == "ddp":
            self.forward = DistributedDataParallel(self.model)
        elif way in ("plan", WEIGHTED):
            ranks = dist.get_world_size() if dist.is_initialized() else 1
            self.session = runtime.attach(self.model, self.optimizer, ddp_plan(self.model, ready, ranks))
        self.weighs = way == WEIGHTED

    def step(self, images: Tensor, labels: Tensor) -> tuple[float, float]:
        """(wall time, processor time of this thread) of one step, in seconds."""
        wall, own = time.perf_counter(), time.thread_time()
        self.optimizer.zero_grad()
        if self.weighs and self.session is not None:
            self.session.weight(len(images))
        functional.cross_entropy(self.forward(images), labels).backward()
        self.optimizer.step()
        return time.perf_counter() - wall, time.thread_time() - own

    def bucket_bytes(self) -> list[int]:
        """Sizes of the buckets that were used, in launch order."""
        if isinstance(self.forward, DistributedDataParallel):
            told = self.forward._get_ddp_logging_data()["rebuilt_bucket_sizes"]
            return [int(size) for size in str(told).split(",")]
        assert self.session is not None
        sizes = {name: p.numel() * p.element_size() for name, p in trainable_parameters(self.model).items()}
        return [sum(sizes[name] for name in bucket.gradients) for bucket in self.session.plan.buckets]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table."""

    model: str
    against: str
    median_us: float
    reference_us: float
    ratio: float
    ci95: tuple[float, float]
    own_time_ratio: float
    """Of processor time of the training thread: what the machine's other work does not reach."""
    limit: float
    buckets: int


def measure_row(name: str, reference: str, ranks: int, pairs: int, way: str = "plan") -> Row:
    """A plan and its reference, made in either order."""
    found = [
        run_ranks(LocalWorld(ranks=ranks), measure_pairs, name, reference, pairs, way, order)[0]
        for order in ((0, 1), (1, 0))
    ]
    return _row(name, reference, np.stack([times for times, _ in found]), found[0][1])


def measure_pairs(
    name: str, reference: str, pairs: int, way: str, order: tuple[int, int]
) -> tuple[np.ndarray, int]:  # fmt: skip
    """On one rank, (times of pairs × reference and plan × wall and thread, in seconds; number of buckets). `order` is
    that in which the sides are made.
    """
    made = {side: Side(name, (reference, way)[side]) for side in order}
    sides = made[0], made[1]
    times = np.zeros((pairs, 2, 2))
    for pair in range(-WARM_UP_PAIRS, pairs):
        images, labels = digits.batch(pair % 50, dist.get_rank() if dist.is_initialized() else 0)
        for side in (0, 1) if pair % 2 else (1, 0):
            times[pair, side] = sides[side].step(images, labels)
    buckets = sides[1].bucket_bytes()
    if reference == "ddp" and sides[0].bucket_bytes() != buckets:
        raise AssertionError(f"DDP has buckets of {sides[0].bucket_bytes()} bytes, the plan of {buckets}")
    for each in sides:
        if each.session is not None:
            each.session.detach()
    return times, len(buckets)


def _row(name: str, reference: str, times: np.ndarray, buckets: int) -> Row:
    """Of times of orders × pairs × sides × clocks."""
    every = np.sqrt(np.prod(times[:, :, 1] / times[:, :, 0], axis=0))
    ratios = np.sort(every[:, 0])
    half = 0.98 * np.sqrt(len(ratios))  # the median's 95 % interval, by order statistics
    low, high = int(len(ratios) / 2 - half), int(np.ceil(len(ratios) / 2 + half))
    return Row(
        model=name,
        against=reference,
        median_us=float(np.median(times[:, :, 1, 0])) * 1e6,
        reference_us=float(np.median(times[:, :, 0, 0])) * 1e6,
        ratio=float(np.median(ratios)),
        ci95=(float(ratios[max(0, low)]), float(ratios[min(len(ratios) - 1, high)])),
        own_time_ratio=float(np.median(every[:, 1])),
        limit=LIMITS[reference],
        buckets=buckets,
    )


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Peaks of resident memory of one rank."""

    gradients_bytes: int
    ddp_bytes: int
    plan_bytes: int

    @property
    def copies(self) -> float:
        """How many copies of the gradients the plan's peak is above DDP's."""
        return (self.plan_bytes - self.ddp_bytes) / self.gradients_bytes


def peak_bytes(way: str) -> tuple[int, int]:
    """On one rank of a fresh process: (peak of resident bytes after some steps, bytes of the gradients)."""
    torch.manual_seed(0)
    model = wide()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    forward: nn.Module = model
    if way == "ddp":
        forward = DistributedDataParallel(model, gradient_as_bucket_view=True)
    else:
        ready = list(reversed(trainable_parameters(model)))
        runtime.attach(model, optimizer, ddp_plan(model, ready, dist.get_world_size()))
    for step in range(MEMORY_STEPS):
        optimizer.zero_grad()
        _loss(forward, step).backward()
        optimizer.step()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return peak, sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def measure_memory() -> Memory:
    """DDP and the plan, each in processes of its own."""
    (ddp, size_bytes), (plan, _) = (run_ranks(LocalWorld(ranks=RANKS), peak_bytes, way)[0] for way in ("ddp", "plan"))
    return Memory(gradients_bytes=size_bytes, ddp_bytes=ddp, plan_bytes=plan)


def table(rows: list[Row], memory: Memory) -> str:
    """Markdown."""
    lines = [
        "| model | against | step ms | reference ms | ratio | 95 % interval | thread's own time | limit |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {r.model} | {r.against} | {r.median_us / 1e3:.2f} | {r.reference_us / 1e3:.2f} | {r.ratio:.4f} | "
        f"{r.ci95[0]:.4f} to {r.ci95[1]:.4f} | {r.own_time_ratio:.3f} | {r.limit} |"
        for r in rows
    ]
    mib = 1024 * 1024
    lines += [
        "",
        f"Peak memory of a rank with {memory.gradients_bytes / mib:.0f} MiB of gradients: DDP with "
        f"gradient_as_bucket_view {memory.ddp_bytes / mib:.0f} MiB, the plan {memory.plan_bytes / mib:.0f} MiB: "
        f"{memory.copies:+.2f} copies of the gradients (limit +1).",
    ]
    return "\n".join(lines)


def main() -> int:
    """Measures and prints; 1 where a limit is passed."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=300, help="pairs of steps for each order of a line")
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--json", action="store_true", help="print records instead of a table")
    options = parser.parse_args()
    rows = []
    for name in options.models:
        for reference, ranks in (("ddp", RANKS), ("bare", 1)):
            rows.append(measure_row(name, reference, ranks, options.pairs))
    rows.append(measure_row(WAITING, "plan", RANKS, options.pairs, WEIGHTED))
    memory = measure_memory()
    if options.json:
        print(json.dumps({"rows": [asdict(row) for row in rows], "memory": asdict(memory)}, indent=1))
    else:
        print(table(rows, memory))
        print(f"\n{datetime.now(UTC):%Y-%m-%d}, {platform.machine()}, torch {torch.__version__}, gloo, {RANKS} ranks")
    return int(any(row.ratio > row.limit for row in rows) or memory.copies > 1)


if __name__ == "__main__":
    sys.exit(main())
