"""What the kernels are given, against what they expect: every misfit is a ValueError that names the argument."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from runtime.kernels.state import MAX_ELEMENTS, Layout, TopkState

FLOATS = (torch.float32, torch.bfloat16)
MOST_RANKS = 512
"""See unpack.cu."""


def check_selection(
    gradients: Sequence[Tensor], residuals: Sequence[Tensor], new_residuals: Sequence[Tensor], values: Tensor,
    indices: Tensor, state: TopkState, swapped: Tensor | None, *, plural: bool,
) -> None:  # fmt: skip
    device, s = state.memory.device, "s" if plural else ""
    elements = state.layout.elements if plural else (state.elements,)
    for name, tensors in (
        (f"gradient{s}", gradients),
        (f"residual{s}", residuals),
        (f"new_residual{s}", new_residuals),
    ):
        if len(tensors) != len(elements):
            raise ValueError(f"{name}: found {len(tensors)} tensors; expected {len(elements)}, one for each segment")
        for i, (tensor, count) in enumerate(zip(tensors, elements, strict=True)):
            label = f"{name}[{i}]" if plural else name
            dtype = tensors[0].dtype if name.startswith("gradient") else residuals[0].dtype
            _check_float(label, dtype)
            check_tensor(label, tensor, count, dtype, device)
    check_tensor("values", values, state.k, residuals[0].dtype, device)
    check_tensor("indices", indices, state.k, torch.int32, device)
    if swapped is not None:
        check_tensor("swapped", swapped, 1, torch.int32, device)


def check_tensor(name: str, tensor: Tensor, elements: int, dtype: torch.dtype, device: torch.device) -> None:
    if tensor.device != device:
        raise ValueError(f"{name}: found a tensor on {tensor.device}; expected {device}, where the state is")
    if tensor.dtype != dtype:
        raise ValueError(f"{name}: found {tensor.dtype}; expected {dtype}")
    if tensor.shape != (elements,):
        raise ValueError(f"{name}: found the shape {tuple(tensor.shape)}; expected ({elements},)")
    if not tensor.is_contiguous():
        raise ValueError(f"{name}: found the stride {tensor.stride()}; expected contiguous memory: `.contiguous()`")


def _check_float(name: str, dtype: torch.dtype) -> None:
    if dtype not in FLOATS:
        raise ValueError(f"{name}: found {dtype}; expected {' or '.join(map(str, FLOATS))}")


def check_memory(layout: Layout, memory: Tensor) -> None:
    if memory.dtype != torch.int64 or memory.numel() * 8 != layout.size_bytes or not memory.is_contiguous():
        raise ValueError(
            f"state: found a memory of {memory.numel()} × {memory.dtype}; expected {layout.size_bytes // 8} × "
            f"torch.int64, as `make_state` makes it for these segments"
        )


def check_apart(named: Sequence[tuple[str, Tensor]]) -> None:
    """Raise where two tensors share memory; names the second one of a pair."""
    spans = sorted(
        (tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size(), name)
        for name, tensor in named
        if tensor.numel()
    )
    for (_, end, one), (start, _, other) in itertools.pairwise(spans):
        if start < end:
            raise ValueError(f"{other}: found memory that {one} uses, too; expected memory of its own")


def check_unpack(sums: Tensor, values: Tensor, indices: Tensor) -> None:
    device = sums.device
    _check_float("sums", sums.dtype)
    _check_float("values", values.dtype)
    check_tensor("sums", sums, sums.numel(), sums.dtype, device)
    if sums.numel() > MAX_ELEMENTS:
        raise ValueError(f"sums: found {sums.numel()} elements; expected at most {MAX_ELEMENTS}")
    for name, tensor, dtype in (("values", values, values.dtype), ("indices", indices, torch.int32)):
        if tensor.device != device:
            raise ValueError(f"{name}: found a tensor on {tensor.device}; expected {device}, where sums are")
        if tensor.dtype != dtype:
            raise ValueError(f"{name}: found {tensor.dtype}; expected {dtype}")
        if tensor.dim() != 2 or tensor.shape != values.shape:
            raise ValueError(
                f"{name}: found the shape {tuple(tensor.shape)}; expected (ranks, k), the same for values and indices"
            )
        if tensor.shape[1] > 1 and tensor.stride(1) != 1:
            raise ValueError(f"{name}: found the strides {tensor.stride()}; expected each row to be contiguous")
    if values.shape[0] > MOST_RANKS:
        raise ValueError(f"values: found {values.shape[0]} ranks; expected at most {MOST_RANKS}")


def check_unpack_memory(sums: Tensor, values: Tensor, indices: Tensor) -> None:
    """Raise where `sums` shares memory with a message; messages may lie among one another."""
    start, end = sums.data_ptr(), sums.data_ptr() + sums.numel() * sums.element_size()
    for name, tensor in (("values", values), ("indices", indices)):
        if not tensor.numel():
            continue
        last = (tensor.shape[0] - 1) * tensor.stride(0) + tensor.shape[1]
        if tensor.data_ptr() < end and start < tensor.data_ptr() + last * tensor.element_size():
            raise ValueError(f"sums: found memory that {name} uses, too; expected memory of its own")
