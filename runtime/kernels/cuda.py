"""Kernels on a CUDA device: loaded and launched through the driver's own interface, on torch's current stream.

`torch.cuda._compile_kernel` would do nearly that, but it is private, asks for a CUDA toolkit (it looks for headers,
which our source does not need), and hands whole numbers over in 32 bits.
"""

from __future__ import annotations

import ctypes
import functools
import sys

import torch

from runtime.errors import EnvironmentFailure
from runtime.kernels.nvrtc import compiler, machine_code
from runtime.kernels.source import KERNELS, UNPACK, WIRE, Program

LEAST_CAPABILITY = 70
"""Least compute capability: lanes that may diverge (Volta), which the source relies on."""


@functools.cache
def _driver() -> ctypes.CDLL:
    name = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        return ctypes.CDLL(name)
    except OSError as error:
        raise EnvironmentFailure(
            f"kernels: the driver's {name} cannot be loaded ({error}): install the driver"
        ) from error


def _check(result: int, call: str) -> None:
    if result:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(result, ctypes.byref(text))
        why = text.value.decode() if text.value else f"error {result}"
        raise EnvironmentFailure(f"kernels: the driver's {call} failed: {why}")


class CudaBackend:
    """Backend of one CUDA device: `runtime.kernels.backend.Backend`."""

    def __init__(self, device: int) -> None:
        properties = torch.cuda.get_device_properties(device)
        self._device = device
        self.capability = 10 * properties.major + properties.minor
        self._multiprocessors = properties.multi_processor_count
        if self.capability < LEAST_CAPABILITY:
            raise EnvironmentFailure(
                f"kernels: found {properties.name} of compute capability {self.capability / 10:g}, expected at least "
                f"{LEAST_CAPABILITY / 10:g}: there torch's own operations are used"
            )
        self._functions: dict[tuple[Program, str], ctypes.c_void_p] = {}
        self._modules: dict[Program, ctypes.c_void_p] = {}
        self._blocks: dict[tuple[Program, str], int] = {}

    def blocks(self, program: Program, kernel: str) -> int:
        key = (program, kernel)
        if key not in self._blocks:
            each = ctypes.c_int()
            with torch.cuda.device(self._device):
                self._enter_context()
                function = self._function(program, kernel)
                result = _driver().cuOccupancyMaxActiveBlocksPerMultiprocessor(
                    ctypes.byref(each), function, ctypes.c_int(program.shape.threads), ctypes.c_size_t(0)
                )
            _check(result, "cuOccupancyMaxActiveBlocksPerMultiprocessor")
            self._blocks[key] = max(1, each.value) * self._multiprocessors
        return self._blocks[key]

    def launch(self, program: Program, kernel: str, grid: int, arguments: ctypes.Array[ctypes.c_uint64]) -> None:
        with torch.cuda.device(self._device):
            function = self._function(program, kernel)
            self._enter_context()
            parameters = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
            stream = ctypes.c_void_p(torch.cuda.current_stream(self._device).cuda_stream)
            sizes = (ctypes.c_uint(value) for value in (grid, 1, 1, program.shape.threads, 1, 1, 0))
            _check(_driver().cuLaunchKernel(function, *sizes, stream, parameters, None), f"cuLaunchKernel of {kernel}")

    def _enter_context(self) -> None:
        """Give this thread a context, which it lacks before it uses the device and the driver's calls expect."""
        context = ctypes.c_void_p()
        _check(_driver().cuCtxGetCurrent(ctypes.byref(context)), "cuCtxGetCurrent")
        if not context.value:
            torch.cuda.current_stream(self._device).query()

    def _function(self, program: Program, kernel: str) -> ctypes.c_void_p:
        key = (program, kernel)
        if key not in self._functions:
            if torch.cuda.is_current_stream_capturing():
                raise EnvironmentFailure(
                    f"kernels: {kernel} is not loaded, which cannot be done while a CUDA graph is captured: call it "
                    f"once before the capture"
                )
            function = ctypes.c_void_p()
            name = kernel.encode()
            result = _driver().cuModuleGetFunction(ctypes.byref(function), self._module(program), name)
            _check(result, f"cuModuleGetFunction of {kernel}")
            self._functions[key] = function
        return self._functions[key]

    def _module(self, program: Program) -> ctypes.c_void_p:
        if program not in self._modules:
            self._enter_context()
            module = ctypes.c_void_p()
            code = machine_code(program, self.capability)
            _check(_driver().cuModuleLoadData(ctypes.byref(module), ctypes.c_char_p(code)), "cuModuleLoadData")
            self._modules[program] = module
        return self._modules[program]


@functools.cache
def cuda_backend(device: int) -> CudaBackend:
    """Return the backend of one device. Raises EnvironmentFailure if kernels cannot run there."""
    why = why_not()
    if why is not None:
        raise EnvironmentFailure(f"kernels: {why}")
    compiler()
    return CudaBackend(device)


def why_not() -> str | None:
    """Return what keeps kernels from running here, before any device is looked at; None: nothing."""
    if torch.version.hip is not None:
        return "this torch is built for ROCm; the kernels are CUDA: there torch's own operations are used"
    if torch.version.cuda is None:
        return "this torch is built without CUDA"
    if not torch.cuda.is_available():
        return f"no device for CUDA {torch.version.cuda}"
    return None


@functools.cache
def working(device: int) -> str | None:
    """Return why kernels do not run on a device; None: they do. Compiles and loads them, ahead of the first step."""
    try:
        backend = cuda_backend(device)
        for program in (Program(name="topk"), UNPACK, WIRE):
            backend.blocks(program, KERNELS[program.name][0])
    except EnvironmentFailure as error:
        return str(error).removeprefix("kernels: ")
    return None
