"""A rank of a rehearsal of buckets: DDP, strategies and a plan on an accelerator that is a timed wait."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any, TypeVar

import torch
from torch import nn

from planner.comparison.measure import (
    LEAST_CLEAR_ROUNDS,
    LEAST_ROUNDS,
    Measured,
    Record,
    VariantRunner,
    measure_all,
)
from planner.comparison.trained import TrainedJob
from planner.comparison.variants import (
    DDP,
    EQUAL_SHARES,
    NO_COMMUNICATION,
    PLAN,
    BucketVariant,
    Hook,
    Lineup,
    Rounds,
    cut_as,
    make_lineup,
)
from planner.decide.batch_shares import choose_shares
from planner.decide.optimize import optimize
from planner.decide.strategies import make_schedule
from planner.documents.profile import Cluster, Line, Profile, SelectionLine
from planner.documents.speeds import on_rank
from planner.emit.read_back import schedule_of
from planner.ir import ACCURACIES
from planner.jobs.training import SEED, BuiltJob, make_optimizer
from planner.model.modes import model_of
from planner.model.problem import Problem, make_problem
from planner.profile.bench import Bench
from planner.profile.delay import measure_delay
from planner.profile.links import measure_apart, measure_links, parts_of
from planner.profile.request import ALL_GATHER, ALL_REDUCE, NARROW_SUMS, REDUCE_SCATTER
from planner.profile.selection import measure_encoding, measure_selection
from planner.profile.step import decided_by_first
from planner.rehearse import ranks
from planner.rehearse.accelerator import AcceleratedModel, make_job
from planner.rehearse.asked import AskedPlan
from planner.rehearse.ranks import SWEEP, WARM_UP_STEPS, Blocks, Decided, Rehearser
from planner.rehearse.scale import Scale, links_of, scaled_plan
from runtime.checks.plan import model_fingerprint
from runtime.comm.topology import node_name
from runtime.optimizers.kinds import Optimizers
from runtime.plan import Plan
from runtime.plan.interfaces import SHARDED_STEP, granted
from runtime.session.session import Session
from runtime.sparse.residuals import ErrorFeedbackState

PHASES = (ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER)
"""Phases of collectives on intra-node and inter-node links."""
ROUNDS_SHARE = 0.48
"""Share of the time left that the fewest rounds may take by the dilation that is chosen."""
BRIEF_SHARE = 0.6
"""The same share if DDP's steps are slow, so that nothing else takes long."""
SLOW = 4.0
"""Ratio of a step to one without communication from which a variant gets the fewest blocks."""
HOOKS: tuple[Hook, ...] = ("fp16",)
"""Hooks of DDP; PowerSGD's products would be the host's work, and are the accelerator's."""


