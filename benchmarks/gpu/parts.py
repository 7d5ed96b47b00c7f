"""What there is to run, in order. Torch-free: the command lists it before anything is imported."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.gpu.setting import Found, Setting


@dataclass(frozen=True)
class Part:
    """One module of this package, whose `run` takes a `Setting` and returns what it has `Found`."""

    name: str
    """That of its module."""
    title: str
    does: str
    """On a device; what follows "would"."""
    share: float
    """Of the time of all parts."""

    def load(self) -> Callable[[Setting], Found]:
        """Import the part, and with it torch."""
        module: Any = importlib.import_module(f"benchmarks.gpu.{self.name}")
        run: Callable[[Setting], Found] = module.run
        return run


PARTS: Mapping[str, Part] = {
    part.name: part
    for part in (
        Part("correctness", "Kernels against their references",
             "compare selection, unpacking and wire formats with torch bit for bit: all dtypes and kinds of input, up "
             "to 2²⁸ elements, misaligned, cold and warm, in graphs and on several streams", 5.0),
        Part("sanitizer", "compute-sanitizer",
             "run kernels under memcheck, racecheck and synccheck, where compute-sanitizer is installed", 4.0),
        Part("waits", "One rank: overlap, and waits of the host",
             "carry messages of a single rank during backward, draw up the events, and count in a profiler's trace how "
             "often backward makes the host wait for the device", 2.0),
        Part("sessions", "Two ranks compared with DDP",
             "train by every kind of plan on two ranks, over NCCL, or over gloo where both share a device: weights "
             "against DDP's, overlap, memory", 4.0),
        Part("commands", "Commands", "run planner doctor, profile, optimize, run and compare --device cuda", 8.0),
        Part("selection", "Selecting the largest elements",
             "time the kernel, warm, cold and phase by phase, against torch.topk and MSTopK, from 2²⁰ to 2²⁷ elements",
             6.0),
        Part("wire", "Encoding and decoding", "time encoding, adding up and decoding in each wire format", 3.0),
        Part("overhead", "Overhead of a step",
             "time steps of ResNet-50, BERT-base and GPT-2 with batches from tiny to full beside DDP, with messages "
             "that nobody waits for: what is left is what hooks and copies cost", 8.0),
    )
}  # fmt: skip
