"""The gradients of a traced run: their sizes and names, which bucket each is in, and FSDP2's groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from planner.documents.profile import DTYPE_BYTES, Gradient
from planner.documents.text import pluralize
from planner.documents.units import Unit, Units, UnitWeight
from planner.traces.events import Run, Step
from runtime.errors import InputError
from runtime.plan.fully_sharded import ROOT
from runtime.plan.names import layer_of

COPIED_BYTES_PER_US = 4000.0
"""Assumed of a host, where only the time of copies tells the sizes of gradients."""
AS_MANY = "expected as many: name the job that was traced"


@dataclass(frozen=True)
class Parameter:
    """A trainable parameter of the model."""

    name: str
    shape: tuple[int, ...]
    matrix: tuple[int, int] | None = None

    @property
    def numel(self) -> int:
        return prod(self.shape)


def parameters_of_run(run: Run, given: Sequence[Parameter] | None) -> tuple[list[Parameter], list[str]]:
    """Return the parameter of each gradient in order of readiness, and notes.

    Args:
        run: the traced run.
        given: the model's parameters; default: gradients are numbered, within FSDP2's groups where there are any.

    Raises InputError: the model has other parameters, or the sizes of gradients are not known.
    """
    step = run.steps[0]
    shapes = next((step.shapes for step in run.steps if step.shapes is not None), None)
    if given is not None and shapes is None:
        ordered = match_parameters(run, None, given)
        _check_totals(run, ordered)
        return ordered, []
    notes = []
    if shapes is None:
        sizes, assumed = _estimated_sizes(run)
        shapes = tuple((size,) for size in sizes)
        notes = [f"sizes of gradients: {assumed}; record_shapes=True gives them"]
    if given is not None:
        return match_parameters(run, shapes, given), notes
    modules = step.modules or [ROOT] * len(shapes)
    names = (f"{module}.gradient_{at}".removeprefix(".") for at, module in enumerate(modules))
    return [Parameter(name, shape) for name, shape in zip(names, shapes, strict=True)], notes


def _estimated_sizes(run: Run) -> tuple[list[int], str]:
    """Return the elements of each gradient where no shape was recorded, and how they were found."""
    step, cuts = run.steps[0], cuts_of(run.steps[0], None)
    if step.buckets and all(message.size_bytes for message in step.buckets) and len(cuts) == len(step.buckets):
        sizes: list[int] = []
        for message, start, stop in zip(step.buckets, [0, *cuts], cuts, strict=False):
            whole = (message.size_bytes or 0) // DTYPE_BYTES[step.dtypes[start]]
            sizes += np.diff(np.linspace(0, whole, stop - start + 1).round().astype(np.int64)).tolist()
        return sizes, "each bucket's elements were shared out evenly over its gradients"
    copied = [one.copied_us for one in run.steps if one.copied_us is not None]
    if copied:
        copied_us = np.median(copied, axis=0)
        estimated = (COPIED_BYTES_PER_US * (copied_us - copied_us.min())) / DTYPE_BYTES[step.dtypes[0]]
        return [max(1, int(numel)) for numel in estimated], "estimated from the time of DDP's copies, roughly"
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


def match_parameters(
    run: Run, shapes: Sequence[tuple[int, ...]] | None, parameters: Sequence[Parameter]
) -> list[Parameter]:
    """Return the model's parameters in the order in which the run's gradients were ready.

    Backward completes modules from the last to the first; of equal shapes the first of these is taken. A shape of one
    dimension may be that of a flattened parameter.

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
            f"{AS_MANY}"
        )
    if shapes is None:
        return left
    found = []
    for index, shape in enumerate(shapes):
        match = next((one for one in left if shape in (one.shape, (one.numel,))), None)
        if match is None:
            raise InputError(
                f"{where}: found {_spelled(shape)} elements in gradient {index}, expected {_spelled(left[0].shape)}, "
                f"those of {left[0].name}, or of another parameter that is left; name the job that was traced"
            )
        left.remove(match)
        found.append(match)
    return found


def _spelled(shape: tuple[int, ...]) -> str:
    return " × ".join(map(str, shape)) or "1"


def _check_totals(run: Run, parameters: Sequence[Parameter]) -> None:
    """Raise InputError where the messages of gradients hold other bytes than the job's parameters."""
    step = run.steps[0]
    sent = [message.size_bytes for message in step.buckets]
    whole = sum(one.numel * DTYPE_BYTES[dtype] for one, dtype in zip(parameters, step.dtypes, strict=True))
    total = sum(size or 0 for size in sent)
    if sent and None not in sent and total != whole:
        raise InputError(
            f"{run.paths[0]}: found {total} bytes of gradients in messages, and {whole} in the job's parameters; "
            f"{AS_MANY}"
        )


def units_of(
    steps: Sequence[Step], parameters: Sequence[Parameter], gradients: Sequence[Gradient], ranks: int, update_us: float
) -> Units | None:
    """Return FSDP2's groups as the units of a profile; None of a run without them.

    Compute of the root module counts as that of its neighbour in forward or backward.

    Args:
        steps: traced steps of one run.
        parameters: those of the model, in order of readiness.
        gradients: theirs, with times of backward.
        ranks: the ranks that share weights.
        update_us: time of the optimizer on one rank's part, in microseconds.
    """
    modules = steps[0].modules
    forward_us = {
        module: float(np.median([step.forwards_us.get(module, 0.0) for step in steps]))
        for module in steps[0].forwards_us
        if module != ROOT
    }
    if modules is None or not forward_us:
        return None
    backward_us, numel = dict.fromkeys(forward_us, 0.0), dict.fromkeys([*forward_us, ROOT], 0)
    place = next(iter(reversed(forward_us)))
    for module, parameter, gradient in zip(modules, parameters, gradients, strict=True):
        place = module if module in backward_us else place
        backward_us[place] += gradient.backward_us
        numel[module if module in numel else ROOT] += parameter.numel
    root_us = float(np.median([step.forwards_us[ROOT] for step in steps]))
    forward_us[next(iter(reversed(forward_us)))] += root_us
    return Units(
        units=tuple(
            Unit(
                module=module, forward_us=round(forward_us[module], 3), backward_us=round(backward_us[module], 3),
                input_requires_grad=index > 0,
            )
            for index, module in enumerate(forward_us)
        ),
        weights=tuple(UnitWeight(modules=(module,), shape=(count,)) for module, count in numel.items() if count),
        element_bytes=DTYPE_BYTES[gradients[0].dtype],
        update_us=round(update_us * ranks, 3),
    )  # fmt: skip
