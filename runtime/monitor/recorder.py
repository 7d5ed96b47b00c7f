"""Marks of a clock in the last steps, turned into times only when a report needs them."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import InitVar, dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from runtime.comm.communicator import CommTiming
from runtime.monitor.clock import Clock
from runtime.torch_compat import ModuleHook, hook_after_forward, hook_before_forward

KEPT_STEPS = 60
"""Number of steps that are kept, more than `runtime.monitor.drift` judges: the last ones may still be on a device."""


USUAL_STEP_US = 1e5


@dataclass(slots=True, eq=False)
class StepMarks:
    """Marks of one step; None: it did not happen."""

    buckets: InitVar[int]
    gradients: InitVar[int]
    micro_batches: list[tuple[Any, Any, Any]] = field(default_factory=list)
    """(forward, its end, end of backward) of the micro-batches before that only accumulated (`no_sync`)."""
    gathered_us: float = 0.0
    """Time in which `session.batches` waited for other ranks, in microseconds; 0: it is not used."""
    forward: Any = None
    followed: Any = None
    """Buffers have followed rank 0 in the first forward; None: nothing was exchanged for them there."""
    forward_end: Any = None
    loss: Any = None
    """The loss is there, backward begins; only callers that know mark it."""
    backward: Any = None
    """The first gradient is ready."""
    backward_end: Any = None
    end: Any = None
    """All gradients are averaged."""
    aligned: Any = None
    """Buffers are rank 0's."""
    update: Any = None
    update_end: Any = None
    ready: list[Any] = field(init=False)
    sent: list[CommTiming] = field(init=False)

    def __post_init__(self, buckets: int, gradients: int) -> None:
        self.ready, self.sent = [None] * gradients, [CommTiming() for _ in range(buckets)]


class Recorder:
    """Records the steps of one session; `steps` holds the last ones, complete up to the optimizer's step."""

    def __init__(self, clock: Clock, buckets: int, gradients: int) -> None:
        # `mark` is bound once, for `ready` runs for every gradient.
        self.clock, self._mark = clock, clock.mark
        self.steps: deque[StepMarks] = deque(maxlen=KEPT_STEPS)
        self.each_gradient = clock.cheap
        """Whether the readiness of every gradient is marked."""
        self.on_backward: Callable[[], None] | None = None
        """Called when the first gradient of a step is ready (for measuring)."""
        self.restarts = 0
        """Number of plans that have begun since the first one."""
        self._shape = (buckets, gradients)
        self._now = StepMarks(*self._shape)

    def restart(self, buckets: int, gradients: int) -> None:
        """Forget all steps: another plan begins. Marks of the present step are kept."""
        self.steps.clear()
        self.restarts += 1
        self._shape = (buckets, gradients)
        before, self._now = self._now, StepMarks(*self._shape)
        self._now.forward, self._now.forward_end, self._now.loss = before.forward, before.forward_end, before.loss
        self._now.micro_batches = before.micro_batches
        self._now.followed, self._now.gathered_us = before.followed, before.gathered_us

    def observe(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[Any]:
        """Hook forward and the optimizers' steps, which are one update; yield the handles."""
        yield hook_before_forward(model, ModuleHook(self._before_forward))
        yield hook_after_forward(model, ModuleHook(self._after_forward))
        for optimizer in optimizers:
            yield optimizer.register_step_pre_hook(self._before_update)
            yield optimizer.register_step_post_hook(self._after_update)

    def _before_forward(self, _module: nn.Module, _arguments: Any) -> None:
        if torch.is_grad_enabled():
            self._now.forward = self.clock.mark()
            if not self._now.micro_batches:
                self._now.followed = None

    def _after_forward(self, _module: nn.Module, _arguments: Any, _output: Any) -> None:
        if torch.is_grad_enabled():
            self._now.forward_end = self.clock.mark()

    def buffers_followed(self) -> None:
        """Mark that buffers have been exchanged in a forward, whose compute begins."""
        if not self._now.micro_batches:
            self._now.followed = self.clock.mark()

    def gathered(self, us: float) -> None:
        """Add a time in microseconds, in which all ranks met before a batch."""
        self._now.gathered_us += us

    def loss_ready(self) -> None:
        """Mark that the loss is there, for callers that know when backward begins."""
        self._now.loss = self.clock.mark()

    @property
    def next_forward(self) -> Any:
        """Mark of the forward of the step that has begun, or None."""
        now = self._now
        return now.micro_batches[0][0] if now.micro_batches else now.forward

    def end_micro_batch(self) -> None:
        now = self._now
        if now.forward is not None and now.forward_end is not None:
            now.micro_batches.append((now.forward, now.forward_end, self.clock.mark()))
            now.forward = now.forward_end = None

    def begin_backward(self) -> None:
        self._now.backward = self.clock.mark()
        if self.on_backward is not None:
            self.on_backward()

    def ready(self, gradient: int) -> None:
        """Mark that the gradient with this index is in its bucket."""
        if self.each_gradient:
            self._now.ready[gradient] = self._mark()

    def sent(self, bucket: int) -> CommTiming:
        """Return the record in which the communicator notes when it sent this bucket."""
        return self._now.sent[bucket]

    def end_backward(self) -> None:
        """Autograd is through; what has not arrived yet is waited for."""
        self._now.backward_end = self.clock.mark()

    def end_step(self) -> None:
        self._now.end = self.clock.mark()
        self.steps.append(self._now)
        self._now = StepMarks(*self._shape)

    def buffers_aligned(self) -> None:
        self.steps[-1].aligned = self.clock.mark()

    def intervals_us(self) -> list[float]:
        """Return how long each of the last steps took, from the end of one exchange to that of the next."""
        return [self.clock.between_us(a.end, b.end) for a, b in pairwise(self.steps)]

    def step_us(self, last: int) -> float:
        """Return the median of the last steps; of none, if another plan has just begun, a usual time."""
        return statistics.median(self.intervals_us()[-last:] or [USUAL_STEP_US])

    @property
    def exchanges_per_update(self) -> int:
        """Number of exchanges in one step of the optimizer, over the last steps; 1 if no optimizer is seen to step."""
        updates = sum(marks.update_end is not None for marks in self.steps)
        return max(1, round(len(self.steps) / updates)) if updates else 1

    def _before_update(self, *_: Any) -> None:
        if self.steps and self.steps[-1].update_end is None:  # else a closure is about to make the next step
            self.steps[-1].update = self.clock.mark()

    def _after_update(self, *_: Any) -> None:
        if not self.steps:
            return
        marks = self.steps[-1]
        if marks.update is None:
            marks.update = marks.end
        marks.update_end = self.clock.mark()