class BucketRehearser(Rehearser[AskedPlan, BucketVariant]):
    """A rehearsal of buckets, on this rank."""

    WHAT = "{variants} variants"

    def __init__(self, asked: AskedPlan, bench: Bench, scale: Scale) -> None:
        """Make the scaled job."""
        super().__init__(asked, bench, scale)
        torch.manual_seed(SEED)
        self._constants = make_problem(asked.slowest, asked.links, where=asked.name)
        schedules = [make_schedule(self._constants, name) for name in asked.strategies]
        self._riskiest = max([asked.accuracy, *(each.accuracy for each in schedules)], key=ACCURACIES.index)
        shared = any(schedule.mode.shares_update for schedule in schedules)
        self._shares_update = shared or SHARDED_STEP in granted(asked.allow)
        own = on_rank(asked.profile, asked.cluster, bench.world.rank, asked.equal_batch)
        self._own, self._own_problem = own.compute, make_problem(own, asked.links, where=asked.name)
        compute = scale.profile(own).compute
        job = make_job(compute, bench.world.rank, scale.dilate, fused=self._riskiest != "relaxed")
        assert isinstance(job.model, AcceleratedModel)
        self._model = job.model
        name = f"rehearsal of {asked.name}"
        self._built = BuiltJob(spec=name, job=job, optimizer=make_optimizer(job, name), device=ranks.CPU)

    @staticmethod
    def most_dilate(asked: AskedPlan, left_s: float) -> float:
        """Return the dilation at which the fewest rounds take most of what is left, by the cluster's constants."""
        problem = make_problem(asked.slowest, asked.links, where=asked.name)
        plan = _planned(asked, asked.slowest, asked.links)
        variants = [*make_lineup(plan, problem, asked.strategies, hooks_of(asked)).variants]
        if asked.global_batch is not None:  # the plan with shares, too
            variants.append(variants[-1].renamed(EQUAL_SHARES))
        blocks = blocks_of(variants, 1, 1.0)
        ddp = next(each for each in blocks if each.name == DDP)
        least_s = sum(each.least_s for each in blocks)
        if ddp.brief:  # whose bucket sizes are not looked for
            return max(1.0, BRIEF_SHARE * left_s / least_s)
        if asked.only_default:  # nor here, and rounds have half of the minutes
            return max(1.0, ROUNDS_SHARE * left_s / least_s * LEAST_ROUNDS / LEAST_CLEAR_ROUNDS)
        return max(1.0, ROUNDS_SHARE * left_s / (least_s + ddp.least_s))  # DDP's best size, too

    def decide(self) -> Decided[BucketVariant]:
        """Time messages and what hosts do alone, and decide by that; every rank calls it."""
        own_us = self._own_us()
        cluster = self._measured_cluster()
        return decided_by_first(self.world, lambda: self._decided(cluster, own_us), "deciding")

    def _own_us(self) -> tuple[float, float]:
        """Return the time of a step without communication beyond the profile's, undilated.

        The first is of a usual rank, the second of the last one, for which those wait that communicate. It is updates
        and Python, for which ranks share the machine's cores. What is compared is not looked at: these steps are made
        before, by all ranks at once.
        """
        slowest = self.scale.profile(self.asked.slowest)
        compute, trained, number = slowest.compute, TrainedJob(self._built), count()
        asked_us = compute.forward_us + compute.update_us + sum(each.backward_us for each in compute.gradients)
        optimizer = trained.optimizer()

        def step() -> None:
            trained.step(trained.model, optimizer, next(number))

        with trained.restored(optimizer):
            usual_us, last_us = self.bare_steps_us(step, WARM_UP_STEPS, "steps without communication")
        usual_us = max(0.0, usual_us - asked_us)
        return usual_us / self.scale.dilate, max(usual_us, last_us - asked_us) / self.scale.dilate

    def _measured_cluster(self) -> Cluster:
        """Time messages alone; return the cluster with their times, undilated and unshrunk."""
        asked, bench, scale = self.asked, self.bench, self.scale
        relaxed, lossy = self._riskiest == "relaxed", self._riskiest != "exact"
        halves, compute = self._shares_update or relaxed, asked.profile.compute
        gathers = halves or lossy or compute.operator is not None
        names = [ALL_REDUCE, *[REDUCE_SCATTER] * halves, *[ALL_GATHER] * gathers, *NARROW_SUMS * lossy]
        size_bytes = round(sum(each.size_bytes for each in compute.gradients) / scale.shrink)
        # Inside hosts messages take little time.
        limits = self.limits(len(names) + 1 + len(PHASES) * (asked.cluster.ranks_per_node > 1))
        times = measure_links(bench, size_bytes, names, limits)
        samples = dict(times.samples)
        parts = parts_of(self.world.gather(node_name(), "counting hosts"))
        if parts is not None:
            phases = {"intra": PHASES, "inter": PHASES}
            samples |= measure_apart(bench, parts, size_bytes, phases, limits).samples
        # The times of these ranks, which are longer than a device's.
        computed: dict[str, Any] = {}
        if lossy:
            selection = measure_selection(bench, size_bytes, limits.longest_s, computes=False)
            encoding = measure_encoding(bench, size_bytes, limits.longest_s / 2, computes=False)
            found: tuple[Mapping[str, Any], ...] = (*selection, *encoding)
            for field, by_name in zip(("sparsify", "unpack", "encode", "decode"), found, strict=True):
                computed[field] = {name: _unscaled_line(line, scale) for name, line in by_name.items()}
        if relaxed:
            lines = measure_delay(bench, [scale.numel(each.numel) for each in compute.gradients])
            computed |= {field: _unscaled_line(line, scale) for field, line in lines.items()}
        return replace(
            asked.cluster, **computed, intra=None, inter=None, samples=self.unscaled(samples),
            back_to_back=self.unscaled(times.back_to_back), collectives=None,
            contention=None, measured_for=None, emulated="namespaces", speed=None,
        )  # fmt: skip

    def _decided(self, cluster: Cluster, own_us: tuple[float, float]) -> Decided[BucketVariant]:
        asked, (usual_us, last_us) = self.asked, own_us

        def here(profile: Profile) -> Profile:
            return replace(profile, compute=replace(profile.compute, update_us=profile.compute.update_us + last_us))

        plan = _planned(asked, here(asked.slowest), cluster)
        problem = make_problem(here(asked.slowest), cluster, where=asked.name)
        lineup = make_lineup(plan, problem, asked.strategies, hooks_of(asked))
        baseline, *others = lineup.variants
        constants = {}
        if asked.global_batch is not None:
            chosen = choose_shares(asked.profile, replace(cluster, speed=asked.cluster.speed), asked.global_batch)
            plan = replace(_planned(asked, here(chosen.profile), cluster), shares=chosen.shares)
            assert plan.predicted is not None
            *others, equal = others
            others.append(replace(equal, name=EQUAL_SHARES, given=False))
            # Its gradients are those of other samples.
            predicted_us, shares = plan.predicted.iteration_us, chosen.shares
            others.append(replace(equal, plan=plan, predicted_us=predicted_us, exact=False, shares=shares))
            constants[PLAN] = make_problem(chosen.profile, asked.links, where=asked.name)
        made = [replace(baseline, predicted_us=(baseline.predicted_us or 0.0) - last_us + usual_us), *others]
        everything = [*made, *(variant for _, variant in lineup.caps)]
        predicted = {
            one.name: _from_constants(one, problem, constants.get(one.name, self._constants)) for one in everything
        }
        return Decided(
            variants=[self._scaled(one) for one in made],
            caps=[] if asked.only_default else [(cap, self._scaled(one)) for cap, one in lineup.caps],
            from_constants_us={name: time_us for name, time_us in predicted.items() if time_us is not None},
            bounds={"bound_us": plan.certificate.lower_bound_us if plan.certificate else None},
        )

    def _scaled(self, variant: BucketVariant) -> BucketVariant:
        """Return a variant whose plan fits the scaled model; its prediction is of the cluster itself."""
        if variant.plan is None:
            return variant
        fingerprint = model_fingerprint(self._model)
        return replace(variant, plan=scaled_plan(variant.plan, self.scale, self.asked.profile.compute, fingerprint))

    def blocks(self, decided: Decided[BucketVariant], steps: int) -> list[Blocks]:
        """Return each variant's blocks of `steps` measured steps."""
        return blocks_of(decided.variants, steps, self.scale.dilate)

    def rounds(self, decided: Decided[BucketVariant], started_s: float) -> tuple[Rounds, Decided[BucketVariant]]:
        """Return the rounds that fit into the minutes, as `Rehearser.rounds`.

        If DDP's default alone is compared, they get half of the minutes, however long a busy machine took until here,
        and end when the plan's ratio to it, or to equal shares, is known.
        """
        if not self.asked.only_default:
            return super().rounds(decided, started_s)
        rounds, decided = super().rounds(decided, max(started_s, time.time() - 30.0 * self.asked.minutes))
        return replace(rounds, clear=(PLAN, DDP if self.asked.global_batch is None else EQUAL_SHARES)), decided

    def _computes(self, variant: BucketVariant) -> None:
        """Have this rank compute in the regions that a variant compiles."""
        if self._own.compiled is not None:
            self._model.retime(self.scale.profile(cut_as(variant, self._own_problem).profile).compute)

    def _batch_factor(self, shares: Mapping[str, int] | None) -> float:
        """Return the time of forward and backward of this rank with its share over that with an equal one."""
        asked, rank = self.asked, self.world.rank
        if shares is None:
            return 1.0
        batch = asked.equal_batch * shares[str(rank)] * asked.cluster.ranks / sum(shares.values())
        mine = on_rank(asked.profile, asked.cluster, rank, batch).compute
        return (mine.step_us - mine.update_us) / (self._own.step_us - self._own.update_us)

    def measure(self, decided: Decided[BucketVariant], rounds: Rounds) -> tuple[Measured, dict[str, Any]]:
        """Measure all variants; return that, dilated, and figures by name and variant, undilated."""
        if self.world.ranks > 1:
            self.world.broadcast([*self._model.parameters()])
        torch.manual_seed(SEED + 1 + self.world.rank)
        hold_links = partial(ranks.pace, links_of(self.asked.cluster), self.scale)
        trained = RehearsedJob(self._built, self._batch_factor)
        runner = RehearsalRunner(trained, self.bench, self.scale, self._model, hold_links, self._computes)
        measured = measure_all(runner, Lineup(decided.variants, decided.caps), rounds, SWEEP)
        late_us = {name: us / self.scale.dilate for name, us in runner.late_by_variant_us().items()}
        return measured, {"late_us": late_us}


