"""The digits at three resolutions, one after the other, as in CommLib's DAWNBench record: a plan in phases.

planner profile examples/resolutions.py:at_8 -o 8px.json
planner profile examples/resolutions.py:at_12 -o 12px.json
planner profile examples/resolutions.py:at_16 -o 16px.json
planner optimize 8px.json 12px.json 16px.json --epochs 13,11,3 --steps-per-epoch 45
planner run examples/resolutions.py:growing --plan plan.json --steps 1215
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from torch import Tensor
from torch.nn import functional

from planner import TrainingJob

sys.path.insert(0, str(Path(__file__).parent))
import digits

EPOCHS = {8: 13, 12: 11, 16: 3}
"""Pixels of a side → epochs."""
STEPS_PER_EPOCH = 45
"""On two ranks."""


def at(pixels: int, step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Return a batch of digits with `pixels` pixels a side."""
    images, labels = digits.batch(step, rank)
    return functional.interpolate(images, size=(pixels, pixels), mode="bilinear"), labels


def pixels_of(step: int) -> int:
    """Return the resolution of a step."""
    left = step
    for pixels, epochs in EPOCHS.items():
        left -= epochs * STEPS_PER_EPOCH
        if left < 0:
            return pixels
    return pixels


def at_8() -> TrainingJob:
    """Return the job of the first phase, to profile."""
    return replace(digits.job(), batch=lambda step, rank: at(8, step, rank))


def at_12() -> TrainingJob:
    """Return the job of the second phase."""
    return replace(digits.job(), batch=lambda step, rank: at(12, step, rank))


def at_16() -> TrainingJob:
    """Return the job of the last phase."""
    return replace(digits.job(), batch=lambda step, rank: at(16, step, rank))


def growing() -> TrainingJob:
    """Return the whole training; a script with epochs calls `session.next_phase()` instead."""
    return replace(digits.job(), batch=lambda step, rank: at(pixels_of(step), step, rank))
