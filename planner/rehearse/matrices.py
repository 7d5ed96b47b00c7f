"""A matrix optimizer of an accelerator that is a timed wait: its operator takes the profile's time, and gives zeros."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from planner.documents.profile import OperatorProfile

if TYPE_CHECKING:
    from planner.rehearse.accelerator import Accelerator

RESULTS = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}
"""Dtype of a result by the bytes of an element."""


class WaitingMatrices(torch.optim.Optimizer):
    """An optimizer with the operator of a profile; it moves no weights, as orthogonalized zeros would not."""

    unit = "matrix"
    batched = True

    def __init__(self, device: Accelerator, operator: OperatorProfile, named: Mapping[str, nn.Parameter]) -> None:
        """`named`: parameters by name, of which it takes those that the profile's operator is of."""
        groups = []
        for shape in operator.shapes:
            parameters = [named[name] for name in shape.parameters]
            item_bytes = round(shape.result_bytes / max(1, parameters[0].numel()))
            dtype = RESULTS.get(item_bytes, torch.bfloat16)
            times = {"operator_us": shape.operator_us, "saved_us": shape.saved_us}
            groups.append({"params": parameters, "dtype": dtype, **times})
        super().__init__(groups, {"lr": 1e-2})
        self._accelerator = device
        dtypes = {group["dtype"] for group in self.param_groups}
        self.update_dtype = dtypes.pop() if operator.applied and len(dtypes) == 1 else None

    def operator(self, matrix: Tensor, group: Mapping[str, Any]) -> Tensor:
        """Wait for the operator's time, of a matrix or a stack of some; return zeros."""
        count = len(matrix) if matrix.dim() > group["params"][0].dim() else 1
        self._accelerator.run(count * group["operator_us"] - (count - 1) * group["saved_us"])
        return torch.zeros_like(matrix, dtype=group["dtype"])

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update once."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.apply(parameter, self.operator(parameter.grad, group), group)

    def apply(self, parameter: Tensor, update: Tensor, group: Mapping[str, Any]) -> None:
        """Update a parameter in place by a result."""
        parameter.add_(update, alpha=-group["lr"])


def split_named(
    operator: OperatorProfile | None, named: Sequence[tuple[str, nn.Parameter]]
) -> tuple[dict[str, nn.Parameter], list[nn.Parameter]]:
    """Return the parameters with an operator by name, and the others."""
    owned = set(operator.parameters) if operator is not None else set()
    return {name: p for name, p in named if name in owned}, [p for name, p in named if name not in owned]
