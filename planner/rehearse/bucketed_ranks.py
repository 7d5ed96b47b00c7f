"""What every rank of a rehearsal of buckets does: DDP, strategies and a plan on an accelerator that is waited for."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any, TypeVar

import torch

from planner.comparison.measure import Measured, Record, Sweep, VariantRunner, measure_all
from planner.comparison.trained import TrainedJob
from planner.comparison.variants import DDP, NO_COMMUNICATION, PLAN, BucketVariant, Hook, make_variants, sweep
from planner.decide.optimize import optimize
from planner.decide.strategies import make_schedule
from planner.documents.profile import Cluster, Line, Profile, SelectionLine
from planner.ir import ACCURACIES, Bucket, Schedule
from planner.jobs.training import SEED, BuiltJob
from planner.model.modes import model_of
from planner.model.problem import Problem, make_problem
from planner.profile.delay import measure_delay
from planner.profile.links import SMALLEST_BYTES, measure_apart, measure_links, parts_of
from planner.profile.progress import Progress
from planner.profile.selection import measure_encoding, measure_selection
from planner.rehearse import ranks
from planner.rehearse.accelerator import AcceleratedModel, Accelerator, make_job
from planner.rehearse.asked import AskedPlan
from planner.rehearse.ranks import Decided, Rehearser, Rounds, Teller
from planner.rehearse.scale import Scale, scaled_plan
from runtime.checks.plan import model_fingerprint
from runtime.comm.topology import node_name
from runtime.comm.world import World
from runtime.errors import InputError
from runtime.plan import Accuracy, Plan
from runtime.plan.interfaces import SHARDED_STEP, granted
from runtime.plan.transports import NATIVE, TWO_SHOT
from runtime.session.session import Session
from runtime.sparse.residuals import ErrorFeedbackState

BETWEEN = ("all_reduce", "reduce_scatter", "all_gather")
"""The phases of collectives on two kinds of link, inside hosts and between them."""
ROUNDS_SHARE = 0.48
"""Of the time left, what the fewest rounds may take where D is chosen …"""
BRIEF_SHARE = 0.6
"""… and where DDP's steps are slow, so that nothing else takes long."""
SWEEP_SHARE = 0.3
"""Of the time left, what looking for DDP's best bucket size may take."""
WARM_UP_STEPS = 1
"""Steps at the begin of each block that are not measured: DDP lays its buckets out again after the first."""
SLOW = 4.0
"""Steps that are so many times longer than without communication get the fewest blocks."""
HOOKS: tuple[Hook, ...] = ("fp16",)
"""Of DDP's; PowerSGD's products would be the host's work, and are the accelerator's."""
SWEEP = Sweep(rounds=1, finalists=2, final_rounds=2, steps=2)
"""Dilated steps differ by little."""


