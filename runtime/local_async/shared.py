"""A model whose tensors lie in memory that several processes share, and one updater's snapshots of it.

All tensors lie in one run of bytes: for each dtype the trained parameters, then the buffers that are averaged (a *flat*
of that dtype), then what is neither: frozen parameters, and buffers of whole numbers; last the probe of races. Thus a
snapshot, a message and an addition are one operation for each dtype.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from runtime.comm.shared_memory import SharedMemory
from runtime.core.buckets import is_dense, view_of
from runtime.errors import EnvironmentFailure, InputError
from runtime.plan.names import canonical_name

ALIGNMENT = 64
"""Bytes; so that vectorized kernels treat a view as they treat a tensor of its own."""
MOST_PROBED = 2**16
"""Largest number of elements of the probe of races, to which each update adds."""

Role = Literal["trained", "averaged", "kept"]


@dataclass(frozen=True)
class Slot:
    """One tensor's place in the shared bytes."""

    name: str
    role: Role
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    start_bytes: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.name} ({str(self.dtype).removeprefix('torch.')} {self.shape}, {self.role})"


@dataclass(frozen=True)
class Flat:
    """The tensors of one dtype that are averaged: bytes [start, end), of which [start, trained_end) are parameters."""

    dtype: torch.dtype
    start_bytes: int
    trained_end_bytes: int
    end_bytes: int

    def trained(self, memory: Tensor) -> Tensor:
        return memory[self.start_bytes : self.trained_end_bytes].view(self.dtype)


@dataclass(frozen=True)
class Layout:
    """Places of a model's tensors; equal for equal models."""

    slots: tuple[Slot, ...]
    flats: tuple[Flat, ...]
    probe_elements: int
    """Elements (int32) of the probe of races (`races.py`), which ends the bytes."""
    size_bytes: int

    @classmethod
    def of(cls, model: nn.Module) -> Layout:
        """Place a model's tensors. Raises InputError, which names it, where a tensor cannot be shared."""
        roles: list[_Roles] = [
            (canonical_name(name), parameter, "trained" if parameter.requires_grad else "kept")
            for name, parameter in model.named_parameters()
        ]
        for name, buffer in model.named_buffers():
            floating = buffer.is_floating_point() or buffer.is_complex()
            roles.append((canonical_name(name), buffer, "averaged" if floating else "kept"))
        _refuse_unshareable(roles)
        slots: list[Slot] = []
        flats: list[Flat] = []
        end = 0
        averaged = {tensor.dtype: None for _, tensor, role in roles if role != "kept"}
        for dtype in averaged:
            start = end
            end = _place((r for r in roles if r[1].dtype == dtype and r[2] == "trained"), slots, end)
            trained_end = end
            end = _place((r for r in roles if r[1].dtype == dtype and r[2] == "averaged"), slots, end)
            flats.append(Flat(dtype, start, trained_end, end))
        end = _place((r for r in roles if r[2] == "kept"), slots, end)
        probed = min(MOST_PROBED, sum(slot.numel for slot in slots if slot.role == "trained"))
        return cls(tuple(slots), tuple(flats), probed, end + probed * torch.int32.itemsize)

    def probe(self, memory: Tensor) -> Tensor:
        """Return the probe in the shared bytes. Shape (probe_elements,), int32."""
        start = self.size_bytes - self.probe_elements * torch.int32.itemsize
        return memory[start : self.size_bytes].view(torch.int32)

    def difference(self, other: Layout) -> str | None:
        """Return how another layout differs, in words; None where it does not."""
        for mine, theirs in zip(self.slots, other.slots, strict=False):
            if mine != theirs:
                return f"{theirs} in place of {mine}"
        if len(self.slots) != len(other.slots):
            return f"{len(other.slots)} tensors in place of {len(self.slots)}"
        return None


_Roles = tuple[str, Tensor, Role]


def _place(roles: Iterable[_Roles], slots: list[Slot], end: int) -> int:
    """Append slots from byte `end` on; returns where they end."""
    for name, tensor, role in roles:
        slots.append(Slot(name, role, tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), end))
        end += -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
    return end


def _refuse_unshareable(roles: list[_Roles]) -> None:
    """Raise where a tensor of its own cannot stand for one of the model's."""
    spans: list[tuple[int, int, int, str]] = []
    for name, tensor, role in roles:
        why = _unshareable(tensor, role)
        if why is not None:
            raise InputError(f"{name} {why}; updaters share the model's tensors, and cannot share this one")
        start = int(tensor.storage_offset()) * tensor.element_size()
        reach = int(sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))) + 1
        if tensor.numel():
            storage = tensor.untyped_storage().data_ptr()
            spans.append((storage, start, start + reach * tensor.element_size(), name))
    for (storage, _, end, name), (other, start, _, following) in zip(sorted(spans), sorted(spans)[1:], strict=False):
        if storage == other and start < end:
            raise InputError(
                f"{following} lies in the memory of {name}, and as tensors that updaters share they would not; "
                f"expected tensors with memory of their own: copy one (clone()), or register one tensor twice"
            )


def _unshareable(tensor: Tensor, role: Role) -> str | None:
    if tensor.layout != torch.strided or tensor.is_quantized:
        return f"is {'quantized' if tensor.is_quantized else 'sparse'}; expected a dense tensor"
    if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer):
        return f"is a {type(tensor).__name__}; expected a torch.Tensor"
    if tensor.device.type not in ("cpu", "cuda"):
        return f"is on the device {tensor.device}; expected cpu or cuda"
    if role != "kept" and not is_dense(tensor):
        return "has elements that share memory, or gaps between them; expected a dense tensor: call contiguous() on it"
    return None


