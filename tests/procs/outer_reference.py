"""One process that plays all workers of a run with outer steps, in whole messages: what sessions are held against."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from runtime.plan import OuterSpec

Loss = Callable[[nn.Module, int, int], Tensor]


class Reference:
    """Workers as models with optimizers of their own; anchors as parameters that torch.optim.SGD updates."""

    def __init__(
        self, make: Callable[[], nn.Module], optimizer: Callable[[nn.Module], torch.optim.Optimizer], loss: Loss,
        workers: int, spec: OuterSpec,
    ) -> None:  # fmt: skip
        """Begin after the synchronous steps, which all workers do alike."""
        self.models = [make() for _ in range(workers)]
        self.optimizers = [optimizer(model) for model in self.models]
        self.loss, self.spec = loss, spec
        names = [name for name, _ in self.models[0].named_parameters()]
        self.fragments: Sequence[Sequence[str]] = spec.fragments or [names]
        self.anchors: dict[str, nn.Parameter] = {}
        self.outer: list[torch.optim.Optimizer] = []
        self.in_flight: dict[int, tuple[int, dict[str, Tensor]]] = {}
        self.steps = self.local = 0
        self.largest = 0.0
        """Largest element of all workers' pseudo-gradients."""

    def _anchor(self) -> None:
        first = dict(self.models[0].named_parameters())
        self.anchors = {name: nn.Parameter(p.detach().clone()) for name, p in first.items()}
        rule = self.spec.optimizer
        self.outer = [
            torch.optim.SGD(
                [self.anchors[name] for name in fragment],
                lr=rule.lr,
                momentum=rule.momentum,
                nesterov=rule.momentum > 0,
            )
            for fragment in self.fragments
        ]

    def run(self, steps: int) -> Reference:
        """Train all workers for some steps."""
        for _ in range(steps):
            for worker, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
                optimizer.zero_grad()
                self.loss(model, worker, self.steps).backward()
                if self.steps >= self.spec.warmup_steps:
                    optimizer.step()
            if self.steps < self.spec.warmup_steps:
                self._synchronous()
            elif not self.anchors:
                raise AssertionError("no anchor")
            else:
                self.local += 1
                self._rounds()
            self.steps += 1
            if self.steps >= self.spec.warmup_steps and not self.anchors:
                self._anchor()
        return self

    def begin(self) -> Reference:
        """Without synchronous steps, workers are alone from the first one on."""
        if self.spec.warmup_steps == 0:
            self._anchor()
        return self

    def _synchronous(self) -> None:
        for parameters in zip(*(model.parameters() for model in self.models), strict=True):
            mean = torch.stack([p.grad for p in parameters if p.grad is not None]).mean(0)
            for parameter in parameters:
                parameter.grad = mean.clone()
        for optimizer in self.optimizers:
            optimizer.step()

    @torch.no_grad()
    def _rounds(self) -> None:
        spec, count = self.spec, len(self.fragments)
        workers = [dict(model.named_parameters()) for model in self.models]
        for index, fragment in enumerate(self.fragments):
            self._arrive(index)
            if self.local % spec.every == (index + 1) * spec.every // count % spec.every:
                apart = {
                    name: torch.stack([self.anchors[name] - worker[name] for worker in workers]) for name in fragment
                }
                self.largest = max(self.largest, *(float(one.abs().max()) for one in apart.values()))
                delta = {name: one.mean(0) for name, one in apart.items()}
                self.in_flight[index] = (self.local + spec.delay_steps, delta)
                self._arrive(index)

    def _arrive(self, index: int) -> None:
        due, delta = self.in_flight.get(index, (-1, {}))
        if due != self.local:
            return
        del self.in_flight[index]
        for name, part in delta.items():
            self.anchors[name].grad = part
        self.outer[index].step()
        for model in self.models:
            for name in delta:
                own = model.get_parameter(name)
                own.copy_(self.spec.mix * own + (1.0 - self.spec.mix) * self.anchors[name])
