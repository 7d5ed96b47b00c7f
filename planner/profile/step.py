"""`planner.profile_step`: measures one training step and the links, inside a running script or under the CLI."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import get_args

import torch
import torch.distributed as dist
from torch import nn

from planner.frontend.layers import estimated_grad_weight_share, split_backward
from planner.frontend.trace import TracedModel, trace
from planner.profile.apart import LinksApart, measure_apart, parts_of
from planner.profile.budget import Phases, heard
from planner.profile.compute import Step, combine, measure_compute
from planner.profile.contention import contention_of, measure_contention
from planner.profile.delay import DelayCosts, measure_delay
from planner.profile.document import (
    Cluster,
    ComputeProfile,
    GradWeightShare,
    Layer,
    OptimizerProfile,
    Profile,
    ProfileWorld,
    SelectionLine,
    SizeFactors,
    Tracing,
    load_profile,
)
from planner.profile.grad_weight import measure_grad_weight_share
from planner.profile.links import LinkTimes, cut_short, measure_links
from planner.profile.norms import measure_norms
from planner.profile.request import BUDGET_S, Request
from planner.profile.selection import measure_selection
from planner.profile.wanted import (
    ALL_GATHER,
    APART,
    CONTENTION,
    DELAY,
    FLAT,
    LAYERS,
    NORMS,
    SELECTION,
    Wanted,
    curves,
)
from planner.progress import Progress, Silent
from planner.sources import counted
from planner.testbed.emulation import emulation_here
from runtime.adaptive import is_adaptive
from runtime.attaching import STEPS_PER_DEADLINE
from runtime.elementwise import find_not_elementwise, state_bytes
from runtime.errors import InputError
from runtime.fit import model_fingerprint, trainable_parameters
from runtime.fit_optimizer import find_unowned
from runtime.optimizers import LayerwiseOptimizer
from runtime.plan import Accuracy, ModelReference
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
    beside: Mapping[str, tuple[SizeFactors, ...]] | None = None
    """Factors of contention by kind of message."""
    sparsify: dict[str, SelectionLine] | None = None
    unpack: dict[str, SelectionLine] | None = None
    delay: DelayCosts | None = None
    notes: tuple[str, ...] = ()


def profile_step(
    model: nn.Module,
    step: Callable[[], object],
    optimizer: torch.optim.Optimizer | None = None,
    process_group: dist.ProcessGroup | None = None,
    *,
    accuracy: Accuracy = "exact",
    add_to: Profile | str | Path | None = None,
    budget_s: float = BUDGET_S,
    timeout_s: float | None = None,
) -> Profile:
    """Measures a step of a script that is already running, and the links between its ranks.

    Says which phase begins, and what is left, through the logger `planner.profile`; on standard error where nobody has
    configured `logging`.

    Args:
        model: the bare module that `step` trains.
        step: runs one forward and backward; may be called some dozens of times. Every rank calls `profile_step`.
        optimizer: its `step()` is timed where given; otherwise the update counts as free.
        process_group: the ranks that train together; default: all of torch.distributed, or this process alone.
        accuracy: the riskiest class of plans that are to be decided from it: `bounded` also measures gathers and what
            selecting elements costs, `relaxed` also what delayed updates cost.
        add_to: a profile of this model on these ranks, or its path, to which only what it lacks is added.
        budget_s: what it may take beyond its first steps, which are ten at the most where steps are long.
        timeout_s: deadline of every wait for other ranks. Default: 300 s until the step has been measured and while it
            is traced; 20 steps, at least 30 s, while collectives are timed (see `deadline_s`).

    Returns:
        The profile, the same on every rank. Parameters, buffers, `.grad`, optimizer and generators are left as found.

    Raises:
        InputError: the model is wrapped (DDP, FSDP), or the step reaches no trainable parameter; `add_to` is of another
            model or of other ranks; the class or the budget is none.
        EnvironmentFailure: a rank died or missed a deadline.
    """
    base = load_profile(add_to) if isinstance(add_to, str | Path) else add_to
    request = Request(accuracy=accuracy, add_to=base, budget_s=budget_s)
    return measure(
        model, lambda _: step(), optimizer, process_group, request=request, progress=Silent(), timeout_s=timeout_s
    )


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
    request: Request | None = None,
    name: str | None = None,
    timeout_s: float | None = None,
) -> Profile:
    """`profile_step` for a step that says when its backward begins; `name` is the model's in the profile."""
    request = request or Request()
    world = World.join(process_group, TIMEOUT_S if timeout_s is None else timeout_s)
    try:
        with heard():
            _agree(model, world)
            described = _describe_world(world, next(model.parameters()).device)
            _check_base(request.add_to, model, described, world)
            measuring = _Measuring(model, step, optimizer, world, request, progress)
            with preserved(model, optimizer):
                found = request.add_to or measuring.step(name or type(model).__name__, described)
                with _hurried(world, found.compute, process_group, timeout_s) as hurried:
                    cluster = measuring.cluster(hurried, found)
            agreed: Profile = world.gather(replace(found, cluster=cluster), "agreeing on the profile")[0]
            return agreed
    finally:
        world.leave()


