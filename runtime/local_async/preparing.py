"""Before a run with local updaters: is all as it has to be, how long may anything take, is there memory for it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from runtime.checks.plan import check_model, check_plan, model_fingerprint, trainable_parameters
from runtime.comm.shared_memory import available_bytes
from runtime.comm.topology import node_name
from runtime.comm.world import RankInfo, World, agree, agreed, bounded_timeout_s, check_timeout_s
from runtime.core.closures import DECIDE_BY_LOSS
from runtime.errors import InputError
from runtime.local_async.job import LocalJob, Part, Request, batches_of
from runtime.local_async.partial import is_reentrant, partial_backward
from runtime.local_async.processes import find_unguarded_script, status_bytes
from runtime.local_async.shared import Layout
from runtime.local_async.updaters import check_start_method
from runtime.monitor.preserve import preserved
from runtime.plan import LocalAsyncSpec, Plan, load_plan
from runtime.plan.names import shorten
from runtime.session.attaching import STEPS_PER_DEADLINE
from runtime.torch_compat import names_ignored_by_ddp
from runtime.version import __version__

ON_LOST = ("continue", "stop")

MPS_PIPES = "/tmp/nvidia-mps"
"""Pipes of NVIDIA's Multi-Process Service, without which the kernels of several updaters alternate on a GPU."""

LEAST_TIMEOUT_S = 120.0
"""An updater is taken for hung after half of it, and its first minibatch may have to read data."""


@dataclass(frozen=True)
class Prepared:
    """A rank that can begin."""

    request: Request
    plan: Plan
    spec: LocalAsyncSpec
    job: LocalJob
    layout: Layout
    timeout_s: float
    """Deadline of every wait from now on."""


@dataclass(frozen=True)
class _Need:
    """The needs of one rank, sent to the others."""

    node: str
    updaters: int
    bytes_each: int | None
    """Memory of an updater; None where it is not known."""
    available_bytes: int
    step_s: float
    asked: tuple[int, int]
    """Steps and seed."""


def agree_on_plan(plan: Plan | str | Path, world: World) -> Plan:
    """Return the plan, which all ranks call this with. Raises PlanMismatch, on all alike, where ranks differ or have
    none.
    """
    loaded, digest, local_async, problem = None, "", "null", None
    try:
        loaded = plan if isinstance(plan, Plan) else load_plan(plan)
        digest = loaded.digest()
        if (spec := loaded.local_async) is not None:
            local_async = "synchronous" if spec.synchronous else f"{spec.updaters} updaters"
    except InputError as error:
        problem = str(error)
    agree(world, RankInfo(__version__, torch.__version__, digest, problem=problem, local_async=local_async))
    assert loaded is not None
    return loaded


def prepare(request: Request, plan: Plan, world: World) -> Prepared:
    """Make the job and check everything; every rank calls it, with the same plan. Raises InputError, on all ranks
    alike, where what was asked for cannot be done.
    """
    spec = plan.local_async
    assert spec is not None
    job, layout = agreed(world, "making the job", lambda: _make(request, spec))
    problem = check_model(job.model) or check_plan(trainable_parameters(job.model), plan, world.ranks)
    agree(world, RankInfo(__version__, torch.__version__, "", model_fingerprint(job.model), problem=problem))
    step_s, private_bytes = agreed(
        world, "trying a minibatch", lambda: _try_minibatch(job, spec, world.rank, request.seed)
    )
    processes, asked = 0 if spec.synchronous else spec.updaters, (request.steps, request.seed)
    need = _Need(node_name(), processes, private_bytes, available_bytes(), step_s, asked)
    return Prepared(request, plan, spec, job, layout, _weigh(request, spec, need, world))


def _make(request: Request, spec: LocalAsyncSpec) -> tuple[LocalJob, Layout]:
    problem = check_request(request) or (None if spec.synchronous else find_unguarded_script())
    if problem is not None:
        raise InputError(problem)
    job = made(request.make)
    if len({parameter.device for parameter in job.model.parameters()}) > 1:
        raise InputError("the model's parameters are on several devices; expected one device per rank")
    if names := names_ignored_by_ddp(job.model):
        raise InputError(
            f"the model has DistributedDataParallel ignore {shorten(sorted(names))}, but local updaters average whole "
            f"models; expected none to be left out: use planner.attach, or take "
            f"_set_params_and_buffers_to_ignore_for_model out"
        )
    optimizer = job.optimizer(p for p in job.model.parameters() if p.requires_grad)
    if isinstance(optimizer, DECIDE_BY_LOSS):
        raise InputError(
            f"the optimizer is {type(optimizer).__name__}, which computes several gradients in each step; expected one "
            f"that takes a step for each gradient, such as torch.optim.SGD"
        )
    return job, Layout.of(job.model)


