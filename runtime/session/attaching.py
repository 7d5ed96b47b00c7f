"""attach: a plan, a model and its ranks are checked against each other before anything is changed."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from runtime.checks.backend import check_backend
from runtime.checks.modes import asked_modes
from runtime.checks.optimizer import check_optimizer, check_owner, warn_of_selection
from runtime.checks.plan import (
    check_attached,
    check_buffers,
    check_model,
    check_plan,
    dtype_name,
    model_fingerprint,
    trainable_parameters,
)
from runtime.checks.topology import adapt, check_topology
from runtime.comm.topology import NodeInfo, find_topology, node_info
from runtime.comm.world import RankInfo, World, agree, deadlines
from runtime.core.members import exchanged_buffers, exchanged_parameters, ignored_ids
from runtime.errors import InputError, PlanMismatch
from runtime.monitor.drift import warn_of_torch
from runtime.optimizers.kinds import inner_optimizer
from runtime.plan import Plan, load_plan
from runtime.plan.names import canonical_name, fingerprint
from runtime.session.session import Session, attached
from runtime.version import __version__

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

S = TypeVar("S", bound=Session)

STEPS_PER_DEADLINE = 20
"""A wait of this many predicted steps (and at least 30 s) is long."""


def attach(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    plan: Plan | str | Path,
    process_group: dist.ProcessGroup | None = None,
    *,
    sync: bool = True,
    broadcast_buffers: bool = True,
    timeout_s: float | None = None,
    drift: bool = True,
    loss_scale: Callable[[], float] | None = None,
    guard: bool = True,
    mesh: DeviceMesh | None = None,
) -> Session:
    """Make `backward()` of a plain model exchange its gradients as the plan says.

    Args:
        model: the bare module, on its device; the same on every rank.
        optimizer: its optimizer, which may hold a part of its parameters, or others, too; its step is timed, and LBFGS
            is given the average of the ranks' losses. None is allowed for every other one, but not with a delay. Of an
            object with a `step` that holds one optimizer (a wrapper), that one counts; plans that do a part of the step
            themselves (delay, a shared step) refuse it.
        plan: a plan, or the path of plan.json; the same on every rank.
        process_group: the ranks that train together; default: all of torch.distributed, or this process alone.
        sync: overwrite parameters and buffers with rank 0's, as DDP does.
        broadcast_buffers: overwrite buffers (BatchNorm) with rank 0's in each step, as DDP does. False leaves each rank
            its own, here too.
        timeout_s: deadline of every wait; default: the process group's own, as for DDP, so that a rank may be busy for
            long outside of a step. A wait of 20 predicted steps, and at least 30 s, is said then, once
            (`runtime.LongWaitWarning`), and a rank on the same machine whose process is stopped is not waited for.
        drift: warn (`runtime.DriftWarning`, once for each plan, on each rank that sees it) when the last 50 steps took
            more than 20 % longer than the plan predicts; see `runtime.monitor.drift`. On rank 0 also at once, where the
            plan was profiled with another version of torch.
        loss_scale: `scaler.get_scale` of the GradScaler, where there is one: what lossy buckets hold back is rescaled
            when the scale changes, and what a delay pushes is unscaled. Not needed for exact plans.
        guard: of lossy plans. In the first steps try the exact plan beside it (`fallback`) by turns, and go on with
            that where the lossy one is not faster (`runtime.FallbackWarning`); later sample what buckets leave behind,
            and send those that leave too much in a wider format, or whole; with a delay, shorten it where ranks'
            weights are too far from each other (`runtime.AccuracyWarning`), and end it where it is not faster than the
            warm-up.
        mesh: for plans with collectives on two kinds of link: the ranks as rows of nodes, the same on every rank, such
            as `init_device_mesh("cuda", (nodes, ranks_per_node))`; default: what torchrun says (GROUP_RANK,
            LOCAL_WORLD_SIZE), or the machines' names.

    Returns:
        The session; `.grad` is the average over ranks whenever `backward()` returns (with a delay, while ranks are
        delayed, a rank's own).

    Raises:
        PlanMismatch: on all ranks alike, before anything is changed: the plan is for another model or number of
            ranks, asks for what this runtime does not know, or ranks hold different plans.
        InputError: the model is attached already, or is none; the optimizer is none.
        EnvironmentFailure: a rank did not come within the deadline.
    """
    return attach_as(
        Session, model, optimizer, plan, process_group, sync=sync, broadcast_buffers=broadcast_buffers,
        timeout_s=timeout_s, drift=drift, loss_scale=loss_scale, guard=guard, mesh=mesh,
    )  # fmt: skip


def attach_as(
    kind: type[S],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    plan: Plan | str | Path,
    process_group: dist.ProcessGroup | None,
    *,
    sync: bool,
    broadcast_buffers: bool,
    timeout_s: float | None,
    drift: bool,
    loss_scale: Callable[[], float] | None,
    guard: bool,
    mesh: DeviceMesh | None,
) -> S:
    """`attach` with a session of another kind."""
    hint = "call planner.attach(model, optimizer, plan)"  # what a script gives, the same on every rank
    if not isinstance(model, nn.Module):
        raise InputError(f"model: found a {type(model).__name__}, expected a torch.nn.Module; {hint}")
    if optimizer is not None and not callable(getattr(optimizer, "step", None)):
        raise InputError(f"optimizer: found a {type(optimizer).__name__}, expected a torch.optim.Optimizer; {hint}")
    loaded: Plan | None = None
    try:  # what is wrong on this rank is reported to all ranks, so that none waits for this one
        loaded = plan if isinstance(plan, Plan) else load_plan(plan)
        problem = check_attached(model, attached) or check_owner(model, optimizer)
        problem = problem or check_optimizer(loaded, optimizer, dict(model.named_parameters()))
    except InputError as error:
        problem = str(error)
    scale: object = loss_scale  # of any type, where callers are not checked
    if problem is None and scale is not None and not callable(scale):
        problem = f"loss_scale: found {scale!r}, expected a function such as scaler.get_scale; pass that"
    predicted_us = loaded.predicted.iteration_us if loaded and loaded.predicted else 0.0
    world = World.join(process_group, *deadlines(timeout_s, process_group, STEPS_PER_DEADLINE * predicted_us / 1e6))
    try:
        if problem is None and broadcast_buffers and world.ranks > 1:
            problem = check_buffers(model)
        plan = _agree(world, model, loaded, problem, mesh, _form_of(model, broadcast_buffers) if sync else "")
        world.take_down_dropped()  # all ranks are known to attach now
        if world.rank == 0 and world.ranks > 1:
            warn_of_selection(plan, inner_optimizer(optimizer))
        if drift and world.rank == 0:
            warn_of_torch(plan)
        if sync:
            followed = exchanged_buffers(model) if broadcast_buffers else []
            world.broadcast([*exchanged_parameters(model), *followed])
        return kind(
            model, optimizer, plan, world, broadcast_buffers=broadcast_buffers, drift=drift, loss_scale=loss_scale,
            guard=guard,
        )  # fmt: skip
    except BaseException:
        world.leave()
        raise


def _form_of(model: nn.Module, buffers: bool) -> str:
    """Return names, shapes and dtypes of what follows rank 0 at attach, as a fingerprint; `buffers`: if those do."""
    ignored, others = ignored_ids(model), model.named_buffers() if buffers else ()
    named = [(n, t) for n, t in chain(model.named_parameters(), others) if id(t) not in ignored]
    if any(isinstance(tensor, nn.UninitializedParameter | nn.UninitializedBuffer) for _, tensor in named):
        return ""  # refused by name
    return fingerprint((canonical_name(name), tuple(tensor.shape), dtype_name(tensor.dtype)) for name, tensor in named)


def _agree(
    world: World, model: nn.Module, plan: Plan | None, problem: str | None, mesh: DeviceMesh | None, followed: str
) -> Plan:
    """Compare plans, models and problems of all ranks, and the `followed` fingerprint of what rank 0 gives them; return
    the plan as it is executed on their nodes.
    """
    digest, print_ = "", ""
    parameters: tuple[str, ...] = ()
    where: NodeInfo | None = None
    try:
        where = node_info(world.group, mesh)
        if plan is not None and problem is None:
            problem = asked_modes(plan)[0].attach_reason or check_model(model)
            parameters_of = trainable_parameters(model)
            problem = problem or check_plan(parameters_of, plan, world.ranks)
            problem = problem or check_backend(plan, world, next(iter(parameters_of.values())).device)
        if plan is not None and problem is None:
            digest, parameters, print_ = plan.digest(), plan.gradients, model_fingerprint(model)
    except InputError as error:
        problem = str(error)
    devices = sorted({parameter.device.type for parameter in exchanged_parameters(model)})
    mine = RankInfo(
        __version__, torch.__version__, digest, print_, parameters, ",".join(devices), problem, where=where,
        followed=followed,
    )  # fmt: skip
    everyone = agree(world, mine)
    assert plan is not None
    world.topology = find_topology([one.where for one in everyone if one.where is not None])
    if problem := check_topology(plan, world.topology):
        raise PlanMismatch(problem)
    return adapt(plan, world, trainable_parameters(model))
