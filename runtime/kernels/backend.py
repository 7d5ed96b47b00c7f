"""Backends that run the kernels of a device, and reasons why there is none.

The one for CUDA is imported when it is needed: it keeps what it compiles in files, by a module that needs pydantic.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from runtime.errors import EnvironmentFailure
from runtime.kernels.source import Program


class Backend(Protocol):
    """Launches kernels of a program on one device."""

    def blocks(self, program: Program, kernel: str) -> int:
        """Return the number of its blocks that the device runs at once."""
        ...

    def launch(self, program: Program, kernel: str, grid: int, arguments: ctypes.Array[ctypes.c_uint64]) -> None:
        """Queue a kernel of `grid` blocks on the current stream; `arguments` are the words of its struct."""
        ...


_installed: dict[str, Backend] = {}
"""Backends by type of device, in place of what `backend_for` would find."""


def backend_for(device: torch.device) -> Backend | None:
    """Return what runs kernels on a device; None on a CPU. Raises EnvironmentFailure where something is missing."""
    if device.type in _installed:
        return _installed[device.type]
    if device.type == "cpu":
        return None
    if device.type != "cuda":
        raise EnvironmentFailure(f"kernels: found the device {device}, expected cuda: use the torch reference there")
    from runtime.kernels.cuda import cuda_backend

    return cuda_backend(torch.cuda.current_device() if device.index is None else device.index)


def usable(device: torch.device) -> str | None:
    """Return why kernels do not run on a device; None: they do. Never raises."""
    if device.type in _installed:
        return None
    if device.type != "cuda":
        return f"there are none for {device.type}"
    from runtime.kernels.cuda import working

    return working(torch.cuda.current_device() if device.index is None else device.index)


@contextmanager
def installed(device_type: str, backend: Backend) -> Iterator[None]:
    """Run kernels of a type of device elsewhere within it: the source itself on the host, in tests."""
    before = _installed.get(device_type)
    _installed[device_type] = backend
    try:
        yield
    finally:
        del _installed[device_type]
        if before is not None:
            _installed[device_type] = before