class _Measuring:
    """One profile in the making, on one rank."""

    def __init__(
        self, model: nn.Module, step: Step, optimizer: torch.optim.Optimizer | None, world: World, request: Request,
        progress: Progress,
    ) -> None:  # fmt: skip
        self._model, self._run, self._optimizer, self._world = model, step, optimizer, world
        self._request, self._progress = request, progress
        self._parameters = trainable_parameters(model)
        self._device = next(model.parameters()).device
        self._nodes: list[str] = world.gather(node_name(), "counting machines")
        mine = Wanted.of(
            request.accuracy,
            world.ranks,
            two_links=parts_of(self._nodes) is not None,
            halves=optimizer is not None
            and find_not_elementwise(optimizer) is None
            and find_unowned(optimizer, self._parameters) is None,
            norms=isinstance(optimizer, LayerwiseOptimizer),
            known=request.add_to.cluster if request.add_to else None,
        )
        self._wanted: Wanted = world.gather(mine, "agreeing on what to measure")[0]
        self._phases = Phases(self._wanted.phases, request.budget_s, first=world.rank == 0)

    def step(self, name: str, described: ProfileWorld) -> Profile:
        """The step and its layers."""
        world, phases = self._world, self._phases
        phases.say(
            f"{name} on {counted(world.ranks, 'rank')}, for {self._request.accuracy} plans: the first steps, at most "
            f"ten where they are long; then {counted(len(self._wanted.phases), 'phase')}, up to "
            f"{self._request.budget_s:.0f} s"
        )
        everyone = measure_compute(self._model, self._optimizer, self._run, world, self._progress, phases)
        compute = combine(everyone, self._model)
        if self._wanted.norms:
            phases.begin(NORMS, world)
            norms = measure_norms(self._parameters, self._optimizer, compute, world, self._device, self._progress)
            compute = replace(compute, norms=norms)
        phases.begin(LAYERS, world)
        layers, tracing = _trace(self._model, self._run, compute, world)
        return Profile(
            model=ModelReference(name=name, fingerprint=model_fingerprint(self._model)),
            world=described,
            compute=replace(compute, optimizer=_describe(self._optimizer, self._parameters)),
            layers=layers,
            tracing=tracing,
        )

    def cluster(self, world: World, found: Profile) -> Cluster:
        """The links, and what goes on beside them, added to what the profile knows of them."""
        nodes = _count(self._nodes)
        emulation = emulation_here()
        known = found.cluster or Cluster(
            name=emulation.spec if emulation else "measured",
            emulated=emulation.kind if emulation else None,
            nodes=nodes,
            ranks_per_node=world.ranks // nodes,
        )
        classes = list(get_args(Accuracy))
        riskiest = max(self._request.accuracy, known.measured_for or classes[0], key=classes.index)
        model_bytes = sum(gradient.size_bytes for gradient in found.compute.gradients)
        added = _added(replace(known, measured_for=riskiest), self._network(world, found.compute), model_bytes)
        if found.cluster is not None and self._wanted.phases:
            names = ", ".join(phase.name for phase in self._wanted.phases)
            added = replace(added, notes=(*(added.notes or ()), f"measured later, {_now()}: {names}"))
        return added

    def _network(self, world: World, compute: ComputeProfile) -> _Network:
        wanted, phases, device, progress = self._wanted, self._phases, self._device, self._progress
        model_bytes = sum(gradient.size_bytes for gradient in compute.gradients)
        found, notes = _Network(), list[str]()
        if wanted.flat:
            each_s = phases.begin(FLAT, world) / curves(wanted.flat)
            with world.naming("timing the collectives"):
                links = measure_links(world, device, model_bytes, progress, wanted.flat, each_s)
            found, notes = replace(found, links=links), cut_short(links, model_bytes)
        if wanted.inside or wanted.between:
            each_s = phases.begin(APART, world) / (len(wanted.inside) + len(wanted.between))
            apart = measure_apart(
                world, self._nodes, device, model_bytes, progress, wanted.inside, wanted.between, each_s
            )
            found, notes = replace(found, apart=apart), [*notes, *(apart.cut if apart else ())]
        if wanted.beside:
            beside = measure_contention(
                self._model, self._optimizer, self._run, world, device, compute, progress, wanted.beside,
                phases.begin(CONTENTION, world),
            )  # fmt: skip
            if not beside:
                notes.append(
                    "how messages and backward slow each other down was not measured, for backward is too short or "
                    "steps are too long; they are taken not to"
                )
            found = replace(found, beside=beside)
        if wanted.selection:
            chosen, unpacked = measure_selection(world, device, model_bytes, progress, phases.begin(SELECTION, world))
            found = replace(found, sparsify=chosen, unpack=unpacked)
        if wanted.delay:
            phases.begin(DELAY, world)
            found = replace(found, delay=measure_delay(world, device, model_bytes, progress))
        for note in notes:
            phases.say(note)
        return replace(found, notes=tuple(notes))


