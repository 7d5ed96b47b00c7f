"""Buffers (BatchNorm statistics) follow rank 0, by DDP's rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from runtime.communicator import describe_failure
from runtime.world import World


class BufferSync:
    """Before a training forward, overwrites all buffers with rank 0's, one message per dtype.

    As with DDP, a forward that follows one without synchronization is left alone: buffers are exchanged once per
    synchronized step. Forwards in evaluation mode or without gradients are never touched, so that one rank may
    evaluate alone.
    """

    def __init__(self, world: World, model: nn.Module, synchronizing: Callable[[], bool]) -> None:
        self._world, self._model, self._synchronizing = world, model, synchronizing
        self._due = True
        self._buffers: dict[torch.dtype, list[Tensor]] = {}
        for buffer in model.buffers():
            self._buffers.setdefault(buffer.dtype, []).append(buffer)
        self._flats = {dtype: torch.cat([b.reshape(-1) for b in group]) for dtype, group in self._buffers.items()}
        self._views = {dtype: _views(self._flats[dtype], group) for dtype, group in self._buffers.items()}

    def install(self) -> list[Any]:
        """Hooks the model's forward; returns the handles. Nothing to do without buffers or with one rank."""
        if not self._buffers or self._world.group is None:
            return []
        return [self._model.register_forward_pre_hook(self._before_forward, prepend=True)]

    def _before_forward(self, _module: nn.Module, _arguments: Any) -> None:
        if not (torch.is_grad_enabled() and self._model.training):
            return
        if self._due:
            self._exchange()
        self._due = self._synchronizing()

    @torch.no_grad()
    def _exchange(self) -> None:
        for dtype, buffers in self._buffers.items():
            if self._world.rank == 0:
                torch._foreach_copy_(self._views[dtype], buffers)
            try:
                dist.broadcast(self._flats[dtype], group=self._world.group, group_src=0)
            except RuntimeError as error:
                raise describe_failure(self._world, "the broadcast of buffers before forward", error) from error
            if self._world.rank != 0:
                torch._foreach_copy_(buffers, self._views[dtype])


def _views(flat: Tensor, buffers: list[Tensor]) -> list[Tensor]:
    parts = flat.split([buffer.numel() for buffer in buffers])
    return [part.view(buffer.shape) for part, buffer in zip(parts, buffers, strict=True)]
