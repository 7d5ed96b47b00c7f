"""Where a state's segments lie in memory: told to the device when that has changed, and not in every step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from runtime.kernels.checks import check_apart
from runtime.kernels.state import POINTED, WORDS_OF_SEGMENT, TopkState


def point_to(
    state: TopkState, gradients: Sequence[Tensor], residuals: Sequence[Tensor], new_residuals: Sequence[Tensor],
    values: Tensor, indices: Tensor,
) -> tuple[int, int, int]:  # fmt: skip
    """Addresses that the table of the state's segments counts from: of one flat buffer, or 0 for many tensors.

    Raises:
        ValueError: tensors share memory, or they have moved while a CUDA graph is captured.
    """
    key = state.memory.data_ptr()
    tensors = (*gradients, *residuals, *new_residuals, values, indices)
    addresses = tuple(tensor.data_ptr() for tensor in tensors)
    addressed, before = POINTED.get(key, (False, ()))
    flat = len(gradients) == 1
    if before != addresses or addressed == flat:
        _check(state, gradients, residuals, new_residuals, values, indices)
        if addressed == flat or not flat:
            _write(state, None if flat else (gradients, residuals, new_residuals))
        POINTED[key] = (not flat, addresses)
    return (addresses[0], addresses[1], addresses[2]) if flat else (0, 0, 0)


def _check(
    state: TopkState, gradients: Sequence[Tensor], residuals: Sequence[Tensor], new_residuals: Sequence[Tensor],
    values: Tensor, indices: Tensor,
) -> None:  # fmt: skip
    named = [("state", state.memory), ("values", values), ("indices", indices)]
    for name, tensors in (("gradient", gradients), ("residual", residuals), ("new_residual", new_residuals)):
        many = len(tensors) > 1
        named += [(f"{name}s[{i}]" if many else name, tensor) for i, tensor in enumerate(tensors)]
    check_apart(named)


def _write(state: TopkState, tensors: Sequence[Sequence[Tensor]] | None) -> None:
    memory = state.memory
    places = None
    if tensors is not None:
        rows = zip(*tensors, strict=True)
        places = [tuple(tensor.data_ptr() // tensor.element_size() for tensor in row) for row in rows]
    table = state.layout.table(places)
    here = state.part("segments").view(torch.int64).view(-1, WORDS_OF_SEGMENT)
    if memory.device.type != "cuda":
        here.copy_(table)
        return
    if torch.cuda.is_current_stream_capturing():
        raise ValueError(
            "gradients: found tensors that have moved since the last call, while a CUDA graph is captured; expected "
            "those of a call before the capture: make one with the same tensors first"
        )
    here.copy_(table.pin_memory(), non_blocking=True)
