"""Executes plans inside an ordinary PyTorch training loop. Importing this package does not import torch.

Examples:
    >>> plan = runtime.load_plan("plan.json")             # doctest: +SKIP
    >>> session = runtime.attach(model, optimizer, plan)  # doctest: +SKIP
"""

from __future__ import annotations

from typing import TYPE_CHECKING

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
from runtime.lazy import lazy
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

# Plans need pydantic, sessions torch, the kernels only torch.
__getattr__ = lazy("runtime", {
    "runtime.plan": ("Plan", "load_plan", "parse_plan"), "runtime.session.attaching": ("attach",),
    "runtime.session.report": ("Report",), "runtime.session.session": ("Session",),
})  # fmt: skip
