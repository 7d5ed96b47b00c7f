"""Whether a plan fits this optimizer.

Where elements are selected, error feedback sends in one step what has gathered over many. SGD moves a weight by all of
it; Adam and the like, which divide by a measure of the gradient's own size, move it about as far as in any other step,
so most of what has gathered is lost, and no residual shows it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from runtime.checks.modes import asked_modes
from runtime.comm.world import World
from runtime.core.closures import DECIDE_BY_LOSS
from runtime.errors import AccuracyCostWarning, AccuracyWarning, InputError
from runtime.optimizers import LayerwiseOptimizer
from runtime.optimizers.kinds import ADAPTIVE, inner_optimizer, inner_optimizers
from runtime.optimizers.units import operator_of
from runtime.pages import page
from runtime.plan import Plan
from runtime.plan.executed import accuracy_of, cost_line


def check_optimizer(plan: Plan, given: object, parameters: Mapping[str, nn.Parameter]) -> str | None:
    """Return why this optimizer, or wrapper of one, cannot train by the plan, or None."""
    optimizers = inner_optimizers(given)
    optimizer = optimizers[0] if len(optimizers) == 1 else None
    planned = {name: parameters[name] for name in plan.gradients if name in parameters}
    # The fallback, too: a run may continue with it.
    for one in (plan, plan.fallback) if plan.fallback is not None else (plan,):
        mode = asked_modes(one)[0]
        owned = mode.owned_step(one)
        if owned is not None and len(optimizers) > 1 and not mode.several:
            return (
                f"the plan {owned}, but found {len(optimizers)} optimizers ({names_of(optimizers)}), expected "
                f"one: put all parameters into one optimizer, or plan without"
            )
        listed = given if isinstance(given, Sequence) else (given,)
        wrapper = next((found for found in listed if all(found is not inner for inner in optimizers)), None)
        if owned is not None and wrapper is not None:
            inside = "" if optimizer is None else f" around {type(optimizer).__name__}"
            return (
                f"the plan {owned}, but found {type(wrapper).__name__}, a wrapper{inside}, whose own part in "
                f"the step nobody else knows; expected the torch.optim.Optimizer itself: give attach the one inside if "
                f"the wrapper changes neither weights nor gradients, or plan without"
            )
        if (problem := mode.check_optimizer(one, optimizers, planned)) is not None:
            return problem
    shared = plan.updates is not None and plan.updates.norms is not None and plan.updates.norms.shares is not None
    if shared and not any(isinstance(one, LayerwiseOptimizer) for one in optimizers):
        return (
            f"the plan shares norms of layers between ranks, but found "
            f"{names_of(optimizers) or 'no optimizer'}, which has none to share; expected "
            f"runtime.optimizers.LARS or LAMB: use the optimizer that was profiled, or profile again"
        )
    if (problem := _check_operator(plan, optimizers, planned)) is not None:
        return problem
    lossy = next((index for index, bucket in enumerate(plan.buckets) if not bucket.dense), None)
    by_loss = next((one for one in optimizers if isinstance(one, DECIDE_BY_LOSS)), None)
    if lossy is None or by_loss is None:
        return None
    return (
        f"bucket {lossy} sends only a part of its gradients, and {type(by_loss).__name__} compares gradients of "
        f"several backwards in each step, which then are of different parts; expected an exact plan: `planner "
        f"optimize` without --accuracy"
    )


def _check_operator(
    plan: Plan, optimizers: Iterable[torch.optim.Optimizer], parameters: Mapping[str, nn.Parameter]
) -> str | None:
    operator = plan.updates.operator if plan.updates is not None else None
    if operator is None or not operator.owners:
        return None
    holders = {id(p): one for one in optimizers for group in one.param_groups for p in group["params"]}
    for name in operator.owners:
        parameter = parameters.get(name)
        holder = holders.get(id(parameter))
        if parameter is None or (holder is not None and operator_of(holder) is not None):
            continue
        found = "no optimizer" if holder is None else type(holder).__name__
        return (
            f"the plan shares the operator of {name}, but found {found} for it, which has no operator without state; "
            f'expected torch.optim.Muon, or a class with unit = "matrix" and operator(self, matrix, group): use the '
            f"optimizer that was profiled, or profile again"
        )
    return None


def holders_of(plan: Plan, given: object, parameters: Mapping[str, nn.Parameter]) -> tuple[str, ...]:
    """Return optimizer and group of each parameter of a plan whose ranks share the optimizer's work; else nothing."""
    operator = plan.updates.operator if plan.updates is not None else None
    if not plan.shares_step and (operator is None or not operator.owners):
        return ()
    places = {
        id(p): f"group {number} of {type(one).__name__} at position {position}"
        for position, one in enumerate(inner_optimizers(given))
        for number, group in enumerate(one.param_groups)
        for p in group["params"]
    }
    return tuple(f"{name} in {places.get(id(parameters.get(name)), 'none')}" for name in plan.gradients)


