"""Operators of matrix optimizers as a plan shares them: which rank computes which, and their time."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from runtime.comm.topology import Topology
from runtime.comm.world import World
from runtime.core.closures import after_backward
from runtime.monitor.clock import Clock
from runtime.optimizers.norms import KEPT_STEPS
from runtime.optimizers.shared_operator import SharedOperator
from runtime.optimizers.units import operator_of
from runtime.plan import OperatorPlan, Plan


@dataclass(frozen=True, kw_only=True)
class OperatorReport:
    """Shared operators in the last steps of one rank: medians in microseconds, and the plan's predictions."""

    parameters: int
    own: int
    """Parameters whose operator this rank computes."""
    measured_us: float
    """Time from the beginning of the step to the end of this rank's share, messages launched."""
    predicted_us: float | None
    replicated_us: float | None

    def __str__(self) -> str:
        text = f"operators of {self.parameters} matrices, {self.own} of them here: {self.measured_us / 1e3:.2f} ms"
        if self.predicted_us is None or self.replicated_us is None:
            return text
        return (
            f"{text}; update predicted {self.predicted_us / 1e3:.2f}, if every rank computes all "
            f"{self.replicated_us / 1e3:.2f} ms"
        )


class PlannedOperators:
    """Keeps the operators of a session's optimizers to its plans; optimizers without one are left alone."""

    def __init__(
        self, optimizers: Sequence[torch.optim.Optimizer], parameters: Mapping[str, nn.Parameter], world: World,
        clock: Clock,
    ) -> None:  # fmt: skip
        """Follow no plan yet; `parameters`: by canonical name."""
        self._parameters, self._world, self._clock = parameters, world, clock
        self._planned = OperatorPlan()
        self._times: deque[tuple[Any, Any]] = deque(maxlen=KEPT_STEPS)
        self._shared: list[SharedOperator] = []
        self._node: World | None = None
        """The ranks of this node, if a plan has had messages inside of nodes."""
        names: dict[Tensor, str] = {parameter: name for name, parameter in parameters.items()}
        if world.group is not None:
            found = ((one, operator_of(one)) for one in optimizers)
            self._shared = [SharedOperator(one, operator, names, world) for one, operator in found if operator]

    def follow(self, plan: Plan) -> None:
        """Share operators as the plan says from the next step on; all ranks call this at the same step."""
        planned = self._planned = (plan.updates and plan.updates.operator) or OperatorPlan()
        self._times.clear()
        owners = planned.owners or {}
        inside = planned.inside or () if owners else ()
        if inside and self._shared and self._node is None:
            assert isinstance(self._world.topology, Topology)  # else the plan has been refused
            self._node = self._world.split(self._world.topology.nodes)
        for shared in self._shared:
            held = {id(p) for group in shared.optimizer.param_groups for p in group["params"]}
            mine = {name: self._parameters[name] for name in owners if id(self._parameters[name]) in held}
            messages = [
                (self._node if number in inside else self._world, [mine[name] for name in message if name in mine])
                for number, message in enumerate(planned.messages)
            ]
            shared.share(
                {parameter: owners[name] for name, parameter in mine.items()},
                [(world, members) for world, members in messages if world is not None and members],
                [mine[name] for name in planned.batched or () if name in mine],
                planned.tolerance or 0.0,
            )

    def begin_step(self) -> None:
        """End what a step that raised has left, for torch calls no hook then: the step of any optimizer begins, also of
        one that is not attached, whose operator may be in the same place.
        """
        for shared in self._shared:
            shared.close()

    def before_step(
        self, optimizer: torch.optim.Optimizer, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> Any:
        """Compute this rank's share, if the optimizer has one, or return arguments of the step whose closure does so
        after its backward.
        """
        shared = next((one for one in self._shared if one.optimizer is optimizer), None)
        return shared and after_backward(lambda: self._compute(shared), arguments, keywords)

    def _compute(self, shared: SharedOperator) -> None:
        begin = self._clock.mark()
        shared.before_step()
        if shared.shared:
            self._times.append((begin, self._clock.mark()))

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """End the step of an optimizer."""
        for shared in self._shared:
            if shared.optimizer is optimizer:
                shared.after_step()

    def report(self) -> OperatorReport | None:
        """Return what shared operators took in the last steps; None where none are shared."""
        shared = [one for one in self._shared if one.shared]
        if not shared or not self._times:
            return None
        return OperatorReport(
            parameters=sum(one.shared for one in shared),
            own=sum(one.own for one in shared),
            measured_us=statistics.median(self._clock.between_us(*marks) for marks in self._times),
            predicted_us=self._planned.shared_us,
            replicated_us=self._planned.replicated_us,
        )

    def observe(self) -> None:
        """Time operators in the first steps in which every rank computes all (see `times_us`)."""
        for shared in self._shared:
            shared.observe(self._clock)

    def times_us(self) -> dict[torch.optim.Optimizer, dict[str, tuple[float, int]]]:
        """Return the optimizers whose operator was timed, with time and bytes of each result."""
        return {one.optimizer: times for one in self._shared if (times := one.times_us())}

    def leave(self) -> None:
        """Share nothing any more."""
        for shared in self._shared:
            shared.share({}, ())
        if self._node is not None:
            self._node.leave()
            self._node = None
