"""Times of one step without overlap: forward, the readiness of each gradient, update; on all ranks at once.

The step runs with the runtime's own hooks, so that what they cost (copying each gradient into its bucket, the
exchange of buffers) is in the figures. The gradients themselves are not sent. When backward has ended all ranks
exchange one message instead: it leaves the caches as training does, and without it forward and update were up to a
quarter too fast.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import nn

from planner.documents.profile import ComputeIntervals, ComputeProfile, Gradient, Interval
from planner.profile.bench import Bench
from planner.profile.links import make_bucket
from planner.profile.request import REPEATS, Phases
from runtime.checks.plan import dtype_name, trainable_parameters
from runtime.comm.by_device import make_communicator
from runtime.comm.collectives import COLLECTIVES
from runtime.comm.communicator import CommTiming, Communicator, Payload, nothing
from runtime.core.options import AttachOptions, CompileArgument
from runtime.errors import InputError
from runtime.monitor.clock import Clock
from runtime.monitor.recorder import StepMarks
from runtime.optimizers.kinds import Optimizers, each_of
from runtime.plan import ModelReference, Plan, PlanBucket, PlanWorld
from runtime.plan.names import layer_of
from runtime.plan.transports import LIBRARY, Transport
from runtime.session.session import Session
from runtime.sparse.compressors.powersgd import matrix_shape

WARM_UP_STEPS, WARM_UP_S = 3, 10.0
"""Number of steps that do not count, and the seconds after which fewer do."""
MIN_REPEATS, MAX_REPEATS = 5, 40
BUDGET_S = 6.0
"""Seconds that all repeats may take, once there are enough of them."""
LONG_S, LONG_REPEATS = 30.0, 3
"""Seconds beyond which the fewest repeats are fewer still, and their number."""
STEADY = 0.1
"""Share of the step by which its quartiles may differ; if they differ by more, the repeats are made again."""
MOST_TIMES = 4
"""Most times that repeats are made. Those that differ least count: others were disturbed."""

MESSAGE_BYTES = 32 * 1024 * 1024
"""Largest message after backward: more than caches hold."""
FIRST_MESSAGE_BYTES, LEAST_MESSAGE_BYTES = 1024 * 1024, 64 * 1024
MESSAGE_S = 0.3
"""Seconds that it may take; on a slow network it is smaller."""

GROUP = 8
"""Gradients per bucket while computation is measured."""

Step = Callable[[Callable[[], None]], object]
"""One forward and backward; calls its argument when the loss is there and backward begins."""


@dataclass(frozen=True)
class Training:
    """A model with a step that trains it."""

    model: nn.Module
    step: Step
    optimizer: Optimizers | None = None
    compile: CompileArgument | None = None
    """Arguments of `torch.compile` for the model; None: it is not compiled."""

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """Return the trained parameters by canonical name."""
        return trainable_parameters(self.model)

    @property
    def device(self) -> torch.device:
        """Return the device of the parameters."""
        return next(iter(self.parameters.values())).device


@dataclass(frozen=True)
class RankTimes:
    """Times of every repeat on one rank, in microseconds, from the start of forward but for the update."""

    forward_us: list[float]
    update_us: list[float]
    """Time from the last averaged gradient to the end of the optimizer's step; empty without an optimizer."""
    ready_us: dict[str, list[float]]
    """Readiness by parameter; NaN in repeats that gave it no gradient."""
    backward_end_us: list[float]


def measuring_plan(model: nn.Module, ranks: int) -> Plan:
    """Return a plan for a session that only measures, in buckets of a usual number of gradients."""
    names = tuple(reversed(trainable_parameters(model)))
    groups = [names[first : first + GROUP] for first in range(0, len(names), GROUP)]
    return Plan(
        model=ModelReference(name=type(model).__name__),
        world=PlanWorld(ranks=ranks),
        accuracy="exact",
        buckets=tuple(PlanBucket(gradients=group) for group in groups),
    )


