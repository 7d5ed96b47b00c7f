"""The kernels' source: CUDA C++ without headers, in several files; and the sizes that host and device share."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources

PARTS: Mapping[str, tuple[str, ...]] = {
    "topk": ("keys.cu", "plan.cu", "topk.cu"),
    "unpack": ("keys.cu", "unpack.cu"),
    "wire": ("keys.cu", "wire.cu"),
}

DTYPES = ("float32", "bfloat16")
"""Dtypes of gradients, residuals and sums; kernels are named after two of them: `ef_topk_bfloat16_float32`."""

WIRE_CODES = ("int8", "float8_e4m3fn", "float16", "bfloat16")

KERNELS: Mapping[str, tuple[str, ...]] = {
    "topk": tuple(f"ef_topk_{gradient}_{residual}" for gradient in DTYPES for residual in DTYPES),
    "unpack": tuple(f"unpack_{values}_{sums}" for values in DTYPES for sums in DTYPES),
    "wire": tuple(f"wire_{code}_{what}" for code in WIRE_CODES for what in (*DTYPES, "combine", "decode")),
}
"""Kernels of each program."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Numbers of threads and of elements that they work on; results do not depend on it."""

    threads: int = 512
    """Per block."""
    vectors: int = 2
    """Runs of four neighbouring elements per thread and tile; at most 4."""
    min_blocks: int = 2
    """Per multiprocessor, at least: bounds the registers of a thread."""

    @property
    def tile(self) -> int:
        """Elements that a block works on together."""
        return 4 * self.vectors * self.threads


@dataclass(frozen=True, kw_only=True)
class Program:
    """One translation unit with its macros."""

    name: str
    """A key of `PARTS`."""
    shape: Shape = field(default_factory=Shape)

    @property
    def text(self) -> str:
        shape = self.shape
        macros = f"#define THREADS {shape.threads}\n#define VECTORS {shape.vectors}\n"
        macros += f"#define MIN_BLOCKS {shape.min_blocks}\n"
        files = resources.files("runtime.kernels")
        return macros + "\n".join(files.joinpath(part).read_text(encoding="utf-8") for part in PARTS[self.name])

    def fingerprint(self, *more: str) -> str:
        """Return a hash of the text and everything else that the result of a compilation depends on."""
        return hashlib.sha256("\n".join((*more, self.text)).encode()).hexdigest()


UNPACK = Program(name="unpack", shape=Shape(threads=256))
"""32 KiB of shared memory: 512 sums, and 512 ranks' places, for each warp."""

UNPACK_PART = 512
"""Elements that a warp adds up at a time: `PART` in unpack.cu."""

WIRE = Program(name="wire", shape=Shape(threads=256))

WIRE_MOST = 512
"""Elements that a warp encodes or decodes at a time, at most: `MOST` in wire.cu."""
