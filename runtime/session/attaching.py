"""Attach a model: a plan, the model and its ranks are checked against each other before anything is changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from runtime.checks.attach import ModelFacts, check_attach, device_kinds, form_of_followed
from runtime.checks.backend import check_backend
from runtime.checks.optimizer import check_steps, holders_of, warn_of_accuracy
from runtime.checks.plan import check_plan
from runtime.checks.topology import adapt, check_topology
from runtime.comm.topology import NodeInfo, find_topology, node_info
from runtime.comm.world import RankInfo, World, agree, deadlines
from runtime.core.compiled import compile_identity
from runtime.core.members import exchanged_buffers, exchanged_parameters
from runtime.core.options import AttachOptions, CompileArgument, ResidualUnit
from runtime.errors import InputError, PlanMismatch
from runtime.monitor.drift import warn_of_torch
from runtime.optimizers.kinds import inner_optimizers
from runtime.plan import Plan, load_plan
from runtime.session.session import Session, attached
from runtime.sparse.learning_rate import learning_rate
from runtime.version import __version__

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

S = TypeVar("S", bound=Session)

STEPS_PER_DEADLINE = 20
"""A wait of this many predicted steps (and at least 30 s) is long."""


def attach(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
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
    weight: Callable[[], float] | None = None,
    residual_unit: ResidualUnit = "gradient",
    compile: CompileArgument | None = None,
) -> Session:
    """Make `backward()` of a plain model exchange its gradients as the plan says.

    Args:
        model: the bare module, on its device; the same on every rank.
        optimizer: its optimizer, which may hold a part of its parameters, or others, too; its step is timed, and LBFGS
            is given the average of the ranks' losses. None is allowed for every other one, but not with a delay. Of an
            object with a `step` that holds one optimizer (a wrapper), that one counts; plans that do a part of the step
            themselves (delay, a shared step) refuse it. Also several optimizers of disjoint parameters, as a sequence;
            they may be stepped in any order, or skipped, alike on all ranks.
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
        guard: of lossy plans. In the first steps alternate with the exact plan (`fallback`), and keep that if the lossy
            plan is not faster (`runtime.FallbackWarning`); later sample the residuals of buckets, and send those
            with too large ones in a wider format, or whole, for some time; with a delay, shorten it where ranks'
            weights are too far from each other (`runtime.AccuracyWarning`), and end it where it is not faster than the
            warm-up.
        mesh: for plans with hierarchical collectives: the ranks as rows of nodes, the same on every rank, such
            as `init_device_mesh("cuda", (nodes, ranks_per_node))`; default: what torchrun says (GROUP_RANK,
            LOCAL_WORLD_SIZE), or the machines' names.
        weight: returns the number of samples or tokens of this rank in the next backward, in place of
            `session.weight(n)` before each; default: all ranks count alike, unless the script calls that.
        residual_unit: what lossy buckets hold back, `"gradient"`; or `"update"`, gradients times their learning rate,
            as in Algorithm 1 of LAGS-SGD. Both are the same for a constant rate.
        compile: compile the model, or compile again what `torch.compile` has made of it, in regions that end where the
            plan's `cuts` are: a backend of `torch.compile` by name (`"inductor"`), or a mapping of its arguments
            `backend`, `mode`, `options` and `dynamic`. Gradients then come region by region. A plan without `cuts` has
            regions of DDP's sizes. Default: the model stays as it is.

    Returns:
        The session; `.grad` is the average over ranks whenever `backward()` returns (with a delay, while ranks are
        delayed, a rank's own).

    Raises:
        PlanMismatch: on all ranks alike, before anything is changed: the plan is for another model or number of
            ranks, asks for what this runtime does not know, or ranks hold different plans.
        InputError: the model is attached already, or is none; the optimizer is none.
        EnvironmentFailure: a rank did not come within the deadline.
    """
    options = AttachOptions(
        process_group=process_group, sync=sync, broadcast_buffers=broadcast_buffers, timeout_s=timeout_s, drift=drift,
        loss_scale=loss_scale, guard=guard, mesh=mesh, weight=weight, residual_unit=residual_unit, compile=compile,
    )  # fmt: skip
    return attach_as(Session, model, optimizer, plan, options)


@dataclass(frozen=True)
class PlanToMake:
    """A plan that is made once all ranks have agreed on the model, from what they agreed on."""

    problem: str | None
    """Problem on this rank, which is reported to all."""
    make: Callable[[World, ModelFacts, Sequence[RankInfo]], Plan]
    """Called on all ranks, with the information of each; gives a plan that drives the model, the same on all."""


def attach_as(
    kind: type[S], model: nn.Module, optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
    plan: Plan | str | Path | PlanToMake, options: AttachOptions,
) -> S:  # fmt: skip
    """`attach` with a session of another kind."""
    hint = "call planner.attach(model, optimizer)"  # what a script gives, the same on every rank
    if not isinstance(model, nn.Module):
        raise InputError(f"model: found a {type(model).__name__}, expected a torch.nn.Module; {hint}")
    check_steps(optimizer, hint)
    if isinstance(optimizer, Sequence) and len(optimizer) == 1:
        optimizer = optimizer[0]
    given: Plan | None = None
    problem = plan.problem if isinstance(plan, PlanToMake) else None
    try:  # what is wrong on this rank is reported to all ranks, so that none waits for this one
        given = plan if isinstance(plan, Plan) else None if isinstance(plan, PlanToMake) else load_plan(plan)
    except InputError as error:
        problem = str(error)
    whole, given = given, given and given.first
    predicted_us = given.predicted.iteration_us if given and given.predicted else 0.0
    group, timeout_s = options.process_group, options.timeout_s
    world = World.join(group, *deadlines(timeout_s, group, STEPS_PER_DEADLINE * predicted_us / 1e6))
    try:
        facts, found = check_attach(model, optimizer, whole, options, world, attached)
        if given is not None and not (problem or found):
            facts = replace(facts, holders=holders_of(given, optimizer, facts.parameters))
        everyone = compare_ranks(world, model, facts, whole, problem or found, options)
        if given is None:
            assert isinstance(plan, PlanToMake)  # else its file was refused
            given = plan.make(world, facts, everyone)
            if problem := check_plan(facts.parameters, given, world.ranks) or check_backend(given, world, facts.device):
                raise PlanMismatch(problem)
        adapted = adapt(given, world, facts.parameters)
        for number, phase in enumerate(whole.all_phases[1:] if whole is not None else (), 1):
            if problem := check_topology(phase, world.topology):
                raise PlanMismatch(f"phase {number} of the plan: {problem}")
        world.take_down_dropped()  # all ranks are known to attach now
        warn_of_accuracy(adapted, inner_optimizers(optimizer), world, guarded=options.guard)
        if options.drift and world.rank == 0:
            warn_of_torch(adapted)
        if options.sync:
            followed = exchanged_buffers(model) if options.broadcast_buffers else []
            world.broadcast([*exchanged_parameters(model), *followed])
        rate = learning_rate(options.residual_unit, inner_optimizers(optimizer))
        options = replace(options, learning_rate=rate)
        session = kind(model, optimizer, adapted, world, options, facts.parameters)
        if whole is not None and whole.phases is not None:
            session._follow(whole.phases)
        return session
    except BaseException:
        world.leave()
        raise


def compare_ranks(
    world: World, model: nn.Module, facts: ModelFacts, plan: Plan | None, problem: str | None, options: AttachOptions
) -> list[RankInfo]:
    """Compare plans, models, and what is wrong on each rank; return what every rank is, and note their nodes."""
    where: NodeInfo | None = None
    try:
        where = node_info(world.group, options.mesh)
    except InputError as error:
        problem = str(error)
    digest, print_, parameters, compiled = "", "", tuple[str, ...](), None
    if problem is None:
        print_, compiled = facts.fingerprint, compile_identity(options.compile)
        digest, parameters = ("", tuple(facts.parameters)) if plan is None else (plan.digest(), plan.first.gradients)
    followed = form_of_followed(model, buffers=options.broadcast_buffers) if options.sync else ""
    mine = RankInfo(
        __version__, torch.__version__, digest, print_, parameters, device_kinds(model), problem, where=where,
        followed=followed, holders=facts.holders, compile=compiled,
    )  # fmt: skip
    everyone = agree(world, mine)
    world.topology = find_topology([one.where for one in everyone if one.where is not None])
    return everyone