class BucketRehearser(Rehearser[AskedPlan, BucketVariant]):
    """See `Rehearser`."""

    def __init__(self, asked: AskedPlan, world: World, scale: Scale, progress: Progress, say: Teller) -> None:
        """Make the scaled job."""
        super().__init__(asked, world, scale, progress, say)
        torch.manual_seed(SEED)
        self._riskiest = _riskiest(asked)
        self._compute = scale.profile(asked.profile).compute
        job = make_job(self._compute, world.rank, scale.dilate, fused=self._riskiest != "relaxed")
        assert isinstance(job.model, AcceleratedModel)
        self._model = job.model
        made = job.optimizer(job.model.parameters())
        self._built = BuiltJob(spec=f"rehearsal of {asked.name}", job=job, optimizer=made, device=ranks.CPU)

    @staticmethod
    def most_dilate(asked: AskedPlan, left_s: float) -> float:
        """See `Rehearser`."""
        plan = _planned(asked, asked.profile, asked.cluster)
        problem = make_problem(asked.profile, asked.cluster, where=asked.name)
        blocks = _blocks(make_variants(plan, problem, asked.strategies, HOOKS), 1, 1.0)
        ddp = next(each for each in blocks if each.name == DDP)
        least_s = sum(each.least_s for each in blocks)
        if ddp.brief:  # whose bucket sizes are not looked for
            return max(1.0, BRIEF_SHARE * left_s / least_s)
        return max(1.0, ROUNDS_SHARE * left_s / (least_s + ddp.least_s))  # DDP's best size, too

    def decide(self) -> Decided[BucketVariant]:
        """See `Rehearser`."""
        own_us = self._own_us()
        cluster = self._measured_cluster()
        return self.first_decides(lambda: self._decided(cluster, own_us), "deciding")

    def _own_us(self) -> tuple[float, float]:
        """Return by how much a step without communication takes longer than the profile's, undilated: on a usual rank,
        and on the last one, for whom those wait that communicate.

        It is updates and Python, for which ranks share the machine's cores. What is compared is not looked at: these
        steps are made before, by all ranks at once.
        """
        compute, trained, number = self._compute, TrainedJob(self._built), count()
        asked_us = compute.forward_us + compute.update_us + sum(each.backward_us for each in compute.gradients)
        optimizer = trained.optimizer()

        def step() -> None:
            trained.step(trained.model, optimizer, next(number), in_ddp=False)

        with trained.restored(optimizer):
            usual_us, last_us = self.bare_steps_us(step, WARM_UP_STEPS, "steps without communication")
        usual_us = max(0.0, usual_us - asked_us)
        return usual_us / self.scale.dilate, max(usual_us, last_us - asked_us) / self.scale.dilate

    def _measured_cluster(self) -> Cluster:
        """Time messages alone; return the cluster with what they take, undilated and unshrunk."""
        asked, world, scale, progress = self.asked, self.world, self.scale, self.progress
        halves, lossy = _shares_update(asked) or self._riskiest == "relaxed", self._riskiest != "exact"
        names = ["all_reduce"] + ["reduce_scatter"] * halves + ["all_gather"] * (halves or lossy)
        names += [TWO_SHOT.algorithm, NATIVE.algorithm] * lossy
        gradients = asked.profile.compute.gradients
        size_bytes = round(sum(each.size_bytes for each in gradients) / scale.shrink)
        two_links = asked.cluster.ranks_per_node > 1
        # Inside hosts messages take little time.
        each_s = ranks.LINK_SHARE * asked.minutes * 60.0 / (len(names) + 1 + len(BETWEEN) * two_links)
        smallest_bytes = max(ranks.LEAST_BYTES, round(SMALLEST_BYTES / scale.shrink))
        times = measure_links(world, ranks.CPU, size_bytes, progress, names, each_s, smallest_bytes)
        samples = dict(times.samples)
        parts = parts_of(world.gather(node_name(), "counting hosts"))
        if parts is not None:
            samples |= measure_apart(world, parts, ranks.CPU, size_bytes, progress, BETWEEN, BETWEEN, each_s).samples
        # What these ranks take for it, which is more than a device would.
        computed: dict[str, Any] = {}
        packing: dict[tuple[str, str], tuple[Mapping[str, Line], Mapping[str, Line]]] = {}
        if lossy:
            packing["sparsify", "unpack"] = measure_selection(
                world, ranks.CPU, size_bytes, progress, each_s, computes=False
            )
            packing["encode", "decode"] = measure_encoding(
                world, ranks.CPU, size_bytes, progress, each_s / 2, computes=False
            )
        for fields, both in packing.items():
            for field, lines in zip(fields, both, strict=True):
                computed[field] = {name: _unscaled_line(line, scale) for name, line in lines.items()}
        if self._riskiest == "relaxed":
            found_lines = measure_delay(world, ranks.CPU, [scale.numel(each.numel) for each in gradients], progress)
            computed |= {field: _unscaled_line(line, scale) for field, line in found_lines.items()}
        return replace(
            asked.cluster, **computed, intra=None, inter=None, samples=self.unscaled(samples),
            back_to_back=self.unscaled(times.back_to_back), collectives=None,
            contention=None, measured_for=None, emulated="namespaces",
        )  # fmt: skip

    def _decided(self, cluster: Cluster, own_us: tuple[float, float]) -> Decided[BucketVariant]:
        asked, compute, (usual_us, last_us) = self.asked, self.asked.profile.compute, own_us
        here = replace(asked.profile, compute=replace(compute, update_us=compute.update_us + last_us))
        plan = _planned(asked, here, cluster)
        problem = make_problem(here, cluster, where=asked.name)
        constants = make_problem(asked.profile, asked.cluster, where=asked.name)
        made = [
            replace(one, predicted_us=(one.predicted_us or 0.0) - last_us + usual_us)
            if one.kind == "no_communication"
            else one
            for one in make_variants(plan, problem, asked.strategies, HOOKS)
        ]
        caps = sweep(plan, problem)
        predicted = {one.name: _from_constants(one, problem, constants) for one in [*made, *(one for _, one in caps)]}
        return Decided(
            plan=plan,
            variants=[self._scaled(one) for one in made],
            caps=[(cap, self._scaled(one)) for cap, one in caps],
            from_constants_us={name: time_us for name, time_us in predicted.items() if time_us is not None},
            bounds={"bound_us": plan.certificate.lower_bound_us if plan.certificate else None},
        )

    def _scaled(self, variant: BucketVariant) -> BucketVariant:
        """Return a variant whose plan fits the scaled model; its prediction is of the cluster itself."""
        if variant.plan is None:
            return variant
        fingerprint = model_fingerprint(self._model)
        return replace(variant, plan=scaled_plan(variant.plan, self.scale, self.asked.profile.compute, fingerprint))

    def rounds(self, decided: Decided[BucketVariant], left_s: float) -> Rounds:
        """See `Rehearser`."""
        return _rounds(decided.variants, decided.caps, left_s, self.asked.minutes, self.scale.dilate)

    def measure(
        self, decided: Decided[BucketVariant], rounds: Rounds, started_s: float
    ) -> tuple[Measured, dict[str, Any]]:
        """See `Rehearser`."""
        world, variants, dilate = self.world, decided.variants, self.scale.dilate
        caps = [one for one in decided.caps if one[0] in rounds.caps]
        slow = f", {ranks.LEAST_ROUNDS} of one step of {', '.join(rounds.brief)}" if rounds.brief else ""
        self.say(
            f"{len(variants)} variants and {len(caps)} bucket sizes of DDP: {rounds.count} rounds of {rounds.steps} "
            f"steps each{slow}"
        )
        if world.ranks > 1:
            world.broadcast([*self._model.parameters()])
        torch.manual_seed(SEED + 1 + world.rank)
        runner = RehearsalRunner(TrainedJob(self._built), world, self.scale, self._model.device)
        alone_s = sum(each.alone_s for each in _blocks(variants, rounds.steps, dilate))
        end_s = started_s + self.asked.minutes * 60.0 - alone_s
        measured = measure_all(
            runner, variants, caps, rounds.count, rounds.steps, self.progress, end_s, SWEEP, rounds.brief
        )
        return measured, {"late_us": {name: us / dilate for name, us in runner.late_by_variant_us().items()}}


