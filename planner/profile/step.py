"""`planner.profile_step`: measures one training step and the links, inside a running script or under the CLI."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from planner.frontend.layers import estimated_grad_weight_share, split_backward
from planner.frontend.trace import TracedModel, trace
from planner.profile.apart import LinksApart, measure_apart
from planner.profile.compute import RankTimes, Step, combine, measure_compute
from planner.profile.contention import measure_contention
from planner.profile.delay import DelayCosts, measure_delay
from planner.profile.document import (
    Cluster,
    ComputeProfile,
    Contention,
    GradWeightShare,
    Layer,
    OptimizerProfile,
    Profile,
    ProfileWorld,
    SelectionLine,
    Tracing,
)
from planner.profile.grad_weight import measure_grad_weight_share
from planner.profile.links import LinkTimes, measure_links
from planner.profile.norms import measure_norms
from planner.profile.selection import measure_selection
from planner.progress import Progress, Silent
from planner.testbed.emulation import emulation_here
from runtime.adaptive import is_adaptive
from runtime.attaching import STEPS_PER_DEADLINE
from runtime.elementwise import find_not_elementwise, state_bytes
from runtime.errors import InputError
from runtime.fit import model_fingerprint, trainable_parameters
from runtime.fit_optimizer import find_unowned
from runtime.plan import ModelReference
from runtime.preserve import preserved
from runtime.topology import node_name
from runtime.torch_compat import is_wrapped
from runtime.world import World, bounded_timeout_s

TIMEOUT_S = 300.0
"""Deadline of each wait before a step has been measured: one of the slowest model has to fit, or its tracing."""

SLOWEST_BYTES_PER_S = 10e6
"""A collective of the whole model has to fit into the deadline on a network as slow as this."""


@dataclass(frozen=True)
class _Network:
    """What was measured of the links, and beside them; nothing with one rank."""

    links: LinkTimes | None = None
    apart: LinksApart | None = None
    contention: Contention | None = None
    sparsify: dict[str, SelectionLine] | None = None
    unpack: dict[str, SelectionLine] | None = None
    delay: DelayCosts | None = None


def profile_step(
    model: nn.Module,
    step: Callable[[], object],
    optimizer: torch.optim.Optimizer | None = None,
    process_group: dist.ProcessGroup | None = None,
    *,
    timeout_s: float | None = None,
) -> Profile:
    """Measures a step of a script that is already running, and the links between its ranks.

    Args:
        model: the bare module that `step` trains.
        step: runs one forward and backward; may be called some dozens of times. Every rank calls `profile_step`.
        optimizer: its `step()` is timed where given; otherwise the update counts as free.
        process_group: the ranks that train together; default: all of torch.distributed, or this process alone.
        timeout_s: deadline of every wait for other ranks. Default: 300 s until the step has been measured and while it
            is traced; 20 steps, at least 30 s, while collectives are timed (see `deadline_s`).

    Returns:
        The profile, the same on every rank. Parameters, buffers, `.grad`, optimizer and generators are left as found.

    Raises:
        InputError: the model is wrapped (DDP, FSDP), or the step reaches no trainable parameter.
        EnvironmentFailure: a rank died or missed a deadline.
    """
    return measure(model, lambda _: step(), optimizer, process_group, progress=Silent(), timeout_s=timeout_s)


def deadline_s(step_us: float, size_bytes: int) -> float:
    """Default deadline of ranks that exchange messages of up to `size_bytes` and whose steps take so long."""
    return bounded_timeout_s(max(STEPS_PER_DEADLINE * step_us / 1e6, size_bytes / SLOWEST_BYTES_PER_S))


def measure(
    model: nn.Module,
    step: Step,
    optimizer: torch.optim.Optimizer | None,
    process_group: dist.ProcessGroup | None,
    *,
    progress: Progress,
    name: str | None = None,
    timeout_s: float | None = None,
) -> Profile:
    """`profile_step` for a step that says when its backward begins; `name` is the model's in the profile."""
    world = World.join(process_group, TIMEOUT_S if timeout_s is None else timeout_s)
    try:
        _agree(model, world)
        device = next(model.parameters()).device
        with preserved(model, optimizer):
            mine = measure_compute(model, optimizer, step, world, progress)
            everyone: list[RankTimes] = world.gather(mine, "comparing times of the step")
            compute = combine(everyone, model)
            parameters = trainable_parameters(model)
            norms = measure_norms(parameters, optimizer, compute, world, device, progress)
            compute = replace(compute, optimizer=_describe(optimizer, parameters), norms=norms)
            with _hurried(world, compute, process_group, timeout_s) as hurried:
                network = _measure_network(model, optimizer, step, hurried, device, everyone, compute, progress)
            layers, tracing = _trace(model, step, compute, world)
        mine_of_all = Profile(
            model=ModelReference(name=name or type(model).__name__, fingerprint=model_fingerprint(model)),
            world=_describe_world(world, device),
            compute=compute,
            layers=layers,
            tracing=tracing,
            cluster=_cluster(world, network),
        )
        agreed: Profile = world.gather(mine_of_all, "agreeing on the profile")[0]
        return agreed
    finally:
        world.leave()


