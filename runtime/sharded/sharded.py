"""The sharded optimizer step (ZeRO-1): buckets are reduce-scattered, each rank updates its part of the weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from runtime.comm.world import World
from runtime.core.buckets import make_plain_buckets
from runtime.core.exchange import Exchange
from runtime.modes.base import NO_HOOKS, Host, Mode, StepHooks, check_one_dtype
from runtime.monitor.step_report import StepReport, sum_of
from runtime.optimizers.kinds import find_missing, find_not_elementwise
from runtime.optimizers.units import unit_of
from runtime.plan import HINT, Plan
from runtime.plan.combinations import SHARDED
from runtime.sharded.exchange import ReduceScatter, padded_length
from runtime.sharded.late_gather import LateStep
from runtime.sharded.step import NEVER, ShardedStep, find_shared_memory


class Sharded(Mode):
    """Every rank has the average of its part of each gradient, and the optimizer's state of that part: equal parts, or
    whole parameters, where the plan has owners.
    """

    name = SHARDED
    what = "a sharded step"
    sends = "reduce_scatter"
    several = True

    def __init__(self, plan: Plan, host: Host, world: World | None = None) -> None:
        """Prepare the mode; `world`: the ranks over which the step is sharded, default: all."""
        super().__init__(plan, host)
        self._world = host.world if world is None else world
        self._steps: Steps | None = None

    @classmethod
    def owned_step(cls, plan: Plan) -> str | None:
        return "has ranks share the optimizer's step"

    @classmethod
    def check_plan(cls, plan: Plan, parameters: Mapping[str, nn.Parameter]) -> str | None:
        """See `Mode.check_plan`: of narrow buckets, and of weights that are gathered in bfloat16."""
        if (problem := check_one_dtype(plan, parameters, "and its ranks share the optimizer's step")) is not None:
            return problem
        assert plan.updates is not None
        assert plan.updates.step is not None
        weights, where = plan.updates.step.weights, "the plan's updates.step.weights"
        narrow = next((index for index, bucket in enumerate(plan.buckets) if not bucket.dense), None)
        if plan.owners and narrow is not None:
            return (
                f"bucket {narrow} has the compressor {plan.buckets[narrow].compressor.name!r}, which encodes parts of "
                f"one length, but whole parameters have owners (updates.step.owners); expected none: {HINT}"
            )
        if weights is None:
            return None
        if plan.owners:
            return (
                f"{where}: found {weights} in a plan with owners of whole parameters (updates.step.owners), whose "
                f"weights are gathered as they are; expected none there: {HINT}"
            )
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
        cls, plan: Plan, optimizers: Sequence[torch.optim.Optimizer], planned: Mapping[str, nn.Parameter]
    ) -> str | None:
        """See `Mode.check_optimizer`: parameters are whole where they have owners alone, and no two of them may share
        memory.
        """
        for optimizer in optimizers or (None,):
            if optimizer is not None and unit_of(optimizer) == "matrix":
                name, dtype = type(optimizer).__name__, getattr(optimizer, "update_dtype", None)
                if dtype is not None and not callable(getattr(optimizer, "apply", None)):
                    return (
                        f"{name}: found update_dtype = {dtype} without apply; expected a method apply(self, parameter, "
                        f"update, group): add it, or leave update_dtype out"
                    )
                held = {id(one) for group in optimizer.param_groups for one in group["params"]}
                cut = next((name for name, p in planned.items() if id(p) in held and name not in plan.owners), None)
                if cut is None:
                    continue
                advice = "an" if plan.outer is not None else f"an owner of {cut} (updates.step.owners), or an"
            else:
                advice = "an"
            if odd := find_not_elementwise(optimizer):
                return (
                    f"the plan has ranks share the optimizer's step, each updating a part of the weights, but found "
                    f"{odd}; expected {advice} optimizer that treats every element by itself, such as torch.optim.SGD "
                    f"or AdamW: use one, or plan without sharing ({NEVER})"
                )
        if len(optimizers) > 1:
            narrow = next((index for index, bucket in enumerate(plan.buckets) if not bucket.dense), None)
            if narrow is not None:
                return (
                    f"bucket {narrow} has the compressor {plan.buckets[narrow].compressor.name!r} in a plan with a "
                    f"sharded optimizer step, but found {len(optimizers)} optimizers; expected one: put all "
                    f"parameters into one, or plan without --accuracy"
                )
        if odd := find_missing(optimizers, planned):
            return (
                f"the plan has ranks share the optimizer's step, and the parameter of the gradient {odd} is not in the "
                f"optimizer; expected all of them in it: add that parameter, freeze it before profiling, or plan "
                f"without sharing (profile again, or {NEVER})"
            )
        return find_shared_memory(planned)

    def make_exchange(self) -> Exchange:
        host, owners = self.host, self.plan.owners
        optimizer_of = {
            id(one): position
            for position, optimizer in enumerate(host.optimizers)
            for group in optimizer.param_groups
            for one in group["params"]
        }

        def message_of(name: str) -> tuple[int, int]:  # of one optimizer, in equal parts or in the order of owners
            position = optimizer_of.get(id(host.parameters[name]), 0)
            return 2 * position + (name in owners), owners.get(name, 0)

        length_of = partial(padded_length, self._world.ranks)
        buckets = make_plain_buckets(self.plan, host.parameters, length_of=length_of, message_of=message_of)
        launcher = ReduceScatter(self.plan, buckets, host, self._world)
        return Exchange(self.plan, host.parameters, buckets, launcher, launcher.carried, host.recorder)

    def begin(self, exchange: Exchange) -> None:
        """See `Mode.begin`: each rank keeps its part of the optimizer's state."""
        assert isinstance(exchange.launcher, ReduceScatter)
        self._steps = Steps(exchange.launcher)
        for optimizer in self.host.optimizers:
            self._steps.of[optimizer] = self._make_step(optimizer, exchange.launcher)

    def _make_step(self, optimizer: torch.optim.Optimizer, launcher: ReduceScatter) -> ShardedStep:
        return ShardedStep(optimizer, launcher, self._world, self.host.recorder.clock)

    @property
    def hooks(self) -> StepHooks:
        return NO_HOOKS if self._steps is None else self._steps

    def report(self) -> StepReport | None:
        planned = self.plan.updates.step if self.plan.updates else None
        return None if self._steps is None else self._steps.report(planned.gather_us if planned else None)

    @contextmanager
    def global_weights(self) -> Iterator[None]:
        """See `Mode.global_weights`: in float32, where they are rounded to be gathered."""
        assert self._steps is not None
        with ExitStack() as inside:
            for step in self._steps.of.values():
                inside.enter_context(step.global_weights())
            yield

    def state(self) -> dict[str, Any]:
        """See `Mode.state`: with this rank's part of the weights, where these are rounded to be gathered."""
        steps = () if self._steps is None else self._steps.of.values()
        masters = {name: one for step in steps for name, one in step.master_state().items()}
        return super().state() | ({"rank": self.host.world.rank, "weights": masters} if masters else {})

    def take_weights(self, saved: Sequence[dict[str, Any]]) -> None:
        """See `Mode.take_weights`. Raises InputError also where this rank's part is not all there."""
        if self._steps is None or not self.plan.rounds_weights:
            super().take_weights(saved)
        else:
            for step in self._steps.of.values():
                step.load_masters(saved)

    @contextmanager
    def whole_optimizer_state(self) -> Iterator[None]:
        """See `Mode.whole_optimizer_state`: gathered from all ranks, on the host."""
        assert self._steps is not None
        with ExitStack() as inside:
            for step in self._steps.of.values():
                inside.enter_context(step.whole_optimizer_state())
            yield

    def end(self) -> None:
        self.hand_over(None)

    close = end

    def hand_over(self, device: torch.device | None) -> None:
        """End the step, with the state by element on a device until another shared step cuts it; None: where it is."""
        steps, self._steps = self._steps, None
        if steps is not None:
            steps.end(device)