def _added(known: Cluster, network: _Network, model_bytes: int) -> Cluster:
    """The cluster with what was measured."""
    links, apart, delay, contention = network.links, network.apart, network.delay, known.contention
    flat, phases = links or LinkTimes({}, {}, {}), apart.times if apart else LinkTimes({}, {}, {})
    if network.beside and contention is not None:
        contention = replace(contention, gathers_by_size=network.beside.get(ALL_GATHER))
    elif network.beside:
        contention = contention_of(network.beside, model_bytes)
    return replace(
        known,
        intra=(apart.intra if apart else None) or known.intra,
        inter=(apart.inter if apart else None) or known.inter,
        samples={**(known.samples or {}), **flat.samples, **phases.samples} or None,
        back_to_back={**(known.back_to_back or {}), **flat.back_to_back} or None,
        collectives={**(known.collectives or {}), **flat.lines, **phases.lines} or None,
        contention=contention,
        sparsify=network.sparsify or known.sparsify,
        unpack=network.unpack or known.unpack,
        push_pack=delay.push_pack if delay else known.push_pack,
        local_update=delay.local_update if delay else known.local_update,
        pull_take=delay.pull_take if delay else known.pull_take,
        notes=(*(known.notes or ()), *network.notes) or None,
    )


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
    _refuse([problem for problem, _ in everyone])
    check_same_model([print_ for _, print_ in everyone])


def _refuse(problems: Sequence[str | None]) -> None:
    """Raises InputError on all ranks alike, given what is wrong on each."""
    first = {problem: rank for rank, problem in reversed(list(enumerate(problems))) if problem}
    if first:
        alike = len(set(problems)) == 1
        raise InputError("\n".join(p if alike else f"rank {rank}: {p}" for p, rank in reversed(first.items())))


def _check_base(known: Profile | None, model: nn.Module, here: ProfileWorld, world: World) -> None:
    """Raises InputError where what is measured here cannot be added to this profile."""
    _refuse(world.gather(None if known is None else _misfit(known, model, here), "comparing profiles"))


def _misfit(known: Profile, model: nn.Module, here: ProfileWorld) -> str | None:
    cure = "profile anew, with none to add to"
    if known.model.fingerprint != model_fingerprint(model):
        return (
            f"the profile to add to is of another model ({known.model.name}), by the names, shapes and dtypes of "
            f"trainable parameters; {cure}"
        )
    if known.cluster is None:
        return f"the profile to add to has no cluster; expected one that `planner profile` has measured: {cure}"
    for field in ("ranks", "nodes", "backend", "device", "emulation"):
        before, now = getattr(known.world, field), getattr(here, field)
        if before != now:
            return f"the profile to add to was measured with {field} {before}, found {now}; measure there, or {cure}"
    return None


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
        nodes=_count(world.gather(node_name(), "counting machines")),
        backend=world.backend,
        device=device.type if device.type == "cpu" else torch.cuda.get_device_name(device),
        torch=torch.__version__,
        measured=_now(),
        threads_per_rank=torch.get_num_threads(),
        cores=os.cpu_count(),
        memory_bytes=None if device.type == "cpu" else torch.cuda.get_device_properties(device).total_memory,
        emulated=emulation.kind if emulation else None,
        emulation=emulation.spec if emulation else None,
    )


def _count(names: Sequence[str]) -> int:
    """How many machines there are, given every rank's; uneven ones count singly."""
    nodes = len(set(names))
    return nodes if len(names) % nodes == 0 else len(names)


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
