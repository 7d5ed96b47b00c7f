"""From a traced run to a profile with its cluster."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from planner.cost.halves import LIBRARY_GATHER, LIBRARY_SCATTER
from planner.documents.accelerators import find_accelerator
from planner.documents.profile import (
    DTYPE_BYTES,
    Cluster,
    ComputeProfile,
    Contention,
    Gradient,
    OptimizerProfile,
    Profile,
    ProfileWorld,
    Sample,
)
from planner.documents.text import pluralize
from planner.traces.events import Floats, Message, Run, Step
from runtime.errors import InputError
from runtime.plan import ModelReference
from runtime.plan.names import layer_of

ALONE, BESIDE, WHOLLY = 0.2, 0.8, 0.99
"""Share of a message beside compute up to which it counts as alone, and from which as overlapped."""
LEAST_COMPARED = 0.1
"""Share of what is overlapped that has to have run alone, too."""
SHOWS = 1.03
"""A slow-down below is noise."""
SAME_SIZE = 0.02
COPIED_BYTES_PER_US = 4000.0
"""Assumed of a host, where only the time of copies tells the sizes of gradients."""
MOST_OVERHEAD_US = 50.0
"""The most that the profiler may add to one operation of a host."""
_KEYS = {"all_reduce": "all_reduce", "all_gather": LIBRARY_GATHER, "reduce_scatter": LIBRARY_SCATTER}
"""Under which keys of a cluster's samples collectives are."""


@dataclass(frozen=True)
class Parameter:
    """A trainable parameter of the model, in the order in which the model has them."""

    name: str
    numel: int
    matrix: tuple[int, int] | None = None


def measured_sizes(run: Run) -> tuple[tuple[int, ...], str | None]:
    """Return the elements of each gradient, and how they were found where the trace does not say."""
    for step in run.steps:
        if step.numel is not None:
            return step.numel, None
    step = run.steps[0]
    cuts = cuts_of(step, None)
    if step.buckets and all(message.size_bytes for message in step.buckets) and len(cuts) == len(step.buckets):
        sizes: list[int] = []
        for message, start, stop in zip(step.buckets, [0, *cuts], cuts, strict=False):
            whole = (message.size_bytes or 0) // DTYPE_BYTES[step.dtypes[start]]
            parts = np.diff(np.linspace(0, whole, stop - start + 1).round().astype(np.int64))
            sizes += parts.tolist()
        return tuple(sizes), "each bucket's elements were shared out evenly over its gradients"
    copied = [one.copied_us for one in run.steps if one.copied_us is not None]
    if copied:
        copied_us = np.median(copied, axis=0)
        estimated = (COPIED_BYTES_PER_US * (copied_us - copied_us.min())) / DTYPE_BYTES[step.dtypes[0]]
        return tuple(max(1, int(numel)) for numel in estimated), "estimated from the time of DDP's copies, roughly"
    raise InputError(
        f"{run.paths[0]}: found no sizes of gradients: neither shapes nor the sizes of messages were recorded; name "
        f"the model with --job, or record with record_shapes=True"
    )


def cuts_of(step: Step, size_bytes: NDArray[np.int64] | None) -> list[int]:
    """Return where each bucket of the run ends among the gradients: by bytes where these agree, else by launches."""
    count = len(step.ready_us)
    if size_bytes is not None and step.buckets and all(message.size_bytes for message in step.buckets):
        ends = np.cumsum(size_bytes)
        sent = np.cumsum([message.size_bytes or 0 for message in step.buckets])
        at = np.searchsorted(ends, sent)
        if sent[-1] == ends[-1] and np.array_equal(ends[at], sent):
            return sorted({int(place) + 1 for place in at})
    launched = sorted({message.gradients for message in step.buckets})
    return [*launched[:-1], count] if launched else []


