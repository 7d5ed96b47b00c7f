"""An accelerator whose work is waited for: a job with a profile's gradients, sizes and times, that computes nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from planner.documents.profile import ComputeProfile
from planner.jobs.job import TrainingJob
from runtime.errors import InputError

T = TypeVar("T")
_OfLayer = tuple[nn.Parameter, float, Tensor]
"""A parameter, its part of backward in microseconds, and its gradient."""

SPIN_S = 200e-6
"""The end of each wait, which is not slept: a sleep ends some tens of microseconds late. Of undilated time: spinning
ranks take the cores from those that send."""
SEED = 0


class Accelerator:
    """The timeline of a device: work queues up, and the host waits for the end of what it has put there.

    A device is delayed by its host only when it runs dry. So hosts' time between two pieces of work counts on a clock
    of its own, which waits do not move: work begins when what was queued before it is done, or when a host that never
    waits would have queued it, whichever is later.
    """

    def __init__(self, dilate: float = 1.0) -> None:
        self._spin_s = SPIN_S / dilate
        self._device_s = self._host_s = self._left_s = 0.0
        self.late_us = 0.0
        """How long the device ran dry, or was waited for in vain by an update, in all."""

    def synchronize(self) -> None:
        """Note that host and device have met: what comes next begins now at the earliest."""
        self._left_s = self._host_s = time.perf_counter()
        self._device_s = max(self._device_s, self._host_s)

    def arrived(self, waited_s: float) -> None:
        """Note that a message is there, for which the host has just waited so long: what comes next begins now at the
        earliest. What the host did before, and does from now on, goes on under work as ever.
        """
        now_s = time.perf_counter()
        self._host_s += now_s - self._left_s - waited_s
        self._left_s = now_s
        self._device_s = max(self._device_s, now_s)

    def queue(self, work_us: float, *, awaited: bool = False) -> None:
        """Put work at the end of the queue; `awaited`: it had to wait for a message, for which no host is late."""
        now_s = time.perf_counter()
        self._host_s += now_s - self._left_s
        self._left_s = now_s
        self.late_us += 0.0 if awaited else max(0.0, self._host_s - self._device_s) * 1e6
        self._device_s = max(self._device_s, self._host_s) + work_us * 1e-6

    def wait(self) -> None:
        """Return when the queue is empty."""
        now_s = time.perf_counter()
        self._host_s += now_s - self._left_s
        if self._device_s - now_s > self._spin_s:
            time.sleep(self._device_s - now_s - self._spin_s)
        # Not a bare loop: threads that send need the interpreter, which a spinning thread gives up every 5 ms only.
        while time.perf_counter() < self._device_s:
            time.sleep(0)
        self._left_s = time.perf_counter()

    def run(self, work_us: float) -> None:
        """Queue work, and wait for it."""
        self.queue(work_us)
        self.wait()

    def occupy(self, work: Callable[[], T]) -> T:
        """Do in earnest what the device would do: it is busy for as long."""
        self.queue(0.0)
        started_s = self._left_s
        done = work()
        self._left_s = time.perf_counter()
        self._device_s += self._left_s - started_s
        return done

    def run_since_met(self, work_us: float) -> None:
        """Wait for work that was queued when host and device met, while the host did the same in earnest."""
        self._device_s += work_us * 1e-6
        self.late_us += max(0.0, time.perf_counter() - self._device_s) * 1e6
        self.wait()


class _Layer(torch.autograd.Function):
    """Forward: nothing. Backward: a wait, after which one parameter has its gradient."""

    @staticmethod
    def forward(
        ctx: Any, chain: Tensor, parameter: Tensor, device: Accelerator, work_us: float, grad: Tensor
    ) -> Tensor:
        ctx.device, ctx.work_us, ctx.grad = device, work_us, grad
        return chain.clone()

    @staticmethod
    def backward(ctx: Any, *of_chain: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        ctx.device.run(ctx.work_us)
        return of_chain[0], ctx.grad, None, None, None


class _Part(nn.Module):
    """A module that holds parameters, with their share of the model's forward."""

    def forward(self, chain: Tensor, layers: Sequence[_OfLayer], device: Accelerator, work_us: float) -> Tensor:
        device.queue(work_us, awaited=True)
        for parameter, backward_us, drawn in layers:
            chain = _Layer.apply(chain, parameter, device, backward_us, drawn)  # type: ignore[no-untyped-call]
        return chain


