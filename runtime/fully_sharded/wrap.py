"""`planner.fully_shard`: a model wrapped as a plan says, by FSDP2's public calls alone."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from runtime.checks.plan import dtype_name, model_fingerprint
from runtime.comm.world import RankInfo, World, agree, deadlines
from runtime.errors import InputError
from runtime.plan import HINT, FullyShardPlan, Plan, load_plan
from runtime.plan.fully_sharded import ROOT, nesting_order
from runtime.plan.names import shorten
from runtime.torch_compat import is_compiled, is_sharded, is_wrapped, names_ignored_by_ddp
from runtime.version import __version__

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

BUFFERS = "set_reduce_scatter_max_input_buffers"


def fully_shard(
    model: nn.Module,
    plan: Plan | str | Path,
    mesh: DeviceMesh | None = None,
    *,
    mp_policy: MixedPrecisionPolicy | None = None,
    timeout_s: float | None = None,
) -> nn.Module:
    """Wrap a plain model in FSDP2 with the groups, prefetches and kept parameters of a plan.

    What runs afterwards is FSDP2 and nothing else: make the optimizer after this call, and save with its state dicts.
    As with FSDP2 itself each rank keeps its part of its own weights: build the same model on every rank.

    Args:
        model: the bare module, not compiled.
        plan: a plan with `fsdp2`, or the path of plan.json; the same on every rank.
        mesh: of all ranks of torch.distributed: 1-D, or for plans with `shard_ranks` 2-D with names, the inner
            dimension of which holds one copy of the parameters; default: made of all ranks.
        mp_policy: FSDP2's, for every group; a plan with `reduce_dtype` adds that. Predictions are of parameters that
            are sent in their own dtype.
        timeout_s: deadline for the other ranks to come here; default: the process group's own.

    Returns:
        The model itself, which is a `torch.distributed.fsdp.FSDPModule` now.

    Raises:
        PlanMismatch: on all ranks alike, before anything is changed: the plan is none for FSDP2, for another model or
            number of ranks, or asks for what this version of torch lacks; the model is compiled or wrapped already,
            ties parameters across groups, or mixes dtypes in a group; ranks hold different plans.
        InputError: the model is none, or the deadline.
        EnvironmentFailure: a rank did not come within the deadline.
    """
    if not isinstance(model, nn.Module):
        raise InputError(
            f"model: found a {type(model).__name__}, expected a torch.nn.Module; call planner.fully_shard(model, plan)"
        )
    world = World.join(None, *deadlines(timeout_s))
    try:
        loaded = _agreed(world, model, plan, mesh, mp_policy)
    finally:
        world.leave()
    assert loaded.fsdp2 is not None
    return _wrap(model, loaded.fsdp2, mesh or _mesh_of(model, loaded.fsdp2, world.ranks), mp_policy)


def _agreed(
    world: World, model: nn.Module, plan: Plan | str | Path, mesh: DeviceMesh | None,
    mp_policy: MixedPrecisionPolicy | None,
) -> Plan:  # fmt: skip
    """Return the plan, once all ranks have the same one and none has a reason against it."""
    loaded, problem, digest, print_ = None, None, "", ""
    try:
        loaded = plan if isinstance(plan, Plan) else load_plan(plan)
        problem = problem_with(model, loaded, world.ranks, mesh, mp_policy)
        if problem is None:
            digest, print_ = loaded.digest(), model_fingerprint(model)
    except InputError as error:
        problem = str(error)
    devices = ",".join(sorted({parameter.device.type for parameter in model.parameters()}))
    agree(world, RankInfo(__version__, torch.__version__, digest, print_, device=devices, problem=problem))
    assert loaded is not None
    return loaded


def problem_with(
    model: nn.Module, plan: Plan, ranks: int, mesh: DeviceMesh | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
) -> str | None:  # fmt: skip
    """Return the first reason why FSDP2 cannot wrap this model by the plan on this number of ranks, or None."""
    spec = plan.fsdp2
    if spec is None:
        return (
            "the plan: found buckets, which attach executes, and no fsdp2; expected groups of modules: make one with "
            "`planner optimize --parallel fsdp2`"
        )
    if plan.buckets:
        return f"the plan: found buckets beside fsdp2, expected none: {HINT}"
    if not dist.is_available() or not dist.is_initialized():
        return (
            "found no process group, which FSDP2 needs even for one rank; expected torch.distributed to be there: "
            "start the script with torchrun and call torch.distributed.init_process_group first"
        )
    if plan.world.ranks != ranks:
        return (
            f"the plan was made for {plan.world.ranks} ranks, found {ranks}; make one for {ranks} "
            f"(`planner optimize --parallel fsdp2 --ranks {ranks}`)"
        )
    return (
        spec.problem_on(ranks, "the plan's fsdp2")
        or _mesh_problem(spec, ranks, mesh)
        or _policy_problem(spec, mp_policy)
        or _model_problem(model)
        or _modules_problem(model, spec)
        or _fingerprint_problem(model, plan)
        or _parameters_problem(model, spec)
        or _version_problem(spec)
    )


def _mesh_problem(spec: FullyShardPlan, ranks: int, mesh: DeviceMesh | None) -> str | None:
    if mesh is None:
        return None
    shard = spec.shard_size(ranks)
    expected = (ranks,) if shard == ranks else (ranks // shard, shard)
    found = tuple(mesh.shape)
    if found != expected:
        names = "" if shard == ranks else ', mesh_dim_names=("replicate", "shard")'
        return (
            f"mesh: found one of shape {found}, expected {expected} for this plan of {ranks} ranks, of which {shard} "
            f"hold one copy of the parameters; make it with init_device_mesh(device, {expected}{names})"
        )
    if len(found) == 2 and mesh.mesh_dim_names is None:
        return 'mesh: found no names of its dimensions, expected some: pass mesh_dim_names=("replicate", "shard")'
    return None


def _policy_problem(spec: FullyShardPlan, policy: MixedPrecisionPolicy | None) -> str | None:
    given = None if policy is None else policy.reduce_dtype
    if spec.reduce_dtype is None or given in (None, getattr(torch, spec.reduce_dtype)):
        return None
    return (
        f"mp_policy: found reduce_dtype {dtype_name(given)}, expected {spec.reduce_dtype}, as the plan says: pass "
        f"that, or plan with --accuracy exact"
    )


def _model_problem(model: nn.Module) -> str | None:
    if is_compiled(model):
        return (
            "the model is compiled, and FSDP2's hooks would be outside of what was compiled; expected a plain module: "
            "call torch.compile after planner.fully_shard, or pass the inner one (model._orig_mod)"
        )
    if names := names_ignored_by_ddp(model):
        return (
            f"the model has DistributedDataParallel ignore {shorten(sorted(names))}, which FSDP2 would shard all the "
            f"same; expected none to be left out: use planner.attach, or torch's fully_shard with ignored_params="
        )
    wrapper = is_wrapped(model)
    sharded = next((name for name, parameter in model.named_parameters() if is_sharded(parameter)), None)
    if wrapper is not None or sharded is not None:
        found = f"is wrapped in {wrapper}" if wrapper else f"has {sharded}, a DTensor, of which each rank holds a part"
        return (
            f"the model {found}; expected a plain module with whole parameters: take the earlier call of fully_shard "
            f"(or the wrapper) out, planner.fully_shard makes all of them"
        )
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.UninitializedParameter):
            return f"{name} has no shape yet (a lazy module); expected one: run one forward before"
        if parameter.dim() == 0:
            return (
                f"{name} has no dimension that could be sharded; expected at least one: make it a tensor of shape (1,)"
            )
    return None


def _modules_problem(model: nn.Module, spec: FullyShardPlan) -> str | None:
    """Return which module of a group is none of the model's, or has no forward before which it could be gathered."""
    modules = dict(model.named_modules(remove_duplicate=False))
    owner: dict[int, str] = {id(model): ROOT}
    for index, group in enumerate(spec.groups):
        for position, name in enumerate(group):
            place = f"the plan's fsdp2.groups[{index}][{position}]: found {name!r}"
            if name not in modules:
                near = difflib.get_close_matches(name, list(modules), n=3)
                hint = f"; near: {', '.join(near)}" if near else ""
                return f"{place}, which is no module of the model; expected a path of named_modules(){hint}: {HINT}"
            module = modules[name]
            if isinstance(module, nn.ModuleList | nn.ModuleDict) and type(module).forward is nn.Module.forward:
                return f"{place}, a {type(module).__name__}, which has no forward; expected what it holds: name that"
            if id(module) in owner:
                return f"{place}, the same module as {owner[id(module)]!r}; expected each module once: take one out"
            owner[id(module)] = name
    return None


