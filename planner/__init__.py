"""A compiler for the communication of data-parallel PyTorch training. Importing this package does not import torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from runtime.version import __version__

if TYPE_CHECKING:
    from planner.decide import optimize
    from planner.job import TrainingJob
    from planner.predict import Simulation, simulate
    from planner.profile.document import Cluster, Profile, load_cluster, load_profile
    from planner.profile.step import profile_step
    from planner.replanning import replan
    from runtime.plan import Plan, load_plan

__all__ = [
    "Cluster",
    "Plan",
    "Profile",
    "Simulation",
    "TrainingJob",
    "__version__",
    "load_cluster",
    "load_plan",
    "load_profile",
    "optimize",
    "profile_step",
    "replan",
    "simulate",
]

_WHERE = {
    "Cluster": "planner.profile.document",
    "Plan": "runtime.plan",
    "Profile": "planner.profile.document",
    "Simulation": "planner.predict",
    "TrainingJob": "planner.job",
    "load_cluster": "planner.profile.document",
    "load_plan": "runtime.plan",
    "load_profile": "planner.profile.document",
    "optimize": "planner.decide",
    "profile_step": "planner.profile.step",
    "replan": "planner.replanning",
    "simulate": "planner.predict",
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'planner' has no attribute {name!r}")
    return getattr(importlib.import_module(_WHERE[name]), name)