class RehearsedJob(TrainedJob):
    """A job whose model waits for as long as this rank computes for its share; its batches hold nothing."""

    def __init__(self, built: BuiltJob, batch_factor: Callable[[Mapping[str, int] | None], float]) -> None:
        """`batch_factor` returns how the times of this rank's batch change with shares."""
        self._batch_factor = batch_factor
        super().__init__(built)

    def share(self, shares: Mapping[str, int] | None) -> Callable[[], float] | None:
        """Train by shares from the next batch on; see `Trained.share`."""
        super().share(None)
        assert isinstance(self.model, AcceleratedModel)
        self.model.batch_factor = self._batch_factor(shares)
        return None if shares is None else self._built.sharing(shares).weight


class RehearsalRunner(VariantRunner):
    """Blocks of variants on an accelerator that is a timed wait, with the work that did not fit under its waits."""

    def __init__(
        self, trained: TrainedJob, bench: Bench, scale: Scale, model: AcceleratedModel,
        hold_links: Callable[[], None], computes: Callable[[BucketVariant], None],
    ) -> None:  # fmt: skip
        """Measure a model; `hold_links` is called after new connections are made, to hold their rate, and `computes`
        before a variant's block, to give the model its times.
        """
        super().__init__(trained, bench, ranks.TIMEOUT_S, WARM_UP_STEPS, shrink=scale.shrink)
        self._accelerator, self._hold_links, self._computes = model.device, hold_links, computes
        self._late_us: dict[str, list[float]] = {}

    def block(self, record: Record[BucketVariant], steps: int) -> None:
        """Make this number of measured steps of one variant, and note how late hooks and updates were."""
        before_us = self._accelerator.late_us
        super().block(record, steps)
        late_us = self._accelerator.late_us - before_us
        late_us /= self.warm_up_steps(record) + record.variant.whole_cycles(steps)
        self._late_us.setdefault(record.variant.name, []).append(late_us)

    @contextmanager
    def communicating(self, variant: BucketVariant, optimizer: Optimizers) -> Iterator[nn.Module]:
        """See `VariantRunner.communicating`; ranks compute as the variant has it."""
        self._computes(variant)
        with super().communicating(variant, optimizer) as forward:
            yield forward

    def _attach(
        self, optimizer: Optimizers | None, plan: Plan, weight: Callable[[], float] | None = None
    ) -> Session:  # fmt: skip
        """Attach a plan; selecting and unpacking are the accelerator's work, which begins with them."""
        session = super()._attach(optimizer, plan, weight)
        self._hold_links()
        if isinstance(feedback := session._exchange.carried, ErrorFeedbackState):
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
        """Return the time of hooks and updates beyond the waits of a step, by variant: the median of blocks."""
        return {name: statistics.median(of_blocks) for name, of_blocks in self._late_us.items()}


