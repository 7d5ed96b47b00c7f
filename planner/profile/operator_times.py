"""The times of a matrix optimizer's operator (Muon's Newton–Schulz), for each distinct shape.

Timed on all ranks at once, as every rank computes all of them, on the matrix that the optimizer's step gives to the
operator: of the first parameter of each shape, after the measured steps. Other ranks wait for the straggler, so the
slowest rank's time counts.
"""

from __future__ import annotations

import statistics
from functools import partial

import torch
from torch import Tensor

from planner.documents.profile import ComputeProfile, OperatorProfile, OperatorShape
from planner.profile.bench import Bench, median_of_slowest
from planner.profile.compute import Training
from runtime.comm.world import World
from runtime.optimizers.kinds import Optimizers, each_of
from runtime.optimizers.shared_operator import SharedOperator
from runtime.optimizers.units import Operator, operator_of
from runtime.session.session import Session

WARM_UPS, REPEATS = 1, 7

Form = tuple[type[torch.optim.Optimizer], tuple[int, ...], torch.dtype]
"""Optimizer, shape and dtype of matrices that take one time."""


def with_operator(given: Optimizers | None) -> tuple[torch.optim.Optimizer, Operator] | None:
    """Return the first optimizer of a model that has an operator without state, with that; None if none has."""
    found = ((one, operator_of(one)) for one in each_of(given))
    return next(((one, operator) for one, operator in found if operator is not None), None)


def measure_operators(training: Training, bench: Bench, compute: ComputeProfile) -> OperatorProfile | None:
    """Time the operator for each shape of matrices, the same on all ranks; None if there are none."""
    found = with_operator(training.optimizer)
    if found is None:
        return None
    optimizer, operator = found
    names: dict[Tensor, str] = {parameter: name for name, parameter in training.parameters.items()}
    timed = {gradient.name for gradient in compute.gradients}
    alone = SharedOperator(optimizer, operator, names, World())
    forms: dict[tuple[tuple[int, ...], torch.dtype], list[str]] = {}
    runs: list[partial[Tensor]] = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if names.get(parameter) not in timed:
                continue
            form = tuple(parameter.shape), parameter.dtype
            matrix = _matrix(alone, parameter, group)
            if matrix is None:  # also of a shape that others have
                continue
            if form not in forms:
                runs.append(partial(operator.compute, matrix, group))
                forms[form] = []
            forms[form].append(names[parameter])
    if not runs:
        return None
    with torch.no_grad():
        results = [operator.compute(*run.args) for run in runs]
        times_us = median_of_slowest(bench.times_us(runs, REPEATS, "operators of matrices", WARM_UPS))
    return OperatorProfile(
        optimizer=type(optimizer).__name__,
        applied=operator.update_dtype is not None,
        shapes=tuple(
            OperatorShape(
                shape=shape, operator_us=round(float(time_us), 3), result_bytes=result.numel() * result.element_size(),
                parameters=tuple(listed),
            )
            for ((shape, _), listed), time_us, result in zip(forms.items(), times_us, results, strict=True)
        ),
    )  # fmt: skip


def _matrix(alone: SharedOperator, parameter: Tensor, group: dict[str, object]) -> Tensor | None:
    """Return what the optimizer's step gives to its operator; of a parameter without a gradient as if it were its own
    weights; None where the step does not call the operator for it.
    """
    before = parameter.grad
    if before is None:
        parameter.grad = parameter.detach().clone()
    try:
        return alone.run_one(parameter, group, lambda matrix, _: matrix.clone())
    finally:
        parameter.grad = before


def operators_of_run(session: Session) -> OperatorProfile | None:
    """Return the times of operators that a run has measured on this rank; None if there are none, or not of all."""
    found = session._operators.times_us()
    if found is None or not found[1].keys() <= session._parameters.keys():
        return None
    optimizer, seen = found
    forms: dict[tuple[int, ...], list[str]] = {}
    for name in seen:
        forms.setdefault(tuple(session._parameters[name].shape), []).append(name)
    operator = operator_of(optimizer)
    return OperatorProfile(
        optimizer=type(optimizer).__name__,
        applied=operator is not None and operator.update_dtype is not None,
        shapes=tuple(
            OperatorShape(
                shape=shape, operator_us=round(statistics.median(seen[name][0] for name in names), 3),
                result_bytes=seen[names[0]][1], parameters=tuple(names),
            )
            for shape, names in forms.items()
        ),
    )  # fmt: skip