class OwnMessages:
    """A communicator that fills the session's buckets and does not send them, but messages of its own."""

    def __init__(self, bench: Bench, kinds: Iterable[Transport]) -> None:
        self._inner = make_communicator(bench.world, [COLLECTIVES[kind] for kind in kinds], bench.device)
        self.close = self._inner.close

    def launch(self, bucket: Payload, sent: CommTiming, prepare: Callable[[], None] = nothing) -> None:
        """Fill a bucket of the session."""
        prepare()

    def wait(self, until: CommTiming | None = None) -> None:
        """Block until the messages that were sent have completed."""
        self._inner.wait()


class AfterBackward(OwnMessages):
    """Sends one message when backward has ended."""

    def __init__(self, bench: Bench, size_bytes: int) -> None:
        super().__init__(bench, [LIBRARY])
        self._bucket = make_bucket(size_bytes, bench.device, "the message behind a measured step")

    def wait(self, until: CommTiming | None = None) -> None:
        """Send the message and block until it has completed."""
        self._inner.launch(self._bucket.payload, CommTiming())
        super().wait(until)


def _make_communicator(bench: Bench, training: Training) -> Communicator | None:
    """Return one whose message has the model's size, or less if that takes long; a small message is timed first."""
    if bench.world.group is None:
        return None
    most_bytes = min(MESSAGE_BYTES, sum(p.numel() * p.element_size() for p in training.parameters.values()))
    size_bytes, tried = min(FIRST_MESSAGE_BYTES, most_bytes), False
    while True:
        communicator = AfterBackward(bench, size_bytes)
        took_s = max(bench.world.gather(bench.timed_us(communicator.wait) / 1e6, "timing a message"))
        fitting_bytes = min(most_bytes, max(LEAST_MESSAGE_BYTES, int(size_bytes * MESSAGE_S / took_s)))
        if fitting_bytes == size_bytes or (tried and took_s <= MESSAGE_S):
            return communicator
        communicator.close()
        size_bytes, tried = fitting_bytes, True


class StepRunner:
    """Runs a step under a measuring session."""

    def __init__(self, training: Training, bench: Bench, communicator: Communicator | None = None) -> None:
        self._training, self._world = training, bench.world
        options = AttachOptions(communicate=False, drift=False, guard=False)
        plan = measuring_plan(training.model, bench.world.ranks)
        self.session = Session(training.model, training.optimizer, plan, bench.world, options)
        if communicator is not None:
            self.session._use_communicator(communicator)
        self.clock = self.session._recorder.clock
        self.session._recorder.each_gradient = True

    def run(self) -> StepMarks:
        """Run one step, which all ranks begin together, from resetting the gradients to the update.

        Caches are left as training leaves them. Forward begins with the step.

        Raises:
            InputError: the step gives no parameter a gradient, or the optimizer's step raises.
        """
        self._world.gather(None, "starting a step together")
        recorder = self.session._recorder
        recorder.steps.clear()
        begun = self.clock.mark()
        for parameter in self._training.model.parameters():
            parameter.grad = None
        self._training.step(recorder.loss_ready)
        if not recorder.steps:
            raise InputError(
                "the step gave no trainable parameter a gradient; expected one forward and backward of the model"
            )
        for optimizer in each_of(self._training.optimizer):
            try:
                optimizer.step()
            except (TypeError, ValueError, RuntimeError) as error:
                raise InputError(
                    f"optimizer.step() raised {type(error).__name__}: {error}; expected a step without arguments"
                ) from error
        marks = recorder.steps[-1]
        if marks.forward is None:  # the step calls parts of the model, never the model
            marks.forward_end = marks.backward
        marks.forward = begun
        return marks

    def close(self) -> None:
        """Remove the hooks; the world stays."""
        self.session.detach(leave=False)


