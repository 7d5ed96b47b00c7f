"""The phases of a profile on one rank: the step, its layers, the links, contention, and what riskier plans compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, get_args

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
from planner.profile.bench import Bench
from planner.profile.compute import Training, combine, measure_compute
from planner.profile.contention import affordable_sizes, contention_of, measure_contention
from planner.profile.delay import measure_delay
from planner.profile.grad_weight import measure_grad_weight_share
from planner.profile.links import Limits, LinkTimes, measure_apart, measure_links, parts_of
from planner.profile.measured_cuts import Regions, with_costs
from planner.profile.norms import measure_norms
from planner.profile.operator_times import measure_operators, with_operator
from planner.profile.request import (
    ALL_GATHER,
    APART,
    CONTENTION,
    DELAY,
    FLAT,
    LAYERS,
    NORMS,
    OPERATORS,
    SELECTION,
    Phases,
    Request,
    Wanted,
    curves,
)
from planner.profile.selection import measure_encoding, measure_low_rank, measure_selection
from planner.testbed.hosts import emulation_here
from runtime.checks.optimizer import names_of
from runtime.checks.plan import model_fingerprint
from runtime.comm.world import World
from runtime.optimizers import LayerwiseOptimizer
from runtime.optimizers.kinds import ADAPTIVE, each_of, find_missing, find_not_elementwise
from runtime.optimizers.units import coarsest_unit, unit_of
from runtime.plan import Accuracy, ModelReference
from runtime.sharded.state import state_bytes

ENCODING_SHARE, LOW_RANK_SHARE = 0.25, 0.1
"""Shares of the time for what riskier plans compute; selection has the rest."""


class Measuring:
    """One profile in the making, on one rank."""

    def __init__(self, training: Training, bench: Bench, nodes: Sequence[str], request: Request) -> None:
        """Agree on what to measure; every rank calls it. `nodes` are those of all ranks."""
        self._training, self._bench, self._request = training, bench, request
        self._nodes, self._parts = count_nodes(nodes), parts_of(nodes)
        optimizer = _describe(training)
        self._flat, self._apart = LinkTimes(), LinkTimes()
        self._beside: dict[str, tuple[SizeFactors, ...]] = {}
        """Factors of contention by kind of message."""
        self._computed: dict[str, Any] = {}
        """Costs of what riskier plans compute, by the cluster's field."""
        self._notes: list[str] = []
        mine = Wanted.of(
            request.accuracy,
            bench.world.ranks,
            two_links=self._parts is not None,
            halves=optimizer is not None and bool(optimizer.unit and optimizer.holds_all),
            norms=any(isinstance(one, LayerwiseOptimizer) for one in each_of(training.optimizer)),
            known=request.add_to.cluster if request.add_to else None,
        )
        if with_operator(training.optimizer):
            mine = mine.with_operator(bench.world.ranks)
        mine = replace(mine, cuts=mine.step and training.compile is not None)
        self._wanted: Wanted = bench.world.gather(mine, "agreeing on what to measure")[0]
        self._phases = Phases(self._wanted.phases, request.budget_s, first=bench.world.rank == 0)
        if not self._wanted.phases:
            self._phases.say(f"all that {request.accuracy} plans need is known already")

    def step(self, name: str, described: ProfileWorld, regions: Regions | None = None) -> Profile:
        """Measure the step, without its layers; `name` and `described` are the model's and the world's, `regions` those
        of a compiled model.
        """
        training, bench, phases, world = self._training, self._bench, self._phases, self._bench.world
        phases.say(
            f"{name} on {pluralize(world.ranks, 'rank')}, for {self._request.accuracy} plans: the first steps, at most "
            f"ten where they are long; then {pluralize(len(self._wanted.phases), 'phase')}, up to "
            f"{self._request.budget_s:.0f} s"
        )
        compute = combine(measure_compute(training, bench, phases), training.parameters)
        if regions is not None:
            compute = with_costs(compute, training, bench, phases, regions)
        if self._wanted.norms:
            phases.begin(NORMS, world)
            compute = replace(compute, norms=measure_norms(training, bench, compute))
        if self._wanted.operator:
            phases.begin(OPERATORS, world)
            compute = replace(compute, operator=measure_operators(training, bench, compute))
        return Profile(
            model=ModelReference(name=name, fingerprint=model_fingerprint(training.model)),
            world=described,
            compute=replace(compute, optimizer=_describe(training)),
        )

    def layers(self, world: World, found: Profile) -> Profile:
        """Return the profile with the layers of the model."""
        self._phases.begin(LAYERS, world)
        traced: TracedModel = trace(self._training.model, lambda: self._training.step(lambda: None))
        backward_us: dict[str, float] = {}
        for gradient in found.compute.gradients:
            backward_us[gradient.layer] = backward_us.get(gradient.layer, 0.0) + gradient.backward_us
        layers = split_backward(traced.layers, backward_us, found.compute.forward_us)
        # How well the graph's split of backward agrees with a measurement.
        share = GradWeightShare(
            estimated=estimated_grad_weight_share(traced.layers),
            measured=measure_grad_weight_share(self._training, found.compute, world),
        )
        tracing = Tracing(method=traced.method, failures=dict(traced.failures) or None, grad_weight_share=share)
        return replace(found, layers=layers, tracing=tracing)

    def links(self, world: World, compute: ComputeProfile) -> None:
        """Time collectives in messages of up to the model's size; `world` has the deadline of its waits."""
        wanted, phases, bench, size_bytes = self._wanted, self._phases, self._on(world), compute.size_bytes
        if wanted.flat:
            limits = Limits(phases.begin(FLAT, world) / curves(wanted.flat))
            with world.error_context("timing the collectives"):
                self._flat = measure_links(bench, size_bytes, wanted.flat, limits)
        if wanted.inside or wanted.between:
            assert self._parts is not None
            limits = Limits(phases.begin(APART, world) / (len(wanted.inside) + len(wanted.between)))
            names = {"intra": wanted.inside, "inter": wanted.between}
            self._apart = measure_apart(bench, self._parts, size_bytes, names, limits)
        self._note(*self._flat.cut, *self._apart.cut)

    def _on(self, world: World) -> Bench:
        return replace(self._bench, world=world)

    def beside(self, world: World, compute: ComputeProfile) -> None:
        """Measure contention, and what riskier plans compute; `world` has the deadline of its waits."""
        wanted, phases, bench = self._wanted, self._phases, self._on(world)
        if wanted.beside:
            allowed_s, step_s = phases.begin(CONTENTION, world), compute.step_us / 1e6
            self._beside = measure_contention(self._training, bench, compute, wanted.beside, allowed_s)
            if not affordable_sizes(step_s, allowed_s):
                self._note(
                    f"how messages and backward slow each other down was not measured, for a step takes {step_s:.3g} "
                    f"s: they are taken not to; --budget-s 300 would allow more of them"
                )
        if wanted.selection:
            allowed_s = phases.begin(SELECTION, world)
            self._computed["low_rank"] = measure_low_rank(bench, compute.size_bytes, LOW_RANK_SHARE * allowed_s)
            for measure, before, after, share in (
                (measure_encoding, "encode", "decode", ENCODING_SHARE),
                (measure_selection, "sparsify", "unpack", 1.0 - ENCODING_SHARE - LOW_RANK_SHARE),
            ):
                packed, unpacked = measure(bench, compute.size_bytes, share * allowed_s)
                self._computed |= {before: packed, after: unpacked}
        if wanted.delay:
            phases.begin(DELAY, world)
            self._computed |= measure_delay(bench, [each.numel for each in compute.gradients])

    def _note(self, *notes: str) -> None:
        for note in notes:
            self._phases.say(note)
        self._notes += notes

    def cluster(self, found: Profile) -> Cluster:
        """Return what the profile knows of the cluster, with what was measured."""
        emulation, flat, apart = emulation_here(), self._flat, self._apart
        known = found.cluster or Cluster(
            name=emulation.spec if emulation else "measured",
            emulated=emulation.kind if emulation else None,
            nodes=self._nodes,
            ranks_per_node=self._bench.world.ranks // self._nodes,
        )
        classes = list(get_args(Accuracy))
        riskiest = max(self._request.accuracy, known.measured_for or classes[0], key=classes.index)
        # A profile that is added to has factors of all-reduces, and lacks those of gathers alone.
        contention = known.contention
        if self._beside and contention is not None:
            contention = replace(contention, gathers_by_size=self._beside.get(ALL_GATHER))
        elif self._beside:
            contention = contention_of(self._beside, found.compute.size_bytes)
        added = replace(
            known,
            measured_for=riskiest,
            intra=apart.links.get("intra", known.intra),
            inter=apart.links.get("inter", known.inter),
            samples={**(known.samples or {}), **flat.samples, **apart.samples} or None,
            back_to_back={**(known.back_to_back or {}), **flat.back_to_back} or None,
            collectives={**(known.collectives or {}), **flat.lines, **apart.lines} or None,
            contention=contention,
            notes=(*(known.notes or ()), *self._notes) or None,
            **self._computed,
        )
        if found.cluster is not None and self._wanted.phases:
            names = ", ".join(phase.name for phase in self._wanted.phases)
            added = replace(added, notes=(*(added.notes or ()), f"measured later, {now()}: {names}"))
        return added


def _describe(training: Training) -> OptimizerProfile | None:
    optimizers = each_of(training.optimizer)
    if not optimizers:
        return None
    return OptimizerProfile(
        name=names_of(optimizers),
        adaptive=any(isinstance(one, ADAPTIVE) for one in optimizers),
        elementwise=all(find_not_elementwise(one) is None for one in optimizers),
        unit=coarsest_unit(optimizers),
        matrices=_matrices(training) or None,
        holds_all=find_missing(optimizers, training.parameters) is None,
        state_bytes=sum(state_bytes(one.state) for one in optimizers),
    )


def _matrices(training: Training) -> tuple[str, ...]:
    """Return the parameters whose optimizers need them whole."""
    by_matrix = (one for one in each_of(training.optimizer) if unit_of(one) == "matrix")
    held = {id(parameter) for one in by_matrix for group in one.param_groups for parameter in group["params"]}
    return tuple(name for name, parameter in training.parameters.items() if id(parameter) in held)


def count_nodes(names: Sequence[str]) -> int:
    """Return the number of machines, given every rank's; uneven ones count singly."""
    nodes = len(set(names))
    return nodes if len(names) % nodes == 0 else len(names)


def now() -> str:
    """Return the time in UTC, as documents have it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