def match_parameters(run: Run, sizes: Sequence[int] | None, parameters: Sequence[Parameter]) -> list[Parameter]:
    """Return the model's parameters in the order in which the run's gradients were ready.

    Backward completes modules from the last to the first; of equal sizes the first of these is taken.

    Raises InputError: the model has other parameters; names the first difference.
    """
    modules: dict[str, list[Parameter]] = {}
    for parameter in parameters:
        modules.setdefault(layer_of(parameter.name), []).append(parameter)
    left = [parameter for module in reversed(modules.values()) for parameter in module]
    count, where = len(run.steps[0].ready_us), run.paths[0]
    if count != len(parameters):
        raise InputError(
            f"{where}: found {pluralize(count, 'gradient')}, and {len(parameters)} trainable parameters in the job; "
            f"expected as many: name the job that was traced"
        )
    if sizes is None:
        return left
    found = []
    for index, numel in enumerate(sizes):
        match = next((parameter for parameter in left if parameter.numel == numel), None)
        if match is None:
            raise InputError(
                f"{where}: found {numel} elements in gradient {index}, expected {left[0].numel}, those of "
                f"{left[0].name}, or of another parameter of the job that is left; name the job that was traced"
            )
        left.remove(match)
        found.append(match)
    return found


def profile_of(
    run: Run, *, name: str, parameters: Sequence[Parameter] | None = None, step_ms: float | None = None,
    steps: Sequence[Step] | None = None, fsdp2: bool = False,
) -> Profile:  # fmt: skip
    """Return the run's profile with its cluster.

    Args:
        run: what was traced.
        name: the model's.
        parameters: the model's trainable parameters; default: gradients are numbered.
        step_ms: what a step takes without the profiler.
        steps: those to take; default: all.

    Raises InputError: parameters do not fit, sizes are not known, or the step is shorter than what it computes.
    """
    chosen = list(steps or run.steps)
    notes = list(run.notes)
    if parameters is not None and chosen[0].numel is None:
        ordered = match_parameters(run, None, parameters)
        sizes = tuple(parameter.numel for parameter in ordered)
        _check_totals(run, sizes)
    else:
        sizes, assumed = measured_sizes(run)
        notes += [f"sizes of gradients: {assumed}; record_shapes=True gives them"] if assumed else []
        ordered = (
            match_parameters(run, sizes, parameters) if parameters is not None
            else [Parameter(f"gradient_{index}", numel) for index, numel in enumerate(sizes)]
        )  # fmt: skip
    chosen = [_with_sizes(step, sizes) for step in chosen]
    cluster, said = cluster_of(run, chosen)
    notes += said
    factor = cluster.contention.compute if cluster is not None and cluster.contention is not None else 1.0
    timings = [_Timing.of(step, factor) for step in chosen]
    if step_ms is not None:
        timings, how = _without_profiler(timings, chosen, run, step_ms)
        notes.append(how)
    forward_us = float(np.median([timing.forward_us for timing in timings]))
    ready = np.median([timing.ready_us for timing in timings], axis=0)
    steps_us = np.diff(np.maximum.accumulate(np.maximum(ready, forward_us)), prepend=forward_us).round(3)
    update_us = float(np.median([timing.update_us for timing in timings]))
    if (together := _together(chosen[0], forward_us)) is not None:
        notes.append(together)
    gradients = tuple(
        Gradient(
            name=parameter.name, layer=layer_of(parameter.name), numel=numel, dtype=dtype, backward_us=float(time_us),
            matrix=parameter.matrix,
        )
        for parameter, numel, dtype, time_us in zip(ordered, sizes, chosen[0].dtypes, steps_us, strict=True)
    )  # fmt: skip
    return Profile(
        model=ModelReference(name=name),
        world=ProfileWorld(
            ranks=run.ranks, nodes=cluster.nodes if cluster is not None else None, backend=run.backend,
            device=run.device, accelerator=run.accelerator, memory_bytes=run.memory_bytes,
        ),
        compute=ComputeProfile(
            forward_us=round(forward_us, 3), update_us=round(update_us, 3), gradients=gradients, repeats=len(chosen),
            optimizer=_optimizer(run),
        ),
        cluster=cluster,
        source=f"read from {pluralize(len(run.paths), 'trace')} of torch.profiler",
        notes=tuple(notes) or None,
    )  # fmt: skip


def _with_sizes(step: Step, sizes: Sequence[int]) -> Step:
    """Return the step with the bytes of messages that do not tell them, from those of their gradients."""
    cuts = cuts_of(step, None)
    if len(cuts) != len(step.buckets) or all(message.size_bytes for message in step.buckets):
        return step
    size_bytes = [numel * DTYPE_BYTES[dtype] for numel, dtype in zip(sizes, step.dtypes, strict=True)]
    buckets = [
        replace(message, size_bytes=message.size_bytes or sum(size_bytes[start:stop]))
        for message, start, stop in zip(step.buckets, [0, *cuts], cuts, strict=False)
    ]
    return replace(step, buckets=tuple(buckets))