def check_request(request: Request) -> str | None:
    if isinstance(request.steps, bool) or not isinstance(request.steps, int) or request.steps < 1:
        return f"steps: found {request.steps!r}, expected a number of minibatches, at least 1; correct it"
    if request.on_lost not in ON_LOST:
        return f"on_lost: found {request.on_lost!r}, expected {' or '.join(ON_LOST)}; correct it"
    try:
        check_timeout_s(LEAST_TIMEOUT_S if request.timeout_s is None else request.timeout_s)
    except InputError as error:
        return str(error)
    return check_start_method(request.start_method)


def made(make: Callable[[], LocalJob]) -> LocalJob:
    """Make the job. Raises InputError where it is none."""
    job: object = make()
    if not isinstance(job, LocalJob):
        raise InputError(f"the job's function returned {type(job).__name__}, expected a runtime.local_async.LocalJob")
    return job


def _try_minibatch(job: LocalJob, spec: LocalAsyncSpec, rank: int, seed: int) -> tuple[float, int | None]:
    """Run one forward and backward in this process, after which the model is as it was.

    Returns:
        Seconds, and the memory that is this process's alone, as an updater's will be; None if that is unknown.

    Raises:
        InputError: backward cannot stop at the plan's blocks.
    """
    with preserved(job.model):
        batch = batches_of(job, rank, Part(seed=seed))(0)
        start = time.perf_counter()
        loss = job.loss(job.model, batch)
        loss.backward()
        device = next(job.model.parameters()).device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        trial = time.perf_counter() - start, status_bytes("RssAnon")
        if is_reentrant(loss):
            # One backward for each block: InputError where one cannot be done.
            parameters = trainable_parameters(job.model)
            for block in spec.blocks or ():
                partial_backward(job.loss(job.model, batch), [parameters[name] for name in block])
        return trial


def _weigh(request: Request, spec: LocalAsyncSpec, need: _Need, world: World) -> float:
    """Return the deadline for all, once there is memory for all updaters."""
    everyone: list[_Need] = world.gather(need, "comparing what updaters need")
    if len({one.asked for one in everyone}) > 1:
        found = ", ".join(f"rank {rank}: {one.asked}" for rank, one in enumerate(everyone))
        raise InputError(f"ranks were asked for different (steps, seed): {found}; give every rank the same")
    for node in dict.fromkeys(one.node for one in everyone):
        _check_memory([one for one in everyone if one.node == node])
    if request.timeout_s is not None:
        return request.timeout_s
    between = max(spec.average_every, spec.then_every, spec.updaters)
    return max(LEAST_TIMEOUT_S, bounded_timeout_s(STEPS_PER_DEADLINE * between * max(one.step_s for one in everyone)))


def _check_memory(needs: list[_Need]) -> None:
    """Raise InputError where the updaters of one node's ranks do not fit into what is left."""
    each = max((one.bytes_each or 0 for one in needs), default=0)
    wanted = sum(one.updaters * (one.bytes_each or 0) for one in needs)
    free = min(one.available_bytes for one in needs)
    if wanted <= free:
        return
    fit = free // (each * len(needs))
    raise InputError(
        f"updaters: found {needs[0].updaters} on each of {len(needs)} ranks of this machine, which take about "
        f"{each / 2**20:.0f} MiB each, {wanted / 2**20:.0f} MiB in all, and it has {free / 2**20:.0f} MiB left; "
        f"expected at most {fit}: plan for fewer updaters (`planner optimize` again), or use a machine with more memory"
    )


def mps_runs() -> bool:
    """Tell whether this machine's control daemon has its pipe where processes of this environment look for it."""
    return (Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", MPS_PIPES)) / "control").exists()


def mps_note(model: nn.Module, updaters: int) -> tuple[str, ...]:
    if updaters == 1 or not any(parameter.is_cuda for parameter in model.parameters()) or mps_runs():
        return ()
    return (
        f"{updaters} updaters took turns on the GPU: found no Multi-Process Service, with which they share it; start "
        f"nvidia-cuda-mps-control -d",
    )
