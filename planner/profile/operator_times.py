"""The times of matrix optimizers' operators (Muon's Newton–Schulz), for each distinct shape, and group's options.

Timed on all ranks at once, as every rank computes all of them, on the matrix that the optimizer's step gives to the
operator: of the first parameter of each shape, after the measured steps. Other ranks wait for the straggler, so the
slowest rank's time counts. What an owner runs before the operator is timed by itself, so is a stack of as many matrices
as each rank has of a shape, where operators take it, with equal bits.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from planner.documents.profile import ComputeProfile, OperatorProfile, OperatorShape
from planner.profile.bench import Bench, median_of_slowest
from planner.profile.compute import Training
from runtime.checks.optimizer import names_of
from runtime.comm.world import World
from runtime.optimizers.kinds import Optimizers, each_of
from runtime.optimizers.shared_operator import SharedOperator
from runtime.optimizers.units import Operator, operator_of, stack_difference
from runtime.session.session import Session

WARM_UPS, REPEATS = 1, 7
MOST_STACKED_BYTES = 64 * 2**20
"""Bytes of the matrices of a stack that is timed: there is less to save with larger ones, and they take memory."""
OF_NO_TIME = ("params", "lr", "initial_lr", "weight_decay")
"""Options of groups that no operator takes longer for."""

WithOperator = tuple[torch.optim.Optimizer, Operator]
Form = tuple[int, tuple[int, ...], torch.dtype, str]
"""Optimizer, by `id`, shape, dtype and options of matrices that take one time."""


def with_operator(given: Optimizers | None) -> list[WithOperator]:
    """Return the optimizers of a model that have an operator without state, with that."""
    found = ((one, operator_of(one)) for one in each_of(given))
    return [(one, operator) for one, operator in found if operator is not None]


def _members(
    optimizers: Iterable[torch.optim.Optimizer], names: Mapping[Tensor, str]
) -> Iterator[tuple[Form, Tensor, dict[str, Any]]]:
    """Yield form, parameter and group of each parameter with a name, in the order of the steps' calls."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            options = str(sorted((name, str(value)) for name, value in group.items() if name not in OF_NO_TIME))
            for p in (p for p in group["params"] if p in names):
                yield (id(optimizer), tuple(p.shape), p.dtype, options), p, group


def measure_operators(training: Training, bench: Bench, compute: ComputeProfile) -> OperatorProfile | None:
    """Time the operator for each shape of matrices, the same on all ranks; None if there are none."""
    found = with_operator(training.optimizer)
    timed = {gradient.name for gradient in compute.gradients}
    names: dict[Tensor, str] = {parameter: name for name, parameter in training.parameters.items() if name in timed}
    operators = {id(one): (operator, SharedOperator(one, operator, names, World())) for one, operator in found}
    forms: dict[Form, dict[int, list[str]]] = {}
    firsts: list[tuple[Operator, Tensor, dict[str, Any]]] = []
    begins: list[partial[Tensor | None]] = []
    for form, parameter, group in _members((one for one, _ in found), names):
        operator, alone = operators[form[0]]
        matrix = _matrix(alone, parameter, group)
        if matrix is None:  # also of a shape that others have
            continue
        if form not in forms:
            firsts.append((operator, matrix, group))
            begins.append(partial(_matrix, alone, parameter, group))
        forms.setdefault(form, {}).setdefault(id(group), []).append(names[parameter])
    if not forms:
        return None
    with torch.no_grad():
        runs = [partial(operator.compute, matrix, group) for operator, matrix, group in firsts]
        results = [run() for run in runs]
        stacks = _stacks(firsts, [max(map(len, of.values())) for of in forms.values()], bench.world)
        all_runs: list[Callable[[], object]] = [*runs, *begins, *(run for run, _ in stacks.values())]
        times_us = median_of_slowest(bench.times_us(all_runs, REPEATS, "operators of matrices", WARM_UPS)).tolist()
    stacked_us = {
        place: round(max(0.0, time_us - times_us[place]) / (count - 1), 3)
        for (place, (_, count)), time_us in zip(stacks.items(), times_us[2 * len(runs) :], strict=True)
    }
    return _profile(
        found,
        (
            OperatorShape(
                shape=form[1], operator_us=round(times_us[place], 3), before_us=round(times_us[len(runs) + place], 3),
                result_bytes=results[place].nbytes, parameters=tuple(listed), stacked_us=stacked_us.get(place),
            )
            for place, (form, by_group) in enumerate(forms.items())
            for listed in by_group.values()
        ),
    )  # fmt: skip


def _stacks(
    firsts: Iterable[tuple[Operator, Tensor, dict[str, Any]]], numbers: Iterable[int], world: World
) -> dict[int, tuple[partial[Tensor], int]]:
    """Return stacks of some matrices whose results have equal bits on all ranks, by their place, and how many of each
    are in one: of as many as a group has, those of one rank.
    """
    mine = dict[int, tuple[partial[Tensor], int]]()
    for place, ((operator, matrix, group), number) in enumerate(zip(firsts, numbers, strict=True)):
        count = min(number, max(2, -(-number // world.ranks)), MOST_STACKED_BYTES // max(1, matrix.nbytes))
        if operator.batched and count > 1 and not stack_difference(operator, [matrix] * count, [group] * count):
            mine[place] = partial(_stacked, operator, matrix, group, count), count
    everyone = world.gather([*mine], "comparing stacks of matrices")
    return {place: stack for place, stack in mine.items() if all(place in of for of in everyone)}


def _stacked(operator: Operator, matrix: Tensor, group: dict[str, Any], count: int) -> Tensor:
    return operator.compute(torch.stack([matrix.clone() for _ in range(count)]), group)


def _profile(found: Sequence[WithOperator], shapes: Iterable[OperatorShape]) -> OperatorProfile:
    applied = all(operator.update_dtype is not None for _, operator in found)
    return OperatorProfile(optimizer=names_of(one for one, _ in found), applied=applied, shapes=tuple(shapes))


def _matrix(alone: SharedOperator, parameter: Tensor, group: dict[str, Any]) -> Tensor | None:
    """Return what the optimizer's step gives to its operator; of a parameter without a gradient as if it were its own
    weights; None where the step does not call the operator for it.
    """
    before = parameter.grad
    if before is None:
        parameter.grad = parameter.detach().clone()
    try:
        return alone.run_one(parameter, group, lambda matrix, _: matrix)
    finally:
        parameter.grad = before


def operators_of_run(session: Session) -> OperatorProfile | None:
    """Return the times of operators that a run has measured on this rank; None if there are none, or not of all."""
    times = session._operators.times_us()
    seen = {name: time for of in times.values() for name, time in of.items()}
    if not seen or not seen.keys() <= session._parameters.keys():
        return None
    names: dict[Tensor, str] = {session._parameters[name]: name for name in seen}
    forms: dict[Form, list[str]] = {}
    for form, parameter, _ in _members(times, names):
        forms.setdefault(form, []).append(names[parameter])
    return _profile(
        with_operator(tuple(times)),
        (
            OperatorShape(
                shape=form[1], operator_us=round(statistics.median(seen[name][0] for name in listed), 3),
                result_bytes=seen[listed[0]][1], parameters=tuple(listed),
            )
            for form, listed in forms.items()
        ),
    )  # fmt: skip
