"""Everything that attach has to know of a model, and every reason against attaching it, found in one visit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Self, cast

import torch
from torch import nn

from runtime.checks.backend import check_backend
from runtime.checks.modes import asked_modes
from runtime.checks.optimizer import check_optimizer, check_owners
from runtime.checks.plan import (
    check_attached,
    check_buffers,
    check_model,
    check_plan,
    check_switch,
    dtype_name,
    parameters_fingerprint,
    trainable_parameters,
)
from runtime.comm.world import World
from runtime.core.compiled import check_compile, check_cuts
from runtime.core.members import exchanged_parameters, named_buffers, named_parameters
from runtime.core.options import AttachOptions
from runtime.errors import InputError
from runtime.optimizers.kinds import inner_optimizers
from runtime.plan import Plan
from runtime.plan.names import canonical_name, fingerprint
from runtime.sparse.learning_rate import check_residual_unit


@dataclass(frozen=True)
class ModelFacts:
    """A model as ranks compare it."""

    parameters: dict[str, nn.Parameter]
    """Parameters that ranks train together, by canonical name; none if there is a `problem`."""
    fingerprint: str
    """Fingerprint of their names, shapes and dtypes."""
    problem: str | None
    """Reason why no plan can drive the model, or None."""
    holders: tuple[str, ...] = ()
    """Optimizer and group of each parameter, where ranks share the optimizer's work."""

    @classmethod
    def of(cls, model: nn.Module, also: Iterable[nn.Parameter] = ()) -> Self:
        """Collect them; `also` are parameters that count as trainable."""
        try:
            problem = check_model(model)
            parameters = trainable_parameters(model, also) if problem is None else {}
        except InputError as error:
            problem, parameters = str(error), {}
        if problem is None and not parameters:
            problem = "the model has no trainable parameter; expected at least one with requires_grad"
        return cls(parameters, parameters_fingerprint(parameters), problem)

    @property
    def device(self) -> torch.device:
        return next(iter(self.parameters.values())).device


def check_attach(
    model: nn.Module, optimizer: object, plan: Plan | None, options: AttachOptions, world: World,
    attached: Iterable[nn.Module],
) -> tuple[ModelFacts, str | None]:  # fmt: skip
    """Return what the model is, and the first reason on this rank why it, its optimizer or the plan cannot be attached.

    Args:
        model, optimizer, options: as `attach` has them.
        plan: also one in phases; None where it is made once ranks have agreed on the model.
        world: the ranks that train together.
        attached: the models that are attached already.
    """
    facts, scale = ModelFacts.of(model), cast(object, options.loss_scale)  # of any type, where callers are not checked

    def reasons() -> Iterator[str | None]:
        yield check_attached(model, attached)
        yield check_owners(model, optimizer)
        if scale is not None and not callable(scale):
            yield f"loss_scale: found {scale!r}, expected a function such as scaler.get_scale; pass that"
        yield check_residual_unit(options.residual_unit, inner_optimizers(optimizer))
        if options.weight is not None and not callable(weight := cast(object, options.weight)):
            yield f"weight: found {weight!r}, expected a function that returns a number of samples; pass that"
        if options.broadcast_buffers and world.ranks > 1:
            yield check_buffers(model)
        yield check_compile(model, options.compile)
        yield facts.problem
        for number, phase in enumerate(() if plan is None else plan.all_phases):
            problem = check_executable(phase, model, optimizer, facts.parameters, world, options)
            if number and (problem := problem or check_switch(phase, 0, 0)):
                problem = f"phase {number} of the plan: {problem}"
            yield problem

    try:
        return facts, next(filter(None, reasons()), None)
    except InputError as error:
        return facts, str(error)


def check_executable(
    plan: Plan, model: nn.Module, optimizer: object, parameters: Mapping[str, nn.Parameter], world: World,
    options: AttachOptions,
) -> str | None:  # fmt: skip
    """Return the first reason on this rank why a session of this model and optimizer cannot train by a plan, or None;
    `parameters` are those that ranks train together, by canonical name.
    """
    mode = asked_modes(plan)[0]
    return (
        check_optimizer(plan, optimizer, parameters)
        or (mode.residual_reason if options.residual_unit == "update" else None)
        or (mode.weight_reason if options.weight is not None else None)
        or check_cuts(model, plan.cuts)
        or mode.attach_reason
        or check_plan(parameters, plan, world.ranks)
        or check_backend(plan, world, next(iter(parameters.values())).device)
    )


def form_of_followed(model: nn.Module, *, buffers: bool) -> str:
    """Return names, shapes and dtypes of what follows rank 0 at attach, as a fingerprint; `buffers`: if those do."""
    named = [*named_parameters(model), *(named_buffers(model) if buffers else ())]
    if any(isinstance(tensor, nn.UninitializedParameter | nn.UninitializedBuffer) for _, tensor in named):
        return ""  # refused by name
    return fingerprint((canonical_name(name), tuple(tensor.shape), dtype_name(tensor.dtype)) for name, tensor in named)


def device_kinds(model: nn.Module) -> str:
    """Return the kinds of device that the model's parameters are on."""
    return ",".join(sorted({parameter.device.type for parameter in exchanged_parameters(model)}))
