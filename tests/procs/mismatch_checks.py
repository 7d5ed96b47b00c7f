"""What the ranks do that do not agree: each case changes one thing on rank 1."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from session_checks import Weighted, convnet, plan_of
from torch import nn

import runtime
import runtime.session.attaching
from planner import profile_step
from runtime.errors import PlannerError
from runtime.plan import ModelReference, Plan


def _said(function: Callable[..., Any], *arguments: Any, **options: Any) -> str:
    """`Type: message` of the error, or nothing."""
    try:
        function(*arguments, **options).detach()
    except PlannerError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _linear(width: int = 4, dtype: torch.dtype = torch.float32) -> nn.Module:
    return nn.Sequential(nn.Linear(3, width), nn.Linear(width, 2)).to(dtype)


def disagreements() -> dict[str, str]:
    """What each rank is told, by case."""
    odd = dist.get_rank() == 1
    said: dict[str, str] = {}
    model = convnet()
    plan = plan_of(model, 3)
    with patch.object(runtime.session.attaching, "__version__", "9.9.9" if odd else runtime.__version__):
        said["versions"] = _said(runtime.attach, model, None, plan)
    with patch.object(torch, "__version__", "9.9.9" if odd else torch.__version__):
        said["versions of torch"] = _said(runtime.attach, model, None, plan)
    said["plans"] = _said(runtime.attach, model, None, plan_of(model, 2) if odd else plan)
    said["notes of plans"] = _said(runtime.attach, model, None, replace(plan, notes=("mine",)) if odd else plan)
    said["compiled"] = _said(runtime.attach, model, None, plan, compile="eager" if odd else None)
    given = {"backend": "eager", "dynamic": odd}
    said["compiled so"] = _said(runtime.attach, model, None, plan, compile=given)
    said["shapes"] = _said(runtime.attach, _linear(5 if odd else 4), None, plan_of(_linear(), 2))
    sized = [replace(bucket, size_bytes=40) for bucket in plan_of(_linear(), 1).buckets]
    stamped = plan_of(_linear(), 1, buckets=tuple(sized), model=ModelReference(name="other", fingerprint="sha256:0"))
    said["sizes"] = _said(runtime.attach, _linear(), None, stamped)
    kinds = torch.float64 if odd else torch.float32
    said["dtypes"] = _said(runtime.attach, _linear(dtype=kinds), None, plan_of(_linear(), 2))
    said["models"] = _said(runtime.attach, Weighted() if odd else model, None, plan)
    said["frozen"] = _said(runtime.attach, model.requires_grad_(not odd), None, plan)
    model.requires_grad_(True)
    said["no path"] = _said(runtime.attach, model, None, None if odd else plan)
    said |= _files(model, plan, odd)
    said["attached"] = _attached_twice(model, plan, odd)
    return said


def _files(model: nn.Module, plan: Plan, odd: bool) -> dict[str, str]:
    """Rank 1's file is missing, cut off, of another version or another model's; rank 0's is sound."""
    said = {}
    with tempfile.TemporaryDirectory() as folder:
        sound, bad = Path(folder, "plan.json"), Path(folder, "bad.json")
        plan.save(sound)
        text = sound.read_text()
        other = json.dumps(plan_of(Weighted(), 1).to_document())
        contents = {"cut": text[:-20], "version": text.replace("plan/1", "plan/2"), "other": other, "missing": None}
        for case, content in contents.items():
            bad.unlink(missing_ok=True)
            if content is not None:
                bad.write_text(content)
            said[f"file {case}"] = _said(runtime.attach, model, None, bad if odd else sound)
    return said


def _attached_twice(model: nn.Module, plan: Plan, odd: bool) -> str:
    """Rank 1's model is attached already, with a session of another group."""
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    first = runtime.attach(model, None, replace(plan, world=replace(plan.world, ranks=1)), alone) if odd else None
    said = _said(runtime.attach, model, None, plan)
    if first is not None:
        first.detach()
    return said


def profiles_of_different_models() -> dict[str, str]:
    """`profile_step` where rank 1 has another model, a wrapped one or one without parameters."""
    odd = dist.get_rank() == 1
    wrapped = nn.parallel.DistributedDataParallel(_linear())
    models = {
        "shapes": _linear(5 if odd else 4),
        "layers": nn.Linear(3, 1) if odd else _linear(),
        "wrapped": wrapped if odd else _linear(),
        "frozen": _linear().requires_grad_(not odd),
    }
    return {case: _said(profile_step, model, lambda: None) for case, model in models.items()}


def different_deadlines() -> tuple[str, float]:
    """(error, weight after a step) where rank 1 alone asks for a deadline."""
    model = Weighted()
    session = runtime.attach(model, None, plan_of(model, 2), timeout_s=20 if dist.get_rank() else None)
    model([torch.full_like(w, float(dist.get_rank())) for w in model.weights]).backward()
    gradient = model.weights[0].grad
    session.detach()
    return "", float(gradient[0]) if gradient is not None else -1.0


def different_groups() -> tuple[str, float]:
    """Rank 1 attaches alone, rank 0 with all: (what each is told, after how many seconds). Comes last."""
    group = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    model = Weighted()
    plan = plan_of(model, 2)
    started = time.monotonic()
    said = _said(runtime.attach, model, None, plan, group if dist.get_rank() == 1 else None, timeout_s=3)
    waited_s = time.monotonic() - started
    time.sleep(max(0.0, 5.0 - waited_s))  # rank 0's store must outlast the wait
    return said, waited_s


def all_mismatches() -> dict[str, Any]:
    """Everything, in one start of processes."""
    return {
        "disagreements": disagreements(),
        "profiles": profiles_of_different_models(),
        "deadlines": different_deadlines(),
        "groups": different_groups(),
    }
