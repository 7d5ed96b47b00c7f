"""Executes plans inside an ordinary PyTorch training loop. Importing this package does not import torch.

>>> import runtime
>>> plan = runtime.load_plan("plan.json")                  # doctest: +SKIP
>>> session = runtime.attach(model, optimizer, plan)       # doctest: +SKIP
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from runtime.errors import AccuracyWarning, AdaptedWarning, DriftWarning, FallbackWarning
from runtime.plan import Plan, load_plan, parse_plan
from runtime.version import __version__

if TYPE_CHECKING:
    from runtime.attaching import attach
    from runtime.report import Report
    from runtime.session import Session

__all__ = [
    "AccuracyWarning", "AdaptedWarning", "DriftWarning", "FallbackWarning", "Plan", "Report", "Session", "__version__",
    "attach", "load_plan", "parse_plan",
]  # fmt: skip

_NEED_TORCH = {"attach": "runtime.attaching", "Session": "runtime.session", "Report": "runtime.report"}


def __getattr__(name: str) -> Any:
    if name not in _NEED_TORCH:
        raise AttributeError(f"module 'runtime' has no attribute {name!r}")
    return getattr(importlib.import_module(_NEED_TORCH[name]), name)
