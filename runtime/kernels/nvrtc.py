"""CUDA C++ → machine code, by the compiler library that comes with CUDA builds of torch (NVRTC). Needs no device.

Results are kept in files by source, options, architecture and version of the compiler, so that only the first process
on a machine compiles.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch

from runtime.errors import EnvironmentFailure
from runtime.kernels.source import Program
from runtime.plan.files import replace_file

OPTIONS = ("--std=c++17", "--fmad=false", "--diag-suppress=177")
"""Sums are rounded as they are written; numbers that are nearly 0 stay what they are (the default). 177: constants that
one of the programs does not use."""

HINT = "install a CUDA build of torch, which brings NVRTC, or `pip install nvidia-cuda-nvrtc`"


class Compiler:
    """A loaded NVRTC."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check(library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)), "nvrtcVersion")
        self.version = f"{major.value}.{minor.value}"

    @functools.cached_property
    def architectures(self) -> tuple[int, ...]:
        """Compute capabilities that it knows, as 10 · major + minor, ascending."""
        count = ctypes.c_int()
        self._check(self._library.nvrtcGetNumSupportedArchs(ctypes.byref(count)), "nvrtcGetNumSupportedArchs")
        found = (ctypes.c_int * count.value)()
        self._check(self._library.nvrtcGetSupportedArchs(found), "nvrtcGetSupportedArchs")
        return tuple(sorted(found))

    def compile(self, program: Program, capability: int, *more: str) -> tuple[bytes, str]:
        """Return (code, log). For devices that the compiler is too old for, the code is one that the driver translates.
        The capability is 10 · major + minor; `more`: options in addition to `OPTIONS`. Raises
        EnvironmentFailure, with the log, if it does not compile.
        """
        known = [one for one in self.architectures if one <= capability]
        if not known:
            raise EnvironmentFailure(
                f"kernels: NVRTC {self.version} knows compute capabilities from {self.architectures[0] / 10:g} on, "
                f"found {capability / 10:g}: install a torch for that device"
            )
        machine_code = known[-1] == capability
        target = f"--gpu-architecture={'sm' if machine_code else 'compute'}_{known[-1]}"
        options = (*OPTIONS, target, *more)
        library, handle = self._library, ctypes.c_void_p()
        source, name = program.text.encode(), f"{program.name}.cu".encode()
        self._check(library.nvrtcCreateProgram(ctypes.byref(handle), source, name, 0, None, None), "nvrtcCreateProgram")
        try:
            given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
            failed = library.nvrtcCompileProgram(handle, len(options), given)
            log = self._get(handle, "ProgramLog").rstrip(b"\0").decode(errors="replace").strip()
            if failed:
                raise EnvironmentFailure(
                    f"kernels: {program.name} does not compile with NVRTC {self.version} {' '.join(options)}: {log}"
                )
            return self._get(handle, "CUBIN" if machine_code else "PTX"), log
        finally:
            library.nvrtcDestroyProgram(ctypes.byref(handle))

    def _get(self, handle: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._check(getattr(self._library, f"nvrtcGet{what}Size")(handle, ctypes.byref(size)), what)
        found = ctypes.create_string_buffer(size.value)
        self._check(getattr(self._library, f"nvrtcGet{what}")(handle, found), what)
        return found.raw

    def _check(self, result: int, call: str) -> None:
        if result:
            self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
            text = self._library.nvrtcGetErrorString(result)
            raise EnvironmentFailure(f"kernels: NVRTC's {call} failed: {text.decode() if text else result}")


@functools.cache
def compiler() -> Compiler:
    """Return the NVRTC of this environment. Raises EnvironmentFailure if there is none that can be loaded."""
    why = "no libnvrtc among the installed packages, in CUDA_HOME, or on the library path"
    for path in _candidates():
        try:
            # NVRTC opens its built-ins by name, which it finds where they are loaded already.
            if "/" in path:
                for builtins in sorted(Path(path).parent.glob("libnvrtc-builtins.so*")):
                    ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
            return Compiler(ctypes.CDLL(path))
        except OSError as error:
            why = str(error)
    raise EnvironmentFailure(f"kernels: NVRTC cannot be loaded ({why}): {HINT}")


def _candidates() -> Iterator[str]:
    """Find files of NVIDIA's packages and of a toolkit, of torch's CUDA first, then the newest; then loader's names."""
    found: list[Path] = []
    package = importlib.util.find_spec("nvidia")
    for place in (package.submodule_search_locations or []) if package is not None else []:
        found += Path(place).glob("*/lib/libnvrtc.so.*")
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if variable in os.environ:
            found += Path(os.environ[variable]).glob("lib*/libnvrtc.so.*")
    named = [path for path in found if re.fullmatch(r"libnvrtc\.so\.\d+(\.\d+)*", path.name)]
    major = (torch.version.cuda or "0").partition(".")[0]  # drivers may be too old for what a newer one makes
    yield from (str(p) for p in sorted(named, key=lambda p: (_version(p)[0] == int(major), _version(p)), reverse=True))
    yield from (f"libnvrtc.so.{major}", "libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so")


def _version(path: Path) -> list[int]:
    return [int(part) for part in path.name.removeprefix("libnvrtc.so.").split(".")]


def machine_code(program: Program, capability: int) -> bytes:
    """Compile, or read what an earlier call, in any process, has left in a file."""
    found = compiler()
    key = program.fingerprint(*OPTIONS, str(capability), found.version)
    path = cache_folder() / f"{program.name}-sm{capability}-{key[:32]}.bin"
    try:
        return path.read_bytes()
    except OSError:
        code, _ = found.compile(program, capability)
        with suppress(OSError):  # the next process compiles again
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, code)
        return code


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "commplanner" / "kernels"
