"""Checks of what kernels are given: everything that does not fit is a ValueError that names the argument."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from runtime.kernels.state import MAX_ELEMENTS, Layout, TopkState

FLOATS = (torch.float32, torch.bfloat16)
MOST_RANKS = 512
"""Most messages that unpack.cu adds up."""
Pair = tuple[Tensor, Tensor]
"""(residual, new residual), or (values, indices)."""
RESIDUALS = ("residual", "new_residual")


def check_selection(gradient: Tensor, residuals: Pair, out: Pair, state: TopkState, swapped: Tensor | None) -> None:
    """Raise ValueError if a tensor of a selection does not fit the state's segments."""
    elements, device, dtype = state.elements, state.memory.device, residuals[0].dtype
    check_float("gradient", gradient.dtype)
    check_float("residual", dtype)
    check_tensor("gradient", gradient, elements, gradient.dtype, device)
    check_residuals(residuals, swapped, elements, dtype, device)
    check_tensor("values", out[0], state.k, dtype, device)
    check_tensor("indices", out[1], state.k, torch.int32, device)


def check_residuals(
    residuals: Pair | None, swapped: Tensor | None, elements: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Raise ValueError if a residual, the new one or the flag that exchanges them does not fit."""
    for name, tensor in zip(RESIDUALS, residuals or (), strict=False):
        check_tensor(name, tensor, elements, dtype, device)
    if swapped is not None:
        check_tensor("swapped", swapped, 1, torch.int32, device)


def check_tensor(name: str, tensor: Tensor, elements: int, dtype: torch.dtype, device: torch.device) -> None:
    """Raise ValueError if a tensor is not 1-D of so many elements, of the dtype, on the device and contiguous."""
    _check_kind(name, tensor, dtype, device)
    if tensor.shape != (elements,):
        raise ValueError(f"{name}: found the shape {tuple(tensor.shape)}; expected ({elements},)")
    if not tensor.is_contiguous():
        raise ValueError(f"{name}: found the stride {tensor.stride()}; expected contiguous memory: `.contiguous()`")


def _check_kind(name: str, tensor: Tensor, dtype: torch.dtype, device: torch.device) -> None:
    if tensor.device != device:
        raise ValueError(f"{name}: found a tensor on {tensor.device}; expected {device}, where the others are")
    if tensor.dtype != dtype:
        raise ValueError(f"{name}: found {tensor.dtype}; expected {dtype}")


def check_float(name: str, dtype: torch.dtype) -> None:
    """Raise ValueError if a dtype is none that the kernels compute with."""
    if dtype not in FLOATS:
        raise ValueError(f"{name}: found {dtype}; expected {' or '.join(map(str, FLOATS))}")


def check_memory(layout: Layout, memory: Tensor) -> None:
    """Raise ValueError if a state's memory is not that of its layout."""
    if memory.dtype != torch.int64 or memory.numel() * 8 != layout.size_bytes or not memory.is_contiguous():
        raise ValueError(
            f"state: found a memory of {memory.numel()} × {memory.dtype}; expected {layout.size_bytes // 8} × "
            f"torch.int64, as `make_state` makes it for these segments"
        )


def check_apart(named: Sequence[tuple[str, Tensor]]) -> None:
    """Raise ValueError if two tensors share memory; names the second one of a pair."""
    spans = sorted(
        (tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size(), name)
        for name, tensor in named
        if tensor.numel()
    )
    for (_, end, one), (start, _, other) in itertools.pairwise(spans):
        if start < end:
            raise ValueError(f"{other}: found memory that {one} uses, too; expected memory of its own")


def check_unpack(sums: Tensor, values: Tensor, indices: Tensor) -> None:
    """Raise ValueError if sums and messages do not fit one another."""
    check_float("sums", sums.dtype)
    check_float("values", values.dtype)
    check_tensor("sums", sums, sums.numel(), sums.dtype, sums.device)
    if sums.numel() > MAX_ELEMENTS:
        raise ValueError(f"sums: found {sums.numel()} elements; expected at most {MAX_ELEMENTS}")
    for name, tensor, dtype in (("values", values, values.dtype), ("indices", indices, torch.int32)):
        _check_kind(name, tensor, dtype, sums.device)
        if tensor.dim() != 2 or tensor.shape != values.shape:
            raise ValueError(
                f"{name}: found the shape {tuple(tensor.shape)}; expected (ranks, k), the same for values and indices"
            )
        if tensor.shape[1] > 1 and tensor.stride(1) != 1:
            raise ValueError(f"{name}: found the strides {tensor.stride()}; expected each row to be contiguous")
    if values.shape[0] > MOST_RANKS:
        raise ValueError(f"values: found {values.shape[0]} ranks; expected at most {MOST_RANKS}")


def check_unpack_memory(sums: Tensor, values: Tensor, indices: Tensor) -> None:
    """Raise ValueError if `sums` shares memory with a message; messages may overlap one another."""
    start, end = sums.data_ptr(), sums.data_ptr() + sums.numel() * sums.element_size()
    for name, tensor in (("values", values), ("indices", indices)):
        if not tensor.numel():
            continue
        last = (tensor.shape[0] - 1) * tensor.stride(0) + tensor.shape[1]
        if tensor.data_ptr() < end and start < tensor.data_ptr() + last * tensor.element_size():
            raise ValueError(f"sums: found memory that {name} uses, too; expected memory of its own")
