"""The phases of a profile on one rank: the step, its layers, the links, and what goes on beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, get_args

import torch
from torch import nn

from planner.documents.profile import (
    Cluster,
    ComputeProfile,
    GradWeightShare,
    OptimizerProfile,
    Profile,
    ProfileWorld,
    SizeFactors,
    Tracing,
)
from planner.documents.text import pluralize
from planner.frontend.layers import estimated_grad_weight_share, split_backward
from planner.frontend.trace import TracedModel, trace
from planner.profile.budget import Phases
from planner.profile.compute import Step, combine, measure_compute
from planner.profile.contention import affordable_sizes, contention_of, measure_contention, step_s
from planner.profile.delay import measure_delay
from planner.profile.grad_weight import measure_grad_weight_share
from planner.profile.links import LinkTimes, cut_short, measure_links
from planner.profile.node_links import LinkProfile, measure_apart, parts_of
from planner.profile.norms import measure_norms
from planner.profile.progress import Progress
from planner.profile.request import Request
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
from planner.testbed.emulation import emulation_here
from runtime.checks.plan import model_fingerprint, trainable_parameters
from runtime.comm.topology import node_name
from runtime.comm.world import World
from runtime.optimizers import LayerwiseOptimizer
from runtime.optimizers.kinds import ADAPTIVE, find_missing, find_not_elementwise
from runtime.plan import Accuracy, ModelReference
from runtime.sharded.state import state_bytes


@dataclass(frozen=True)
class Network:
    """What was measured of the links, and beside them; nothing with one rank."""

    links: LinkTimes | None = None
    apart: LinkProfile | None = None
    beside: Mapping[str, tuple[SizeFactors, ...]] | None = None
    """Factors of contention by kind of message."""
    computed: Mapping[str, Any] = field(default_factory=dict)
    """What riskier plans compute, by the cluster's field."""
    notes: tuple[str, ...] = ()


