"""An accelerator that is a timed wait: a job with a profile's gradients, sizes and times, that computes nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from planner.documents.profile import ComputeProfile
from planner.jobs.job import TrainingJob
from planner.rehearse.matrices import WaitingMatrices, split_named
from runtime.errors import InputError

T = TypeVar("T")
_OfLayer = tuple[nn.Parameter, float, Tensor]
"""A parameter, its part of backward in microseconds, and its gradient."""

SPIN_S = 200e-6
"""Undilated seconds at the end of each wait that are not slept: a sleep ends some tens of microseconds late, but
spinning ranks take the cores from those that send."""
SEED = 0


class Accelerator:
    """The timeline of a device: work queues up, and the host waits for the end of what it has put there.

    A device is delayed by its host only when its queue is empty. So hosts' time between two pieces of work counts on a
    clock of its own, which waits do not move: work begins when what was queued before it is done, or when a host that
    never waits would have queued it, whichever is later.
    """

    def __init__(self, dilate: float = 1.0) -> None:
        self._spin_s = SPIN_S / dilate
        self._device_s = self._host_s = self._left_s = 0.0
        self.late_us = 0.0
        """Microseconds in which the device was idle, or an update waited for it in vain, in all."""

    def synchronize(self) -> None:
        """Note that host and device have met: what comes next begins now at the earliest."""
        self._left_s = self._host_s = time.perf_counter()
        self._device_s = max(self._device_s, self._host_s)

    def arrived(self, waited_s: float) -> None:
        """Note that a message has come, for which the host has just waited: what follows begins now or later.

        The host's other work still overlaps with the device's.
        """
        now_s = self._host_continued(waited_s)
        self._device_s = max(self._device_s, now_s)

    def _host_continued(self, waited_s: float = 0.0) -> float:
        """Advance the host's clock by its work since it was left, and return the time."""
        now_s = time.perf_counter()
        self._host_s += now_s - self._left_s - waited_s
        self._left_s = now_s
        return now_s

    def queue(self, work_us: float, *, awaited: bool = False) -> None:
        """Put work at the end of the queue; `awaited`: it had to wait for a message, for which no host is late."""
        self._host_continued()
        self.late_us += 0.0 if awaited else max(0.0, self._host_s - self._device_s) * 1e6
        self._device_s = max(self._device_s, self._host_s) + work_us * 1e-6

    def wait(self) -> None:
        """Block until the queue is empty."""
        now_s = self._host_continued()
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
        """Run work that the device would do, which is busy for as long, and return its result."""
        self.queue(0.0)
        started_s = self._left_s
        done = work()
        self._left_s = time.perf_counter()
        self._device_s += self._left_s - started_s
        return done

    def run_since_met(self, work_us: float) -> None:
        """Wait for work that was queued when host and device met, while the host did the same."""
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

    Forward is one wait; if hooks wait for weights before modules run, it passes through them, each with its share of
    backward.

    Gradients are drawn once, different ones on each rank. The loss is made of some weights, so that different training
    has different losses.
    """

    def __init__(self, compute: ComputeProfile, rank: int, dilate: float = 1.0) -> None:
        super().__init__()
        self.device = Accelerator(dilate)
        self.batch_factor = 1.0
        """Times of forward and backward over those of the profile: of a batch of another size."""
        self._forward_us, self._update_us = compute.forward_us, compute.update_us
        if compute.operator is not None:  # which the optimizer waits for itself
            of_all_us = sum(shape.operator_us * len(shape.parameters) for shape in compute.operator.shapes)
            self._update_us = max(0.0, self._update_us - of_all_us)
        generator = torch.Generator().manual_seed(SEED + 1 + rank)
        self._layers: list[_OfLayer] = []
        self._parts: list[tuple[nn.Module, list[_OfLayer]]] = []
        for gradient in compute.gradients:
            dtype = getattr(torch, gradient.dtype)
            parameter = nn.Parameter(torch.zeros(gradient.numel, dtype=dtype))
            *path, last = gradient.name.split(".")
            holder = holder_of(self, path, _Part)
            holder.register_parameter(last or "_", parameter)
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
        factor = self.batch_factor
        self.device.queue(factor * self._forward_us)
        # Building the graph overlaps with the forward's wait, as launching kernels does.
        chain = self._of_weights() + batch.detach().requires_grad_()
        for parameter, work_us, drawn in reversed(self._layers):
            chain = _Layer.apply(chain, parameter, self.device, factor * work_us, drawn)  # type: ignore[no-untyped-call]
        self.device.wait()
        return chain

    def _forward_by_part(self, batch: Tensor) -> Tensor:
        """Return the loss module by module; each is called, so that its hooks wait."""
        chain, backward_us = batch.detach().requires_grad_(), sum(us for _, us, _ in self._layers)
        share, factor = self._forward_us / backward_us if backward_us > 0.0 else 0.0, self.batch_factor
        self.device.queue(0.0 if backward_us > 0.0 else factor * self._forward_us)
        for part, layers in reversed(self._parts):
            forward = _Part.forward.__get__(part) if part is self else part
            timed = [(parameter, factor * us, drawn) for parameter, us, drawn in reversed(layers)]
            chain = forward(chain, timed, self.device, share * sum(us for _, us, _ in timed))
        # Weights are all there now, and reading them overlaps with the wait.
        chain = self._of_weights() + chain
        self.device.wait()
        return chain

    def _of_weights(self) -> Tensor:
        weights = [parameter.detach()[:1].double() for parameter, *_ in self._layers[:: max(1, len(self._layers) // 8)]]
        return 1.0 + torch.cat(weights).sum()

    def retime(self, compute: ComputeProfile) -> None:
        """Take the times of forward and of gradients from another profile of the model: compiled in other regions."""
        self._forward_us = compute.forward_us
        times_us = [gradient.backward_us for gradient in compute.gradients]
        self._layers = [(one, us, drawn) for (one, _, drawn), us in zip(self._layers, times_us, strict=True)]
        by_parameter = {id(layer[0]): layer for layer in self._layers}
        self._parts = [(part, [by_parameter[id(one)] for one, *_ in layers]) for part, layers in self._parts]

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Make the optimizer's steps take the profile's time; a rank that updates a part, its part of it."""

        waits = isinstance(optimizer, WaitingMatrices)

        def begin(*_: Any) -> None:
            self.device.synchronize()

        # The updated part is known after it: of a sharded step each rank has its parts in the optimizer.
        def end(*_: Any) -> None:
            updated = sum(p.numel() for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
            if waits:  # results may have been waited for
                self.device.synchronize()
            self.device.run_since_met(self._update_us * updated / max(1, self._numel))

        optimizer.register_step_pre_hook(begin)
        optimizer.register_step_post_hook(end)


def holder_of(model: nn.Module, path: Sequence[str], make: Callable[[], nn.Module]) -> nn.Module:
    """Return the module at a path inside a model, where modules are made that are missing.

    Raises:
        InputError: a parameter has the name of one of them.
    """
    module = model
    for part in path:
        if part in module._parameters:
            raise InputError(
                f"the profile has the gradients {part} and {'.'.join(path)}.…, which no module can have both"
            )
        inner = module._modules.get(part)
        if inner is None:
            inner = make()
            module.add_module(part or "_", inner)
        module = inner
    return module


def make_job(compute: ComputeProfile, rank: int, dilate: float = 1.0, fused: bool = True) -> TrainingJob:
    """Return a job that takes the profile's times, updates included.

    Args:
        compute: the times, scaled already.
        rank: of this process; gradients differ by rank.
        dilate: the dilation, by which waits need not end as precisely.
        fused: whether the real update is one call of the host, which plans with a delay cannot have.
    """
    model = AcceleratedModel(compute, rank, dilate)
    adaptive = compute.optimizer is not None and compute.optimizer.adaptive
    # A profile without an update's time gets the update that takes the least.
    momentum = 0.9 if compute.update_us > 0.0 else 0.0

    def optimizer(named: Any) -> list[torch.optim.Optimizer]:
        matrices, others = split_named(compute.operator, list(named))
        made: list[torch.optim.Optimizer] = []
        if matrices and compute.operator is not None:
            made.append(WaitingMatrices(model.device, compute.operator, matrices))
        if others and adaptive:
            made.append(torch.optim.AdamW(others, lr=1e-4, fused=fused))
        elif others:
            made.append(torch.optim.SGD(others, lr=1e-2, momentum=momentum, fused=fused))
        for one in made:
            model.update(one)
        return made

    return TrainingJob(
        model=model,
        loss=lambda trained, batch: trained(batch),
        batch=lambda step, rank: torch.zeros((), dtype=torch.float64),
        optimizer=optimizer,
        batch_samples=1,
    )
