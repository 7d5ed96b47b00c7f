"""Measurements for local updaters: the parts of backward by layer, and the throughput of concurrent updaters.

Backward is taken apart by leaving parts of it out. A partial backward for one layer alone brings gradients of inputs
down to it, and forms that layer's gradients of weights; one for all layers down to it forms the others' too. The
difference is what those cost. With many layers some of them are measured, evenly spread over backward, and what lies
between two is shared out by readiness. All ranks measure at once, as they train.

Updaters are the runtime's own, on all ranks at once: in the first half of each run nothing is averaged, in the second
averagings follow one another without pause.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from planner.documents.local_async import LayerBackward, LocalAsyncProfile, UpdaterRate
from planner.documents.profile import ComputeProfile, Gradient
from planner.profile.bench import Bench
from runtime.comm.shared_memory import available_bytes
from runtime.comm.topology import node_name
from runtime.comm.world import World
from runtime.errors import InputError
from runtime.local_async import LocalJob, run_local_async
from runtime.local_async.partial import partial_backward
from runtime.plan import LocalAsyncSpec, ModelReference, Plan, PlanBucket, PlanWorld
from runtime.plan.timeline import Span

Floats = NDArray[np.float64]

PROBES = 24
"""Most layers that are measured."""
WARM_UPS, REPEATS = 1, 7
BUDGET_S = 10.0
"""Seconds that taking backward apart may take; fewer layers are measured if steps are long."""
LEAST_PROBES = 6

RUN_S = 4.0
"""Seconds of one half of a run with updaters, if one process alone worked."""
LEAST_MINIBATCHES, MOST_MINIBATCHES = 12, 300
"""Least number of minibatches of each updater in a half, and most of all updaters of a rank."""
BEGINNING = 0.25
"""Share of the first half that does not count."""


def measure_backward(
    loss: Callable[[], Tensor], parameters: Mapping[str, nn.Parameter], compute: ComputeProfile, bench: Bench
) -> tuple[float, float, tuple[LayerBackward, ...]]:
    """Return (forward, backward from the loss to the first layer, the parts of each layer), the same on all ranks.

    Args:
        loss: runs one forward, which does not change the model but for buffers.
        parameters: the trained ones by canonical name.
        compute: the measured step, whose readiness counts.
        bench: the ranks.
    """
    runs = _runs(compute.gradients)
    most = _affordable(compute.forward_us + compute.backward_us)
    probes = _probes([sum(g.backward_us for g in run) for run in runs], most)
    tensors = [[parameters[gradient.name] for gradient in run] for run in runs]
    # Row: of each probe (forward, backward for it alone, what the others add), one right after the other.
    rows: list[list[tuple[float, float, float]]] = []

    def time_probes() -> None:
        rows.append([])
        for probe in probes:
            forward_us, single_us = _timed_us(bench, loss, tensors[probe])
            _, whole_us = _timed_us(bench, loss, [parameter for run in tensors[: probe + 1] for parameter in run])
            rows[-1].append((forward_us, single_us, whole_us - single_us))

    bench.times_us([time_probes], REPEATS, "partial backwards", WARM_UPS)
    times_us = np.median(np.array(bench.world.gather(rows[WARM_UPS:], "comparing backwards")), axis=1)
    forward_us, single_us, others_us = np.median(times_us, axis=0).T  # over repeats, then ranks: (probes, 3)
    return (round(float(np.median(forward_us)), 3), *take_apart(runs, probes, single_us, others_us))


def _runs(gradients: Sequence[Gradient]) -> list[list[Gradient]]:
    return [list(run) for _, run in groupby(gradients, key=lambda gradient: gradient.layer)]


def _affordable(step_us: float) -> int:
    each_s = 2 * (WARM_UPS + REPEATS) * step_us / 1e6
    return max(LEAST_PROBES, min(PROBES, int(BUDGET_S / each_s) if each_s > 0.0 else PROBES))


def _probes(times_us: Sequence[float], most: int) -> list[int]:
    """Return the first layer, the last one, and others at even distances in time between; all where there are few."""
    count = len(times_us)
    if count <= most:
        return list(range(count))
    reached = np.cumsum(times_us)
    wanted = np.linspace(reached[0], reached[-1], most)
    return sorted({0, count - 1, *np.clip(np.searchsorted(reached, wanted), 0, count - 1).tolist()})


def _timed_us(bench: Bench, loss: Callable[[], Tensor], block: Sequence[Tensor]) -> tuple[float, float]:
    """Time (forward, partial backward)."""
    values: list[Tensor] = []
    forward_us = bench.timed_us(lambda: values.append(loss()))
    return forward_us, bench.timed_us(lambda: partial_backward(values[0], block))


def take_apart(
    runs: Sequence[Sequence[Gradient]], probes: Sequence[int], single_us: Floats, others_us: Floats
) -> tuple[float, tuple[LayerBackward, ...]]:
    """Return (backward from the loss to the first layer, the parts of each layer but for updates).

    Args:
        runs: gradients by layer, in readiness order.
        probes: the layers that were measured, growing, with the first and the last.
        single_us: backward for each of them alone. Shape (probes,).
        others_us: additional time of backward for all layers before it in readiness. Shape (probes,).
    """
    from scipy.optimize import isotonic_regression  # a second that ranks without updaters do not spend on importing

    reached_us = np.cumsum([sum(gradient.backward_us for gradient in run) for run in runs])
    at_us = reached_us[list(probes)]
    # Noise is taken out by the non-decreasing sequence next to what was measured, in least squares.
    # What the layers before each one spend on gradients of weights, and what a backward for it alone takes.
    before_us = np.interp(reached_us, at_us, isotonic_regression(np.maximum(others_us, 0.0)).x)
    before_us[0] = 0.0
    alone_us = np.interp(reached_us, at_us, single_us)
    weight_us = np.diff(before_us, append=before_us[-1])
    # Of the layer that is ready last: half of what its backward adds to reaching it, for that cannot be left out.
    weight_us[-1] = (
        float(alone_us[0]) / 2.0
        if len(alone_us) == 1
        else max(0.0, float(alone_us[-1] - (alone_us[-2] - weight_us[-2]))) / 2.0
    )
    input_us = isotonic_regression(np.maximum(alone_us - weight_us, 0.0)).x
    steps_us = np.diff(input_us, append=input_us[-1])
    layers = tuple(
        LayerBackward(
            layer=run[0].layer,
            gradients=len(run),
            grad_weight_us=round(float(weight), 3),
            grad_input_us=round(float(step), 3),
            update_us=0.0,
        )
        for run, weight, step in zip(runs, weight_us, steps_us, strict=True)
    )
    return round(float(input_us[0]), 3), layers


def with_updates(
    layers: Sequence[LayerBackward], gradients: Sequence[Gradient], update_us: float
) -> tuple[LayerBackward, ...]:
    """Return layers with their shares, by elements, of the time of an update of all."""
    elements = [sum(gradient.numel for gradient in run) for run in _runs(gradients)]
    scale = update_us / max(1, sum(elements))
    return tuple(
        replace(layer, update_us=round(count * scale, 3)) for layer, count in zip(layers, elements, strict=True)
    )


@dataclass(frozen=True)
class Measured:
    """The measured rate of a number of updaters."""

    rate: UpdaterRate
    batch_us: float
    update_us: float
    """Medians over the minibatches of all updaters."""


def measure_updaters(
    job: Callable[[], LocalJob], names: Sequence[str], step_us: float, bench: Bench, most: int
) -> tuple[Measured, ...]:
    """Measure the throughput of 1, 2, 4, … updaters of each rank.

    It ends early if memory does not hold them, or if the last two numbers had no more throughput than the one before.

    Args:
        job: makes the job, on a rank and on each of its updaters.
        names: all gradients in readiness order.
        step_us: time of a minibatch of one process.
        bench: the ranks.
        most: largest number of updaters.
    """
    points: list[Measured] = []
    for updaters in bench.progress.track(numbers_up_to(most), "concurrent updaters"):
        try:
            points.append(_measure(job, names, step_us, bench.world, updaters))
        except InputError:  # on all ranks alike
            if not points:
                raise
            break
        if stalled([point.rate.minibatch_us for point in points]):
            break
    return tuple(points)


def expected_s(step_us: float, most: int) -> float:
    """Estimate the seconds of measuring up to `most` updaters, at a step of one process of `step_us` microseconds."""
    step_s, numbers = step_us / 1e6, numbers_up_to(most)
    apart_s = 2 * (WARM_UPS + REPEATS) * _affordable(step_us) * step_s
    return apart_s + sum(2 * max(RUN_S, LEAST_MINIBATCHES * updaters * step_s) for updaters in numbers)


def stalled(minibatch_us: Sequence[float]) -> bool:
    """Return whether neither of the last two numbers of updaters had more throughput than the one before them."""
    return len(minibatch_us) > 2 and min(minibatch_us[-2:]) >= minibatch_us[-3]


def numbers_up_to(most: int) -> list[int]:
    """Return powers of two, then `most` itself."""
    return sorted({most, *(2**power for power in range(most.bit_length()) if 2**power <= most)})


def _measure(
    job: Callable[[], LocalJob], names: Sequence[str], step_us: float, world: World, updaters: int
) -> Measured:
    enough = min(MOST_MINIBATCHES, int(RUN_S * 1e6 / max(step_us, 1.0)))
    half = max(LEAST_MINIBATCHES * updaters, enough)
    spec = LocalAsyncSpec(updaters=updaters, average_every=2 * half + 1, then_every=1, switch_fraction=0.5)
    plan = Plan(
        model=ModelReference(name="measured"),
        world=PlanWorld(ranks=world.ranks),
        accuracy="relaxed",
        buckets=(PlanBucket(gradients=tuple(names)),),
        local_async=spec,
    )
    run = run_local_async(job, plan, 2 * half, timeout_s=world.timeout_s)
    losses: list[str | None] = world.gather(
        next((one.lost for one in run.report.updaters if one.lost), None), "looking for lost updaters"
    )
    for rank, why in enumerate(losses):
        if why is not None:
            raise InputError(
                f"--updaters: of {updaters} on rank {rank} one {why}, so what they get done is not known; expected all "
                f"to last: ask for fewer, or free memory"
            )
    peak_bytes, spans = sum(one.peak_bytes for one in run.report.updaters), run.report.spans
    halves = halves_us(run.ends_s, half, updaters)
    mine = (*halves, peak_bytes, _median_us(spans, "batch"), _median_us(spans, "update"))
    everyone: list[tuple[float, float, int, float, float]] = world.gather(mine, "comparing updaters")
    quiet, averaging, memory, batches, updates = zip(*everyone, strict=True)
    rate = UpdaterRate(
        updaters=updaters,
        minibatch_us=round(statistics.fmean(quiet), 3),
        averaging_us=round(statistics.fmean(averaging), 3) if world.ranks > 1 else None,
        memory_bytes=max(memory),
    )
    return Measured(rate, round(statistics.fmean(batches), 3), round(statistics.fmean(updates), 3))


def _median_us(spans: Sequence[Span], task: str) -> float:
    """Return the median duration of the spans whose task begins with `task`."""
    return statistics.median(span.duration_us for span in spans if span.task.startswith(f"{task} "))


def halves_us(ends_s: Sequence[float], half: int, updaters: int) -> tuple[float, float]:
    """Return a minibatch of the rank in the first half of a run and in the second, without what begins and ends each.

    In the beginning processes are not at work evenly, those of other ranks may be starting still, and libraries prepare
    what they keep; at the end some have nothing left to do.
    """
    warm = max(2 * updaters, int(half * BEGINNING))
    first, second = ends_s[warm:half], ends_s[half + 2 * updaters : len(ends_s) - updaters]
    first_us, second_us = ((part[-1] - part[0]) / (len(part) - 1) * 1e6 for part in (first, second))
    return first_us, second_us


def measure_local_async(
    job: Callable[[], LocalJob],
    loss: Callable[[], Tensor],
    parameters: Mapping[str, nn.Parameter],
    compute: ComputeProfile,
    bench: Bench,
    most: int,
) -> LocalAsyncProfile:
    """Measure the profile's section on local updaters; every rank calls it.

    Arguments are those of `measure_backward` and `measure_updaters`.

    Raises:
        InputError: updaters cannot share the model.
    """
    memory: list[tuple[str, int]] = bench.world.gather((node_name(), available_bytes()), "comparing memory")
    nodes = [node for node, _ in memory]
    forward_us, loss_us, layers = measure_backward(loss, parameters, compute, bench)
    names = [gradient.name for gradient in compute.gradients]
    points = measure_updaters(job, names, compute.step_us, bench, most)
    return LocalAsyncProfile(
        batch_us=points[0].batch_us,
        forward_us=forward_us,
        loss_us=loss_us,
        layers=with_updates(layers, compute.gradients, points[0].update_us),
        curve=tuple(point.rate for point in points),
        memory_available_bytes=min(free // nodes.count(node) for node, free in memory),
    )
