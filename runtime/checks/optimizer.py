"""Whether a plan fits this optimizer: every misfit in words, before any training step."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import torch
from torch import nn

from runtime.checks.elementwise import find_not_elementwise
from runtime.core.closures import DECIDE_BY_LOSS
from runtime.optimizers import LayerwiseOptimizer
from runtime.plan import Plan

NEVER = "`planner optimize` without --allow sharded-step"


def inner_optimizer(optimizer: object) -> torch.optim.Optimizer | None:
    """The optimizer whose step calls hooks: itself, or the one that a wrapper (a scaler, a lookahead) holds.

    None where there is none, or where it is not clear which one it is.
    """
    seen: list[object] = []
    while optimizer is not None and all(optimizer is not one for one in seen):
        attributes = getattr(optimizer, "__dict__", {})
        # A wrapper may be derived from Optimizer, and not initialized as one.
        if isinstance(optimizer, torch.optim.Optimizer) and "_optimizer_step_pre_hooks" in attributes:
            return optimizer
        seen.append(optimizer)
        held = {id(value): value for value in attributes.values() if isinstance(value, torch.optim.Optimizer)}
        named = attributes.get("optimizer")
        optimizer = next(iter(held.values())) if len(held) == 1 else named if callable(_step_of(named)) else None
    return None


def _step_of(thing: object) -> object:
    return getattr(thing, "step", None)


def _no_plain_sgd(optimizer: torch.optim.Optimizer | None) -> str | None:
    """What owners of weights cannot do of an optimizer, or None."""
    if not isinstance(optimizer, torch.optim.SGD):
        return "no optimizer" if optimizer is None else type(optimizer).__name__
    # A fused step is scaled by a GradScaler itself, and what takes its place here is not.
    options = ("dampening", "maximize", "differentiable", "fused")
    return next((f"SGD with {o}" for group in optimizer.param_groups for o in options if group[o]), None)


def find_unowned(optimizer: torch.optim.Optimizer | None, parameters: Mapping[str, nn.Parameter]) -> str | None:
    """A parameter that is in none of the optimizer's groups, by name, or None."""
    groups = [] if optimizer is None else optimizer.param_groups
    known = {id(parameter) for group in groups for parameter in group["params"]}
    return next((name for name, parameter in parameters.items() if id(parameter) not in known), None)


def find_shared_memory(parameters: Mapping[str, nn.Parameter]) -> str | None:
    """Why ranks cannot share the step of parameters of which two lie in the same memory, or None."""
    places = sorted((p.data_ptr(), name) for name, p in parameters.items() if p.numel())
    for (start, name), (following, other) in pairwise(places):
        if following < start + _extent_bytes(parameters[name]):
            return (
                f"found {name} and {other} in the same memory (`.data` of one is the other's), expected each parameter "
                f"in memory of its own, for ranks share the optimizer's step: make them one parameter, or plan without "
                f"sharing ({NEVER})"
            )
    return None


def _extent_bytes(tensor: torch.Tensor) -> int:
    """From the first element to the end of the last one."""
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (1 + steps) * tensor.element_size()


def _find_unserved(optimizer: torch.optim.Optimizer | None, planned: Mapping[str, nn.Parameter]) -> str | None:
    """Why owners of the weights cannot do what this optimizer does, or None."""
    if (odd := _no_plain_sgd(optimizer)) is not None:
        return (
            f"the plan has a delay, for which owners of the weights and ranks do what torch.optim.SGD does, but found "
            f"{odd}; expected torch.optim.SGD with momentum, weight decay or Nesterov's momentum: use that, or plan "
            f"without --accuracy relaxed"
        )
    if (odd := find_unowned(optimizer, planned)) is not None:
        return (
            f"the plan has a delay and the gradient {odd}, whose parameter is not in the optimizer; expected all of "
            f"them in it, for owners of the weights do what it does: add that parameter, or freeze it before profiling"
        )
    return None


def _find_wrapper(plan: Plan, given: object, *, sharded: bool) -> str | None:
    """Why a plan that takes a part of the optimizer's step into its own hands cannot do so of a wrapper's, or None."""
    what = {
        "has a delay, for which owners of the weights do the optimizer's step": plan.delay is not None,
        "has ranks share the optimizer's step": sharded,
    }
    reason = next((text for text, holds in what.items() if holds), None)
    inner = inner_optimizer(given)
    if reason is None or given is inner:
        return None
    inside = "" if inner is None else f" around {type(inner).__name__}"
    return (
        f"the plan {reason}, but found {type(given).__name__}, a wrapper{inside}, whose own part in the step nobody "
        f"else knows; expected the torch.optim.Optimizer itself: give attach the one inside if the wrapper changes "
        f"neither weights nor gradients, or plan without"
    )


def find_optimizer_misfit(plan: Plan, given: object, parameters: Mapping[str, nn.Parameter]) -> str | None:
    """Why this optimizer, or wrapper of one, cannot train by the plan, or None."""
    optimizer = inner_optimizer(given)
    planned = {name: parameters[name] for name in plan.gradients if name in parameters}
    sharded = plan.sharded or (plan.fallback is not None and plan.fallback.sharded)
    if problem := _find_wrapper(plan, given, sharded=sharded):
        return problem
    if plan.delay is not None and (problem := _find_unserved(optimizer, planned)):
        return problem
    if sharded and (odd := find_not_elementwise(optimizer)):
        return (
            f"the plan has ranks share the optimizer's step, each updating a part of the weights, but found {odd}; "
            f"expected an optimizer that treats every element by itself, such as torch.optim.SGD or AdamW: use one, or "
            f"plan without sharing ({NEVER})"
        )
    if sharded and (odd := find_unowned(optimizer, planned)):
        return (
            f"the plan has ranks share the optimizer's step, and the parameter of the gradient {odd} is not in the "
            f"optimizer; expected all of them in it: add that parameter, freeze it before profiling, or plan without "
            f"sharing (profile again, or {NEVER})"
        )
    if sharded and (problem := find_shared_memory(planned)):
        return problem
    shared = plan.updates is not None and plan.updates.norms is not None and plan.updates.norms.shares is not None
    if shared and not isinstance(optimizer, LayerwiseOptimizer):
        return (
            f"the plan shares norms of layers between ranks, but found "
            f"{'no optimizer' if optimizer is None else type(optimizer).__name__}, which has none to share; expected "
            f"runtime.optimizers.LARS or LAMB: use the optimizer that was profiled, or profile again"
        )
    lossy = next((index for index, bucket in enumerate(plan.buckets) if bucket.compressor.name != "none"), None)
    if lossy is None or not isinstance(optimizer, DECIDE_BY_LOSS):
        return None
    return (
        f"bucket {lossy} sends only a part of its gradients, and {type(optimizer).__name__} compares gradients of "
        f"several backwards in each step, which then are of different parts; expected an exact plan: `planner "
        f"optimize` without --accuracy"
    )
