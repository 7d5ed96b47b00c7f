"""Whether a plan fits this optimizer: every misfit in words, before any training step.

Where elements are selected, error feedback sends in one step what has gathered over many. SGD moves a weight by all of
it; Adam and the like, which divide by a measure of the gradient's own size, move it about as far as in any other step,
so most of what has gathered is lost, and no residual shows it.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import torch
from torch import nn

from runtime.core.closures import DECIDE_BY_LOSS
from runtime.errors import AccuracyWarning
from runtime.optimizers import LAMB, LayerwiseOptimizer
from runtime.plan import Plan
from runtime.sharded.step import NEVER, find_shared_memory


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
        optimizer = (
            next(iter(held.values())) if len(held) == 1 else named if callable(getattr(named, "step", None)) else None
        )
    return None


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


ELEMENTWISE: tuple[type[torch.optim.Optimizer], ...] = (
    torch.optim.ASGD, torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW,
    torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.SGD,
)  # fmt: skip
"""Those of torch. What is derived from them may not be; a class of one's own says so by `elementwise = True`."""

_WHY_NOT: tuple[tuple[type[torch.optim.Optimizer], str], ...] = (
    (LayerwiseOptimizer, "scales the step of each layer by norms of the whole layer"),
    (torch.optim.LBFGS, "compares whole gradients of several backwards"),
    (torch.optim.Adafactor, "keeps sums over rows and columns of whole matrices"),
    (torch.optim.Muon, "orthogonalizes whole matrices"),
    (torch.optim.SparseAdam, "takes sparse gradients"),
)


def find_not_elementwise(optimizer: torch.optim.Optimizer | None) -> str | None:
    """What about an optimizer needs whole parameters, as what follows "found", or None."""
    if optimizer is None:
        return "no optimizer"
    name = type(optimizer).__name__
    for kind, why in _WHY_NOT:
        if isinstance(optimizer, kind):
            return f"{name}, which {why}"
    if type(optimizer) not in ELEMENTWISE and getattr(type(optimizer), "elementwise", False) is not True:
        return f"{name}, of which this version does not know that it treats every element by itself"
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return f"{name} with differentiable=True, whose step is a part of a graph"
    return None


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


ADAPTIVE: tuple[type[torch.optim.Optimizer], ...] = (
    torch.optim.Adadelta, torch.optim.Adafactor, torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW,
    torch.optim.Adamax, torch.optim.Muon, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop,
    torch.optim.Rprop, LAMB,
)  # fmt: skip
"""Those of torch and of this package, and what is derived from them."""


def is_adaptive(optimizer: torch.optim.Optimizer | None) -> bool:
    """Whether steps hardly depend on the size of gradients."""
    return isinstance(optimizer, ADAPTIVE)


def warn_of_selection(plan: Plan, optimizer: torch.optim.Optimizer | None) -> None:
    """Says so where a plan selects elements for such an optimizer."""
    selected = sum(bucket.collective == "sparse" for bucket in plan.buckets)
    if selected and is_adaptive(optimizer):
        warnings.warn(
            f"{selected} of {len(plan.buckets)} buckets send selected elements, and {type(optimizer).__name__} divides "
            f"gradients by their own size, so that what was held back is mostly lost when it comes; expect a worse "
            f"model after the same steps (docs/results/lags.md has figures): use torch.optim.SGD, or an exact plan",
            AccuracyWarning,
            stacklevel=3,
        )
