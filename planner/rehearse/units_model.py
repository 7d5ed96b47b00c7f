"""A model of units that are waited for: parameters, memory and times of a profile's units, and no computation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from planner.documents.units import Unit, Units, UnitWeight
from planner.fsdp2.program import Shape, first_leaf
from planner.rehearse.accelerator import SEED, Accelerator
from runtime.plan.fully_sharded import contains
from runtime.torch_compat import is_sharded

BYTES = 4
"""Of an element, whatever the profile's dtype: bytes are what is acted out."""
RATE = 1e-3
"""Of the update."""


class _Acted(torch.autograd.Function):
    """Forward: a wait, and memory that backward frees. Backward: a wait, after which parameters have gradients."""

    @staticmethod
    def forward(ctx: Any, chain: Tensor, work: _Work, *parameters: Tensor) -> Tensor:
        kept = torch.empty(work.unit.activation_bytes, dtype=torch.uint8)
        working = torch.empty(work.unit.forward_working_bytes, dtype=torch.uint8)
        ctx.save_for_backward(kept)
        ctx.work, ctx.wanted = work, ctx.needs_input_grad[2:]
        work.device.run(work.unit.forward_us)
        del working
        return chain.clone()

    @staticmethod
    def backward(ctx: Any, *of_chain: Tensor) -> tuple[Tensor | None, ...]:
        work = ctx.work
        # Autograd copies gradients when this has returned; they are as large here already.
        gradient_bytes = sum(drawn.nbytes for drawn, wanted in zip(work.gradients, ctx.wanted, strict=True) if wanted)
        working = torch.empty(gradient_bytes + max(0, work.unit.backward_working_bytes), dtype=torch.uint8)
        work.device.run(work.unit.backward_us)
        del working
        gradients = (drawn if wanted else None for drawn, wanted in zip(work.gradients, ctx.wanted, strict=True))
        return of_chain[0], None, *gradients


class _Work:
    """What a unit's turn takes, and the gradients that come of it."""

    def __init__(self, unit: Unit, device: Accelerator) -> None:
        self.unit, self.device = unit, device
        self.gradients: list[Tensor] = []


class _Turn(nn.Module):
    """A unit. Parameters that belong to modules above it come to no hook of its own, so it looks them up there."""

    def __init__(self, work: _Work) -> None:
        super().__init__()
        self._work = work
        self._used: list[tuple[nn.Module, str]] = []

    def use(self, owner: nn.Module, name: str, drawn: Tensor) -> None:
        """Have the gradient of a parameter come of this unit's backward."""
        self._used.append((owner, name))
        self._work.gradients.append(drawn)

    def forward(self, chain: Tensor) -> Tensor:
        parameters = [getattr(owner, name) for owner, name in self._used]
        acted: Tensor = _Acted.apply(chain, self._work, *parameters)  # type: ignore[no-untyped-call]
        return acted


class UnitsModel(nn.Module):
    """A model of a profile's units (already scaled), each under its path, that takes their times and their memory.

    A unit holds the parameters that no module outside of it has; others are the model's own. Gradients are drawn once,
    other ones on each rank. What goes on from unit to unit is one number.
    """

    def __init__(self, units: Units, rank: int, ranks: int, dilate: float = 1.0) -> None:
        super().__init__()
        self.device = Accelerator(dilate)
        self._update_us, self._loss_bytes = units.update_us / ranks, units.loss_working_bytes
        self._first_requires_grad = units.units[0].input_requires_grad
        self._order = [_put(self, unit.module, _Turn(_Work(unit, self.device))) for unit in units.units]
        shape, generator = Shape.of(units, ranks), torch.Generator().manual_seed(SEED + 1 + rank)
        for number, weight in enumerate(units.weights):
            turn = self._order[first_leaf(shape, weight.modules)]
            name, parameter = f"weight_{number}", _parameter(weight, units.element_bytes)
            owner = self if (home := _home(units, weight)) is None else self._order[home]
            owner.register_parameter(name, parameter)
            drawn = torch.randn(parameter.numel(), generator=generator).mul_(1e-2)
            turn.use(owner, name, drawn)

    def forward(self, batch: Tensor) -> Tensor:
        """Return the loss, and begin a step on the accelerator's timeline."""
        self.device.synchronize()
        chain = batch.detach().requires_grad_(self._first_requires_grad)
        for turn in self._order:
            chain = turn(chain)
        return chain

    def step(self) -> None:
        """Take one step: forward, backward and update, at the end of which the host has waited for the accelerator."""
        loss = self(torch.zeros(1))
        working = torch.empty(self._loss_bytes, dtype=torch.uint8)
        del working
        loss.sum().backward()
        self.device.synchronize()
        with torch.no_grad():
            pairs = list(self._parts())
            if pairs:
                torch._foreach_add_([part for part, _ in pairs], [gradient for _, gradient in pairs], alpha=-RATE)
        for parameter in self.parameters():
            parameter.grad = None
        self.device.run_since_met(self._update_us)

    def local_bytes(self) -> int:
        """Return the bytes of this rank's parts of parameters."""
        return sum(_local(parameter).untyped_storage().nbytes() for parameter in self.parameters())

    def local_pointers(self) -> set[int]:
        """Return where this rank's parts of parameters lie."""
        return {_local(parameter).untyped_storage().data_ptr() for parameter in self.parameters()}

    def _parts(self) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's part of every parameter, with its gradient."""
        for parameter in self.parameters():
            if parameter.grad is not None:
                yield _local(parameter), _local(parameter.grad)


def _put(model: nn.Module, path: str, turn: _Turn) -> _Turn:
    *above, last = path.split(".")
    module = model
    for name in above:
        if name not in module._modules:
            module.add_module(name, nn.Module())
        module = module._modules[name]  # type: ignore[assignment]
    module.add_module(last, turn)
    return turn


def _parameter(weight: UnitWeight, element_bytes: int) -> nn.Parameter:
    numel = max(1, round(weight.numel * element_bytes / BYTES))
    return nn.Parameter(torch.zeros(numel), requires_grad=weight.trainable)


def _home(units: Units, weight: UnitWeight) -> int | None:
    """Return the unit that all modules of a parameter are in; None where there is none."""
    for number, unit in enumerate(units.units):
        if all(module == unit.module or contains(unit.module, module) for module in weight.modules):
            return number
    return None


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
