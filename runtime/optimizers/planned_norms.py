"""The norms of layers as a plan shares them: which rank computes which, and their time."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from runtime.comm.world import World
from runtime.monitor.clock import Clock
from runtime.optimizers.layerwise import LayerwiseOptimizer
from runtime.plan import NormPlan, Plan


@dataclass(frozen=True, kw_only=True)
class NormReport:
    """Norms of layers in the last steps of one rank: medians in microseconds, and the plan's predictions."""

    layers: int
    shared: bool
    measured_us: float
    """Computing, sending and waiting for others; not what was done while they were in flight."""
    predicted_us: float | None
    replicated_us: float | None
    shared_us: float | None

    def __str__(self) -> str:
        how = "shared by ranks" if self.shared else "by every rank"
        text = f"norms of {self.layers} layers, {how}: {self.measured_us / 1e3:.2f}"
        if self.predicted_us is None:
            return f"{text} ms"
        other_us, other = (self.replicated_us, "by every rank") if self.shared else (self.shared_us, "shared")
        comparison = "" if other_us is None else f", {other} {other_us / 1e3:.2f}"
        return f"{text}, predicted {self.predicted_us / 1e3:.2f}{comparison} ms"


class PlannedNorms:
    """Keeps the norms of a session's first optimizer that has any to its plans; others are left alone."""

    def __init__(
        self, optimizers: Sequence[torch.optim.Optimizer], parameters: Mapping[str, nn.Parameter], world: World,
        clock: Clock,
    ) -> None:  # fmt: skip
        """Follow no plan yet; `parameters`: by canonical name."""
        self._optimizer = next((one for one in optimizers if isinstance(one, LayerwiseOptimizer)), None)
        self._parameters, self._world, self._clock = parameters, world, clock
        self._planned: NormPlan | None = None
        self._decided = False
        """Whether a plan says who computes the norms."""

    def follow(self, plan: Plan) -> None:
        """Share norms as the plan says from the next step on, and time them anew; all ranks call this at the same step.

        A plan that says nothing of norms leaves alone what the user chose.
        """
        if self._optimizer is None:
            return
        self._planned = plan.updates.norms if plan.updates else None
        self._optimizer.observe_norms(self._clock)
        if self._planned is None:
            self._stop_sharing()
            return
        owners: dict[Tensor, int] = {}
        for rank, share in enumerate(self._planned.shares or ()):
            owners.update((self._parameters[name], rank) for name in share)
        self._optimizer.share_over(self._world, owners)
        self._decided = True

    def _stop_sharing(self) -> None:
        if self._optimizer is not None and self._decided:
            self._optimizer.share_over(World(), {})
            self._decided = False

    def report(self) -> NormReport | None:
        """Return what norms took in the last steps, and were predicted to; None where there were none."""
        times_us = self._optimizer.norm_times_us() if self._optimizer else []
        if self._optimizer is None or not times_us:
            return None
        return NormReport(
            layers=len(self._optimizer.adapted()),
            shared=self._optimizer.sharing is not None,
            measured_us=statistics.median(times_us),
            predicted_us=self._planned.predicted_us if self._planned else None,
            replicated_us=self._planned.replicated_us if self._planned else None,
            shared_us=self._planned.shared_us if self._planned else None,
        )

    def leave(self) -> None:
        self._stop_sharing()
        if self._optimizer is not None:
            self._optimizer.observe_norms(None)