def _fingerprint_problem(model: nn.Module, plan: Plan) -> str | None:
    if plan.model.fingerprint in (None, model_fingerprint(model)):
        return None
    return (
        f"the plan (for {plan.model.name}) is for another model, by the names, shapes and dtypes of its trainable "
        f"parameters; expected the one that was profiled: profile this model again"
    )


def _parameters_problem(model: nn.Module, spec: FullyShardPlan) -> str | None:
    """Return which parameter would be in two groups, or which group would mix dtypes."""
    owner: dict[int, tuple[str, str]] = {}
    dtypes: dict[str, tuple[str, torch.dtype]] = {}
    for name, parameter, group in owned_parameters(model, spec):
        first, other = owner.setdefault(id(parameter), (name, group))
        if other != group:
            return (
                f"{first} and {name} are one parameter (tied), in {group_words(other)} and in {group_words(group)}; "
                f"expected both in one group: put the modules into one, or leave both to the model itself"
            )
        if not parameter.requires_grad:
            continue
        before, dtype = dtypes.setdefault(group, (name, parameter.dtype))
        if dtype != parameter.dtype:
            return (
                f"{before} is {dtype_name(dtype)} and {name} {dtype_name(parameter.dtype)}, both in "
                f"{group_words(group)}; FSDP2 expects one dtype of trainable parameters in a group: convert one, or "
                f"group them apart"
            )
    return None