class Measuring:
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
            and find_missing(optimizer, self._parameters) is None,
            norms=isinstance(optimizer, LayerwiseOptimizer),
            known=request.add_to.cluster if request.add_to else None,
        )
        self._wanted: Wanted = world.gather(mine, "agreeing on what to measure")[0]
        self._phases = Phases(self._wanted.phases, request.budget_s, first=world.rank == 0)
        if not self._wanted.phases:
            self._phases.say(f"all that {request.accuracy} plans need is known already")

    def step(self, name: str, described: ProfileWorld) -> Profile:
        """The step, without its layers."""
        world, phases = self._world, self._phases
        phases.say(
            f"{name} on {pluralize(world.ranks, 'rank')}, for {self._request.accuracy} plans: the first steps, at most "
            f"ten where they are long; then {pluralize(len(self._wanted.phases), 'phase')}, up to "
            f"{self._request.budget_s:.0f} s"
        )
        everyone = measure_compute(self._model, self._optimizer, self._run, world, self._progress, phases)
        compute = combine(everyone, self._parameters)
        if self._wanted.norms:
            phases.begin(NORMS, world)
            norms = measure_norms(self._parameters, self._optimizer, compute, world, self._device, self._progress)
            compute = replace(compute, norms=norms)
        return Profile(
            model=ModelReference(name=name, fingerprint=model_fingerprint(self._model)),
            world=described,
            compute=replace(compute, optimizer=_describe(self._optimizer, self._parameters)),
        )

    def layers(self, world: World, found: Profile) -> Profile:
        """The profile with the layers of the model."""
        self._phases.begin(LAYERS, world)
        traced: TracedModel = trace(self._model, lambda: self._run(lambda: None))
        backward_us: dict[str, float] = {}
        for gradient in found.compute.gradients:
            backward_us[gradient.layer] = backward_us.get(gradient.layer, 0.0) + gradient.backward_us
        layers = split_backward(traced.layers, backward_us, None, found.compute.forward_us)
        # How well the graph's split of backward agrees with a measurement.
        share = GradWeightShare(
            estimated=estimated_grad_weight_share(traced.layers),
            measured=measure_grad_weight_share(self._model, self._run, found.compute, world),
        )
        tracing = Tracing(method=traced.method, failures=dict(traced.failures) or None, grad_weight_share=share)
        return replace(found, layers=layers, tracing=tracing)

    def links(self, world: World, compute: ComputeProfile) -> Network:
        """What collectives take."""
        wanted, phases, device, progress = self._wanted, self._phases, self._device, self._progress
        model_bytes = sum(gradient.size_bytes for gradient in compute.gradients)
        found, notes = Network(), list[str]()
        if wanted.flat:
            each_s = phases.begin(FLAT, world) / curves(wanted.flat)
            with world.error_context("timing the collectives"):
                links = measure_links(world, device, model_bytes, progress, wanted.flat, each_s)
            found, notes = replace(found, links=links), cut_short(links, model_bytes)
        if wanted.inside or wanted.between:
            each_s = phases.begin(APART, world) / (len(wanted.inside) + len(wanted.between))
            apart = measure_apart(
                world, self._nodes, device, model_bytes, progress, wanted.inside, wanted.between, each_s
            )
            found, notes = replace(found, apart=apart), [*notes, *(apart.cut if apart else ())]
        return self._noted(found, notes)

    def beside(self, world: World, compute: ComputeProfile, found: Network) -> Network:
        """What goes on beside messages, and what riskier plans compute."""
        wanted, phases, device, progress = self._wanted, self._phases, self._device, self._progress
        model_bytes = sum(gradient.size_bytes for gradient in compute.gradients)
        if wanted.beside:
            allowed_s = phases.begin(CONTENTION, world)
            beside = measure_contention(
                self._model, self._optimizer, self._run, world, device, compute, progress, wanted.beside, allowed_s
            )
            found = replace(found, beside=beside)
            if not affordable_sizes(step_s(compute), allowed_s):
                note = (
                    f"how messages and backward slow each other down was not measured, for a step takes "
                    f"{step_s(compute):.3g} s: they are taken not to; --budget-s 300 would allow more of them"
                )
                found = self._noted(found, [note])
        if wanted.selection:
            chosen, unpacked = measure_selection(world, device, model_bytes, progress, phases.begin(SELECTION, world))
            found = replace(found, computed={"sparsify": chosen, "unpack": unpacked})
        if wanted.delay:
            phases.begin(DELAY, world)
            found = replace(found, computed={**found.computed, **measure_delay(world, device, model_bytes, progress)})
        return found

    def _noted(self, found: Network, notes: Sequence[str]) -> Network:
        for note in notes:
            self._phases.say(note)
        return replace(found, notes=(*found.notes, *notes))

    def cluster(self, found: Profile, network: Network) -> Cluster:
        """What the profile knows of the cluster, with what was measured."""
        nodes, emulation = count_nodes(self._nodes), emulation_here()
        known = found.cluster or Cluster(
            name=emulation.spec if emulation else "measured",
            emulated=emulation.kind if emulation else None,
            nodes=nodes,
            ranks_per_node=self._world.ranks // nodes,
        )
        classes = list(get_args(Accuracy))
        riskiest = max(self._request.accuracy, known.measured_for or classes[0], key=classes.index)
        model_bytes = sum(gradient.size_bytes for gradient in found.compute.gradients)
        apart, contention = network.apart, known.contention
        if network.beside and contention is not None:
            contention = replace(contention, gathers_by_size=network.beside.get(ALL_GATHER))
        elif network.beside:
            contention = contention_of(network.beside, model_bytes)
        flat, phases = network.links or LinkTimes({}, {}, {}), apart.times if apart else LinkTimes({}, {}, {})
        added = replace(
            known,
            measured_for=riskiest,
            intra=(apart.intra if apart else None) or known.intra,
            inter=(apart.inter if apart else None) or known.inter,
            samples={**(known.samples or {}), **flat.samples, **phases.samples} or None,
            back_to_back={**(known.back_to_back or {}), **flat.back_to_back} or None,
            collectives={**(known.collectives or {}), **flat.lines, **phases.lines} or None,
            contention=contention,
            notes=(*(known.notes or ()), *network.notes) or None,
            **network.computed,
        )
        if found.cluster is not None and self._wanted.phases:
            names = ", ".join(phase.name for phase in self._wanted.phases)
            added = replace(added, notes=(*(added.notes or ()), f"measured later, {now()}: {names}"))
        return added


def _describe(
    optimizer: torch.optim.Optimizer | None, parameters: Mapping[str, nn.Parameter]
) -> OptimizerProfile | None:
    if optimizer is None:
        return None
    return OptimizerProfile(
        name=type(optimizer).__name__,
        adaptive=isinstance(optimizer, ADAPTIVE),
        elementwise=find_not_elementwise(optimizer) is None,
        holds_all=find_missing(optimizer, parameters) is None,
        state_bytes=state_bytes(optimizer),
    )


def count_nodes(names: Sequence[str]) -> int:
    """How many machines there are, given every rank's; uneven ones count singly."""
    nodes = len(set(names))
    return nodes if len(names) % nodes == 0 else len(names)


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
