"""A traced run as a profile with its cluster."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.documents.profile import (
    DTYPE_BYTES,
    ComputeProfile,
    Gradient,
    OptimizerProfile,
    Profile,
    ProfileWorld,
)
from planner.documents.text import pluralize
from planner.model.regions import is_whole
from planner.traces.curves import cluster_of
from planner.traces.events import Floats, Run, Step, covered, union
from planner.traces.gradients import Parameter, cuts_of, parameters_of_run, units_of
from runtime.errors import InputError
from runtime.plan import ModelReference
from runtime.plan.names import layer_of

WHOLE = "nearly all gradients are ready at the end of backward, as of a compiled model"
MOST_OVERHEAD_US = 50.0
"""The most that the profiler may add to one operation of a host."""


def profile_of(
    run: Run, model: ModelReference, parameters: Sequence[Parameter] | None = None, *, step_ms: float | None = None,
    steps: Sequence[Step] | None = None,
) -> Profile:  # fmt: skip
    """Return the run's profile with its cluster.

    Args:
        run: the traced run.
        model: its name, and its fingerprint where parameters are given.
        parameters: the model's trainable parameters; default: gradients are numbered.
        step_ms: length of a step without the profiler, in milliseconds.
        steps: those to take; default: all.

    Raises InputError: parameters do not fit, sizes are not known, or the step is shorter than its compute.
    """
    ordered, said = parameters_of_run(run, parameters)
    chosen = [_with_sizes(step, ordered) for step in steps or run.steps]
    cluster, limits = cluster_of(run, chosen)
    notes = [*run.notes, *said, *limits]
    factor = cluster.contention.compute if cluster is not None and cluster.contention is not None else 1.0
    timings = [_Timing.of(step, factor) for step in chosen]
    if step_ms is not None:
        timings, how = _without_profiler(timings, chosen, run, step_ms)
        notes.append(how)
    forward_us = float(np.median([timing.forward_us for timing in timings]))
    ready = np.median([timing.ready_us for timing in timings], axis=0)
    steps_us = np.diff(np.maximum.accumulate(np.maximum(ready, forward_us)), prepend=forward_us).round(3)
    update_us = round(float(np.median([timing.update_us for timing in timings])), 3)
    gradients = tuple(
        Gradient(
            name=parameter.name, layer=layer_of(parameter.name), numel=parameter.numel, dtype=dtype,
            backward_us=float(time_us), matrix=parameter.matrix,
        )
        for parameter, dtype, time_us in zip(ordered, chosen[0].dtypes, steps_us, strict=True)
    )  # fmt: skip
    compute = ComputeProfile(
        forward_us=round(forward_us, 3), update_us=update_us, gradients=gradients, repeats=len(chosen),
        optimizer=_optimizer(run.optimizer),
    )  # fmt: skip
    if is_whole(compute):
        how = "" if parameters else "; import it with --job, and cuts are predicted at its blocks"
        notes.append(f"{WHOLE}: nothing can be hidden{how}")
    units = units_of(chosen, ordered, gradients, run.ranks, update_us)
    if units is not None:
        notes.append(f"a run of FSDP2, {units.summary}: plan it with --parallel fsdp2; activations are not in traces")
    return Profile(
        model=model,
        world=ProfileWorld(
            ranks=run.ranks, nodes=cluster.nodes if cluster is not None else None, backend=run.backend,
            device=run.device, accelerator=run.accelerator, memory_bytes=run.memory_bytes,
        ),
        compute=compute,
        cluster=cluster,
        units=units,
        source=f"read from {pluralize(len(run.paths), 'trace')} of torch.profiler",
        notes=tuple(notes) or None,
    )  # fmt: skip


def _optimizer(name: str | None) -> OptimizerProfile | None:
    return None if name is None else OptimizerProfile(name=name, adaptive="adam" in name.lower())


def _with_sizes(step: Step, parameters: Sequence[Parameter]) -> Step:
    """Return the step with the bytes of messages that do not tell them, from those of their gradients."""
    cuts = cuts_of(step, None)
    if len(cuts) != len(step.buckets) or all(message.size_bytes for message in step.buckets):
        return step
    sizes = [one.numel * DTYPE_BYTES[dtype] for one, dtype in zip(parameters, step.dtypes, strict=True)]
    buckets = [
        replace(message, size_bytes=message.size_bytes or sum(sizes[start:stop]))
        for message, start, stop in zip(step.buckets, [0, *cuts], cuts, strict=False)
    ]
    return replace(step, buckets=tuple(buckets))


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
        starts, ends = union(step.compute)
        gaps = np.concatenate([starts[:1], starts[1:] - ends[:-1]])
        at = np.stack([starts - gaps, starts], axis=1).ravel()
        removable = np.stack([np.concatenate([[0.0], np.cumsum(gaps)[:-1]]), np.cumsum(gaps)], axis=1).ravel()
        if step.overhead is not None:
            at, removable = step.overhead[0], MOST_OVERHEAD_US * step.overhead[1]
        if compute_factor == 1.0:
            return cls(step.forward_us, step.ready_us, step.update_us, at, removable)
        edges, beside = covered(np.array([(m.start_us, m.end_us) for m in step.messages] or [(0.0, 0.0)]))
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


def _without_profiler(
    timings: list[_Timing], steps: Sequence[Step], run: Run, step_ms: float
) -> tuple[list[_Timing], str]:
    """Shorten what the host holds up until the replayed step takes as long as it does without the profiler."""
    wanted_us, found = step_ms * 1e3, []
    if not 0.0 < wanted_us < 1e12:
        raise InputError(f"--step-ms: found {step_ms:g}, expected the milliseconds of a step without the profiler")
    shares, least_us = [], []
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
        least_us.append(length(1.0))
        while high - low > 1e-6:
            middle = (low + high) / 2
            low, high = (middle, high) if length(middle) > wanted_us else (low, middle)
        shares.append(high)
        found.append(timing.without(high, step.span_us))
    if float(np.median(least_us)) > wanted_us * 1.001:  # a single step may be a long one
        raise InputError(
            f"--step-ms: found {step_ms:g}, and {np.median(least_us) / 1e3:.4g} ms of kernels and messages in steps "
            f"of {run.paths[0]}, which no host shortens; expected at least that"
        )
    share, what = float(np.median(shares)), "idle gaps of the accelerator" if run.device != "cpu" else "operations"
    return found, (
        f"assumed that the profiler lengthens {what} alike, so that {share:.0%} of what it may have added was taken "
        f"out for a step of {step_ms:g} ms"
    )


def model_name(path: str) -> str:
    """Return a model's name from that of its trace."""
    name = re.sub(r"\.(json|gz|zip|pt|trace)\b", "", path.rpartition("/")[2])
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-.") or "traced"