def _optimizer(run: Run) -> OptimizerProfile | None:
    name = run.optimizer
    return None if name is None else OptimizerProfile(name=name, adaptive="adam" in name.lower())


def _check_totals(run: Run, sizes: Sequence[int]) -> None:
    """Raise InputError where the messages of gradients hold other bytes than the job's parameters."""
    step = run.steps[0]
    sent = [message.size_bytes for message in step.buckets]
    whole = sum(numel * DTYPE_BYTES[dtype] for numel, dtype in zip(sizes, step.dtypes, strict=True))
    total = sum(size or 0 for size in sent)
    if sent and None not in sent and total != whole:
        raise InputError(
            f"{run.paths[0]}: found {total} bytes of gradients in messages, and {whole} in the "
            f"job's parameters; expected as many: name the job that was traced"
        )


def _together(step: Step, forward_us: float) -> str | None:
    """Say so where all gradients are ready at once, as of a compiled backward."""
    backward_us = step.last_gradient_us - forward_us
    late = np.count_nonzero(step.ready_us > step.last_gradient_us - 0.05 * backward_us)
    if len(step.ready_us) > 2 and late > 0.9 * len(step.ready_us):
        return "nearly all gradients are ready at the end of backward, as of a compiled model: nothing can be hidden"
    return None


@dataclass(frozen=True)
class _Timing:
    """The times of one step, as far as they are changed on the way into a profile."""

    forward_us: float
    ready_us: Floats
    update_us: float
    at_us: Floats
    """Moments, increasing, …"""
    removable_us: Floats
    """… and how much time before each of them a faster host would save."""

    @classmethod
    def of(cls, step: Step, compute_factor: float) -> _Timing:
        """Take out how much messages slow compute."""
        starts, ends = _union(step.compute)
        gaps = np.concatenate([starts[:1], starts[1:] - ends[:-1]])
        at = np.stack([starts - gaps, starts], axis=1).ravel()
        removable = np.stack([np.concatenate([[0.0], np.cumsum(gaps)[:-1]]), np.cumsum(gaps)], axis=1).ravel()
        if step.overhead is not None:
            at, removable = step.overhead[0], MOST_OVERHEAD_US * step.overhead[1]
        if compute_factor == 1.0:
            return cls(step.forward_us, step.ready_us, step.update_us, at, removable)
        edges, beside = _covered(np.array([(m.start_us, m.end_us) for m in step.messages] or [(0.0, 0.0)]))
        saved = 1.0 - 1.0 / compute_factor

        def faster(time_us: Floats | float) -> Floats:
            return np.asarray(time_us - saved * np.interp(time_us, edges, beside, left=0.0))

        return cls(float(faster(step.forward_us)), faster(step.ready_us), step.update_us, at, removable)

    def without(self, share: float, span_us: float) -> _Timing:
        """Return the step of a host that saves this share of what it can."""

        def faster(time_us: Floats | float) -> Floats:
            return np.asarray(time_us - share * np.interp(time_us, self.at_us, self.removable_us))

        end_us = float(faster(span_us)) - float(faster(span_us - self.update_us))
        return replace(
            self, forward_us=float(faster(self.forward_us)), ready_us=np.maximum.accumulate(faster(self.ready_us)),
            update_us=max(0.0, end_us),
        )  # fmt: skip


def _union(spans: Floats) -> tuple[Floats, Floats]:
    """Return starts and ends of the union of intervals that are ordered by start."""
    reach = np.maximum.accumulate(spans[:, 1])
    first = np.concatenate([[True], spans[1:, 0] > reach[:-1]])
    last = np.concatenate([first[1:], [True]])
    return spans[first, 0], reach[last]


