"""Units of an optimizer's work: elements, whole parameters, or not known; and operators without state.

Everything that divides an optimizer's step over ranks reads it here: parts of elements (`runtime.sharded`), whole
parameters on owners, and operators on owners (`runtime.optimizers.shared_operator`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from runtime.torch_compat import apply_orthogonalized, orthogonalize, orthogonalize_replaced

Unit = Literal["element", "matrix"]
"""`element`: any part of a parameter can be updated by itself. `matrix`: a whole parameter, of any number of
dimensions, can be updated without the others."""

ELEMENTWISE: tuple[type[torch.optim.Optimizer], ...] = (
    torch.optim.ASGD, torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW,
    torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.SGD,
)  # fmt: skip
"""Elementwise optimizers of torch. Derived ones may not be; other classes declare it with `elementwise = True`."""

BY_MATRIX: Mapping[str, str] = {
    "torch.optim.Muon": "orthogonalizes whole matrices",
    "pytorch_optimizer.optimizer.soap.SOAP": "keeps preconditioners and eigenbases of whole matrices",
    "pytorch_optimizer.optimizer.shampoo.Shampoo": "keeps preconditioners of whole matrices",
    "pytorch_optimizer.optimizer.shampoo.ScalableShampoo": "keeps preconditioners of whole matrices",
}
"""Optimizers whose unit is a whole parameter, by module and class, with what they do with it. Derived ones may have
another; other classes declare it with `unit = "matrix"`."""


def kind_name(optimizer: torch.optim.Optimizer) -> str:
    """Return an optimizer's class with its module, as `BY_MATRIX` names it."""
    kind = type(optimizer)
    if kind is torch.optim.Muon:  # whose module's name differs between versions
        return "torch.optim.Muon"
    return f"{kind.__module__}.{kind.__qualname__}"


def unit_of(optimizer: torch.optim.Optimizer) -> Unit | None:
    """Return the unit of an optimizer's work, or None where it is not known."""
    kind = type(optimizer)
    if kind in ELEMENTWISE or getattr(kind, "elementwise", False) is True:
        return "element"
    if kind_name(optimizer) in BY_MATRIX or getattr(kind, "unit", None) == "matrix":
        return "matrix"
    return None


def coarsest_unit(optimizers: Iterable[torch.optim.Optimizer]) -> Unit | None:
    """Return the unit of the work of several optimizers together; None where one is not known, or there are none."""
    units = {unit_of(one) for one in optimizers}
    if None in units or not units:
        return None
    return "matrix" if "matrix" in units else "element"


Compute = Callable[[Tensor, Mapping[str, Any]], Tensor]
"""An operator: from a matrix and the options of its parameter group to the result, without state."""


class Operator(Protocol):
    """The heavy part without state of an optimizer's `step`, which calls it once for each parameter with a gradient."""

    @property
    def keeps_inputs(self) -> bool:
        """True if `step` writes to no parameter and no gradient before it calls the operator."""

    @property
    def batched(self) -> bool:
        """True if `compute` takes a stack of matrices of one group, (b, m, n), too."""

    @property
    def update_dtype(self) -> torch.dtype | None:
        """Dtype of results that `apply` takes; None where it does not say how they are applied."""

    def apply(self, parameter: Tensor, update: Tensor, group: Mapping[str, Any]) -> None:
        """Update a parameter in place by a result, as the step does, without gradient and state."""

    def compute(self, matrix: Tensor, group: Mapping[str, Any]) -> Tensor:
        """Return the operator's result."""

    def replaced(self, function: Compute) -> AbstractContextManager[None]:
        """Return a context in which `step` calls `function` in its place."""


class OwnOperator:
    """The method `operator` of an optimizer's class."""

    keeps_inputs = False

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self.batched = getattr(type(optimizer), "batched", False) is True

    @property
    def update_dtype(self) -> torch.dtype | None:
        found: torch.dtype | None = getattr(self._optimizer, "update_dtype", None)
        return found

    def apply(self, parameter: Tensor, update: Tensor, group: Mapping[str, Any]) -> None:
        type(self._optimizer).apply(self._optimizer, parameter, update, group)  # type: ignore[attr-defined]

    def compute(self, matrix: Tensor, group: Mapping[str, Any]) -> Tensor:
        result: Tensor = type(self._optimizer).operator(self._optimizer, matrix, group)  # type: ignore[attr-defined]
        return result

    @contextmanager
    def replaced(self, function: Compute) -> Iterator[None]:
        attributes = vars(self._optimizer)
        attributes["operator"] = function
        try:
            yield
        finally:
            attributes.pop("operator", None)


class NewtonSchulz:
    """The orthogonalization of `torch.optim.Muon`, in torch's own arithmetic."""

    keeps_inputs = True
    batched = True
    update_dtype = torch.bfloat16

    def apply(self, parameter: Tensor, update: Tensor, group: Mapping[str, Any]) -> None:
        apply_orthogonalized(parameter, update, group)

    def compute(self, matrix: Tensor, group: Mapping[str, Any]) -> Tensor:
        return orthogonalize(matrix, group["ns_coefficients"], group["ns_steps"], group["eps"])

    @contextmanager
    def replaced(self, function: Compute) -> Iterator[None]:
        def called(matrix: Tensor, coefficients: Any, steps: int, eps: float) -> Tensor:
            return function(matrix, {"ns_coefficients": coefficients, "ns_steps": steps, "eps": eps})

        with orthogonalize_replaced(called):
            yield


def operator_of(optimizer: torch.optim.Optimizer) -> Operator | None:
    """Return the stateless operator of an optimizer: a method `operator(self, matrix, group)` of a class with
    `unit = "matrix"`, or Newton–Schulz of `torch.optim.Muon`; None where there is none.
    """
    if type(optimizer) is torch.optim.Muon:
        return NewtonSchulz()
    declared = getattr(type(optimizer), "unit", None) == "matrix"
    return OwnOperator(optimizer) if declared and callable(getattr(type(optimizer), "operator", None)) else None


DRAWS = 2
"""Random stacks that are compared, too: gradients may be zeros at first, whose bits are equal in any order of sums."""


@torch.no_grad()
def stack_difference(operator: Operator, matrices: Sequence[Tensor], options: Sequence[Mapping[str, Any]]) -> float:
    """Return how far the results of a stack are from those of its matrices one at a time, relative to the largest
    element of these: 0.0 where all bits are equal, infinity where a stack has no such results.
    """
    generator, largest = torch.Generator(matrices[0].device).manual_seed(0), 0.0
    for draw in range(1 + DRAWS):
        given = [torch.empty_like(one).normal_(generator=generator) if draw else one for one in matrices]
        alone = torch.stack([operator.compute(one.clone(), of) for one, of in zip(given, options, strict=True)])
        try:
            stack = operator.compute(torch.stack(given), options[0])
        except Exception:  # ranks compare what each has found
            return math.inf
        if (stack.shape, stack.dtype) != (alone.shape, alone.dtype):
            return math.inf
        if not torch.equal(*(one.contiguous().view(torch.uint8) for one in (stack, alone))):
            apart = float((stack - alone).abs().max() / alone.abs().max())
            largest = max(largest, apart if apart > 0.0 else math.inf)  # signs of zeros, or no numbers
    return largest
