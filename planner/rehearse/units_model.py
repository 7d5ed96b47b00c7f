"""A model of units that are timed waits: parameters, memory and times of a profile's units, and no computation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from planner.documents.units import Unit, Units, UnitWeight
from planner.fsdp2.program import Shape, first_leaf
from planner.rehearse.accelerator import SEED, Accelerator, holder_of
from runtime.plan.fully_sharded import contains
from runtime.torch_compat import is_sharded

BYTES = 4
"""Bytes of an element, for any dtype of the profile: bytes are what is emulated."""
RATE = 1e-3
"""Learning rate of the update."""


class _Acted(torch.autograd.Function):
    """Forward: a wait, and memory that backward frees. Backward: a wait, after which parameters have gradients."""

    @staticmethod
    def forward(ctx: Any, chain: Tensor, turn: _Turn, *parameters: Tensor) -> Tensor:
        kept = torch.empty(turn.unit.activation_bytes, dtype=torch.uint8)
        working = torch.empty(turn.unit.forward_working_bytes, dtype=torch.uint8)
        ctx.save_for_backward(kept)
        ctx.turn, ctx.wanted = turn, ctx.needs_input_grad[2:]
        turn.device.run(turn.unit.forward_us)
        del working
        return chain.clone()

    @staticmethod
    def backward(ctx: Any, *of_chain: Tensor) -> tuple[Tensor | None, ...]:
        turn = ctx.turn
        gradients = [drawn if wanted else None for drawn, wanted in zip(turn.gradients, ctx.wanted, strict=True)]
        # Autograd copies gradients when this has returned; they are as large here already.
        gradient_bytes = sum(drawn.nbytes for drawn in gradients if drawn is not None)
        working = torch.empty(gradient_bytes + max(0, turn.unit.backward_working_bytes), dtype=torch.uint8)
        turn.device.run(turn.unit.backward_us)
        del working
        return of_chain[0], None, *gradients


class _Turn(nn.Module):
    """A unit. Parameters that belong to modules above it come to no hook of its own, so it looks them up there."""

    def __init__(self, unit: Unit, device: Accelerator) -> None:
        super().__init__()
        self.unit, self.device = unit, device
        self.gradients: list[Tensor] = []
        self._used: list[tuple[nn.Module, str]] = []

    def use(self, owner: nn.Module, name: str, drawn: Tensor) -> None:
        """Make this unit's backward give a parameter its gradient."""
        self._used.append((owner, name))
        self.gradients.append(drawn)

    def forward(self, chain: Tensor) -> Tensor:
        """Take the unit's time and memory, and pass the chain on."""
        parameters = [getattr(owner, name) for owner, name in self._used]
        acted: Tensor = _Acted.apply(chain, self, *parameters)  # type: ignore[no-untyped-call]
        return acted


class UnitsModel(nn.Module):
    """A model of a profile's units (already scaled), each under its path, that takes their times and their memory.

    A unit holds the parameters that no module outside of it has; others are the model's own. Gradients are drawn once,
    different ones on each rank. Units pass one number on.
    """

    def __init__(self, units: Units, rank: int, ranks: int, dilate: float = 1.0) -> None:
        super().__init__()
        self.device = Accelerator(dilate)
        self._update_us, self._loss_bytes = units.update_us / ranks, units.loss_working_bytes
        self._first_requires_grad = units.units[0].input_requires_grad
        self._order = [_Turn(unit, self.device) for unit in units.units]
        for turn in self._order:
            *above, last = turn.unit.module.split(".")
            holder_of(self, above, nn.Module).add_module(last, turn)
        shape, generator = Shape.of(units, ranks), torch.Generator().manual_seed(SEED + 1 + rank)
        for number, weight in enumerate(units.weights):
            turn = self._order[first_leaf(shape, weight.modules)]
            name, numel = f"weight_{number}", max(1, round(weight.numel * units.element_bytes / BYTES))
            parameter = nn.Parameter(torch.zeros(numel), requires_grad=weight.trainable)
            owner = next((unit for unit in self._order if _holds(unit, weight)), self)
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
            pairs = [(_local(p), _local(p.grad)) for p in self.parameters() if p.grad is not None]
            if pairs:
                torch._foreach_add_([part for part, _ in pairs], [gradient for _, gradient in pairs], alpha=-RATE)
        for parameter in self.parameters():
            parameter.grad = None
        self.device.run_since_met(self._update_us)

    def local_bytes(self) -> int:
        """Return the bytes of this rank's parts of parameters."""
        return sum(_local(parameter).untyped_storage().nbytes() for parameter in self.parameters())

    def local_pointers(self) -> set[int]:
        """Return the addresses of this rank's parts of parameters."""
        return {_local(parameter).untyped_storage().data_ptr() for parameter in self.parameters()}


def _holds(turn: _Turn, weight: UnitWeight) -> bool:
    """Return whether all modules of a parameter are in a unit."""
    path = turn.unit.module
    return all(module == path or contains(path, module) for module in weight.modules)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