def _without_profiler(
    timings: list[_Timing], steps: Sequence[Step], run: Run, step_ms: float
) -> tuple[list[_Timing], str]:
    """Shorten what the host holds up until the replayed step takes as long as it does without the profiler."""
    wanted_us, found = step_ms * 1e3, []
    if not 0.0 < wanted_us < 1e12:
        raise InputError(f"--step-ms: found {step_ms:g}, expected the milliseconds of a step without the profiler")
    shares = []
    for timing, step in zip(timings, steps, strict=True):
        gap_us = step.gap_us or 0.0 if run.device != "cpu" else 0.0

        def length(share: float, timing: _Timing = timing, step: Step = step, gap_us: float = gap_us) -> float:
            changed = timing.without(share, step.span_us)
            end_us = float(changed.ready_us[-1])
            reached = 0.0
            for message in step.buckets:
                reached = max(reached, float(changed.ready_us[message.gradients - 1])) + message.cost_us
            return max(end_us, reached) + changed.update_us + (1.0 - share) * gap_us

        low, high = 0.0, 1.0
        if length(1.0) > wanted_us * 1.001:
            raise InputError(
                f"--step-ms: found {step_ms:g}, and {length(1.0) / 1e3:.4g} ms of kernels and messages in step "
                f"{step.number} of {run.paths[0]}, which no host shortens; expected at least that"
            )
        while high - low > 1e-6:
            middle = (low + high) / 2
            low, high = (middle, high) if length(middle) > wanted_us else (low, middle)
        shares.append(high)
        found.append(timing.without(high, step.span_us))
    share, what = float(np.median(shares)), "idle gaps of the accelerator" if run.device != "cpu" else "operations"
    return found, (
        f"assumed that the profiler lengthens {what} alike, so that {share:.0%} of what it may have added was taken "
        f"out for a step of {step_ms:g} ms"
    )