class SharedModel:
    """A model with its tensors in shared bytes, in one of the processes that share them."""

    def __init__(self, model: nn.Module, layout: Layout, memory: Tensor) -> None:
        """Make the model's tensors views of the bytes (`memory`, 1-D, uint8, on its device), whose values they get."""
        self.model, self.layout, self.memory = model, layout, memory
        self.flats = [memory[flat.start_bytes : flat.end_bytes].view(flat.dtype) for flat in layout.flats]
        self.probe = layout.probe(memory)
        places = {slot.name: slot for slot in layout.slots}
        self._views: dict[str, Tensor] = {}
        self.parameters: dict[str, nn.Parameter] = {}
        """The trained ones by canonical name."""
        for name, parameter in model.named_parameters():
            short = canonical_name(name)
            self._views[short] = _view(memory, places[short], parameter)
            parameter.data = self._views[short]
            if places[short].role == "trained":
                self.parameters[short] = parameter
        self._buffers: list[tuple[nn.Module, str, str]] = []
        for name, module, key, buffer in list(_buffer_places(model)):
            if name not in self._views:
                self._views[name] = _view(memory, places[name], buffer)
            module._buffers[key] = self._views[name]
            self._buffers.append((module, key, name))

    def follow_buffers(self) -> None:
        """Copy buffers that a forward has replaced into the shared ones, which take their place again."""
        for module, key, name in self._buffers:
            buffer, view = module._buffers[key], self._views[name]
            if buffer is not view and buffer is not None:
                view.copy_(buffer)
                module._buffers[key] = view

    @property
    def kept(self) -> list[Tensor]:
        """Tensors that are not averaged."""
        return [
            self.memory[slot.start_bytes : slot.start_bytes + slot.size_bytes].view(slot.dtype)
            for slot in self.layout.slots
            if slot.role == "kept" and slot.size_bytes
        ]

    def release(self) -> None:
        """Give the model tensors of its own, with the values of now."""
        own = {name: view.clone() for name, view in self._views.items()}
        for name, parameter in self.model.named_parameters():
            parameter.data = own[canonical_name(name)]
        for module, key, name in self._buffers:
            module._buffers[key] = own[name]


def _view(memory: Tensor, slot: Slot, tensor: Tensor) -> Tensor:
    if not tensor.numel():
        return torch.empty_like(tensor)
    size_bytes = -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
    flat = memory[slot.start_bytes : slot.start_bytes + size_bytes].view(slot.dtype)
    return view_of(flat, slot.start_bytes // tensor.element_size(), tensor)


def _buffer_places(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """(name, module, key, buffer) of every buffer; one that hangs at several places has one name."""
    first: dict[int, str] = {}
    for path, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is not None:
                name = first.setdefault(id(buffer), canonical_name(f"{path}.{key}" if path else key))
                yield name, module, key, buffer


class Snapshots:
    """One updater's copies of the shared parameters, taken without a lock, to compute gradients with."""

    def __init__(self, shared: SharedModel) -> None:
        # Of the trained parameters alone: all else is used where it is.
        layout, memory = shared.layout, shared.memory
        self._from = [flat.trained(memory) for flat in layout.flats]
        self._to = [torch.empty_like(flat) for flat in self._from]
        starts = {flat.dtype: (flat.start_bytes, copy) for flat, copy in zip(layout.flats, self._to, strict=True)}
        self._places: list[tuple[nn.Parameter, Tensor, Tensor]] = []
        for slot in layout.slots:
            if slot.role == "trained" and slot.shape.count(0) == 0:
                parameter = shared.parameters[slot.name]
                start_bytes, copy = starts[slot.dtype]
                offset = (slot.start_bytes - start_bytes) // slot.dtype.itemsize
                self._places.append((parameter, parameter.data, view_of(copy, offset, parameter)))

    def take(self) -> None:
        """Copy the shared parameters as they are, while others may change them; the model computes with the copy."""
        for copy, shared in zip(self._to, self._from, strict=True):
            copy.copy_(shared)
        for parameter, _, mine in self._places:
            parameter.data = mine

    def leave(self) -> None:
        """Make the shared parameters the model's again."""
        for parameter, shared, _ in self._places:
            parameter.data = shared


def make_memory(model: nn.Module, layout: Layout) -> tuple[Any, Tensor]:
    """Return (what to send to another process, the bytes) for the model's tensors, which keep their values once they
    are views of these. On a CPU an anonymous file; on a GPU torch sends a handle to the device's memory (IPC). Raises
    EnvironmentFailure: there is not so much memory.
    """
    size_bytes = max(layout.size_bytes, ALIGNMENT)
    device = next(model.parameters()).device
    if device.type == "cuda":
        try:
            memory = torch.zeros(size_bytes, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError as error:
            raise EnvironmentFailure(
                f"{device} has no {size_bytes} bytes left for the shared model; use fewer ranks on it, or a smaller "
                f"model"
            ) from error
        handle: Any = memory
    else:
        try:
            handle = SharedMemory(size_bytes)
        except OSError as error:
            raise EnvironmentFailure(
                f"this system gives no shared memory of {size_bytes} bytes ({error.strerror}); use fewer ranks on this "
                f"machine, or a smaller model"
            ) from error
        memory = handle.bytes()
    tensors = {canonical_name(name): tensor for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    with torch.no_grad():
        for slot in layout.slots:
            tensor = tensors[slot.name]
            _view(memory, slot, tensor).copy_(tensor)
    return handle, memory
