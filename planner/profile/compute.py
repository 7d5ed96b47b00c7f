"""Times of one step without communication: forward, the readiness of each gradient, update; on all ranks at once.

The step runs with the runtime's own hooks, so that what they cost (copying each gradient into its bucket, the
exchange of buffers before forward) is in the figures; only the collectives are left out.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from planner.profile.document import ComputeProfile, Gradient
from planner.progress import Progress
from runtime.communicator import Communicator
from runtime.fit import dtype_name, trainable_parameters
from runtime.names import layer_of
from runtime.plan import ModelReference, Plan, PlanBucket, PlanWorld
from runtime.recorder import StepMarks
from runtime.session import Session
from runtime.world import World

WARM_UP_STEPS = 3
MIN_REPEATS, MAX_REPEATS = 5, 40
BUDGET_S = 6.0
"""What the repeats may take in all, once there are enough of them."""

GROUP = 8
"""Gradients per bucket while computation is measured."""

Step = Callable[[Callable[[], None]], object]
"""One forward and backward; calls its argument when the loss is there and backward begins."""


@dataclass(frozen=True)
class RankTimes:
    """What one rank measured; microseconds from the start of forward, medians over repeats."""

    forward_us: float
    update_us: float
    ready_us: dict[str, float]
    spread_us: dict[str, float]
    backward_end_us: float
    step_spread_us: float
    repeats: int


def measuring_plan(model: nn.Module, ranks: int) -> Plan:
    """A plan for a session that only measures: in buckets of a usual number of gradients."""
    names = tuple(reversed(trainable_parameters(model)))
    groups = [names[first : first + GROUP] for first in range(0, len(names), GROUP)]
    return Plan(
        model=ModelReference(name=type(model).__name__),
        world=PlanWorld(ranks=ranks),
        accuracy="exact",
        buckets=tuple(PlanBucket(gradients=group) for group in groups),
    )


class StepRunner:
    """Runs a step under a measuring session and keeps its marks."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None, step: Step, world: World,
        communicator: Communicator | None = None,
    ) -> None:  # fmt: skip
        self._model, self._step, self._world = model, step, world
        self.session = Session(model, optimizer, measuring_plan(model, world.ranks), world, communicate=False)
        if communicator is not None:
            self.session.use_communicator(communicator)
        self.clock = self.session.recorder.clock
        self.session.recorder.each_gradient = True

    def run(self) -> StepMarks:
        """One step from gradients that are None, begun by all ranks together."""
        for parameter in self._model.parameters():
            parameter.grad = None
        self._world.gather(None, "starting a step together")
        recorder = self.session.recorder
        before = len(recorder.steps)
        recorder.steps.clear()
        self._step(recorder.loss_ready)
        if not recorder.steps:
            raise RuntimeError(f"the step ran no backward that reached a trainable parameter ({before} before)")
        return recorder.steps[-1]

    def close(self) -> None:
        """Takes the hooks off; the world stays."""
        self.session.detach(leave=False)


def measure_compute(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, step: Step, world: World, progress: Progress
) -> RankTimes:
    """This rank's times; the model and the optimizer change (see `planner.profile.preserve`)."""
    runner = StepRunner(model, optimizer, step, world)
    try:
        started = time.perf_counter()
        for _ in progress.track(range(WARM_UP_STEPS), "warm-up"):
            runner.run()
        each_s = max(world.gather((time.perf_counter() - started) / WARM_UP_STEPS, "timing the warm-up"))
        repeats = int(min(MAX_REPEATS, max(MIN_REPEATS, BUDGET_S / max(each_s, 1e-9))))
        marks = [runner.run() for _ in progress.track(range(repeats), "forward and backward")]
        names = runner.session.plan.gradients
        update_us = measure_update(optimizer, runner, world) if optimizer is not None else 0.0
    finally:
        runner.close()
    return _summarize(marks, names, runner, update_us)


def _summarize(marks: Sequence[StepMarks], names: Sequence[str], runner: StepRunner, update_us: float) -> RankTimes:
    between = runner.clock.between_us
    forward = [between(m.forward, m.loss or m.forward_end) for m in marks]
    end = [between(m.forward, m.backward_end) for m in marks]
    ready: dict[str, list[float]] = {}
    for mark in marks:
        for name, at in zip(names, mark.ready, strict=True):
            if at is not None:
                ready.setdefault(name, []).append(between(mark.forward, at))
    return RankTimes(
        forward_us=statistics.median(forward),
        update_us=update_us,
        ready_us={name: statistics.median(times) for name, times in ready.items()},
        spread_us={name: _spread(times) for name, times in ready.items()},
        backward_end_us=statistics.median(end),
        step_spread_us=_spread(end),
        repeats=len(marks),
    )


def _spread(values: Sequence[float]) -> float:
    low, high = np.percentile(values, [25, 75])
    return float(high - low)


def measure_update(optimizer: torch.optim.Optimizer, runner: StepRunner, world: World) -> float:
    """Median time of `optimizer.step()`, on all ranks at once, with the gradients of the last step."""
    times = []
    for _ in range(MIN_REPEATS):
        world.gather(None, "starting an update together")
        start = runner.clock.mark()
        optimizer.step()
        times.append((start, runner.clock.mark()))
    return statistics.median(runner.clock.between_us(start, end) for start, end in times[1:])


def combine(ranks: Sequence[RankTimes], model: nn.Module) -> ComputeProfile:
    """One profile from all ranks' times: medians over ranks, gradients in order of readiness.

    A parameter that got no gradient on any rank is not in it.
    """
    parameters = trainable_parameters(model)
    order = {name: position for position, name in enumerate(reversed(parameters))}
    ready_us = {name: _over_ranks([r.ready_us.get(name) for r in ranks]) for name in parameters}
    known = {name: time_us for name, time_us in ready_us.items() if time_us is not None}
    forward_us = statistics.median(rank.forward_us for rank in ranks)
    gradients = []
    before_us = forward_us
    for name in sorted(known, key=lambda name: (known[name], order[name])):
        at_us = max(before_us, known[name])
        gradients.append(
            Gradient(
                name=name,
                layer=layer_of(name),
                numel=parameters[name].numel(),
                dtype=dtype_name(parameters[name].dtype),
                backward_us=_round(at_us - before_us),
                spread_us=_round(_over_ranks([r.spread_us.get(name) for r in ranks]) or 0.0),
            )
        )
        before_us = at_us
    return ComputeProfile(
        forward_us=_round(forward_us),
        update_us=_round(statistics.median(rank.update_us for rank in ranks)),
        gradients=tuple(gradients),
        repeats=min(rank.repeats for rank in ranks),
        step_spread_us=_round(statistics.median(rank.step_spread_us for rank in ranks)),
    )


def _over_ranks(values: Sequence[float | None]) -> float | None:
    known: NDArray[np.float64] = np.array([value for value in values if value is not None])
    return float(np.median(known)) if known.size else None


def _round(time_us: float) -> float:
    """Nanoseconds: no clock here is finer."""
    return round(time_us, 3)