class RehearsalRunner(VariantRunner):
    """Blocks of variants on an accelerator that is waited for, and what did not fit under its waits."""

    def __init__(self, trained: TrainedJob, world: World, scale: Scale, device: Accelerator) -> None:
        super().__init__(trained, world, ranks.TIMEOUT_S, WARM_UP_STEPS, shrink=scale.shrink)
        self._accelerator = device
        self._late_us: dict[str, list[float]] = {}

    def block(self, record: Record[BucketVariant], steps: int) -> None:
        before_us = self._accelerator.late_us
        super().block(record, steps)
        late_us = self._accelerator.late_us - before_us
        late_us /= self.warm_up_steps(record) + record.variant.whole_cycles(steps)
        self._late_us.setdefault(record.variant.name, []).append(late_us)

    def _attach(self, optimizer: torch.optim.Optimizer | None, plan: Plan) -> Session:
        """As elsewhere; selecting and unpacking are the accelerator's work, which has begun when they have."""
        session = super()._attach(optimizer, plan)
        if isinstance(feedback := session.exchange.carried, ErrorFeedbackState):
            for lossy in feedback.lossy.values():
                lossy.pack = partial(self._on_device, lossy.pack)  # type: ignore[method-assign]
                lossy.unpack = partial(self._on_arrival, lossy.unpack)  # type: ignore[method-assign]
        return session

    def _on_device(self, work: Callable[..., Any], *arguments: Any) -> Any:
        return self._accelerator.occupy(partial(work, *arguments))

    def _on_arrival(self, work: Callable[..., Any]) -> Any:
        self._accelerator.synchronize()  # both have waited for the message: the host was not late
        return self._on_device(work)

    def late_by_variant_us(self) -> dict[str, float]:
        """Return, of a step, by how much hooks and updates took longer than waits: the median of blocks."""
        return {name: statistics.median(of_blocks) for name, of_blocks in self._late_us.items()}


