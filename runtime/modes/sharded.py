"""The sharded optimizer step (ZeRO-1): buckets are reduce-scattered, each rank updates its part of the weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from runtime.core.buckets import make_plain_buckets
from runtime.core.exchange import Exchange
from runtime.modes.base import Host, Mode
from runtime.optimizers.kinds import find_missing, find_not_elementwise
from runtime.plan import Plan
from runtime.plan.combinations import SHARDED
from runtime.sharded.exchange import ReduceScatter
from runtime.sharded.late_gather import LateStep
from runtime.sharded.step import NEVER, ShardedStep, StepReport, find_shared_memory
from runtime.sparse.residuals import ErrorFeedbackState


class Sharded(Mode):
    """Every rank has the average of its part of each gradient, and the optimizer's state of that part."""

    name = SHARDED
    what = "a sharded step"
    owns_step = "has ranks share the optimizer's step"
    drops_residuals = (
        "found a plan whose ranks share the optimizer's step, after one that holds gradients back, which it cannot "
        "send; expected an exact plan without `updates.step` for a step first: session.switch to it, train a step, "
        "then switch"
    )
    sends = "reduce_scatter"

    def __init__(self, plan: Plan, host: Host) -> None:
        super().__init__(plan, host)
        self._step: ShardedStep | None = None

    @classmethod
    def check_optimizer(
        cls, optimizer: torch.optim.Optimizer | None, planned: Mapping[str, nn.Parameter]
    ) -> str | None:
        """See `Mode.check_optimizer`: whole parameters are not there, nor memory that two of them share."""
        if odd := find_not_elementwise(optimizer):
            return (
                f"the plan has ranks share the optimizer's step, each updating a part of the weights, but found {odd}; "
                f"expected an optimizer that treats every element by itself, such as torch.optim.SGD or AdamW: use "
                f"one, or plan without sharing ({NEVER})"
            )
        if odd := find_missing(optimizer, planned):
            return (
                f"the plan has ranks share the optimizer's step, and the parameter of the gradient {odd} is not in the "
                f"optimizer; expected all of them in it: add that parameter, freeze it before profiling, or plan "
                f"without sharing (profile again, or {NEVER})"
            )
        return find_shared_memory(planned)

    def make_exchange(self) -> Exchange:
        host = self.host
        buckets = make_plain_buckets(self.plan, host.parameters, parts=host.world.ranks)
        launcher = ReduceScatter(buckets, host.world, host.recorder, host.device)
        return Exchange(self.plan, host.parameters, buckets, launcher, ErrorFeedbackState(), host.recorder)

    def begin(self, exchange: Exchange) -> None:
        """See `Mode.begin`: each rank keeps its part of the optimizer's state."""
        assert isinstance(exchange.launcher, ReduceScatter)
        assert self.host.optimizer is not None  # else the plan has been refused
        given = self.host.optimizer, exchange.launcher, self.host.world, self.host.recorder.clock
        gathers = self.plan.gathers
        self._step = ShardedStep(*given) if gathers is None else LateStep(*given, self.host.model, gathers)

    def before_forward(self) -> None:
        if self._step is not None:
            self._step.before_forward()

    def wait_for_weights(self) -> None:
        if self._step is not None:
            self._step.wait_for_weights()

    def before_step(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        return None if self._step is None else self._step.before_step(arguments, keywords)

    def after_step(self) -> None:
        if self._step is not None:
            self._step.after_step()

    def report(self) -> StepReport | None:
        planned = self.plan.updates.step if self.plan.updates else None
        return None if self._step is None else self._step.report(planned.gather_us if planned else None)

    def optimizer_state_dict(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """See `Mode.optimizer_state_dict`: put together of all ranks' parts, on the host."""
        assert self._step is not None
        return self._step.optimizer_state_dict()

    def end(self) -> None:
        step, self._step = self._step, None
        if step is not None:
            step.end()

    close = end
