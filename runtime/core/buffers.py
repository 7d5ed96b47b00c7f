"""Buffers (BatchNorm statistics) follow rank 0, by DDP's rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from runtime.comm.communicator import raise_failure
from runtime.comm.world import World
from runtime.core.members import ignored_ids
from runtime.torch_compat import ModuleHook, hook_before_forward

ALIGNMENT_BYTES = 16
"""Of the largest element there is, so that any dtype may begin at a multiple of it."""


class BufferSync:
    """Before a training forward, overwrites all buffers with rank 0's, in one message.

    As with DDP, a forward that follows one without synchronization is left alone: buffers are exchanged once per
    synchronized step. Forwards in evaluation mode or without gradients are never touched, so that one rank may
    evaluate alone.
    """

    def __init__(
        self, world: World, model: nn.Module, synchronizing: Callable[[], bool], apart: Callable[[], bool]
    ) -> None:
        """`synchronizing` is asked in a forward: whether the next one begins with an exchange; `apart` before a
        forward: whether ranks' buffers are their own now.
        """
        self._world, self._model, self._synchronizing, self._apart = world, model, synchronizing, apart
        self._due = True
        self._places = _places(model)
        self._buffers: list[Tensor] = []
        self._collect()

    def install(self) -> list[Any]:
        """Hook the model's forward; returns the handles. Nothing to do without buffers or with one rank."""
        if not self._buffers or self._world.group is None:
            return []
        return [hook_before_forward(self._model, ModuleHook(self._before_forward))]

    def _before_forward(self, _module: nn.Module, _arguments: Any) -> None:
        if not (torch.is_grad_enabled() and self._model.training):
            return
        if self._due and not self._apart():
            self._exchange()
        self._due = self._synchronizing()

    def _collect(self) -> None:
        """Take the buffers that the model has now; a forward may have replaced some."""
        # By lookup: a script's table has no `get`.
        found = [owner[name] for owner, name in self._places if name in owner]
        buffers = [buffer for buffer in found if buffer is not None]
        if len(buffers) != len(self._buffers) or any(a is not b for a, b in zip(buffers, self._buffers, strict=True)):
            self._buffers = buffers
            self._flat, self._views = _pack(buffers)

    @torch.no_grad()
    def _exchange(self) -> None:
        self._collect()
        if self._world.rank == 0:
            torch._foreach_copy_(self._views, self._buffers)
        what = "the broadcast of buffers before forward"
        try:
            work = dist.broadcast(self._flat, group=self._world.group, group_src=0, async_op=True)
            self._world.wait(work, what, self._flat.device)
        except RuntimeError as error:
            raise_failure(self._world, what, error)
        if self._world.rank != 0:
            # By `.data`, as no change that autograd counts: a graph of an earlier forward may have saved the buffers.
            torch._foreach_copy_([buffer.data for buffer in self._buffers], self._views)


def _places(model: nn.Module) -> list[tuple[dict[str, Tensor], str]]:
    """Where each buffer that is exchanged hangs: looking there takes a tenth of the time of walking through modules."""
    known = ignored_ids(model)
    places: list[tuple[dict[str, Tensor], str]] = []
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and id(buffer) not in known:
                known.add(id(buffer))
                places.append((module._buffers, name))  # type: ignore[arg-type]
    return places


def _pack(buffers: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Make one run of bytes that holds all buffers, whatever their dtypes, and a view of it for each."""
    starts, end = [], 0
    for buffer in buffers:
        starts.append(end)
        end += -(-buffer.numel() * buffer.element_size() // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    flat = torch.zeros(end, dtype=torch.uint8, device=buffers[0].device if buffers else None)
    views = [
        flat[start : start + buffer.numel() * buffer.element_size()].view(buffer.dtype).view(buffer.shape)
        for start, buffer in zip(starts, buffers, strict=True)
    ]
    return flat, views
