"""Faults that are put into the kernels' source on purpose, and a check that has to notice each of them.

Run as a script: prints the names of those that it has not noticed. Each mutant runs in a process of its own, for it may
write anywhere.
"""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
from pathlib import Path

import torch
from kernel_cases import expect_equal, family, steady_residual
from kernel_host import SMALL, HostBackend, compiled, translation_unit

from runtime.kernels import make_state, unpack_, unpack_torch
from runtime.kernels.backend import installed
from runtime.kernels.source import UNPACK, UNPACK_PART, Program
from runtime.kernels.state import WARM

MUTANTS: dict[str, tuple[str, str]] = {
    "ties: the higher index wins": ("tie >= start && tie - start < missing", "tie >= p.ties - missing"),
    "ties: one more": ("tie - start < missing)", "tie - start <= missing)"),
    "rounding: half away from zero": ("0x7fffu + ((word >> 16) & 1u)", "0x8000u"),
    "rounding: towards zero": ("(word + 0x7fffu + ((word >> 16) & 1u))", "word"),
    "mask: one element more": ("position + j - lead < elements) found", "position + j - lead <= elements) found"),
    "mask: a vector before the first": ("if (position >= lead && position + 3", "if (position + 3"),
    "mask: a vector over the end": ("position + 3 - lead < elements", "position - lead < elements"),
    "keys: NaN above infinity": ("return min(word & 0x7fffffffu, INFINITE)", "return word & 0x7fffffffu"),
    "keys: with sign": ("key_of(u32 word) { return min(word & 0x7fffffffu", "key_of(u32 word) { return min(word"),
    "NaN keeps its bits": ("? 0x7fc00000u : word", "? word : word"),
    "the residual is not zeroed": ("store<R16>(place.following, index, 0);", ";"),
    "too few candidates are taken for enough": ("p.source = k <= stored && stored", "p.source = stored"),
    "too many candidates are taken for all": ("stored && stored <= s.capacity ? LIST", "stored ? LIST"),
    "keys above the window are not": ("if (found.bin[0] == BINS - 1)", "if (false)"),
    "a chunk counts itself": ("threadIdx.x; c < chunk; c += THREADS", "threadIdx.x; c <= chunk; c += THREADS"),
    "a phase does not wait": ("if (before != PHASES) wait_for(before);", ";"),
    "nothing is made ready for the next call": ("if (!shared.planner) return;\n        u32", "return;\n        u32"),
    "no barrier before counts are read": ("void flush(Shared &shared, u32 *histogram) {\n    __syncthreads();",
                                          "void flush(Shared &shared, u32 *histogram) {\n    "),
    "no barrier before candidates are stored": ("    __syncthreads();\n    const u32 offset = shared.offset;",
                                                "    const u32 offset = shared.offset;"),
    "unpack: one place too far": ("(u32) found < end", "(u32) found <= end"),
    "unpack: only 32 elements of a rank": ("if (taken < WARP) break;", "break;"),
}  # fmt: skip
"""Name → (a piece of the source, what takes its place)."""


def sources(name: str) -> tuple[Program, str]:
    """The program that a mutant changes, and its text."""
    program = UNPACK if name.startswith("unpack") else Program(name="topk", shape=SMALL)
    piece, other = MUTANTS[name]
    assert program.text.count(piece) == 1, f"{name}: the source has {program.text.count(piece)} × {piece!r}"
    return program, program.text.replace(piece, other)


def check(backend: HostBackend) -> None:
    """Raises where the source does not do what the reference says."""
    n = 6 * SMALL.tile + 5
    for name in ("normal", "few values", "any bits", "narrow", "nan"):
        for dtype in (torch.float32, torch.bfloat16):
            for k, capacity in ((40, None), (1, 8)):
                state = make_state([n], [k], "cpu", shape=SMALL, capacity=capacity)
                for step in range(3):
                    room = steady_residual(n + 8, 40, 200).to(dtype)[step : step + n]
                    expect_equal(backend, state, family(name, n + 8, step, torch.float32)[step : step + n], room)
                for floor in (0x7F000000, 0):
                    state.warm[:, : WARM.index("multiple")] = torch.tensor([floor, floor, 12])
                    expect_equal(backend, state, family(name, n, 7, torch.float32), torch.zeros(n, dtype=dtype))


def check_unpack(backend: HostBackend) -> None:
    """Likewise."""
    n, k = 20 * UNPACK_PART, 3000
    indices = torch.stack([torch.arange(start, start + k) for start in (0, 400, n - k, 300)]).to(torch.int32)
    values = torch.randn(4, k, generator=torch.Generator().manual_seed(0))
    for _ in range(3):
        sums = torch.full((n,), 7.0)
        with installed("cpu", backend):
            unpack_(sums, values, indices)
        assert torch.equal(sums, unpack_torch(values, indices, n, factor=1.0, dtype=torch.float32))


def noticed(library: ctypes.CDLL, number: int, name: str) -> bool:
    """Whether a mutant fails the check, or crashes."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0
    program, _ = sources(name)
    backend = HostBackend(
        library, grid=1 if program.name == "unpack" else 4, resident=3, names={program.name: f"mutant{number}"}
    )
    try:
        (check_unpack if program.name == "unpack" else check)(backend)
    except BaseException:
        os._exit(1)
    os._exit(0)


def main() -> int:
    """Compiles all mutants and runs those of the given share: `kernel_mutants.py SHARE OF`."""
    share, of = int(sys.argv[1]), int(sys.argv[2])
    mine = dict(list(enumerate(MUTANTS))[share::of])
    found = {f"mutant{number}": sources(name) for number, name in mine.items()}
    programs = {key: program for key, (program, _) in found.items()}
    text = translation_unit(programs, {key: text for key, (_, text) in found.items()}, ("float32",))
    with tempfile.TemporaryDirectory() as folder:
        library = compiled(text, Path(folder), "-O0")
    print("\n".join(name for number, name in mine.items() if not noticed(library, number, name)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
