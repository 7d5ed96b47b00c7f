"""Accelerators: peak rates and memory, and how many times as fast one is as another. Torch-free.

The one table of what accelerators can do; `planner.documents.nccl` has what NCCL's cost model knows of their links.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

from runtime.errors import InputError

ROOM = 0.92
"""Share of an accelerator's memory that plans may fill: the rest is the library's buffers and fragments."""


class Accelerator(NamedTuple):
    """Peak rates and memory of an accelerator, by its vendor's data sheet."""

    tensor_flops: float
    """Dense FLOP/s of its matrix units in BF16 (FP16 on Volta); 0 without such units."""
    flops: float
    """FLOP/s in FP32 without them."""
    memory_bytes: float
    memory_bytes_per_s: float

    @property
    def dense_flops(self) -> float:
        """Return the peak that shares reached in training refer to."""
        return self.tensor_flops or self.flops


ACCELERATORS: Mapping[str, Accelerator] = {
    "k80": Accelerator(0.0, 4.37e12, 12e9, 240e9),
    "p102-100": Accelerator(0.0, 10.8e12, 5e9, 440e9),
    "v100": Accelerator(125e12, 15.7e12, 32e9, 900e9),
    "v100-16gb": Accelerator(125e12, 15.7e12, 16e9, 900e9),
    "a100": Accelerator(312e12, 19.5e12, 80e9, 2039e9),
    "a100-40gb": Accelerator(312e12, 19.5e12, 40e9, 1555e9),
    "h100": Accelerator(989.4e12, 66.9e12, 80e9, 3350e9),
    "h100-pcie": Accelerator(756e12, 51e12, 80e9, 2000e9),
    "h100-nvl": Accelerator(835e12, 60e12, 94e9, 3900e9),
    "h200": Accelerator(989.4e12, 66.9e12, 141e9, 4800e9),
    "b200": Accelerator(2250e12, 75e12, 180e9, 8000e9),
    "gb200": Accelerator(2500e12, 80e12, 186e9, 8000e9),
    "a10g": Accelerator(70e12, 31.5e12, 24e9, 600e9),
    "a40": Accelerator(149.7e12, 37.4e12, 48e9, 696e9),
    "l40s": Accelerator(362e12, 91.6e12, 48e9, 864e9),
    "rtx4090": Accelerator(165.2e12, 82.6e12, 24e9, 1008e9),
    "mi300x": Accelerator(1307.4e12, 163.4e12, 192e9, 5300e9),
    "mi325x": Accelerator(1307.4e12, 163.4e12, 256e9, 6000e9),
}
"""Registry by name, `KIND` or `KIND-VARIANT`: a further accelerator is a row here. Sources: data sheets of NVIDIA and
AMD, without sparsity; of a K80 one of its two GPUs, with boost; P102-100 from its 3,200 cores at 1.68 GHz and its bus.
A 4090 counts with FP32 accumulation."""

SCALED_WITHIN = 0.35
"""Relative error of a time that was scaled to another accelerator. `speed_ratio` is 21 % off at most on
published pairs: ResNet-50 on K80, V100 and A100, and MPT on A100 and H100 (tests/null/documents/test_accelerators.py);
pairs further apart were not checked."""

_WORD = re.compile(r"[a-z]+\d+[a-z0-9]*|\d+gb|[a-z]+|\d+", re.ASCII)


def kind_of(name: str) -> str:
    """Return the name without its variant.

    >>> kind_of("a100-40gb")
    'a100'
    """
    return name if name == "p102-100" else name.partition("-")[0]


def find_accelerator(text: str | None, memory_bytes: int | None = None) -> str | None:
    """Return the name in the table of a device as its driver names it; None where it is not known.

    Args:
        text: name of the device.
        memory_bytes: its memory, which tells variants apart that the name does not.

    >>> find_accelerator("NVIDIA A100-SXM4-40GB"), find_accelerator("NVIDIA GeForce RTX 4090")
    ('a100-40gb', 'rtx4090')
    >>> find_accelerator("NVIDIA A100-PG509-200", 42_297_524_224)
    'a100-40gb'
    """
    if text is None:
        return None
    spelled = re.sub(r"(\d+)\s*gi?b\b", r"\1gb", text.lower())
    spelled = re.sub(r"(?<=\d)(sxm|pcie|nvl)", r" \1", re.sub(r"\b(?:rtx\s*)?(\d{4})\b", r"rtx\1", spelled))
    words = set(_WORD.findall(spelled))
    if "laptop" in words:
        return None  # fewer units under the name of the desktop's
    found = [name for name in ACCELERATORS if set(_WORD.findall(name)) <= words]
    name = max(found, key=len, default=None)
    if name is None or memory_bytes is None or kind_of(name) != name:
        return name
    variants = [other for other in ACCELERATORS if kind_of(other) == name]
    return min(variants, key=lambda other: abs(ACCELERATORS[other].memory_bytes - memory_bytes))


def speed_ratio(old: str, new: str) -> float:
    """Return how many times as fast training is on `new` as on `old`.

    The geometric mean of how many times as fast their matrix units are (in FP32 where one of them has none) and their
    memory: some of a step is bound by one, some by the other.
    """
    before, after = ACCELERATORS[old], ACCELERATORS[new]
    both = before.tensor_flops and after.tensor_flops
    peak = after.tensor_flops / before.tensor_flops if both else after.flops / before.flops
    return math.sqrt(peak * memory_ratio(old, new))


def memory_ratio(old: str, new: str) -> float:
    """Return how many times as fast the memory of `new` is as that of `old`."""
    return ACCELERATORS[new].memory_bytes_per_s / ACCELERATORS[old].memory_bytes_per_s


def check_memory(memory_mib: float | None) -> float | None:
    """Return a limit of memory. Raises InputError where it is none."""
    if memory_mib is not None and not 0.0 < memory_mib < math.inf:
        raise InputError(
            f"--max-memory-mib: found {memory_mib:g}, expected MiB of memory on each rank, such as 40000; correct it"
        )
    return memory_mib