def _planned(asked: AskedPlan, profile: Profile, cluster: Cluster) -> Plan:
    return optimize(profile, cluster, accuracy=asked.accuracy, allow=asked.allow, compress=asked.compress)


def hooks_of(asked: AskedPlan) -> tuple[Hook, ...]:
    """Return the hooks of DDP that are compared."""
    return () if asked.only_default else HOOKS


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
    """Return the step, in microseconds, by the cluster's constants alone; None if they do not cover it."""
    constants = cut_as(variant, constants)
    if variant.kind == "no_communication":
        return constants.compute_end_us + constants.update_us
    if variant.plan is None:
        return None
    if variant.plan.accuracy == "exact" and not variant.plan.sharded:
        schedule = schedule_of(constants, variant.plan)
    elif variant.name != PLAN:
        schedule = make_schedule(cut_as(variant, problem), variant.name)
    else:
        return None
    return float(model_of(schedule).step_us(constants, schedule))


def blocks_of(variants: Sequence[BucketVariant], steps: int, dilate: float) -> list[Blocks]:
    """Return each variant's blocks of `steps` measured steps, dilated."""
    predicted_s = {one.name: dilate * one.predicted_us / 1e6 for one in variants if one.predicted_us}
    computed_s, ddp_s = predicted_s[NO_COMMUNICATION], predicted_s[DDP]
    found = []
    for one in variants:
        step_s = predicted_s.get(one.name, (computed_s + ddp_s) / 2.0)  # a hook's, which sends half of the bytes
        brief = step_s > SLOW * computed_s
        block_steps = max(WARM_UP_STEPS, one.least_warm_up) + one.whole_cycles(1 if brief else steps)
        after = 1 if brief else 2  # see `VariantRunner.alone`
        found.append(Blocks(name=one.name, step_s=step_s, steps=block_steps, after=after, brief=brief))
    return found
