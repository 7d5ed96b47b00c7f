"""LAP-SGD and LPP-SGD: several updaters of each rank share one model without locks; ranks average without waiting.

`run_local_async` trains a job so, and by what it is compared with; docs/concepts/local-updaters.md tells how. Source:
Algorithm 1 of "Scaling the Wild: Decentralizing Hogwild!-style Shared-memory SGD" (Chatterjee, Kungurtsev, Alistarh,
2022). Importing this package does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runtime.local_async.job import LocalJob, Part, PartSampler
    from runtime.local_async.report import LocalReport
    from runtime.local_async.run import LocalRun, run_local_async

__all__ = ["LocalJob", "LocalReport", "LocalRun", "Part", "PartSampler", "run_local_async"]

_WHERE = {
    "LocalJob": "job",
    "LocalReport": "report",
    "LocalRun": "run",
    "Part": "job",
    "PartSampler": "job",
    "run_local_async": "run",
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
