"""A compiler for the communication of data-parallel PyTorch training. Importing this package does not import torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import runtime


def _check_not_shadowed() -> None:
    """Refuse another `runtime` in the place of ours: `runtime` is a name that scripts give to files of their own.

    Raises:
        ImportError: names the file that hides the package.
    """
    ours = Path(__file__).resolve().parents[1] / "runtime"
    found = runtime.__file__ or next(iter(runtime.__path__))
    if Path(found).resolve().parent != ours:
        raise ImportError(
            f"planner: found {found} under the name 'runtime', expected planner's own package {ours}; that file comes "
            f"earlier on sys.path and hides it: rename it, or start Python where it is not on the path"
        )


_check_not_shadowed()

from runtime.errors import (  # noqa: E402 - after the check, for its message names the file
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
from runtime.lazy import lazy  # noqa: E402
from runtime.version import __version__  # noqa: E402

if TYPE_CHECKING:
    from planner.comparison.report import Comparison
    from planner.comparison.script import compare
    from planner.decide.optimize import optimize
    from planner.decide.simulate import Simulation, simulate
    from planner.documents.profile import Cluster, Profile, load_cluster, load_profile
    from planner.jobs.job import TrainingJob
    from planner.jobs.replanning import replan
    from planner.online.attach import PlannedSession, attach
    from planner.profile.step import profile_step
    from runtime.datacache import CachedDataset, CachedSampler, CacheStats, RawDataset
    from runtime.fully_sharded.wrap import fully_shard
    from runtime.local_async import LocalJob, LocalReport, LocalRun, PartSampler, run_local_async
    from runtime.optimizers import LAMB, LARS
    from runtime.optimizers.pto import parallel_tensor_op
    from runtime.plan import Plan, load_plan, parse_plan
    from runtime.session.report import Report
    from runtime.session.session import Session
    from runtime.session.share_sampler import ShareSampler

__all__ = [
    "LAMB", "LARS", "AccuracyCostWarning", "AccuracyWarning", "AdaptedWarning", "CacheStats", "CacheWarning",
    "CachedDataset", "CachedSampler", "Cluster", "Comparison", "DriftWarning", "FallbackWarning", "LocalJob",
    "LocalReport", "LocalRun", "LongWaitWarning", "LostUpdaterWarning", "PartSampler", "Plan", "PlannedSession",
    "Profile", "RawDataset", "Report", "Session", "ShareSampler", "Simulation", "StragglerWarning", "TrainingJob",
    "__version__", "attach", "compare", "fully_shard", "load_cluster", "load_plan", "load_profile", "optimize",
    "parallel_tensor_op", "parse_plan", "profile_step", "replan", "run_local_async", "simulate",
]  # fmt: skip

# Deciding needs no torch, training no planning.
__getattr__ = lazy("planner", {
    "planner.comparison.report": ("Comparison",),
    "planner.comparison.script": ("compare",),
    "planner.decide.optimize": ("optimize",),
    "planner.decide.simulate": ("Simulation", "simulate"),
    "planner.documents.profile": ("Cluster", "Profile", "load_cluster", "load_profile"),
    "planner.jobs.job": ("TrainingJob",),
    "planner.jobs.replanning": ("replan",),
    "planner.online.attach": ("PlannedSession", "attach"),
    "planner.profile.step": ("profile_step",),
    "runtime.datacache": ("CacheStats", "CachedDataset", "CachedSampler", "RawDataset"),
    "runtime.fully_sharded.wrap": ("fully_shard",),
    "runtime.local_async": ("LocalJob", "LocalReport", "LocalRun", "PartSampler", "run_local_async"),
    "runtime.optimizers": ("LAMB", "LARS"),
    "runtime.optimizers.pto": ("parallel_tensor_op",),
    "runtime.plan": ("Plan", "load_plan", "parse_plan"),
    "runtime.session.report": ("Report",),
    "runtime.session.session": ("Session",),
    "runtime.session.share_sampler": ("ShareSampler",),
})  # fmt: skip


def __dir__() -> list[str]:
    return __all__
