"""Kernels against their references, bit for bit."""

from __future__ import annotations

import torch

from benchmarks.gpu.checks import SMALL, Checks, Scale
from benchmarks.gpu.setting import Found, Setting, sentence
from runtime.kernels.cuda import why_not, working
from runtime.kernels.nvrtc import compiler


def run(setting: Setting) -> Found:
    """Every check; without kernels the references run against themselves."""
    torch.manual_seed(0)
    failures: list[str] = []
    by = "No kernel runs on a CPU: its references ran."
    if setting.on_device:
        why = why_not() or working(setting.device.index or 0)
        if why is not None:
            return Found(f"No kernels here: {why}.", (f"no kernels: {why}",))
        by = f"Kernels compiled by NVRTC {compiler().version}."
    checks = Checks(setting.device, setting.pick(Scale(), SMALL))
    checks.all()
    failures += checks.failed
    lines = [by, sentence(f"{checks.made:,} comparisons, bit for bit", failures)]
    return Found(" ".join(lines), tuple(failures), tuple(checks.skipped))
