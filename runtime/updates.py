"""What a plan says of the optimizer's step: whether ranks share the norms of layers, and what these take."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from runtime.clock import Clock
from runtime.optimizers import LayerwiseOptimizer
from runtime.plan import NormPlan, Plan
from runtime.world import World


@dataclass(frozen=True, kw_only=True)
class NormReport:
    """Norms of layers in the last steps of one rank: medians in microseconds, beside what the plan predicts."""

    layers: int
    shared: bool
    """Whether ranks share the work, or each does all of it."""
    measured_us: float
    """Computing, sending and waiting for others; not what was done while they were on their way."""
    predicted_us: float | None
    replicated_us: float | None
    """Predicted, where each rank does all of it."""
    shared_us: float | None
    """Predicted, where ranks share it."""

    def __str__(self) -> str:
        how = "shared by ranks" if self.shared else "by every rank"
        text = f"norms of {self.layers} layers, {how}: {self.measured_us / 1e3:.2f}"
        if self.predicted_us is None:
            return f"{text} ms"
        other_us, other = (self.replicated_us, "by every rank") if self.shared else (self.shared_us, "shared")
        beside = "" if other_us is None else f", {other} {other_us / 1e3:.2f}"
        return f"{text}, predicted {self.predicted_us / 1e3:.2f}{beside} ms"


class Updates:
    """Keeps an optimizer to the plan of a session; does nothing for optimizers without norms."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | None,
        parameters: Mapping[str, nn.Parameter],
        world: World,
        clock: Clock,
    ) -> None:
        """Of one session; `parameters` by canonical name."""
        self._optimizer = optimizer if isinstance(optimizer, LayerwiseOptimizer) else None
        self._parameters, self._world, self._clock = parameters, world, clock
        self._plan: NormPlan | None = None
        self._decided = False
        """Whether a plan says who computes the norms."""

    def follow(self, plan: Plan) -> None:
        """From the next step on norms are shared as the plan says; times begin anew.

        A plan that says nothing of norms leaves alone what the user chose.
        """
        if self._optimizer is None:
            return
        self._plan = plan.updates.norms if plan.updates else None
        self._optimizer.observe_norms(self._clock)
        if self._plan is None:
            self._give_back()
            return
        owners: dict[Tensor, int] = {}
        for rank, share in enumerate(self._plan.shares or ()):
            owners.update((self._parameters[name], rank) for name in share)
        self._optimizer.share_over(self._world, owners)
        self._decided = True

    def _give_back(self) -> None:
        """What a plan has decided holds no longer."""
        if self._optimizer is not None and self._decided:
            self._optimizer.share_over(World(), {})
            self._decided = False

    def report(self) -> NormReport | None:
        """What norms took in the last steps, and were predicted to; None where there were none."""
        times_us = self._optimizer.norm_times_us() if self._optimizer else []
        if self._optimizer is None or not times_us:
            return None
        return NormReport(
            layers=len(self._optimizer.adapted()),
            shared=self._optimizer.sharing is not None,
            measured_us=statistics.median(times_us),
            predicted_us=self._plan.predicted_us if self._plan else None,
            replicated_us=self._plan.replicated_us if self._plan else None,
            shared_us=self._plan.shared_us if self._plan else None,
        )

    def leave(self) -> None:
        """The optimizer is plain again."""
        self._give_back()
        if self._optimizer is not None:
            self._optimizer.observe_norms(None)