def _planned(asked: AskedPlan, profile: Profile, cluster: Cluster) -> Plan:
    return optimize(profile, cluster, accuracy=asked.accuracy, allow=asked.allow, compress=asked.compress)


def _riskiest(asked: AskedPlan) -> Accuracy:
    """Return the riskiest class of what is rehearsed, strategies included: it says what has to be measured."""
    problem = make_problem(asked.profile, asked.cluster, where=asked.name)
    classes = [asked.accuracy, *(make_schedule(problem, name).accuracy for name in asked.strategies)]
    return max(classes, key=ACCURACIES.index)


def _shares_update(asked: AskedPlan) -> bool:
    """Return whether ranks of anything that is rehearsed may share the optimizer's step."""
    problem = make_problem(asked.profile, asked.cluster, where=asked.name)
    shared = (make_schedule(problem, name).mode.shares_update for name in asked.strategies)
    return SHARDED_STEP in granted(asked.allow) or any(shared)


AnyLine = TypeVar("AnyLine", Line, SelectionLine)


def _unscaled_line(line: AnyLine, scale: Scale) -> AnyLine:
    def unscaled(alpha_us: float, beta: float) -> tuple[float, float]:
        return alpha_us / scale.dilate, beta / (scale.dilate * scale.shrink)

    alpha_us, beta = unscaled(line.alpha_us, line.beta_us_per_byte)
    made = replace(line, alpha_us=alpha_us, beta_us_per_byte=beta)
    if isinstance(made, SelectionLine) and made.by_density:
        rows = tuple((density, *unscaled(*of_density)) for density, *of_density in made.by_density)
        return replace(made, by_density=rows)
    return made


def _from_constants(variant: BucketVariant, problem: Problem, constants: Problem) -> float | None:
    """Return the step as the cluster's constants alone have it; None where they say nothing of it."""
    if variant.kind == "no_communication":
        return constants.compute_end_us + constants.update_us
    if variant.plan is None:
        return None
    if variant.plan.accuracy == "exact" and not variant.plan.sharded:
        schedule = _schedule_of(variant.plan, constants)
    elif variant.name != PLAN:
        schedule = make_schedule(problem, variant.name)
    else:
        return None
    return float(model_of(schedule).step_us(constants, schedule))


