"""The kernels' own source on the host: compiled by g++ with kernel_host.h, launched as on a device."""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from runtime.kernels.source import DTYPES, KERNELS, UNPACK, WIRE, Program, Shape

COMPILER = shutil.which("g++") or shutil.which("clang++")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler (g++, clang++) for the kernels' source")

SMALL = Shape(threads=64, vectors=2, min_blocks=1)
"""Tiles of 512 elements, so that few elements are many tiles."""

HEADER = Path(__file__).with_name("kernel_host.h")
STRUCTS = {"topk": "Arguments", "unpack": "UnpackArguments", "wire": "WireArguments"}


class HostBackend:
    """See `runtime.kernels.backend.Backend`."""

    def __init__(
        self, library: ctypes.CDLL, *, grid: int = 3, resident: int = 2, seed: int = 1,
        names: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        """`resident` of a grid's blocks run at once; `seed`: in which order threads run.

        `names`: under which name a program is in the library, where that is another.
        """
        self._library, self._grid, self._resident, self.seed = library, grid, resident, seed
        self._names = names or {}

    def blocks(self, program: Program, kernel: str) -> int:
        """Any number will do."""
        return self._grid

    def launch(self, program: Program, kernel: str, grid: int, arguments: ctypes.Array[ctypes.c_uint64]) -> None:
        """Runs the kernel to its end. Raises RuntimeError where blocks wait for ever."""
        self.seed += 1
        run = self._library[f"launch_{self._names.get(program.name, program.name)}"]
        run.restype = ctypes.c_char_p
        failure = run(
            kernel.encode(), arguments, ctypes.c_uint(grid), ctypes.c_uint(program.shape.threads),
            ctypes.c_uint(min(self._resident, grid)), ctypes.c_ulonglong(self.seed),
        )  # fmt: skip
        if failure:
            raise RuntimeError(f"{kernel}: {failure.decode()}")


def translation_unit(
    programs: Mapping[str, Program], texts: Mapping[str, str] | None = None, gradients: Sequence[str] = DTYPES
) -> str:
    """C++ of several programs, each in a namespace of its name, with a function launch_NAME for each.

    `texts` may stand for what programs are; only kernels for these dtypes of gradients, or values, are compiled.
    """
    pieces = [f'#include "{HEADER}"']
    for name, program in programs.items():
        text = (texts or {}).get(name, program.text).replace('extern "C" __global__', "__global__")
        text = "\n".join(line for line in text.splitlines() if not _is_kernel_of_others(line, gradients))
        struct = STRUCTS[program.name]
        kernels = [k for k in KERNELS[program.name] if not _is_kernel_of_others(f"({k},", gradients)]
        cases = "".join(
            f'    if (!strcmp(kernel, "{k}")) return host::run([] {{ {k}(given); }}, grid, size, resident, seed);\n'
            for k in kernels
        )
        pieces.append(
            f"#undef THREADS\n#undef VECTORS\n#undef MIN_BLOCKS\n#undef EF_TOPK\n#undef UNPACK\n#undef WIRE\n"
            f"namespace program_{name} {{\n{text}\nstatic {struct} given;\n"
            f'extern "C" const char *launch_{name}(const char *kernel, const {struct} *arguments, unsigned grid, '
            f"unsigned size, unsigned resident, unsigned long long seed) {{\n    given = *arguments;\n{cases}"
            f'    return "no such kernel";\n}}\n}}\n'
        )
    return "\n".join(pieces)


def _is_kernel_of_others(line: str, gradients: Sequence[str]) -> bool:
    others = [dtype for dtype in DTYPES if dtype not in gradients]
    return any(f"({kernel}_{dtype}_" in line for kernel in ("ef_topk", "unpack") for dtype in others)


def compiled(text: str, folder: Path, *options: str) -> ctypes.CDLL:
    """A library of C++."""
    assert COMPILER is not None
    folder.mkdir(parents=True, exist_ok=True)
    source, library = folder / "kernels.cpp", folder / "kernels.so"
    source.write_text(text, encoding="utf-8")
    command = [COMPILER, "-std=c++17", "-O1", "-ffp-contract=off", "-fPIC", "-shared", "-w", *options]
    done = subprocess.run([*command, "-o", library, source], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:4000]
    return ctypes.CDLL(str(library))


def _library(shape: Shape) -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as folder:
        programs = {"topk": Program(name="topk", shape=shape), "unpack": UNPACK, "wire": WIRE}
        return compiled(translation_unit(programs), Path(folder))


@functools.cache
def small_library() -> ctypes.CDLL:
    """All programs, selection with small tiles."""
    return _library(SMALL)


@functools.cache
def usual_library() -> ctypes.CDLL:
    """All programs as they run on devices."""
    return _library(Shape())
