"""The sharded optimizer step (ZeRO-1): buckets are reduce-scattered, each rank updates its part of the weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn

from runtime.core.buckets import make_plain_buckets
from runtime.core.exchange import Exchange
from runtime.modes.base import NO_HOOKS, Host, Mode, StepHooks, check_one_dtype
from runtime.monitor.step_report import StepReport
from runtime.optimizers.kinds import find_missing, find_not_elementwise
from runtime.plan import HINT, Plan
from runtime.plan.combinations import SHARDED
from runtime.sharded.exchange import ReduceScatter, padded_length
from runtime.sharded.late_gather import LateStep
from runtime.sharded.step import NEVER, ShardedStep, find_shared_memory


class Sharded(Mode):
    """Every rank has the average of its part of each gradient, and the optimizer's state of that part."""

    name = SHARDED
    what = "a sharded step"
    owns_step = "has ranks share the optimizer's step"
    sends = "reduce_scatter"

    def __init__(self, plan: Plan, host: Host) -> None:
        super().__init__(plan, host)
        self._step: ShardedStep | None = None

    @classmethod
    def check_plan(cls, plan: Plan, parameters: Mapping[str, nn.Parameter]) -> str | None:
        """See `Mode.check_plan`: of narrow buckets, and of weights that are gathered in bfloat16."""
        if (problem := check_one_dtype(plan, parameters, "and its ranks share the optimizer's step")) is not None:
            return problem
        assert plan.updates is not None
        assert plan.updates.step is not None
        weights, where = plan.updates.step.weights, "the plan's updates.step.weights"
        if weights is None:
            return None
        if weights != "bfloat16":
            return f"{where}: found {weights!r}, expected 'bfloat16', or none for weights as they are: {HINT}"
        if plan.accuracy == "exact":
            return (
                f"{where}: found {weights} in a plan whose accuracy is exact, but rounded weights are not those of "
                f'DDP; expected none there: set "accuracy" to "bounded" if rounding them is meant'
            )
        odd = next((n for n in plan.gradients if parameters[n].is_complex() or parameters[n].dtype.itemsize > 4), None)
        if odd is not None:
            return (
                f"{where}: found {weights}, but {odd} is {str(parameters[odd].dtype).removeprefix('torch.')}; expected "
                f"parameters of at most 32 bits (float32 is rounded, 16 bits are gathered as they are): convert it "
                f"before attach, or leave weights out"
            )
        return None

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
        length_of = partial(padded_length, host.world.ranks)
        buckets = make_plain_buckets(self.plan, host.parameters, length_of=length_of)
        launcher = ReduceScatter(self.plan, buckets, host.world, host.recorder, host.device, host.options)
        return Exchange(self.plan, host.parameters, buckets, launcher, launcher.carried, host.recorder)

    def begin(self, exchange: Exchange) -> None:
        """See `Mode.begin`: each rank keeps its part of the optimizer's state."""
        assert isinstance(exchange.launcher, ReduceScatter)
        assert self.host.optimizer is not None  # else the plan has been refused
        self._step = self._make_step(self.host.optimizer, exchange.launcher)

    def _make_step(self, optimizer: torch.optim.Optimizer, launcher: ReduceScatter) -> ShardedStep:
        return ShardedStep(optimizer, launcher, self.host.world, self.host.recorder.clock)

    @property
    def hooks(self) -> StepHooks:
        return NO_HOOKS if self._step is None else self._step

    def report(self) -> StepReport | None:
        planned = self.plan.updates.step if self.plan.updates else None
        return None if self._step is None else self._step.report(planned.gather_us if planned else None)

    def global_weights(self) -> AbstractContextManager[None]:
        """See `Mode.global_weights`: in float32, where they are rounded to be gathered."""
        assert self._step is not None
        return self._step.global_weights()

    def state(self) -> dict[str, Any]:
        """See `Mode.state`: with this rank's part of the weights, where these are rounded to be gathered."""
        masters = None if self._step is None else self._step.master_state()
        return super().state() | ({"rank": self.host.world.rank, "weights": masters} if masters else {})

    def take_weights(self, saved: Sequence[dict[str, Any]]) -> None:
        """See `Mode.take_weights`. Raises InputError also where this rank's part is not all there."""
        if self._step is None or not self.plan.rounds_weights:
            super().take_weights(saved)
        else:
            self._step.load_masters(saved)

    def whole_optimizer_state(self) -> AbstractContextManager[None]:
        """See `Mode.whole_optimizer_state`: gathered from all ranks, on the host."""
        assert self._step is not None
        return self._step.whole_optimizer_state()

    def end(self) -> None:
        step, self._step = self._step, None
        if step is not None:
            step.end()

    close = end


class LateGather(Sharded):
    """A sharded step whose weights are all-gathered during the next forward."""

    def _make_step(self, optimizer: torch.optim.Optimizer, launcher: ReduceScatter) -> ShardedStep:
        assert self.plan.gathers is not None
        world, clock = self.host.world, self.host.recorder.clock
        return LateStep(optimizer, launcher, world, clock, self.host.model, self.plan.gathers)
