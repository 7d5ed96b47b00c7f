"""Executes plans inside an ordinary PyTorch training loop. Importing this package does not import torch.

Examples:
    >>> plan = runtime.load_plan("plan.json")             # doctest: +SKIP
    >>> session = runtime.attach(model, optimizer, plan)  # doctest: +SKIP
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from runtime.errors import (
    AccuracyCostWarning,
    AccuracyWarning,
    AdaptedWarning,
    CacheWarning,
    DriftWarning,
    FallbackWarning,
    LongWaitWarning,
    LostUpdaterWarning,
    StragglerWarning,
)
from runtime.version import __version__

if TYPE_CHECKING:
    from runtime.plan import Plan, load_plan, parse_plan
    from runtime.session.attaching import attach
    from runtime.session.report import Report
    from runtime.session.session import Session

__all__ = [
    "AccuracyCostWarning", "AccuracyWarning", "AdaptedWarning", "CacheWarning", "DriftWarning", "FallbackWarning",
    "LongWaitWarning", "LostUpdaterWarning", "Plan", "Report", "Session", "StragglerWarning", "__version__", "attach",
    "load_plan", "parse_plan",
]  # fmt: skip

_WHERE = {
    "Plan": "runtime.plan",
    "Report": "runtime.session.report",
    "Session": "runtime.session.session",
    "attach": "runtime.session.attaching",
    "load_plan": "runtime.plan",
    "parse_plan": "runtime.plan",
}
"""Modules that are imported when a name is first used: plans need pydantic, sessions torch, the kernels only torch."""


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'runtime' has no attribute {name!r}")
    return getattr(importlib.import_module(_WHERE[name]), name)
