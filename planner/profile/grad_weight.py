"""The measured share of backward that is spent on gradients of weights: a check on the estimate from FLOPs.

With every parameter frozen but the one whose gradient is ready last, backward still carries the gradient of the loss
through all layers, and forms one weight gradient instead of all. What that saves is the cost of weight gradients.
"""

from __future__ import annotations

import statistics
import time

from planner.documents.profile import ComputeProfile
from planner.profile.compute import Step, Training
from planner.profile.request import LOGGER
from runtime.comm.world import World

REPEATS = 3
BUDGET_S = 6.0
"""Seconds that it may take: there are fewer repeats, or none, if steps are long."""


def measure_grad_weight_share(training: Training, compute: ComputeProfile, world: World) -> float | None:
    """Measure the share of backward, 0 to 1, median over ranks. Gradients and flags are left as found.

    It is None on a GPU (host times mean nothing there), if the model does not run with frozen parameters, and if steps
    are too long.
    """
    parameters, step = training.parameters, training.step
    step_s = (compute.forward_us + compute.backward_us) / 1e6
    # The same number on all ranks: a step may have collectives of its own. Each part begins with a step to warm up.
    repeats = min(REPEATS, int(BUDGET_S / max(step_s, 1e-9) / 2) - 1)
    mine = None
    if repeats >= 1 and all(parameter.device.type == "cpu" for parameter in parameters.values()):
        try:
            full_s = _backward_s(step, repeats)
            for name, parameter in parameters.items():
                parameter.requires_grad_(name == compute.gradients[-1].name)
            chain_s = _backward_s(step, repeats)
            if full_s and chain_s is not None:
                mine = min(1.0, max(0.0, 1.0 - chain_s / full_s))
        except Exception:  # a user's step may do anything with a frozen parameter; the check is optional
            LOGGER.debug("the share of gradients of weights could not be measured", exc_info=True)
        finally:
            for parameter in parameters.values():
                parameter.requires_grad_(True)
    known = [share for share in world.gather(mine, "comparing shares of backward") if share is not None]
    return round(statistics.median(known), 4) if known else None


def _backward_s(step: Step, repeats: int) -> float | None:
    """Return median seconds from loss to end of the step; None if the step does not report when backward begins."""
    times = []
    for _ in range(repeats + 1):
        begun: list[float] = []
        step(lambda begun=begun: begun.append(time.perf_counter()))  # type: ignore[misc]
        if not begun:
            return None
        times.append(time.perf_counter() - begun[-1])
    return statistics.median(times[1:])
