"""Whether a plan fits this optimizer.

Where elements are selected, error feedback sends in one step what has gathered over many. SGD moves a weight by all of
it; Adam and the like, which divide by a measure of the gradient's own size, move it about as far as in any other step,
so most of what has gathered is lost, and no residual shows it.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import torch
from torch import nn

from runtime.checks.modes import asked_modes
from runtime.core.closures import DECIDE_BY_LOSS
from runtime.errors import AccuracyCostWarning, AccuracyWarning
from runtime.optimizers import LayerwiseOptimizer
from runtime.optimizers.kinds import ADAPTIVE, inner_optimizer
from runtime.pages import page
from runtime.plan import Plan
from runtime.plan.measured_accuracy import cost_line


def check_optimizer(plan: Plan, given: object, parameters: Mapping[str, nn.Parameter]) -> str | None:
    """Return why this optimizer, or wrapper of one, cannot train by the plan, or None."""
    optimizer = inner_optimizer(given)
    planned = {name: parameters[name] for name in plan.gradients if name in parameters}
    # The fallback, too: a run may continue with it.
    for mode in (asked_modes(one)[0] for one in (plan, plan.fallback) if one is not None):
        if mode.owns_step is not None and given is not optimizer:
            inside = "" if optimizer is None else f" around {type(optimizer).__name__}"
            return (
                f"the plan {mode.owns_step}, but found {type(given).__name__}, a wrapper{inside}, whose own part in "
                f"the step nobody else knows; expected the torch.optim.Optimizer itself: give attach the one inside if "
                f"the wrapper changes neither weights nor gradients, or plan without"
            )
        if (problem := mode.check_optimizer(optimizer, planned)) is not None:
            return problem
    shared = plan.updates is not None and plan.updates.norms is not None and plan.updates.norms.shares is not None
    if shared and not isinstance(optimizer, LayerwiseOptimizer):
        return (
            f"the plan shares norms of layers between ranks, but found "
            f"{'no optimizer' if optimizer is None else type(optimizer).__name__}, which has none to share; expected "
            f"runtime.optimizers.LARS or LAMB: use the optimizer that was profiled, or profile again"
        )
    lossy = next((index for index, bucket in enumerate(plan.buckets) if not bucket.dense), None)
    if lossy is None or not isinstance(optimizer, DECIDE_BY_LOSS):
        return None
    return (
        f"bucket {lossy} sends only a part of its gradients, and {type(optimizer).__name__} compares gradients of "
        f"several backwards in each step, which then are of different parts; expected an exact plan: `planner "
        f"optimize` without --accuracy"
    )


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


def warn_of_selection(plan: Plan, optimizer: torch.optim.Optimizer | None) -> None:
    """Warn where a plan whose cost was not measured selects elements for an optimizer that divides by their size."""
    if plan.accuracy_measured is not None:
        return
    selected = sum(bucket.transport.sparse for bucket in plan.buckets)
    if selected and isinstance(optimizer, ADAPTIVE):
        warnings.warn(
            f"{selected} of {len(plan.buckets)} buckets send selected elements, and {type(optimizer).__name__} divides "
            f"gradients by their own size, so that what was held back is mostly lost when it comes; expect a worse "
            f"model after the same steps ({page('results/lags')} has figures): use torch.optim.SGD, or an exact plan",
            AccuracyWarning,
            stacklevel=3,
        )


def warn_of_cost(plan: Plan) -> None:
    """Warn of what a plan costs in accuracy, unless it was measured to learn as DDP does, or is one whose buckets ended
    within DDP's own spread in the project's tasks: exact ones, and narrow dtypes.
    """
    measured = plan.accuracy_measured
    risky = plan.accuracy == "relaxed" or any(b.transport.sparse or b.compressor.rank for b in plan.buckets)
    if risky and (measured is None or measured.verdict not in ("as ddp", "better")):
        line = cost_line(plan.accuracy, measured)
        warnings.warn(f"{line}; {page('concepts/accuracy')} has what is known", AccuracyCostWarning, stacklevel=3)