class AcceleratedModel(nn.Module):
    """A model of a profile's parameters (1-D, under their names) whose forward and backward take the profile's times.

    Forward is one wait; where somebody waits for weights before modules run, it passes through them, each with that
    share of forward which it has of backward.

    Gradients are drawn once, other ones on each rank. The loss is made of some weights, so that who trains otherwise
    sees other losses.
    """

    def __init__(self, compute: ComputeProfile, rank: int, dilate: float = 1.0) -> None:
        super().__init__()
        self.device = Accelerator(dilate)
        self._forward_us, self._update_us = compute.forward_us, compute.update_us
        generator = torch.Generator().manual_seed(SEED + 1 + rank)
        self._layers: list[_OfLayer] = []
        self._parts: list[tuple[nn.Module, list[_OfLayer]]] = []
        for gradient in compute.gradients:
            dtype = getattr(torch, gradient.dtype)
            parameter = nn.Parameter(torch.zeros(gradient.numel, dtype=dtype))
            holder = _register(self, gradient.name, parameter)
            drawn = torch.randn(gradient.numel, generator=generator).mul_(1e-2).to(dtype)
            self._layers.append((parameter, gradient.backward_us, drawn))
            if not self._parts or self._parts[-1][0] is not holder:
                self._parts.append((holder, []))
            self._parts[-1][1].append(self._layers[-1])
        self._numel = sum(parameter.numel() for parameter in self.parameters())

    def forward(self, batch: Tensor) -> Tensor:
        """Return the loss, from which backward passes through the gradients in order of readiness."""
        self.device.synchronize()
        if any(part._forward_pre_hooks for part, _ in self._parts if part is not self):
            return self._forward_by_part(batch)
        self.device.queue(self._forward_us)
        # What builds the graph goes on under the forward's wait, as launching kernels does.
        chain = self._of_weights() + batch.detach().requires_grad_()
        for parameter, work_us, drawn in reversed(self._layers):
            chain = _Layer.apply(chain, parameter, self.device, work_us, drawn)  # type: ignore[no-untyped-call]
        self.device.wait()
        return chain

    def _forward_by_part(self, batch: Tensor) -> Tensor:
        """The same, module by module; each is called, so that what waits before it does."""
        chain, backward_us = batch.detach().requires_grad_(), sum(us for _, us, _ in self._layers)
        share = self._forward_us / backward_us if backward_us > 0.0 else 0.0
        self.device.queue(0.0 if backward_us > 0.0 else self._forward_us)
        for part, layers in reversed(self._parts):
            forward = _Part.forward.__get__(part) if part is self else part
            chain = forward(chain, layers[::-1], self.device, share * sum(us for _, us, _ in layers))
        # Weights are all there now, and looking at them goes on under the wait.
        chain = self._of_weights() + chain
        self.device.wait()
        return chain

    def _of_weights(self) -> Tensor:
        weights = [parameter.detach()[:1].double() for parameter, *_ in self._layers[:: max(1, len(self._layers) // 8)]]
        return 1.0 + torch.cat(weights).sum()

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Make the optimizer's steps take the profile's time; a rank that updates a part, its part of it."""

        def begin(*_: Any) -> None:
            self.device.synchronize()

        # How much is updated is known after it: where ranks share the step, each has its parts in the optimizer.
        def end(*_: Any) -> None:
            updated = sum(p.numel() for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
            self.device.run_since_met(self._update_us * updated / max(1, self._numel))

        optimizer.register_step_pre_hook(begin)
        optimizer.register_step_post_hook(end)


def _register(model: nn.Module, name: str, parameter: nn.Parameter) -> nn.Module:
    """Put a parameter under its dotted name, and return the module that holds it.

    Raises InputError where one name is another's beginning.
    """
    *path, last = name.split(".")
    module = model
    for part in path:
        inner = module._modules.get(part)
        if inner is None:
            if part in module._parameters:
                raise InputError(f"the profile has the gradients {part} and {name}, which no module can have both")
            inner = _Part()
            module.add_module(part or "_", inner)
        module = inner
    module.register_parameter(last or "_", parameter)
    return module


def make_job(compute: ComputeProfile, rank: int, dilate: float = 1.0, fused: bool = True) -> TrainingJob:
    """Return a job that takes the profile's times, updates included.

    Args:
        compute: what to act out, scaled already.
        rank: of this process; gradients differ by rank.
        dilate: by how much, at which waits need not end as precisely.
        fused: whether the real update is one call of the host, which plans with a delay cannot have.
    """
    model = AcceleratedModel(compute, rank, dilate)
    adaptive = compute.optimizer is not None and compute.optimizer.adaptive
    # A profile without an update's time gets the update that takes the least.
    momentum = 0.9 if compute.update_us > 0.0 else 0.0

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer
        if adaptive:
            made = torch.optim.AdamW(parameters, lr=1e-4, fused=fused)
        else:
            made = torch.optim.SGD(parameters, lr=1e-2, momentum=momentum, fused=fused)
        model.update(made)
        return made

    return TrainingJob(
        model=model,
        loss=lambda trained, batch: trained(batch),
        batch=lambda step, rank: torch.zeros((), dtype=torch.float64),
        optimizer=optimizer,
        batch_samples=1,
    )