def names_of(optimizers: Iterable[object]) -> str:
    """Return the classes of optimizers, as `Muon, AdamW`."""
    return ", ".join(type(one).__name__ for one in optimizers)


def check_steps(given: object, hint: str) -> None:
    """Raise InputError, which ends with `hint`, unless `given` is None, has a `step`, or is a sequence of what has."""
    if isinstance(given, Sequence) and not given:
        raise InputError(f"optimizer: found an empty {type(given).__name__}, expected an optimizer, or None; {hint}")
    several = isinstance(given, Sequence) and not isinstance(given, str)
    for one in given if several else (given,):  # type: ignore[attr-defined]
        if (one is None and not several) or callable(getattr(one, "step", None)):
            continue
        found = f"a {type(given).__name__} with a {type(one).__name__}" if several else f"a {type(one).__name__}"
        raise InputError(f"optimizer: found {found}, expected a torch.optim.Optimizer; {hint}")


def check_owners(model: nn.Module, given: object) -> str | None:
    """Return why these optimizers (one, a sequence, or None) cannot be this model's: see `check_owner`; or None."""
    if not isinstance(given, Sequence):
        return check_owner(model, given)
    holders: dict[int, int] = {}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for position, one in enumerate(given):
        if (problem := check_owner(model, one)) is not None:
            return problem
        for parameter in (
            p for inner in inner_optimizers(one) for group in inner.param_groups for p in group["params"]
        ):
            before = holders.setdefault(id(parameter), position)
            if before != position:
                name = names.get(id(parameter), f"a parameter of shape {tuple(parameter.shape)}")
                return (
                    f"optimizers: found {name} in two of them, {type(given[before]).__name__} at position {before} and "
                    f"{type(one).__name__} at {position}; expected disjoint parameters: take it out of one"
                )
    return None


def check_owner(model: nn.Module, given: object) -> str | None:
    """Return why an optimizer cannot be this model's, or None. It may hold others' parameters, too, or some alone; a
    wrapper may hold copies of them.
    """
    if not isinstance(given, torch.optim.Optimizer) or inner_optimizer(given) is not given:
        return None
    held = {id(parameter) for group in given.param_groups for parameter in group["params"]}
    if not held.isdisjoint(map(id, model.parameters())):
        return None
    return (
        f"optimizer: found {type(given).__name__} of {len(held)} parameters, none of which is the model's "
        f"({type(model).__name__}); expected the model's optimizer: pass that, made after what replaces parameters, or "
        f"None where the optimizer updates copies (master weights)"
    )


def warn_of_accuracy(plan: Plan, optimizers: Sequence[torch.optim.Optimizer], world: World, *, guarded: bool) -> None:
    """Warn on rank 0 where a plan whose cost was not measured selects elements for an optimizer that divides by their
    size; and, where it is `guarded`, of a plan that was measured to learn worse than DDP does, or of whose low rank,
    selection or relaxed mode that is not known. Narrow dtypes ended within DDP's own spread in the project's tasks.
    """
    if world.rank or world.ranks == 1:
        return
    measured, optimizer = accuracy_of(plan), next((one for one in optimizers if isinstance(one, ADAPTIVE)), None)
    selected = sum(bucket.transport.sparse for bucket in plan.buckets)
    if selected and optimizer is not None and measured is None:
        warnings.warn(
            f"{selected} of {len(plan.buckets)} buckets send selected elements, and {type(optimizer).__name__} divides "
            f"gradients by their own size, so that what was held back is mostly lost when it comes; expect a worse "
            f"model after the same steps ({page('results/lags')} has figures): use torch.optim.SGD, or an exact plan",
            AccuracyWarning,
            stacklevel=3,
        )
    risky = plan.accuracy == "relaxed" or any(b.transport.sparse or b.compressor.rank for b in plan.buckets)
    verdict = "not known" if measured is None else measured.verdict
    if guarded and (verdict == "worse" or (risky and verdict == "not known")):
        warnings.warn(
            f"{cost_line(plan)}; {page('concepts/accuracy')} has what is known", AccuracyCostWarning, stacklevel=3
        )
