"""LAP-SGD and LPP-SGD: several updaters of each rank share one model without locks; ranks average without waiting.

`run_local_async` trains a job so, and by what it is compared with; docs/concepts/local-updaters.md tells how. Source:
Algorithm 1 of "Scaling the Wild: Decentralizing Hogwild!-style Shared-memory SGD" (Chatterjee, Kungurtsev, Alistarh,
2022). Importing this package does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.lazy import lazy

if TYPE_CHECKING:
    from runtime.local_async.job import LocalJob, Part, PartSampler
    from runtime.local_async.report import LocalReport
    from runtime.local_async.run import LocalRun, run_local_async

__all__ = ["LocalJob", "LocalReport", "LocalRun", "Part", "PartSampler", "run_local_async"]

__getattr__ = lazy(__name__, {
    f"{__name__}.job": ("LocalJob", "Part", "PartSampler"), f"{__name__}.report": ("LocalReport",),
    f"{__name__}.run": ("LocalRun", "run_local_async"),
})  # fmt: skip
