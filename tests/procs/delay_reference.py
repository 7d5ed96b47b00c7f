"""SSD-SGD in one process: all workers and servers, written down from the algorithms and not from the runtime.

A worker is a rank or a node. Pushes may be compressed, with error feedback at the worker.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from runtime.plan import DelaySpec

Weights = list[Tensor]
Gradient = Callable[[Weights, int, int], Weights]
"""(weights, rank, step) → gradients."""


@dataclass
class Sgd:
    """Momentum SGD as the user sets it up."""

    lr: Callable[[int], float]
    momentum: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False


@dataclass
class Lossy:
    """What workers push in place of everything."""

    density: float | None = None
    """Of the largest elements of each owner's part; None: all of them as `dtype`."""
    dtype: torch.dtype = torch.bfloat16
    buckets: list[list[int]] = field(default_factory=list)
    """Parameters by number, as they lie in each bucket."""

    def push(self, flat: Tensor, residual: Tensor, owners: int) -> Tensor:
        """What is pushed of a bucket; `residual` becomes the rest."""
        total = residual + flat
        if self.density is None:
            sent = total.to(self.dtype).to(total.dtype)
        else:
            sent, share, values = torch.zeros_like(total), -(-total.numel() // owners), total.tolist()
            for start in range(0, total.numel(), share):
                part = range(start, min(total.numel(), start + share))
                kept = sorted(part, key=lambda i: (-abs(values[i]), i))[: max(1, int(self.density * len(part)))]
                sent[kept] = total[kept]
        residual.copy_(total - sent)
        return sent


@dataclass
class Reference:
    """The state of everybody after some steps; ranks of a node have the same weights."""

    gradient: Gradient
    first: Weights
    ranks: int
    spec: DelaySpec
    sgd: Sgd
    ranks_per_node: int = 1
    lossy: Lossy | None = None
    residuals: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    """By worker and bucket."""
    velocity: list[Tensor | None] = field(init=False)
    lrs: list[float] = field(default_factory=list)
    pulled: Weights | None = None

    def __post_init__(self) -> None:
        self.weights = [w.clone() for w in self.first]
        """The servers'."""
        self.local = [[w.clone() for w in self.first] for _ in range(self.ranks)]
        self.before = [w.clone() for w in self.first]
        self.velocity = [None] * len(self.first)
        if not self.spec.warmup_steps:
            self.lrs = [self.sgd.lr(0)] * self.spec.steps

    def run(self, steps: int) -> Reference:
        """Trains from step 0 on."""
        for step in range(steps):
            self.step(step)
        return self

    def step(self, step: int) -> None:
        """One step of all workers."""
        lr = self.sgd.lr(step)
        alone = [self.gradient(self.local[rank], rank, step) for rank in range(self.ranks)]
        nodes = range(0, self.ranks, self.ranks_per_node)
        workers = [_mean(alone[first : first + self.ranks_per_node]) for first in nodes]
        everyone = [workers[rank // self.ranks_per_node] for rank in range(self.ranks)]
        warms = step < self.spec.warmup_steps
        self.serve(_mean(alone) if warms else self.pushed(workers), lr)
        if warms:
            self.local = [[w.clone() for w in self.weights] for _ in range(self.ranks)]
            self.before = [w.clone() for w in self.weights]
        else:
            lr_sum = sum(self.lrs[-self.spec.steps :])
            for rank, gradients in enumerate(everyone):
                if self.pulled is not None:
                    self.local[rank] = [w.clone() for w in self.pulled]
                for index, gradient in enumerate(gradients):
                    self.update(rank, index, gradient, lr, lr_sum)
            if self.pulled is not None:
                self.before = self.pulled
            pulls = (step + 1) % self.spec.steps == 0
            self.pulled = [w.clone() for w in self.weights] if pulls else None
        self.lrs.append(lr)

    def pushed(self, workers: list[Weights]) -> Weights:
        """The sum of what workers push."""
        lossy = self.lossy
        if lossy is None:
            return _mean(workers)
        scale, sums = 1.0 / len(workers), [torch.zeros_like(one) for one in workers[0]]
        for worker, gradients in enumerate(workers):
            for bucket, members in enumerate(lossy.buckets):
                flat = torch.cat([gradients[index].flatten() for index in members]) * scale
                residual = self.residuals.setdefault((worker, bucket), torch.zeros_like(flat))
                parts = lossy.push(flat, residual, self.ranks).split([gradients[index].numel() for index in members])
                for index, part in zip(members, parts, strict=True):
                    sums[index] += part.view_as(sums[index])
        return sums

    def serve(self, average: Weights, lr: float) -> None:
        """The servers' update."""
        for index, gradient in enumerate(average):
            if self.sgd.weight_decay:
                gradient = gradient.add(self.weights[index], alpha=self.sgd.weight_decay)
            if self.sgd.momentum:
                velocity = self.velocity[index]
                velocity = gradient.clone() if velocity is None else velocity.mul(self.sgd.momentum).add(gradient)
                self.velocity[index] = velocity
                gradient = gradient.add(velocity, alpha=self.sgd.momentum) if self.sgd.nesterov else velocity
            self.weights[index] = self.weights[index].add(gradient, alpha=-lr)

    def update(self, rank: int, index: int, gradient: Tensor, lr: float, lr_sum: float) -> None:
        """One parameter's local update."""
        spec, weight = self.spec, self.local[rank][index]
        direction = gradient * spec.alpha
        direction = direction.add(weight, alpha=self.sgd.weight_decay)
        sync = (self.before[index] - weight) * ((1.0 - self.sgd.momentum) / lr_sum)
        direction = direction.add(sync, alpha=spec.beta)
        self.local[rank][index] = weight.add(direction, alpha=-lr * spec.local_lr_scale)


def _mean(everyone: list[Weights]) -> Weights:
    """In order."""
    means = []
    for parts in zip(*everyone, strict=True):
        total = parts[0] * (1.0 / len(everyone))
        for part in parts[1:]:
            total = total + part * (1.0 / len(everyone))
        means.append(total)
    return means
