"""NVIDIA's Multi-Process Service, without which the kernels of several updaters take turns on a GPU."""

from __future__ import annotations

import os
from pathlib import Path

from torch import nn

DEFAULT_PIPES = "/tmp/nvidia-mps"


def mps_runs() -> bool:
    """Whether this machine's control daemon has its pipe where processes of this environment look for it."""
    return (Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", DEFAULT_PIPES)) / "control").exists()


def mps_note(model: nn.Module, updaters: int) -> tuple[str, ...]:
    """What to tell of it, if anything."""
    on_gpu = any(parameter.is_cuda for parameter in model.parameters())
    if not on_gpu or updaters == 1 or mps_runs():
        return ()
    return (
        f"{updaters} updaters took turns on the GPU: found no Multi-Process Service, with which they share it; start "
        f"nvidia-cuda-mps-control -d",
    )
