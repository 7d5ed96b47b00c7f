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
from kernel_cases import expect_equal, expect_equal_wire, family, steady_residual
from kernel_host import SMALL, HostBackend, compiled, translation_unit

from runtime.kernels import make_state, unpack_, unpack_torch
from runtime.kernels.backend import installed
from runtime.kernels.source import UNPACK, UNPACK_PART, WIRE, WIRE_CODES, Program
from runtime.kernels.state import WARM
from runtime.plan import CompressorSpec

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
    "wire: ties away from zero": ("(magnitude >> DROPPED & 1u)", "1u"),
    "wire: no subnormal codes": ("if (magnitude < normal)", "if (false)"),
    "wire: no signs of codes": ("sign = word >> 31 ? SIGN : 0u", "sign = 0u"),
    "wire: the scale of a lane's first elements": ("i < 4 * RUNS; i++) largest", "i < 4; i++) largest"),
    "wire: the scale of half a warp": ("for (u32 d = WARP / 2; d; d /= 2) largest = max(",
                                       "for (u32 d = WARP / 4; d; d /= 2) largest = max("),
    "wire: scales are rounded down": ("(word + (u32) a.dropped) &", "word &"),
    "wire: scales of any size": ("word = min(max(word, (u32) a.least_scale), (u32) a.largest_scale);", ";"),
    "wire: infinities have a scale": ("if (largest >= INFINITE)", "if (largest > INFINITE)"),
    "wire: of what is not finite something is kept": ("return odd ? 0.0f : __fadd_rn(", "return __fadd_rn("),
    "wire: no largest code": ("value = value > limit ? limit : value < -limit ? -limit : value;", ";"),
    "wire: −0 stays in a residual": ("        return rounded;\n", "        return (float) (int) rounded;\n"),
    "wire: −0 stays in what is decoded": ("a.no_minus_zero ? __fadd_rn(sum, 0.0f) : sum", "sum"),
    "wire: only the last rank counts": ("sum = rank ? __fadd_rn(sum, value) : value;", "sum = value;"),
    "wire: residuals never change places": ("const bool swapped = a.swapped && __ldcg(a.swapped);",
                                            "const bool swapped = false;"),
    "wire: what the sum loses takes the residual's place": ("__fadd_rn(__uint_as_float(before[j]), rest)", "rest"),
    "wire: vectors of misplaced rows": (" && (a.width | a.share) % 4 == 0", ""),
    "wire: vectors of misplaced floats": ("of_floats % 16 == 0 && ", ""),
    "wire: one element more": ("(1u << (count - at)) - 1;", "(2u << (count - at)) - 1;"),
    "wire: blocks run over their part": ("min(min(width, share - b.inside), elements - b.first)",
                                         "min(width, elements - b.first)"),
}  # fmt: skip
"""Name → (a piece of the source, what takes its place)."""


def sources(name: str) -> tuple[Program, str]:
    """The program that a mutant changes, and its text."""
    found = [program for program in (UNPACK, WIRE) if name.startswith(f"{program.name}:")]
    program = found[0] if found else Program(name="topk", shape=SMALL)
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


def check_wire(backend: HostBackend) -> None:
    """Likewise."""
    for code in WIRE_CODES:
        for parts, n in ((1, 1200), (3, 1003)):
            spec = CompressorSpec(name="wire", dtype=code)
            for step, name in enumerate(("normal", "any bits", "signed zeros", "infinities", "few values", "layers")):
                gradient, residual = family(name, n + 1, step, torch.float32), torch.zeros(n + 1)
                for at in (0, 1):
                    places = slice(at, at + n)
                    expect_equal_wire(backend, spec, parts, gradient[places], residual[places], swapped=bool(step % 2))
                    residual[places] = 0.01 * gradient[places].nan_to_num(0.0, 0.0, 0.0)


CHECKS = {"topk": check, "unpack": check_unpack, "wire": check_wire}


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
        CHECKS[program.name](backend)
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