def measure_compute(training: Training, bench: Bench, phases: Phases) -> list[RankTimes]:
    """Return every rank's times; the model and the optimizer change (see `runtime.monitor.preserve`).

    Repeats that differ much are made again, and those that differ least count. The budget begins after the first ones.
    """
    world, progress = bench.world, bench.progress
    found: list[list[RankTimes]] = []
    with closing(StepRunner(training, bench, _make_communicator(bench, training))) as runner:
        each_s = spent_s = 0.0
        for _ in progress.track(range(WARM_UP_STEPS), "warm-up"):
            if spent_s > WARM_UP_S:
                break
            started = time.perf_counter()
            runner.run()
            each_s = max(world.gather(time.perf_counter() - started, "timing the warm-up"))
            spent_s += each_s
        fewest = MIN_REPEATS if MIN_REPEATS * each_s <= LONG_S else LONG_REPEATS
        repeats = int(min(MAX_REPEATS, max(fewest, BUDGET_S / max(each_s, 1e-9))))
        phases.say(f"a step takes {each_s:.3g} s, {repeats} more: {repeats * each_s:.0f} s")
        names, allowed_s = runner.session.plan.gradients, 0.0
        while True:
            marks = [runner.run() for _ in progress.track(range(repeats), "forward and backward")]
            found.append(world.gather(rank_times(marks, names, runner.clock), "comparing times of the step"))
            spread = spread_of(found[-1])
            if len(found) == 1:
                allowed_s = phases.begin(REPEATS, world)
            if spread <= STEADY or len(found) == MOST_TIMES or len(found) * repeats * each_s > allowed_s:
                break
            phases.say(f"the quartiles of steps are {spread:.0%} apart: {repeats} more, {repeats * each_s:.0f} s")
    return min(found, key=spread_of)


