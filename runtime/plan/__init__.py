"""Records of plan.json and the other files that planner and runtime share. Imports no torch."""

from __future__ import annotations

from runtime.plan.document import (
    MAX_UPDATERS,
    NO_COMPRESSION,
    Accuracy,
    CompressorSpec,
    DelaySpec,
    LocalAsyncSpec,
    ModelReference,
    NormPlan,
    OperatorPlan,
    Plan,
    PlanBucket,
    PlanWorld,
    StepPlan,
    UpdatePlan,
    blocks_problem,
    check_has_buckets,
    gathers_problem,
    interface_problem,
    load_plan,
    parse_plan,
)
from runtime.plan.fully_sharded import FullyShardPlan
from runtime.plan.outer_spec import OuterOptimizer, OuterSpec
from runtime.plan.strict_json import HINT

__all__ = [
    "HINT", "MAX_UPDATERS", "NO_COMPRESSION", "Accuracy", "CompressorSpec", "DelaySpec", "FullyShardPlan",
    "LocalAsyncSpec", "ModelReference", "NormPlan", "OperatorPlan", "OuterOptimizer", "OuterSpec", "Plan", "PlanBucket",
    "PlanWorld", "StepPlan", "UpdatePlan", "blocks_problem", "check_has_buckets", "gathers_problem",
    "interface_problem", "load_plan", "parse_plan",
]  # fmt: skip
