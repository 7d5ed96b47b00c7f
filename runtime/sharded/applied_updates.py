"""Updates of owned matrices, gathered in their own dtype in place of new weights.

Where the result of an optimizer's operator has fewer bits than weights (Newton–Schulz: bfloat16), every rank gets it
and applies weight decay and rate itself, as with DDP. In the first step new weights are gathered, too, and compared:
where a rank would have other bits, weights are gathered in all steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import ExitStack
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from runtime.comm.world import World
from runtime.core.buckets import Slot
from runtime.errors import FallbackWarning, InputError
from runtime.optimizers.units import Operator, operator_of
from runtime.sharded.part import ROUNDED, OwnPart


class AppliedUpdates:
    """Results of the operator of one optimizer in one step, until all ranks have applied them."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, operator: Operator, dtype: torch.dtype, slots: Mapping[int, Slot],
        world: World,
    ) -> None:  # fmt: skip
        """`dtype`: of results; `slots`: of the optimizer's parameters, by `id`."""
        self._optimizer, self._operator, self._dtype, self._slots, self._world = (
            optimizer, operator, dtype, slots, world,
        )  # fmt: skip
        self._shapes: dict[int | None, torch.Size] = {slot.index: slot.parameter.shape for slot in slots.values()}
        self._groups: dict[int, dict[str, Any]] = {}
        """Group of each parameter that the step updates on any rank, by place in the plan."""
        self._calls: list[int | None] = []
        """Parameters whose operator this rank's step calls, in that order: place in the plan, None: in no plan."""
        self._results: list[Tensor] = []
        self._open = ExitStack()
        self._compared = False
        self._problem: str | None = None
        """Reason against applying updates, found in the first step."""

    @classmethod
    def of(
        cls, optimizer: torch.optim.Optimizer, parts: list[OwnPart], slots: Mapping[int, Slot], world: World
    ) -> AppliedUpdates | None:
        """Return those of an optimizer; None where new weights have to be gathered."""
        operator = operator_of(optimizer)
        dtype = None if operator is None else operator.update_dtype
        if operator is None or dtype is None or not dtype.is_floating_point or dtype.itemsize > ROUNDED.itemsize:
            return None
        if not all(part.by_parameter and part.whole.itemsize > dtype.itemsize for part in parts):
            return None
        return cls(optimizer, operator, dtype, slots, world)

    def begin(self, owned: Mapping[int, object]) -> None:
        """Keep the results of the step that comes next; groups have parameters. `owned`: by `id`, this rank's."""
        self._groups.clear()
        self._results.clear()
        self._calls.clear()
        if self._compared:
            self._problem = None
        for group in self._optimizer.param_groups:
            for parameter in (p for p in group["params"] if p.grad is not None):
                slot = self._slots.get(id(parameter))
                if slot is not None:
                    self._groups[slot.index] = group
                if slot is None or id(parameter) in owned:
                    self._calls.append(None if slot is None else slot.index)
        self._open.enter_context(self._operator.replaced(self._compute))

    def _compute(self, matrix: Tensor, group: Mapping[str, Any]) -> Tensor:
        result = self._operator.compute(matrix, group)
        self._results.append(result)
        return result

    def end(self) -> None:
        """End the step: the operator is the optimizer's own again."""
        self._open.close()

    def _check(self) -> None:
        calls = zip(self._calls, self._results, strict=False)
        if len(self._results) != len(self._calls) or any(
            one.dtype != self._dtype or one.shape != self._shapes.get(index, one.shape) for index, one in calls
        ):
            forms = sorted({f"{one.dtype} {tuple(one.shape)}" for one in self._results})
            self._problem = (
                f"{type(self._optimizer).__name__}: its step called its operator {len(self._results)} times for "
                f"{len(self._calls)} parameters, with the results {', '.join(forms[:4]) or 'none'}; expected one call "
                f"for each parameter with a gradient, and a result in its shape and {self._dtype}: call it in every "
                f"step, or leave out update_dtype"
            )

    @torch.no_grad()
    def gather(self, part: OwnPart, doing: str) -> None:
        """Give every rank the new weights of a message, of which this one has updated its part."""
        self._check()
        flat = part.scratch[: part.updates_bytes].view(self._dtype)[: part.whole.numel()]
        updates, weights = part.views(flat), part.views(part.whole)
        results = {} if self._problem else dict(zip(self._calls, self._results, strict=True))
        for slot in (slot for slot in part.message.slots if slot.index in part.places):
            updates[slot.name].copy_(results.get(slot.index, torch.zeros(())))
        if self._problem is not None and self._compared:
            if flat.device.type != "cpu":  # where to look at what comes would have the host wait
                raise InputError(self._problem)
            flat[part.own].fill_(math.nan)
        part.gathered(self._world, flat[part.own], doing, flat[: sum(part.sizes)])
        self._raise_together(part, flat)
        for slot in part.message.slots:
            if slot.index in self._groups and slot.index not in part.places:
                self._operator.apply(weights[slot.name], updates[slot.name], self._groups[slot.index])
        if not self._compared:
            applied = part.whole.clone()
            part.gather_weights(self._world, doing)
            if not torch.equal(applied.view(torch.uint8), part.whole.view(torch.uint8)) and self._problem is None:
                names = [slot.name for slot in part.message.slots]
                self._problem = (
                    f"on rank {self._world.rank} `apply` of {type(self._optimizer).__name__} gives other weights than "
                    f"its step (among {names[0]} … {names[-1]}); expected the same bits"
                )

    def _raise_together(self, part: OwnPart, flat: Tensor) -> None:
        """Raise InputError where a rank has sent no numbers because of a problem: on all ranks, which have got them."""
        if not self._compared or flat.device.type != "cpu":
            return
        starts = accumulate(part.sizes, initial=0)
        if any(size and math.isnan(flat[start]) for start, size in zip(starts, part.sizes, strict=False)):
            everyone = self._world.gather(self._problem, "comparing updates that are no numbers")
            if problem := next(filter(None, everyone), None):
                raise InputError(problem)

    def finish(self) -> bool:
        """Free the results of the step; return whether updates are applied in the next one; all ranks call this."""
        updated = len(self._groups)
        self._results.clear()
        if self._compared:
            return True
        everyone = self._world.gather((self._problem, updated), "comparing weights after applied updates")
        problem = next((found for found, _ in everyone if found), None)
        self._compared = all(count for _, count in everyone)
        if problem is not None:
            self._world.warn(f"new weights are gathered in place of updates: {problem}", FallbackWarning)
        return problem is None