def measure_again(training: Training, bench: Bench, steps: int) -> list[RankTimes]:
    """Return every rank's times of a few steps, a part of which warm up: of a form of the model."""
    with closing(StepRunner(training, bench, _make_communicator(bench, training))) as runner:
        warm_up = min(WARM_UP_STEPS, steps // 3)
        for _ in range(warm_up):
            runner.run()
        marks = [runner.run() for _ in range(steps - warm_up)]
        mine = rank_times(marks, runner.session.plan.gradients, runner.clock)
        return bench.world.gather(mine, "comparing times of another form of the step")


def rank_times(marks: Sequence[StepMarks], names: Sequence[str], clock: Clock) -> RankTimes:
    """Return the times between the marks of some steps; `names`: of gradients, in the order of the session's plan."""
    between = clock.between_us
    ready: dict[str, list[float]] = {}
    for position, name in enumerate(names):
        at = [mark.ready[position] for mark in marks]
        if any(mark is not None for mark in at):
            ready[name] = [math.nan if a is None else between(m.forward, a) for m, a in zip(marks, at, strict=True)]
    return RankTimes(
        forward_us=[between(m.forward, m.loss or m.forward_end) for m in marks],
        update_us=[between(m.end, m.update_end) for m in marks if m.update is not None],
        ready_us=ready,
        backward_end_us=[between(m.forward, m.backward_end) for m in marks],
    )


def busy_times_us(marks: Sequence[StepMarks], clock: Clock) -> list[list[tuple[float, float]]]:
    """Return begin and end of each message on the link, by step, in microseconds from the start of forward."""
    return [
        [
            (clock.between_us(mark.forward, sent.start), clock.between_us(mark.forward, sent.end))
            for sent in mark.sent
            if sent.start is not None and sent.end is not None
        ]
        for mark in marks
    ]


def step_times_us(ranks: Sequence[RankTimes]) -> NDArray[np.float64]:
    """Return forward, backward and update of each repeat on the rank that took longest. Shape (repeats,)."""
    updates = min(len(rank.update_us) for rank in ranks)
    if not updates:
        return _latest([rank.backward_end_us for rank in ranks])
    return _latest([np.add(rank.update_us[-updates:], rank.backward_end_us[-updates:]) for rank in ranks])


def spread_of(ranks: Sequence[RankTimes]) -> float:
    """Return the distance of the quartiles of the step, as a share of its median."""
    times_us = step_times_us(ranks)
    return _spread(times_us) / max(float(np.median(times_us)), 1e-9)


def matrix_of(parameter: torch.Tensor) -> tuple[int, int] | None:
    """Return the (rows, columns) that low-rank factors could replace; None for a parameter of one dimension."""
    rows, columns = matrix_shape(parameter)
    return (rows, columns) if min(rows, columns) > 1 else None


def gradient_of(name: str, parameter: torch.Tensor, backward_us: float, spread_us: float | None = None) -> Gradient:
    """Return what a profile says of a parameter's gradient."""
    return Gradient(
        name=name, layer=layer_of(name), numel=parameter.numel(), dtype=dtype_name(parameter.dtype),
        backward_us=backward_us, spread_us=spread_us, matrix=matrix_of(parameter),
    )  # fmt: skip


def combine(ranks: Sequence[RankTimes], parameters: Mapping[str, nn.Parameter]) -> ComputeProfile:
    """Make one profile of all ranks' times, gradients in order of readiness.

    A collective begins when its last rank has come, and which rank that is changes from step to step. So a gradient
    counts as ready when it is on all ranks: in each repeat the latest rank, then the median over repeats. The update is
    what it adds to that of the end of backward: between two collectives each rank has one of both, one after the other.
    Forward is a median over ranks and repeats.

    Args:
        ranks: the times of each rank.
        parameters: the trained ones by canonical name; those without a gradient on any rank are left out.
    """
    order = {name: position for position, name in enumerate(reversed(list(parameters)))}
    everywhere = {name: _latest([r.ready_us[name] for r in ranks if name in r.ready_us]) for name in parameters}
    ready_us = {name: float(np.nanmedian(times)) for name, times in everywhere.items() if times.size}
    forwards_us = np.array([rank.forward_us for rank in ranks])
    forward_us = float(np.median(forwards_us))
    gradients = []
    before_us = forward_us
    for name in sorted(ready_us, key=lambda name: (ready_us[name], order[name])):
        at_us = max(before_us, ready_us[name])
        spread_us = _round(_spread(everywhere[name]))
        gradients.append(gradient_of(name, parameters[name], _round(at_us - before_us), spread_us))
        before_us = at_us
    ends_us = _latest([rank.backward_end_us for rank in ranks])
    steps_us = step_times_us(ranks)
    # On the slowest rank, which another one may be in every repeat; 0 without an optimizer.
    update_us, updates = 0.0, min(len(rank.update_us) for rank in ranks)
    if updates:
        last_us = _latest([rank.backward_end_us[-updates:] for rank in ranks])
        update_us = max(0.0, float(np.median(steps_us) - np.median(last_us)))
    return ComputeProfile(
        forward_us=_round(forward_us),
        update_us=_round(update_us),
        gradients=tuple(gradients),
        repeats=len(ranks[0].forward_us),
        step_spread_us=_round(_spread(ends_us)),
        intervals=ComputeIntervals(
            forward_us=_quartiles(forwards_us),
            backward_us=_quartiles(ends_us - forward_us),
            step_us=_quartiles(steps_us),
        ),
    )


def _latest(ranks: Sequence[ArrayLike]) -> NDArray[np.float64]:
    """Return the latest rank's time of each repeat; NaN if none has one. Shape (repeats,), or (0,) without ranks."""
    return np.fmax.reduce(np.array(ranks, dtype=np.float64), axis=0) if ranks else np.empty(0)


def _spread(values: NDArray[np.float64]) -> float:
    low, high = np.nanpercentile(values, [25, 75])
    return float(high - low)


def _quartiles(values: NDArray[np.float64]) -> Interval:
    low, high = np.nanpercentile(values, [25, 75])
    return max(0.0, _round(float(low))), max(0.0, _round(float(high)))


def _round(time_us: float) -> float:
    """Round to nanoseconds: no clock here is finer."""
    return round(time_us, 3)
