"""plan.json and the other files that planner and runtime share. Imports no torch."""

from __future__ import annotations

from runtime.plan.document import (
    HINT,
    MAX_UPDATERS,
    NO_COMPRESSION,
    Accuracy,
    CompressorSpec,
    DelaySpec,
    LocalAsyncSpec,
    ModelReference,
    NormPlan,
    Plan,
    PlanBucket,
    PlanWorld,
    StepPlan,
    UpdatePlan,
    check_blocks,
    gathers_problem,
    interface_problem,
    load_plan,
    parse_plan,
)

__all__ = [
    "HINT", "MAX_UPDATERS", "NO_COMPRESSION", "Accuracy", "CompressorSpec", "DelaySpec", "LocalAsyncSpec",
    "ModelReference", "NormPlan", "Plan", "PlanBucket", "PlanWorld", "StepPlan", "UpdatePlan",
    "check_blocks", "gathers_problem", "interface_problem", "load_plan", "parse_plan",
]  # fmt: skip
