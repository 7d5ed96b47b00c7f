"""What is said of nodes, groups and plans that do not fit, and of a rank that does not come."""

from __future__ import annotations

import os
import time
import warnings
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from hierarchy_reference import HITOPK, NARROW, TINY, on_grid, planned
from lossy_reference import loss_of
from session_checks import convnet
from step_checks import raised
from torch import Tensor

import runtime
from runtime.comm.phased_communicator import default_order
from runtime.plan import CompressorSpec, Plan, PlanWorld


def refusals() -> dict[str, str]:
    """What is said of nodes, groups and plans that do not fit; alike on all ranks."""
    model, said = convnet(), {}
    plan = planned(model, 4, [("all_reduce", "torus_2d", None)], 4)

    def told(environment: dict[str, str], plan: Plan = plan, **options: Any) -> str:
        before = dict(os.environ)
        os.environ.update(environment)
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                problem = raised(lambda: runtime.attach(model, None, plan, **options).detach())
        finally:
            os.environ.clear()
            os.environ.update(before)
        return problem or "; ".join(str(one.message) for one in caught if one.category is runtime.AdaptedWarning)

    rank = dist.get_rank()
    pairs = {"GROUP_RANK": str(rank // 2), "LOCAL_WORLD_SIZE": "2"}
    said["uneven"] = told({"GROUP_RANK": str(rank // 3), "LOCAL_WORLD_SIZE": "3" if rank < 3 else "1"})
    said["other number"] = told(pairs | {"LOCAL_WORLD_SIZE": "4"})
    said["no number"] = told(pairs | {"LOCAL_WORLD_SIZE": "many"})
    library = planned(model, 4, [("all_reduce", "library", None)], 4)
    said["uneven, but it does not matter"] = told({"GROUP_RANK": str(rank // 3)}, library)
    tree = planned(model, 4, [("all_reduce", "tree", None)], 4)
    said["nor for a tree"] = told({"GROUP_RANK": str(rank // 3)}, tree)
    said["other nodes"] = told(pairs, replace(plan, world=PlanWorld(ranks=4, nodes=4)))
    said["one node"] = told({}, replace(planned(model, 4, HITOPK, 4), world=PlanWorld(ranks=4, nodes=2)))
    said["narrow on one node"] = told({}, replace(planned(model, 4, [*HITOPK, *NARROW], 4), world=PlanWorld(ranks=4)))
    said["torus on one node"] = told({}, replace(plan, world=PlanWorld(ranks=4, nodes=2), phase_order=((0, 0),)))
    said["too few"] = told(pairs, planned(model, 4, [("sparse", "hitopk", TINY)], 4))
    said["flat mesh"] = told({}, mesh=_Mesh(torch.arange(4)))
    said["other mesh"] = told({}, mesh=_Mesh(torch.arange(4).view(2, 2) + 1))
    said["different meshes"] = told({}, mesh=_Mesh(torch.tensor([[0, 1], [2, 3]] if rank else [[0, 2], [1, 3]])))
    said["mesh"] = told(
        {}, replace(plan, world=PlanWorld(ranks=4, nodes=2)), mesh=_Mesh(torch.tensor([[0, 3], [1, 2]]))
    )
    layers = CompressorSpec(name="topk", selector="exact", density=0.1, scope="layer")
    said["by layer"] = told(pairs, planned(model, 4, [("sparse", "hitopk", layers)], 4))
    said["short order"] = told(pairs, replace(plan, phase_order=((0, 0),)))
    backwards = tuple(reversed(default_order([3] * len(plan.buckets))))
    said["order"] = told(pairs, replace(plan, phase_order=backwards))
    return said


class _Mesh:
    """What of a DeviceMesh is looked at."""

    def __init__(self, mesh: Tensor) -> None:
        self.mesh = mesh


def late_rank() -> tuple[str, float]:
    """Rank 3 never comes to the second step: (what this rank is told, after how many seconds)."""
    with on_grid(2, 2) as group:
        assert group is not None
        model = convnet()
        plan = planned(model, 4, HITOPK, 4)
        runtime.attach(model, None, plan, group, timeout_s=3, broadcast_buffers=False)
        loss_of(model, 0).backward()
        begun = time.monotonic()
        if dist.get_rank() == 3:
            time.sleep(9)
            return "", 0.0
        message = raised(lambda: loss_of(model, 1).backward())
        passed_s = time.monotonic() - begun
        time.sleep(max(0.0, 9 - passed_s))
        return message, passed_s
