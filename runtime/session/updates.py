"""What a plan says of the optimizer's step: whether ranks share norms of layers, or all of it, and what that takes."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from runtime.comm.world import World
from runtime.core.exchange import Exchange
from runtime.errors import InputError
from runtime.monitor.clock import Clock
from runtime.optimizers import LayerwiseOptimizer
from runtime.plan import NormPlan, Plan, StepPlan
from runtime.sharded.exchange import ReduceScatter
from runtime.sharded.step import ShardedStep, StepReport


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
    """Keeps an optimizer to the plan of a session."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | None,
        parameters: Mapping[str, nn.Parameter],
        world: World,
        clock: Clock,
    ) -> None:
        """Of one session; `parameters` by canonical name."""
        self._optimizer = optimizer
        self._layerwise = optimizer if isinstance(optimizer, LayerwiseOptimizer) else None
        self._parameters, self._world, self._clock = parameters, world, clock
        self._norms: NormPlan | None = None
        self._decided = False
        """Whether a plan says who computes the norms."""
        self._step: StepPlan | None = None
        self._sharded: ShardedStep | None = None
        self._handles: list[Any] = []
        if optimizer is not None and world.ranks > 1:
            self._handles = [
                optimizer.register_step_pre_hook(self._before_step),
                optimizer.register_step_post_hook(self._after_step),
            ]

    def _before_step(self, _: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        return None if self._sharded is None else self._sharded.before_step(arguments, keywords)

    def _after_step(self, *_: Any) -> None:
        if self._sharded is not None:
            self._sharded.after_step()

    def follow(self, plan: Plan, exchange: Exchange) -> None:
        """From the next step on norms, or the whole step, are shared as the plan says; times begin anew.

        A plan that says nothing of norms leaves alone what the user chose. All ranks call this at the same step.

        Args:
            plan: the new one.
            exchange: its buckets, which are in place.
        """
        self._end_sharing()
        self._step = plan.updates.step if plan.updates else None
        if isinstance(exchange.launcher, ReduceScatter) and self._optimizer is not None:
            self._sharded = ShardedStep(self._optimizer, exchange.launcher, self._world, self._clock)
        if self._layerwise is not None:
            self._share_norms(self._layerwise, plan)

    def _share_norms(self, optimizer: LayerwiseOptimizer, plan: Plan) -> None:
        self._norms = plan.updates.norms if plan.updates else None
        optimizer.observe_norms(self._clock)
        if self._norms is None:
            self._give_back()
            return
        owners: dict[Tensor, int] = {}
        for rank, share in enumerate(self._norms.shares or ()):
            owners.update((self._parameters[name], rank) for name in share)
        optimizer.share_over(self._world, owners)
        self._decided = True

    def _give_back(self) -> None:
        """What a plan has decided of norms holds no longer."""
        if self._layerwise is not None and self._decided:
            self._layerwise.share_over(World(), {})
            self._decided = False

    def _end_sharing(self) -> None:
        """Every rank has the whole state of the optimizer again."""
        sharded, self._sharded = self._sharded, None
        if sharded is not None:
            sharded.end()

    def report(self) -> NormReport | None:
        """What norms took in the last steps, and were predicted to; None where there were none."""
        times_us = self._layerwise.norm_times_us() if self._layerwise else []
        if self._layerwise is None or not times_us:
            return None
        return NormReport(
            layers=len(self._layerwise.adapted()),
            shared=self._layerwise.sharing is not None,
            measured_us=statistics.median(times_us),
            predicted_us=self._norms.predicted_us if self._norms else None,
            replicated_us=self._norms.replicated_us if self._norms else None,
            shared_us=self._norms.shared_us if self._norms else None,
        )

    def step_report(self) -> StepReport | None:
        """What sharing the step took; None where ranks do not, or have made no step."""
        return None if self._sharded is None else self._sharded.report(self._step.gather_us if self._step else None)

    def optimizer_state_dict(self) -> dict[str, Any]:
        """See `Session.optimizer_state_dict`; raises InputError without an optimizer."""
        if self._sharded is not None:
            return self._sharded.optimizer_state_dict()
        if self._optimizer is None:
            raise InputError(
                "session.optimizer_state_dict: found no optimizer; expected attach(model, optimizer, plan)"
            )
        return self._optimizer.state_dict()

    def leave(self) -> None:
        """The optimizer is plain again."""
        for handle in self._handles:
            handle.remove()
        self._give_back()
        if self._layerwise is not None:
            self._layerwise.observe_norms(None)
        self._end_sharing()
