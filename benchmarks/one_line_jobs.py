"""Jobs of `benchmarks.one_line`, and how ranks train them: with DDP, or with whatever takes its place.

Jobs that are rehearsed, `googlenet/5`, wait as long as an accelerator would compute that is five times as fast as the
model's profile says, and have a quarter of its bytes; others compute on the cores that also send.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from math import prod

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from benchmarks.compiled_models import LENGTH, WORDS, Bert, Gpt, Vit, resnet
from benchmarks.overhead import convolutions, encoder
from examples.digits import ResNet20
from planner.comparison.statistics import Interval, ratio_interval
from planner.comparison.variants import distinct_caps
from planner.documents.catalog import find_profile
from planner.jobs.job import TrainingJob
from planner.jobs.launch import LocalWorld, run_ranks
from planner.jobs.training import make_optimizer, weights_sha256
from planner.rehearse.accelerator import make_job
from planner.rehearse.scale import Scale
from planner.strategies.baselines import CAPS_MIB
from planner.testbed.hosts import parse_emulation
from runtime.optimizers.kinds import each_of

RANKS = 2
"""Ranks on loopback."""
SMALLER = 4.0
"""By how much rehearsed jobs are smaller than their models: what is sent costs the cores time as well."""
SPIN_LESS = 4.0
"""By how much the ends of waits that are not slept are shorter: deep models have a gradient every 100 us."""
SWEPT_STEPS = 40
KEPT_BATCHES = 8
"""Last batches that are not made again."""

Rounds = list[list[float]]
"""Times of steps in microseconds, by block."""


class Recurrent(nn.Module):
    """Two LSTM layers between an embedding and a classifier; 9.3 million parameters with the default sizes."""

    def __init__(self, words: int = 4000, width: int = 640) -> None:
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(words, 256), nn.LSTM(256, width, 2, batch_first=True)
        self.out = nn.Linear(width, words)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens (batch, length) → scores of the next one (batch, classes)."""
        found: Tensor = self.out(self.lstm(self.embedding(tokens))[0][:, -1])
        return found


class Language(nn.Module):
    """A transformer whose output shares the weights of its embedding; 5.2 million parameters with the default sizes."""

    def __init__(self, words: int = 8000, width: int = 256) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens (batch, length) → scores of the next one (batch, classes)."""
        return functional.linear(self.layers(self.embedding(tokens))[:, -1], self.embedding.weight)


def perceptron(width: int = 1024) -> nn.Module:
    """Twelve equal layers; 12.6 million parameters with the default width."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(12)), nn.Linear(width, 10))


Batch = Callable[[torch.Generator], tuple[Tensor, Tensor]]


def _random(classes: int, *shape: int, words: int = 0, each: bool = False) -> Batch:
    """Return batches of numbers, or of some words; labels of a sample, or of each word."""
    labels = shape if each else shape[:1]

    def batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randint(words, shape, generator=generator) if words else torch.randn(*shape, generator=generator)
        return x, torch.randint(classes, (prod(labels),), generator=generator)

    return batch


COMPUTED: dict[str, tuple[Callable[[], nn.Module], Batch]] = {
    "resnet20": (ResNet20, _random(10, 64, 1, 16, 16)),
    "convolutions": (convolutions, _random(10, 16, 1, 16, 16)),
    "encoder": (encoder, _random(10, 6, 1, 16, 16)),
    "perceptron": (perceptron, _random(10, 32, 1024)),
    "lstm": (Recurrent, _random(4000, 8, 16, words=4000)),
    "language": (Language, _random(8000, 8, 32, words=8000)),
}
SMALL: dict[str, tuple[Callable[[], nn.Module], Batch]] = {
    "small resnet20": (ResNet20, _random(10, 8, 1, 16, 16)),
    "small perceptron": (lambda: perceptron(256), _random(10, 256, 256)),
    "small lstm": (lambda: Recurrent(1000, 160), _random(1000, 16, 16, words=1000)),
    "small language": (lambda: Language(2000, 96), _random(2000, 8, 32, words=2000)),
}
"""Of a million parameters at most, for links of 200 Mbit/s."""
COMPILED: dict[str, tuple[Callable[[], nn.Module], Batch]] = {
    "gpt": (Gpt, _random(WORDS, 4, LENGTH, words=WORDS, each=True)),
    "bert": (Bert, _random(WORDS, 3, LENGTH, words=WORDS, each=True)),
    "vit": (Vit, _random(10, 4, 3, 32, 32)),
    "resnet": (resnet, _random(10, 4, 3, 32, 32)),
    "mlp": (lambda: perceptron(640), _random(10, 128, 640)),
}
"""Those of `benchmarks.compiled`."""
JOBS = COMPUTED | SMALL | COMPILED
LOOPBACK = "loopback"