def _schedule_of(plan: Plan, problem: Problem) -> Schedule:
    """Return the schedule of a plan that is exact and synchronous."""
    index = {gradient.name: place for place, gradient in enumerate(problem.profile.compute.gradients)}
    return Schedule(
        buckets=tuple(
            Bucket(tuple(index[name] for name in bucket.gradients), bucket.transport) for bucket in plan.buckets
        )
    )


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """What measuring one variant takes."""

    name: str
    step_s: float
    steps: int
    """Of a block, those that do not count included."""
    brief: bool
    """See `planner.comparison.measure.Record`."""

    @property
    def least_s(self) -> float:
        """What the fewest rounds take, and its messages alone."""
        return self.alone_s + self.step_s * ranks.LEAST_ROUNDS * self.steps

    @property
    def alone_s(self) -> float:
        """What timing its messages alone takes at the most; see `VariantRunner.alone`."""
        return self.step_s * (1 if self.brief else 2)

    @property
    def round_s(self) -> float:
        """What one round more takes."""
        return 0.0 if self.brief else self.step_s * self.steps


def _blocks(variants: Sequence[BucketVariant], steps: int, dilate: float) -> list[Blocks]:
    """Return each variant's blocks of so many measured steps, dilated."""
    predicted_s = {one.name: dilate * one.predicted_us / 1e6 for one in variants if one.predicted_us}
    computed_s, ddp_s = predicted_s[NO_COMMUNICATION], predicted_s[DDP]
    found = []
    for one in variants:
        step_s = predicted_s.get(one.name, (computed_s + ddp_s) / 2.0)  # a hook's, which sends half of the bytes
        brief = step_s > SLOW * computed_s
        warm_up_steps = max(WARM_UP_STEPS, one.least_warm_up)
        block_steps = warm_up_steps + one.whole_cycles(1 if brief else steps)
        found.append(Blocks(name=one.name, step_s=step_s, steps=block_steps, brief=brief))
    return found


def _rounds(
    variants: Sequence[BucketVariant],
    caps: Sequence[tuple[float, BucketVariant]],
    left_s: float,
    minutes: float,
    dilate: float,
) -> Rounds:
    """Return what fits.

    Raises:
        InputError: not even the fewest rounds do; says how many minutes would.
    """
    # Steps that are slow even undilated: fewer of each block.
    for steps in range(ranks.BLOCK_STEPS, 0, -1):
        blocks = _blocks(variants, steps, dilate)
        least_s = sum(each.least_s for each in blocks)
        if least_s <= left_s:
            break
    if least_s > left_s:
        slowest = max(blocks, key=lambda each: each.step_s)
        raise InputError(
            f"--minutes {minutes:g}: a step of {slowest.name} takes {slowest.step_s:.2g} s here, and the fewest rounds "
            f"of {len(variants)} variants {least_s / 60:.1f} minutes of the {max(0.0, left_s) / 60:.1f} that are left; "
            f"expected --minutes {minutes + (least_s - left_s) / 60 + 0.5:.0f} or more, fewer strategies, or --dilate "
            f"less"
        )
    # The sizes that are predicted to be the fastest: what the sweep has no time for would have lost. The best one is
    # measured with the others.
    by_prediction = sorted(caps, key=lambda one: one[1].predicted_us or 0.0)
    ddp = next(each for each in blocks if each.name == DDP)

    def swept_s(count: int) -> float:
        tried_s = SWEEP.blocks(count) * (WARM_UP_STEPS + SWEEP.steps) * ddp.step_s
        return tried_s + (ddp.least_s if count else 0.0)

    most_s = 0.0 if ddp.brief else min(SWEEP_SHARE * left_s, left_s - least_s)
    most = max(count for count in range(len(caps) + 1) if swept_s(count) <= most_s)
    left_s -= least_s + swept_s(most)
    round_s = sum(each.round_s for each in blocks) + (ddp.round_s if most else 0.0)
    return Rounds(
        count=min(ranks.MOST_ROUNDS, ranks.LEAST_ROUNDS + int(left_s / round_s)),
        steps=steps,
        brief=tuple(each.name for each in blocks if each.brief),
        caps=frozenset(cap for cap, _ in by_prediction[:most]),
    )
