"""What a rank alone makes of the states of a run with delay: it has all of the global weights, and no delay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from runtime.delay.checkpoint import Place, buckets_of, check_state, copy_all, delays_of, joined, residuals_of
from runtime.plan import Plan


def is_delayed(given: Any) -> bool:
    """Whether it is the state of a run with delay, or states of some."""
    everyone = given if isinstance(given, Sequence) else [given]
    return any(isinstance(one, Mapping) and "delay" in one for one in everyone)


@torch.no_grad()
def ended(
    given: Any, plan: Plan, parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer
) -> tuple[int, dict[str, Any]]:
    """Gives model and optimizer the global weights and momenta.

    Returns:
        The number of the next step, and a state of a run without delay: what had yet to be pushed.

    Raises:
        InputError: not the states of all ranks; of a run with another delay, model or optimizer.
    """
    assert plan.delay is not None
    states, _ = delays_of(given, Place(0, 1, 1, buckets_of(plan)))
    planned = {name: parameters[name] for name in plan.gradients}
    check_state(states[0], plan.delay, planned, len(optimizer.param_groups))
    carried: dict[str, Any] = {}
    if states[0]["stage"] == "delayed":
        weights, momenta = joined([one["pieces"] for one in states], planned)
        copy_all([planned[name] for name in weights], list(weights.values()))
        for name, momentum in momenta.items():
            optimizer.state[planned[name]]["momentum_buffer"] = momentum
        late = residuals_of(states, 0, 1)
        carried = {"residuals": late, "steps": 0, "loss_scale": 1.0} if late else {}
    step: int = states[0]["step"]
    return step, {"plan": plan.digest(), "ranks": 1, "rank": 0, "carried": carried}