def cluster_of(run: Run, steps: Sequence[Step]) -> tuple[Cluster | None, list[str]]:
    """Return the cluster that a run's messages show, and what limits it; None where none was sent."""
    ranks = run.ranks
    nodes, notes = run.nodes, []
    if nodes is None:
        nodes = -(-ranks // run.devices_per_node) if run.devices_per_node else 1
        nodes = nodes if ranks % nodes == 0 else 1
        if ranks > 1:
            notes.append(f"taken as {pluralize(nodes, 'node')}, which one trace does not tell: correct cluster.nodes")
    accelerator = find_accelerator(run.accelerator)
    if ranks == 1:
        return Cluster(nodes=1, accelerator=accelerator, source="a run of one rank"), notes  # type: ignore[arg-type]
    messages = [message for step in steps for message in step.messages if message.ranks in (None, ranks)]
    samples: dict[str, tuple[Sample, ...]] = {}
    for collective, key in _KEYS.items():
        found = _curve([m for m in messages if m.collective == collective and m.size_bytes], run)
        if found:
            samples[key] = found
    if "all_reduce" not in samples and LIBRARY_GATHER not in samples:
        notes.append("no message of gradients is in the trace: name a cluster with --cluster when you plan")
        return None, notes
    if "all_reduce" not in samples:
        halves = (samples[LIBRARY_GATHER], samples.get(LIBRARY_SCATTER, samples[LIBRARY_GATHER]))
        samples["all_reduce"] = tuple(sorted((size, 2.0 * time) for size, time in halves[1]))
        notes.append("the cost of an all-reduce was taken as twice that of a reduce-scatter, for none is in the trace")
    if len(run.traced_ranks) == 1:
        waits = [max(0.0, m.duration_us - least) for m in messages for least in [_least(m, messages)]]
        notes.append(
            f"costs of messages are upper bounds: one rank's trace holds what it waits for others, up to "
            f"{max(waits, default=0.0) / 1e3:.3g} ms of a message here; import the traces of all ranks"
        )
    contention, said = _contention(steps, messages)
    cluster = Cluster(
        nodes=nodes, ranks_per_node=ranks // nodes, samples=samples, contention=contention, accelerator=accelerator,  # type: ignore[arg-type]
        measured_for="exact",
        source=f"messages of {pluralize(len(run.paths), 'trace')}, group {run.group or 'unknown'}",
    )  # fmt: skip
    return cluster, [*notes, *said]


def _least(message: Message, messages: Sequence[Message]) -> float:
    """Return the shortest that any message as large took."""
    return min(
        other.duration_us
        for other in messages
        if other.collective == message.collective and (other.size_bytes or 0) >= (message.size_bytes or 0)
    )


def _curve(messages: Sequence[Message], run: Run) -> tuple[Sample, ...]:
    """Return (bytes, µs) by size: the median over steps; no larger than that of a larger message, which bounds it."""
    by_size: dict[int, list[float]] = {}
    for message in messages:
        by_size.setdefault(message.size_bytes or 0, []).append(message.cost_us)
    sizes = sorted(by_size)
    times = [float(np.median(by_size[size])) for size in sizes]
    bounded = np.minimum.accumulate(times[::-1])[::-1]
    return tuple((float(size), round(float(time), 3)) for size, time in zip(sizes, bounded, strict=True))


def _contention(steps: Sequence[Step], messages: Sequence[Message]) -> tuple[Contention | None, list[str]]:
    """Return the slow-down of messages and compute by one another, where the same ones ran alone and overlapped."""
    planned = set(map(id, messages))
    rows: tuple[list[Floats], list[Floats]] = [], []
    # Kernels without a grid are the same ones where they have the same place in their steps.
    aligned = len({len(step.compute) for step in steps}) == 1
    for step in steps:
        sent = np.array([(m.start_us, m.end_us, id(m) in planned, m.size_bytes or 0, m.cost_us) for m in step.messages])
        if not len(sent):
            continue
        start, stop = step.compute.T
        shares = _busy(sent)(start, stop)
        names = np.where(step.kernels >= 0, step.kernels, -1 - np.arange(len(start)) if aligned else np.iinfo(int).min)
        same = (shares == 0.0) | (shares >= WHOLLY)
        rows[0].append(np.stack([names, shares, stop - start])[:, same & (names != np.iinfo(int).min)])
        own = sent[(sent[:, 2] == 1.0) & (sent[:, 3] > 0.0)]
        shares = _busy(step.compute)(own[:, 0], own[:, 1])
        clear = (shares <= ALONE) | (shares >= BESIDE)
        rows[1].append(np.stack([np.round(np.log(own[:, 3]) / SAME_SIZE), shares, own[:, 4]])[:, clear])
    compute, network = (_ratio(np.concatenate(of, axis=1)) if of else 1.0 for of in rows)
    if max(network, compute) < SHOWS:
        return None, []
    said = (
        f"contention: compute takes {compute:.2f} times as long during messages, messages {network:.2f} times during "
        f"compute, of what ran both alone and overlapped; compute times are those without messages"
    )
    return Contention(compute=round(max(1.0, compute), 3), network=round(max(1.0, network), 3)), [said]


def _busy(spans: Floats) -> Callable[[Floats, Floats], Floats]:
    """Return a function that gives which share of intervals lies within these, which are ordered by start."""
    edges, before = _covered(spans)

    def share(start: Floats, stop: Floats) -> Floats:
        inside = np.interp(stop, edges, before) - np.interp(start, edges, before)
        return np.asarray(inside / np.maximum(stop - start, 1e-9))

    return share


def _covered(spans: Floats) -> tuple[Floats, Floats]:
    """Return the edges of the union of intervals, and how much of it lies before each of them."""
    begin, end = _union(spans)
    within = np.cumsum(end - begin)
    return np.stack([begin, end], axis=1).ravel(), np.stack([within - (end - begin), within], axis=1).ravel()


def _ratio(rows: Floats) -> float:
    """Return how many times as long what is overlapped takes in all; 1 where too little of it also ran alone.

    `rows` are keys, shares of overlap and durations. Shape (3, samples).
    """
    overlapped = float(rows[2, rows[1] >= 0.5].sum())
    compared = alone_us = beside_us = 0.0
    for key in np.unique(rows[0]):
        shares, durations = rows[1:, rows[0] == key]
        alone, beside = durations[shares < 0.5], durations[shares >= 0.5]
        if len(alone) and len(beside):
            compared += float(beside.sum())
            alone_us += float(len(beside) * np.median(alone))
            beside_us += float(len(beside) * np.median(beside))
    return beside_us / alone_us if alone_us > 0.0 and compared > LEAST_COMPARED * overlapped else 1.0


def model_name(path: str) -> str:
    """Return a model's name from that of its trace."""
    name = re.sub(r"\.(json|gz|zip|pt|trace)\b", "", path.rpartition("/")[2])
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-.") or "traced"