def _describe(
    optimizer: torch.optim.Optimizer | None, parameters: Mapping[str, nn.Parameter]
) -> OptimizerProfile | None:
    if optimizer is None:
        return None
    return OptimizerProfile(
        name=type(optimizer).__name__,
        adaptive=is_adaptive(optimizer),
        elementwise=find_not_elementwise(optimizer) is None,
        holds_all=find_unowned(optimizer, parameters) is None,
        state_bytes=state_bytes(optimizer),
    )


@contextmanager
def _hurried(
    world: World, compute: ComputeProfile, process_group: dist.ProcessGroup | None, timeout_s: float | None
) -> Iterator[World]:
    """The same ranks, with a deadline that follows from the measured step where none was given."""
    if world.group is None or timeout_s is not None:
        yield world
        return
    step_us = compute.forward_us + sum(gradient.backward_us for gradient in compute.gradients) + compute.update_us
    hurried = World.join(process_group, deadline_s(step_us, sum(gradient.size_bytes for gradient in compute.gradients)))
    try:
        yield hurried
    finally:
        hurried.leave()


def _agree(model: nn.Module, world: World) -> None:
    """Every rank comes to the same verdict, so that none waits for one that has given up.

    Raises:
        InputError: a rank's model cannot be measured, or ranks hold different models.
    """
    everyone: list[tuple[str | None, str]] = world.gather(_problem(model), "comparing models")
    problems = {problem: rank for rank, (problem, _) in reversed(list(enumerate(everyone))) if problem}
    if problems:
        alike = len({problem for problem, _ in everyone}) == 1
        raise InputError("\n".join(p if alike else f"rank {rank}: {p}" for p, rank in reversed(problems.items())))
    check_same_model([print_ for _, print_ in everyone])


def check_same_model(fingerprints: Sequence[str]) -> None:
    """Raises InputError where ranks hold different models, given the fingerprints of all."""
    if len(set(fingerprints)) > 1:
        listed = ", ".join(f"rank {rank}: {print_}" for rank, print_ in enumerate(fingerprints[:8]))
        raise InputError(
            f"ranks hold different models, by the names, shapes and dtypes of their trainable parameters ({listed}), "
            f"expected equal ones; build the same model on every rank"
        )


def _problem(model: nn.Module) -> tuple[str | None, str]:
    """(why this model cannot be measured, its fingerprint)."""
    wrapper = is_wrapped(model)
    if wrapper is not None:
        return f"the model is wrapped in {wrapper}, expected a plain one; profile the inner module (model.module)", ""
    try:
        found = model_fingerprint(model)
    except InputError as error:
        return str(error), ""
    if not trainable_parameters(model):
        return "the model has no trainable parameter, expected at least one with requires_grad; unfreeze one", ""
    return None, found


