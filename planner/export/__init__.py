"""A plan in the forms that stock executors read. `EXPORTERS` is the only list of them. Torch-free.

Notes report what a form cannot hold, each with what it costs where that is known: from the simulator where the
plan's profile is given, else from what the plan says of its own alternatives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from planner.documents.catalog import find_cluster, find_profile
from planner.documents.profile import Cluster, Profile
from planner.export.base import Export
from planner.export.chakra import to_chakra
from planner.export.ddp import to_ddp
from planner.export.ddp_hook import to_ddp_hook
from planner.export.inductor import to_inductor
from planner.export.nccl_tuner import to_nccl_tuner
from planner.export.step_graphs import export_layers, export_step
from planner.model.problem import Problem, make_problem
from runtime.errors import InputError
from runtime.plan import Plan, check_has_buckets, load_plan

EXPORTERS: Mapping[str, Callable[[Plan, Problem | None], Export]] = {
    "chakra": to_chakra,
    "ddp": to_ddp,
    "ddp-hook": to_ddp_hook,
    "dot": partial(export_step, dot="step"),
    "graphml": export_step,
    "inductor": to_inductor,
    "layers-dot": partial(export_layers, dot="layers"),
    "layers-graphml": export_layers,
    "nccl-tuner": to_nccl_tuner,
}


def export(
    plan: Plan | str | Path,
    to: str,
    profile: Profile | str | Path | None = None,
    cluster: Cluster | str | Path | None = None,
) -> Export:
    """Return a plan in the form `to`, by its name in `EXPORTERS`.

    `profile` and `cluster` are those that the plan was made from: with them buckets are checked and costs simulated.

    Raises:
        InputError: another name; a wrong document, or one of another model; nothing of the plan can be expressed.
    """
    if to not in EXPORTERS:
        raise InputError(f"--to: found {to!r}, expected one of: {', '.join(EXPORTERS)}")
    where = str(plan) if isinstance(plan, str | Path) else "plan"
    loaded = plan if isinstance(plan, Plan) else load_plan(plan)
    check_has_buckets(loaded, where, "FSDP2 is a stock executor itself: planner.fully_shard tells it the plan")
    if profile is None and cluster is not None:
        raise InputError("--cluster: found it without --profile; expected both, as the plan was made from")
    problem = None
    if profile is not None:
        machines = None if cluster is None else find_cluster(cluster)
        problem = make_problem(find_profile(profile), machines, loaded.world.ranks, where=str(cluster or profile))
        if odd := sorted({g.name for g in problem.profile.compute.gradients} ^ set(loaded.gradients)):
            raise InputError(
                f"--profile: found a profile of another model: only one of it and {where} holds {', '.join(odd[:5])}"
                f"{f' and {len(odd) - 5} more' if odd[5:] else ''}; expected the one that the plan was made from"
            )
    return EXPORTERS[to](loaded, problem)
