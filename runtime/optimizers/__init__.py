"""Optimizers for large batches: ordinary `torch.optim.Optimizer`s, whose layer norms ranks may share."""

from __future__ import annotations

from runtime.optimizers.lamb import LAMB
from runtime.optimizers.lars import LARS
from runtime.optimizers.layerwise import LayerwiseOptimizer

__all__ = ["LAMB", "LARS", "LayerwiseOptimizer"]