def _measure_network(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, step: Step, world: World, device: torch.device,
    ranks: list[RankTimes], compute: ComputeProfile, progress: Progress,
) -> _Network:  # fmt: skip
    if world.group is None:
        return _Network()
    model_bytes = sum(gradient.size_bytes for gradient in compute.gradients)
    with world.naming("timing the collectives"):
        links = measure_links(world, device, model_bytes, progress)
    apart = measure_apart(world, _node_names(world), device, model_bytes, progress)
    overlapped_us = min(_overlapped_us(rank) for rank in ranks)
    contention = measure_contention(model, optimizer, step, world, device, overlapped_us, model_bytes, progress)
    chosen, added = measure_selection(world, device, model_bytes, progress)
    delay = measure_delay(world, device, model_bytes, progress)
    return _Network(apart.beside(links) if apart else links, apart, contention, chosen, added, delay)


def _overlapped_us(rank: RankTimes) -> float:
    """Median over repeats of the time from the first gradient to the end of backward."""
    first_us = np.nanmin(np.array(list(rank.ready_us.values())), axis=0)
    return float(np.median(np.array(rank.backward_end_us) - first_us))


def _trace(model: nn.Module, step: Step, compute: ComputeProfile, world: World) -> tuple[tuple[Layer, ...], Tracing]:
    """Layers from the graph, and how well its split of backward agrees with a measurement."""
    traced: TracedModel = trace(model, lambda: step(lambda: None))
    backward_us: dict[str, float] = {}
    for gradient in compute.gradients:
        backward_us[gradient.layer] = backward_us.get(gradient.layer, 0.0) + gradient.backward_us
    layers = split_backward(traced.layers, backward_us, None, compute.forward_us)
    share = GradWeightShare(
        estimated=estimated_grad_weight_share(traced.layers),
        measured=measure_grad_weight_share(model, step, compute, world),
    )
    tracing = Tracing(method=traced.method, failures=dict(traced.failures) or None, grad_weight_share=share)
    return layers, tracing


def _describe_world(world: World, device: torch.device) -> ProfileWorld:
    emulation = emulation_here()
    return ProfileWorld(
        ranks=world.ranks,
        nodes=_nodes(world),
        backend=world.backend,
        device=device.type if device.type == "cpu" else torch.cuda.get_device_name(device),
        torch=torch.__version__,
        measured=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        threads_per_rank=torch.get_num_threads(),
        cores=os.cpu_count(),
        memory_bytes=None if device.type == "cpu" else torch.cuda.get_device_properties(device).total_memory,
        emulated=emulation.kind if emulation else None,
        emulation=emulation.spec if emulation else None,
    )


def _node_names(world: World) -> list[str]:
    """Every rank's machine: torchrun's node number where it started the ranks, else the host's name."""
    names: list[str] = world.gather(node_name(), "counting machines")
    return names


def _nodes(world: World) -> int:
    """How many machines there are; uneven ones count singly."""
    nodes = len(set(_node_names(world)))
    return nodes if world.ranks % nodes == 0 else world.ranks


def _cluster(world: World, network: _Network) -> Cluster:
    nodes, emulation = _nodes(world), emulation_here()
    links, apart, delay = network.links, network.apart, network.delay
    return Cluster(
        name=emulation.spec if emulation else "measured",
        emulated=emulation.kind if emulation else None,
        nodes=nodes,
        ranks_per_node=world.ranks // nodes,
        intra=apart.intra if apart else None,
        inter=apart.inter if apart else None,
        samples=links.samples if links else None,
        back_to_back=links.back_to_back if links else None,
        collectives=links.lines if links else None,
        contention=network.contention,
        sparsify=network.sparsify,
        unpack=network.unpack,
        push_pack=delay.push_pack if delay else None,
        local_update=delay.local_update if delay else None,
        pull_take=delay.pull_take if delay else None,
    )