def world_of(link: str) -> LocalWorld:
    """Return ranks on this machine, or on emulated hosts such as `4x1@1gbit`."""
    if link == LOOPBACK:
        return LocalWorld(ranks=RANKS)
    emulation = parse_emulation(link)
    return LocalWorld(ranks=emulation.ranks, emulation=emulation)


def accelerated(job: str, rank: int) -> TrainingJob:
    """Return a rehearsed job."""
    model, _, faster = job.partition("/")
    scale = Scale(dilate=1.0 / float(faster), shrink=SMALLER)
    return make_job(scale.profile(find_profile(model)).compute, rank, SPIN_LESS)


def parameters_of(job: str) -> list[nn.Parameter]:
    """Return the parameters of a job's model, the last ones first, as they become ready."""
    computed = JOBS.get(job)
    model = computed[0]() if computed else accelerated(job, 0).model
    return [*model.parameters()][::-1]


class Run:
    """A model and its batches, the same in every process but for the rank."""

    def __init__(self, job: str) -> None:
        torch.manual_seed(0)
        torch.set_num_threads(1)
        self._batch: Callable[[int], tuple[Tensor, Tensor]] | None = None
        if computed := JOBS.get(job):
            make, batch = computed
            self._batch = lru_cache(KEPT_BATCHES)(lambda number: batch(torch.Generator().manual_seed(number)))
            self.model = make()
            self.optimizer: torch.optim.Optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)
        else:
            rehearsed = accelerated(job, dist.get_rank())
            self.model, (self.optimizer,) = rehearsed.model, each_of(make_optimizer(rehearsed, "rehearsal"))

    def loss(self, forward: nn.Module, number: int) -> Tensor:
        if self._batch is None:
            alone: Tensor = forward(torch.zeros((), dtype=torch.float64))
            return alone
        x, labels = self._batch(dist.get_world_size() * number + dist.get_rank())
        return functional.cross_entropy(forward(x), labels)

    def step(self, forward: nn.Module, number: int) -> None:
        self.optimizer.zero_grad()
        self.loss(forward, number).backward()
        self.optimizer.step()

    def times_us(self, forward: nn.Module, steps: int, begin: int = 0) -> list[float]:
        times = []
        for number in range(begin, begin + steps):
            begun = time.perf_counter()
            self.step(forward, number)
            times.append((time.perf_counter() - begun) * 1e6)
        return times


def with_ddp(job: str, steps: int, cap_mib: float | None) -> tuple[list[float], str]:
    """On one rank: DDP, with its default buckets or of one size; times of steps, and the weights' digest."""
    run = Run(job)
    times = run.times_us(DistributedDataParallel(run.model, bucket_cap_mb=cap_mib), steps)
    return times, weights_sha256(run.model)


def swept(job: str, caps_mib: Sequence[float | None], steps: int) -> list[list[float]]:
    """On one rank: some steps of DDP with buckets of each size."""
    return [with_ddp(job, steps, cap_mib)[0] for cap_mib in caps_mib]


def best_cap(world: LocalWorld, job: str, steps: int = SWEPT_STEPS) -> float | None:
    """Return DDP's best bucket size in MiB, of some steps with each; None: its default."""
    sizes = [p.numel() * p.element_size() for p in parameters_of(job)]
    caps: list[float | None] = [None, *distinct_caps(sizes, [0] * len(sizes), CAPS_MIB)]
    sweep_us = np.max(run_ranks(world, swept, job, caps, steps), axis=0)
    return caps[int(np.argmin(np.median(sweep_us[:, 5:], axis=1)))]


def ratio_of(ranks: Sequence[tuple[Rounds, Rounds]]) -> tuple[Interval, float, float]:
    """Return the ratio of the medians of two ways' steps on the slowest rank, and both medians in microseconds."""
    ours, other = (np.max([one[way] for one in ranks], axis=0) for way in range(2))
    ours = ours[:, : other.shape[1]]
    return ratio_interval(ours, other), float(np.median(ours)), float(np.median(other))