class Steps(StepHooks):
    """The sharded steps of a session's optimizers."""

    def __init__(self, launcher: ReduceScatter) -> None:
        self._launcher = launcher
        self.of: dict[torch.optim.Optimizer, ShardedStep] = {}
        """Sharded step of each optimizer, in the order of `attach`."""

    def before_forward(self) -> None:
        for step in self.of.values():
            step.before_forward()

    def wait_for_weights(self) -> None:
        for step in self.of.values():
            step.wait_for_weights()

    def begin_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.of[optimizer].begin_step(optimizer)

    def before_step(
        self, optimizer: torch.optim.Optimizer, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> Any:
        return self.of[optimizer].before_step(optimizer, arguments, keywords)

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.of[optimizer].after_step(optimizer)

    def end(self, device: torch.device | None) -> None:
        """End all of them; all ranks call this."""
        with ExitStack() as ends:  # all, also where one raises
            ends.callback(self._launcher.release)
            for step in reversed(self.of.values()):
                ends.callback(step.end, device)

    def report(self, predicted_gather_us: float | None) -> StepReport | None:
        """Return what the last steps took, of all optimizers together; None where there were none."""
        reports = [found for step in self.of.values() if (found := step.report(predicted_gather_us)) is not None]
        return sum_of(reports) if reports else None


class LateGather(Sharded):
    """A sharded step whose weights are all-gathered during the next forward."""

    def _make_step(self, optimizer: torch.optim.Optimizer, launcher: ReduceScatter) -> ShardedStep:
        assert self.plan.gathers is not None
        clock = self.host.recorder.clock
        return LateStep(optimizer, launcher, self._world, clock, self.host.model, self.plan.gathers)