def owned_parameters(model: nn.Module, spec: FullyShardPlan) -> Iterator[tuple[str, nn.Parameter, str]]:
    """Give each parameter, a tied one under each of its names: (name, parameter, name of the group that holds it)."""
    modules = dict(model.named_modules(remove_duplicate=False))
    group_of = {id(modules[name]): group[0] for group in spec.groups for name in group}
    for path, parameter in model.named_parameters(remove_duplicate=False):
        steps = path.split(".")[:-1]
        above = (".".join(steps[:count]) for count in range(len(steps), 0, -1))
        yield path, parameter, next((group_of[id(modules[at])] for at in above if id(modules[at]) in group_of), ROOT)


def group_words(group: str) -> str:
    """Name a group in a message."""
    return f"the group of {group}" if group else "the model's own group"


def _version_problem(spec: FullyShardPlan) -> str | None:
    from torch.distributed import fsdp  # costs seconds

    wanted = spec.reduce_scatter_max_input_buffers
    if wanted in (None, 1) or hasattr(fsdp.FSDPModule, BUFFERS):
        return None
    lost_us = spec.lost_without_buffers_us
    lost = "" if lost_us is None else f", without which a step takes {lost_us / 1e3:.3g} ms longer, as predicted"
    return (
        f"the plan's fsdp2.reduce_scatter_max_input_buffers: found {wanted}, but torch {torch.__version__} has no "
        f"{BUFFERS}{lost}; expected a newer torch: install one, or take the field out"
    )


def _mesh_of(model: nn.Module, spec: FullyShardPlan, ranks: int) -> DeviceMesh:
    device = next(model.parameters()).device.type
    if device == "meta":
        device = torch.accelerator.current_accelerator().type if torch.accelerator.is_available() else "cpu"  # type: ignore[union-attr]
    shard = spec.shard_size(ranks)
    if shard == ranks:
        return init_device_mesh(device, (ranks,))
    return init_device_mesh(device, (ranks // shard, shard), mesh_dim_names=("replicate", "shard"))


def _wrap(
    model: nn.Module, spec: FullyShardPlan, mesh: DeviceMesh, mp_policy: MixedPrecisionPolicy | None
) -> nn.Module:
    from torch.distributed import fsdp  # costs seconds

    options: dict[str, Any] = {"mesh": mesh}
    if spec.reduce_dtype is not None:
        mp_policy = dataclasses.replace(
            mp_policy or fsdp.MixedPrecisionPolicy(), reduce_dtype=getattr(torch, spec.reduce_dtype)
        )
    if mp_policy is not None:
        options["mp_policy"] = mp_policy
    modules: Mapping[str, Any] = dict(model.named_modules(remove_duplicate=False))
    order = nesting_order(spec.groups)
    assert order is not None
    for index in order:
        group = spec.groups[index]
        found = [modules[name] for name in group]
        keep = spec.reshard_after_forward.get(group[0])
        fsdp.fully_shard(found if len(found) > 1 else found[0], reshard_after_forward=keep, **options)
    fsdp.fully_shard(model, reshard_after_forward=spec.reshard_after_forward.get(ROOT), **options)
    for name, targets in spec.forward_prefetch.items():
        modules[name].set_modules_to_forward_prefetch([modules[target] for target in targets])
    for name, targets in spec.backward_prefetch.items():
        modules[name].set_modules_to_backward_prefetch([modules[target] for target in targets])
    if spec.reduce_scatter_max_input_buffers not in (None, 1):
        getattr(model, BUFFERS)(spec.reduce_scatter_max_input_buffers)
    return model
