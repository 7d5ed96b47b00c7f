"""Rivals of GLU and of SSD-SGD: local updates by plain SGD and by DC-ASGD-a, and training by ASGD.

Sources: SSD-SGD (Xu et al., arXiv 2012.05396), Fig. 5 and 7, which compare with them; DC-ASGD-a (Zheng et al.,
"Asynchronous Stochastic Gradient Descent with Delay Compensation", 2017), Eq. 10 and 14.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.learning import Task
from runtime.delay import local_weights
from runtime.plan import DelaySpec

LocalUpdate = Callable[
    [DelaySpec, Sequence[Tensor], Sequence[Tensor], Sequence[Tensor], Mapping[str, Any], float], None
]
"""As `runtime.delay.local_weights.glu`."""


@torch.no_grad()
def sgd(
    spec: DelaySpec,
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    before: Sequence[Tensor],
    rates: Mapping[str, Any],
    lr_sum: float,
) -> None:
    """Update by plain SGD, in place: w ← w − lr_loc·(g + wd·w)."""
    for own, gradient in zip(weights, gradients, strict=True):
        own.add_(gradient + rates["weight_decay"] * own, alpha=-float(rates["lr"]) * spec.local_lr_scale)


class DcAsgd:
    """DC-ASGD-a: the gradient of the own weights, compensated towards the weights of the last pull.

    g̃ = g + λ·g⊙g⊙(pre_weight − w) with λ = λ₀ / √(m + ε), where m is the running mean of g⊙g; then plain SGD.
    """

    def __init__(self, scale: float = 2.0, decay: float = 0.95, epsilon: float = 1e-7) -> None:
        """Take λ₀, the decay of the running mean, and ε; the defaults are the paper's for CIFAR-10."""
        self._scale, self._decay, self._epsilon = scale, decay, epsilon
        self._means: dict[int, Tensor] = {}
        """Running means by address of the weights, which stay where they are."""

    @torch.no_grad()
    def __call__(
        self,
        spec: DelaySpec,
        weights: Sequence[Tensor],
        gradients: Sequence[Tensor],
        before: Sequence[Tensor],
        rates: Mapping[str, Any],
        lr_sum: float,
    ) -> None:
        """Update in place, as `glu`."""
        compensated = []
        for own, gradient, pulled in zip(weights, gradients, before, strict=True):
            square = gradient * gradient
            mean = self._means.setdefault(own.data_ptr(), torch.zeros_like(square))
            mean.mul_(self._decay).add_(square, alpha=1.0 - self._decay)
            compensated.append(gradient + self._scale * square * (pulled - own) / (mean + self._epsilon).sqrt())
        sgd(spec, weights, compensated, before, rates, lr_sum)


@contextmanager
def local_update(update: LocalUpdate | None) -> Iterator[None]:
    """Replace GLU in runs inside; None: leave it."""
    before = local_weights.glu
    local_weights.glu = update or before  # type: ignore[assignment]
    try:
        yield
    finally:
        local_weights.glu = before


def train_asgd(task: Task, seed: int, workers: int) -> nn.Module:
    """Train by ASGD, as one sequential program: every rank that calls it gets the same model.

    A server updates its weights by each worker's gradient as it comes, one worker after the other, and gives that one
    the new ones; so each gradient is of weights `workers` − 1 updates old. The rate is shared out, so that all workers
    together move the weights as far as a synchronous step does.
    """
    torch.manual_seed(seed)
    server = task.model()
    optimizer = task.optimizer(server.parameters())
    for group in optimizer.param_groups:
        group["lr"] /= workers
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, task.steps * workers)
    models = [copy.deepcopy(server) for _ in range(workers)]
    for update in range(task.steps * workers):
        step, worker = divmod(update, workers)
        model = models[worker]
        model.zero_grad()
        task.loss(model, task.batch(step + 10_000 * seed, worker)).backward()
        for mine, own in zip(server.parameters(), model.parameters(), strict=True):
            mine.grad = own.grad
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            for mine, own in zip(server.parameters(), model.parameters(), strict=True):
                own.copy_(mine)
    # Statistics of norms are the first worker's, as delayed ranks keep their own.
    for buffer, first in zip(server.buffers(), models[0].buffers(), strict=True):
        buffer.copy_(first)
    return server
