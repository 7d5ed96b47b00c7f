"""`planner.profile_step`: measures one training step and the links, inside a running script or under the CLI."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn

from planner.documents.profile import ComputeProfile, Profile, ProfileWorld, load_profile
from planner.profile.bench import Bench, Progress, memory_bytes
from planner.profile.compute import Training
from planner.profile.measured_cuts import regions_of
from planner.profile.measuring import Measuring, count_nodes, now
from planner.profile.request import BUDGET_S, Request, heard
from planner.testbed.hosts import emulation_here
from runtime.checks.optimizer import check_steps
from runtime.checks.plan import check_model, model_fingerprint, trainable_parameters
from runtime.comm.topology import node_name
from runtime.comm.world import World, bounded_timeout_s
from runtime.core.compiled import CompileOptions, check_compile
from runtime.core.options import CompileArgument
from runtime.errors import InputError
from runtime.monitor.preserve import preserved
from runtime.optimizers.kinds import Optimizers, each_of
from runtime.plan import Accuracy
from runtime.session.attaching import STEPS_PER_DEADLINE
from runtime.torch_compat import is_wrapped

T = TypeVar("T")

TIMEOUT_S = 300.0
"""Deadline of each wait before a step has been measured: a step of the slowest model has to fit, or its tracing."""

SLOWEST_BYTES_PER_S = 10e6
"""A collective of the whole model has to fit into the deadline on a network as slow as this."""


def profile_step(
    model: nn.Module,
    step: Callable[[], object],
    optimizer: Optimizers | None = None,
    process_group: dist.ProcessGroup | None = None,
    *,
    accuracy: Accuracy = "exact",
    add_to: Profile | str | Path | None = None,
    budget_s: float = BUDGET_S,
    timeout_s: float | None = None,
    compile: CompileArgument | None = None,
) -> Profile:
    """Measure a step of a script that is already running, and the links between its ranks.

    The logger `planner.profile` reports each phase and the time that is left; on standard error if `logging` is not
    configured.

    Args:
        model: the bare module that `step` trains.
        step: runs one forward and backward; may be called some dozens of times. Every rank calls `profile_step`.
        optimizer: its `step()` is timed where given, or those of several, one after the other; otherwise the update
            counts as free.
        process_group: the ranks that train together; default: all of torch.distributed, or this process alone.
        accuracy: the riskiest class of plans that are to be decided from it: `bounded` also measures gathers and the
            costs of selecting elements, `relaxed` also those of delayed updates.
        add_to: a profile of this model on these ranks, or its path, to which only what it lacks is added.
        budget_s: seconds that it may take beyond compiling and its first steps, at most ten if steps are long.
        timeout_s: deadline of every wait for other ranks. Default: 300 s until the step has been measured and while it
            is traced; 20 steps, at least 30 s, while collectives are timed (see `deadline_s`).
        compile: as for `planner.attach`: the model is compiled, and what cuts of its graph cost is measured.

    Returns:
        The profile, the same on every rank. Parameters, buffers, `.grad`, optimizer and generators are left as found.

    Raises:
        InputError: the model is wrapped (DDP, FSDP), or the step reaches no trainable parameter; `add_to` is of another
            model or of other ranks; the class or the budget is none.
        EnvironmentFailure: a rank died or missed a deadline.
    """
    check_steps(optimizer, "pass the model's optimizer")
    base = load_profile(add_to) if isinstance(add_to, str | Path) else add_to
    request = Request(accuracy=accuracy, add_to=base, budget_s=budget_s)
    return measure(Training(model, lambda _: step(), optimizer, compile), request, process_group, timeout_s=timeout_s)


@contextmanager
def joined(group: dist.ProcessGroup | None, timeout_s: float | None, notice_s: float | None = None) -> Iterator[World]:
    """Join the ranks of a group, with a deadline of their own (default: 300 s), until this ends; see `World.join`."""
    world = World.join(group, TIMEOUT_S if timeout_s is None else timeout_s, notice_s)
    try:
        yield world
    finally:
        world.leave()


def deadline_s(step_us: float, size_bytes: int) -> float:
    """Return the default deadline of ranks that exchange messages of `size_bytes`, with steps of `step_us`."""
    return bounded_timeout_s(max(STEPS_PER_DEADLINE * step_us / 1e6, size_bytes / SLOWEST_BYTES_PER_S))


def measure(
    training: Training,
    request: Request,
    process_group: dist.ProcessGroup | None = None,
    *,
    name: str | None = None,
    progress: Progress | None = None,
    timeout_s: float | None = None,
) -> Profile:
    """Measure a step that reports when its backward begins; otherwise as `profile_step`.

    Args:
        training: the step.
        request: what is measured.
        process_group: the ranks that train together.
        name: of the model in the profile; default: its class.
        progress: shows bars.
        timeout_s: deadline of every wait for other ranks.
    """
    model = training.model
    with joined(process_group, timeout_s) as world, heard():
        # Every rank comes to the same verdict, so that none waits for one that has given up.
        everyone: list[tuple[str | None, str]] = world.gather(_problem(training), "comparing models")
        refuse_alike([problem for problem, _ in everyone])
        check_same_model([print_ for _, print_ in everyone])
        device, emulation = training.device, emulation_here()
        nodes: list[str] = world.gather(node_name(), "counting machines")
        described = ProfileWorld(
            ranks=world.ranks,
            nodes=count_nodes(nodes),
            backend=world.backend,
            device=device.type if device.type == "cpu" else torch.cuda.get_device_name(device),
            torch=torch.__version__,
            measured=now(),
            threads_per_rank=torch.get_num_threads(),
            cores=os.cpu_count(),
            memory_bytes=memory_bytes(device),
            emulated=emulation.kind if emulation else None,
            emulation=emulation.spec if emulation else None,
        )
        # What is added to a profile has to be measured of its model, in its world.
        wrong = None if request.add_to is None else _incompatibility(request.add_to, training, described)
        refuse_alike(world.gather(wrong, "comparing profiles"))
        measuring = Measuring(training, Bench(world, device, progress or Progress()), nodes, request)
        with preserved(model, each_of(training.optimizer)), regions_of(training) as regions:
            found = request.add_to or measuring.step(name or type(model).__name__, described, regions)
            with _with_measured_timeout(world, found.compute, process_group, timeout_s) as hurried:
                measuring.links(hurried, found.compute)
                # With the long deadline: tracing a model may take long. And before what can be shortened.
                found = found if request.add_to else measuring.layers(world, found)
                measuring.beside(hurried, found.compute)
        mine = replace(found, cluster=measuring.cluster(found))
        agreed: Profile = world.gather(mine, "agreeing on the profile")[0]
        return agreed


@contextmanager
def _with_measured_timeout(
    world: World, compute: ComputeProfile, process_group: dist.ProcessGroup | None, timeout_s: float | None
) -> Iterator[World]:
    """Join the same ranks with a deadline that follows from the measured step, unless one was given."""
    if world.group is None or timeout_s is not None:
        yield world
        return
    with joined(process_group, deadline_s(compute.step_us, compute.size_bytes)) as hurried:
        yield hurried


def decided_by_first(world: World, decide: Callable[[], T], what: str) -> T:
    """Return what the first rank decides, the same on all ranks; every rank calls it.

    So ranks whose libraries round differently cannot come to different decisions.

    Args:
        world: the ranks.
        decide: called on the first rank alone.
        what: names the exchange in errors.

    Raises:
        InputError: on all ranks alike, if the first one raises it.
    """
    mine: T | InputError | None = None
    if world.rank == 0:
        try:
            mine = decide()
        except InputError as error:
            mine = error
    found: T | InputError = world.gather(mine, what)[0]
    if isinstance(found, InputError):
        raise found
    return found


def refuse_alike(problems: Sequence[str | None]) -> None:
    """Raise InputError on all ranks alike, given the problem of each."""
    first = {problem: rank for rank, problem in reversed(list(enumerate(problems))) if problem}
    if first:
        alike = len(set(problems)) == 1
        raise InputError("\n".join(p if alike else f"rank {rank}: {p}" for p, rank in reversed(first.items())))


def _incompatibility(known: Profile, training: Training, here: ProfileWorld) -> str | None:
    """Return the reason why nothing can be added to a profile here."""
    hint = "profile anew, with none to add to"
    if known.model.fingerprint != model_fingerprint(training.model):
        return (
            f"the profile to add to is of another model ({known.model.name}), by the names, shapes and dtypes of "
            f"trainable parameters; {hint}"
        )
    if known.cluster is None:
        return f"the profile to add to has no cluster; expected one that `planner profile` has measured: {hint}"
    before = None if known.compute.compiled is None else known.compute.compiled.backend
    compiled = None if training.compile is None else CompileOptions.of(training.compile).name
    if before != compiled:
        return (
            f"the profile to add to was measured with compile={before!r}, found compile={compiled!r}, whose times and "
            f"cuts are others; pass {before!r}, or {hint}"
        )
    for field in ("ranks", "nodes", "backend", "device", "emulation"):
        before, now = getattr(known.world, field), getattr(here, field)
        if before != now:
            return f"the profile to add to was measured with {field} = {before}, found {now}; measure there, or {hint}"
    return None


def check_same_model(fingerprints: Sequence[str]) -> None:
    """Raise InputError if ranks hold different models, given the fingerprints of all."""
    if len(set(fingerprints)) > 1:
        listed = ", ".join(f"rank {rank}: {print_}" for rank, print_ in enumerate(fingerprints[:8]))
        raise InputError(
            f"ranks hold different models, by the names, shapes and dtypes of their trainable parameters ({listed}), "
            f"expected equal ones; build the same model on every rank"
        )


def _problem(training: Training) -> tuple[str | None, str]:
    """Return (why this model cannot be measured, its fingerprint)."""
    model = training.model
    wrapper = is_wrapped(model)
    if wrapper is not None:
        return f"the model is wrapped in {wrapper}, expected a plain one; profile the inner module (model.module)", ""
    try:
        if (problem := check_model(model) or check_compile(model, training.compile)) is not None:
            return problem, ""
        found = model_fingerprint(model)
    except InputError as error:
        return str(error), ""
    if not trainable_parameters(model):
        return "the model has no trainable parameter, expected at least one with requires_grad; unfreeze one", ""
    return None, found
