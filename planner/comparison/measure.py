"""A rank of `planner compare`: blocks of variants are interleaved, each from the same weights."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import runtime
from planner.comparison.rounding import RoundingState, rounding_hook
from planner.comparison.same import Deviation, FirstStep
from planner.comparison.statistics import ratio_interval, step_values
from planner.comparison.trained import Trained, TrainedJob
from planner.comparison.variants import DDP, PLAN, BucketVariant, Lineup, Rounds, Variant, distinct_caps
from planner.jobs.training import SEED, attribute_user_errors, build
from planner.profile.bench import Bench, Progress, median_of_slowest, synchronize
from planner.profile.step import joined
from planner.strategies.baselines import BUCKET_BYTES, FIRST_BUCKET_BYTES, MIB
from runtime.checks.plan import trainable_parameters
from runtime.comm.world import World, first_line
from runtime.core.compiled import CompiledModel
from runtime.core.members import exchanged_buffers, exchanged_parameters
from runtime.errors import CommunicationError, InputError, PlanMismatch
from runtime.monitor.clock import make_clock
from runtime.monitor.preserve import generators, restore_generators
from runtime.optimizers.kinds import Optimizers, each_of
from runtime.plan import Plan
from runtime.session.session import Session

V = TypeVar("V", bound=Variant)

WARM_UP_STEPS = 3
"""Number in each block: DDP lays its buckets out again after the first step, PowerSGD begins with the third."""


LEAST_ROUNDS = 2
"""Number of rounds that are measured however late it is."""

LEAST_CLEAR_ROUNDS = 4
"""Number of rounds from which a ratio may count as known."""

ALONE_REPEATS = 5

ONE_BUCKET_MIB = 2.0**33

POWERSGD = "powersgd"
"""DDP's hook of this name, one of `planner.comparison.variants.HOOKS`."""


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """The measurements by which DDP's bucket size is chosen; the chosen one is measured once more with the others."""

    rounds: int = 2
    """Number of rounds of all sizes."""
    finalists: int = 3
    """Number of the fastest sizes that get further rounds."""
    final_rounds: int = 3
    """Number of these rounds."""
    steps: int = 3
    """Measured steps of a block."""

    def blocks(self, sizes: int) -> int:
        """Return the number of blocks of `sizes` sizes and of DDP's default."""
        return (sizes + 1) * self.rounds + min(sizes + 1, self.finalists) * self.final_rounds if sizes else 0


@dataclass
class Record(Generic[V]):
    """The measurements of one variant on one rank."""

    variant: V
    step_us: list[list[float]] = field(default_factory=list)
    """Times of measured steps, by round."""
    losses: list[list[float | None]] = field(default_factory=list)
    """Losses of all steps, by round; None if the step does not return it."""
    deviations: list[Deviation] = field(default_factory=list)
    """Distances of its first steps from DDP's, by round; for exact variants, without the round that DDP's is of."""
    alone_us: float | None = None
    """Time of all its messages without a backward."""
    figures: list[float] = field(default_factory=list)
    """Medians over measured steps of a plan whose ranks wait for each other, as `rank_arrivals` takes them; empty of
    what else is compared."""
    failure: str | None = None
    """Reason why it could not be measured."""
    difference: float = 0.0
    """Largest difference of a final weight from the first variant's, relative to its parameter's largest weight; for
    wrappings, whose weights are not restored between blocks."""


@dataclass(frozen=True)
class Measured:
    """Everything that one rank measured."""

    records: Sequence[Record[Any]]
    backward_us: float = 0.0
    """Time of backward of the no-communication baseline; 0 if there is none, or nothing called its forward."""
    micro_batches: tuple[int, int] = (1, 1)
    """Number of micro-batches of a step, and of those that exchange gradients."""


class Runner(Generic[V]):
    """Measures variants on this rank, in blocks of steps that are interleaved."""

    def __init__(self, bench: Bench) -> None:
        self.bench, self.world = bench, bench.world

    def block(self, record: Record[V], steps: int) -> None:
        """Make this number of measured steps of one variant; every rank calls it."""
        raise NotImplementedError

    def interleave(self, records: Sequence[Record[V]], rounds: Rounds, what: str = "measuring") -> None:
        """Make blocks of all variants that work, and show each round as `what`.

        Each round begins with another variant, so that none always follows the same one.
        """
        progress, longest_s = self.bench.progress, 0.0
        for number in progress.track(range(rounds.count), what):
            left_s = min(self.world.gather(rounds.end_s - time.time(), "looking at the clock"))
            if number >= LEAST_ROUNDS and longest_s > left_s:
                break
            started_s, shift = time.perf_counter(), number % len(records)
            for record in (*records[shift:], *records[:shift]):
                name = record.variant.name
                progress.say(f"{what}: {name}, round {number + 1} of {rounds.count}")
                if record.failure is None and (number < LEAST_ROUNDS or name not in rounds.brief):
                    self.block(record, 1 if name in rounds.brief else rounds.steps)
            longest_s = max(longest_s, *self.world.gather(time.perf_counter() - started_s, "timing a round"))
            if rounds.clear is not None and number + 1 >= LEAST_CLEAR_ROUNDS and self._is_clear(records, rounds.clear):
                break

    def _is_clear(self, records: Sequence[Record[V]], names: tuple[str, str]) -> bool:
        """Return whether the ratio of two variants' steps is known well enough, the same on all ranks."""
        mine = [next(one.step_us for one in records if one.variant.name == name) for name in names]
        by_name = zip(*self.world.gather(mine, "comparing rounds"), strict=True)  # brief ones have fewer blocks
        return ratio_interval(*(step_values(np.array(one), together=True) for one in by_name)).telling_rounds is None


class VariantRunner(Runner[BucketVariant]):
    """One model on this rank, trained by one variant after the other, each block from the same state."""

    def __init__(
        self, trained: Trained, bench: Bench, timeout_s: float | None, warm_up_steps: int = WARM_UP_STEPS,
        shrink: float = 1.0,
    ) -> None:  # fmt: skip
        """Keep the present state, that of the random generators included: blocks begin with it.

        Args:
            trained: the model that all variants train.
            bench: its ranks.
            timeout_s: deadline of every wait; default 300 s.
            warm_up_steps: the first of each block, which do not count.
            shrink: bytes of the model that is rehearsed per byte of this one; DDP's bucket sizes are of the former.
        """
        super().__init__(bench)
        self._shrink = shrink
        self.trained, self._timeout_s, self._warm_up_steps = trained, timeout_s, warm_up_steps
        self.model = trained.model
        self.compiled = None if trained.compile is None else CompiledModel(trained.model, trained.compile)
        self._device = bench.device
        self._generators = generators()
        self._missing = self.unused = False
        self._micro_batches = (1, 1)
        self._figures: dict[str, list[list[float]]] = {}
        """Figures of each measured step by variant; see `Record.figures`."""
        self._session: Session | None = None
        """Session of the plan that communicates."""
        self._first_step = FirstStep(trainable_parameters(self.model))
        self.backward_us: list[float] = []

    def block(self, record: Record[BucketVariant], steps: int) -> None:
        """Warm up and make this number of steps of one variant, after which everything is as it was."""
        failure = None
        try:
            self._block(record, steps)
        except CommunicationError:
            raise
        except (InputError, RuntimeError) as error:
            if record.variant.hook is None:
                raise
            failure = first_line(error)  # not every hook works with every backend and device
        failures = self.world.gather(failure, f"the end of a block of {record.variant.name}")
        record.failure = next(filter(None, failures), None)

    def check(self, variants: Sequence[BucketVariant]) -> None:
        """Attach each plan once, before anything is measured. Raises as `named_plan`."""
        planned = [variant for variant in variants if variant.kind == "plan"]
        for variant in sorted(planned, key=lambda one: one.name != PLAN):
            with named_plan(variant):
                optimizer = self.trained.optimizer()
                with self.trained.restored(optimizer), self.communicating(variant, optimizer):
                    pass

    def warm_up(self, baseline: BucketVariant) -> None:
        """Make the steps that are slow only once, and find out whether parameters go unused."""
        self.block(Record(baseline), 1)
        self.unused = any(self.world.gather(self._missing, "comparing the first step"))
        self.backward_us.clear()

    def measure(self, variants: Sequence[BucketVariant], rounds: Rounds) -> Measured:
        """Interleave blocks of all variants, then time their messages alone."""
        records = [Record(variant) for variant in variants]
        self.interleave(records, rounds)
        for record in records:
            if record.variant.plan is not None and not record.variant.cycle and record.failure is None:
                with self.trained.restored(self.trained.optimizer()):
                    record.alone_us = self.alone(record.variant.plan, brief=record.variant.name in rounds.brief)
            if figures := self._figures.get(record.variant.name):
                record.figures = torch.tensor(figures, dtype=torch.float64).nanmedian(dim=0).values.tolist()
        backward_us = statistics.median(self.backward_us) if self.backward_us else 0.0
        backward_us = max(self.world.gather(backward_us, "the time of backward"))
        return Measured(records, backward_us, self._micro_batches)

    def warm_up_steps(self, record: Record[BucketVariant]) -> int:
        """Return the number of steps of a block that do not count."""
        return max(self._warm_up_steps, record.variant.least_warm_up)

    def _block(self, record: Record[BucketVariant], steps: int) -> None:
        variant, warm_up_steps = record.variant, self.warm_up_steps(record)
        times: list[float] = []
        losses: list[float | None] = []
        optimizer = self.trained.optimizer()
        with self.trained.restored(optimizer):
            self.model.zero_grad(set_to_none=True)
            with self.communicating(variant.steady, optimizer) as forward, self._watched(variant, optimizer):
                self.world.gather(None, "the start of a block")
                restore_generators(self._generators)  # the same masks for all variants, whatever was drawn before
                if variant.plain_ddp and not self._first_step.taken:
                    self._first_step.begin()
                for step in range(warm_up_steps + variant.whole_cycles(steps)):
                    synchronize(self._device)
                    start = time.perf_counter()
                    loss = self.trained.step(forward, optimizer, step)
                    synchronize(self._device)
                    times.append((time.perf_counter() - start) * 1e6)
                    losses.append(loss)
                    if step == 0 and self._first_step.taken and variant.exact and variant.kind != "no_communication":
                        record.deviations.append(self._first_step.compare())
                    elif step == 0 and variant.plain_ddp:
                        self._first_step.take_ddp()
                self._note_steps(variant, len(times) - warm_up_steps)
        measured = times[warm_up_steps:]
        # Steps of a delay differ from each other: their mean over whole cycles of k counts.
        record.step_us.append([statistics.fmean(measured)] * steps if variant.cycle else measured)
        record.losses.append(losses)

    def _note_steps(self, variant: BucketVariant, steps: int) -> None:
        """Keep what the session of a plan has seen of a block's last steps, which are measured."""
        if self._session is None:
            return
        if (seen := self._session.report()).steps:
            self._micro_batches = seen.micro_batches
        if not variant.cycle:
            self._figures.setdefault(variant.name, []).extend(self._session.arrival_figures()[-steps:])

    @contextmanager
    def _watched(self, variant: BucketVariant, optimizer: Optimizers) -> Iterator[None]:
        """Note the time from forward to the optimizer's step, and missing gradients, of steps without communication."""
        if variant.kind != "no_communication":
            yield
            return
        clock = make_clock(self._device)
        ends: list[Any] = []
        spans: list[tuple[Any, Any]] = []

        def note(*_: Any) -> None:
            if ends:
                spans.append((ends[-1], clock.mark()))
                ends.clear()
            self._missing |= any(p.requires_grad and p.grad is None for p in self.model.parameters())

        handles = [
            self.model.register_forward_hook(lambda *_: ends.append(clock.mark())),
            each_of(optimizer)[0].register_step_pre_hook(note),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self.backward_us += [clock.between_us(*span) for span in spans]

    @contextmanager
    def communicating(self, variant: BucketVariant, optimizer: Optimizers) -> Iterator[nn.Module]:
        """Yield the module to call in place of the model, while gradients are sent as the variant says.

        Batches are by its shares.
        """
        weight = self.trained.share(variant.shares)
        if variant.kind == "no_communication":
            self.trained.no_sync = nullcontext
            if self.compiled is None:
                yield self.model
                return
            self.compiled.cut(())
            try:
                yield self.model
            finally:
                self.compiled.remove()
        elif variant.kind == "ddp":
            wrapped = [self._wrap(variant)]
            self.trained.no_sync = wrapped[0].no_sync
            try:
                yield wrapped[0] if self.compiled is None else self.compiled.around(wrapped[0])
            finally:
                wrapped.clear()
                self.trained.no_sync = nullcontext
                gc.collect()  # its hooks stay on the parameters until it is gone
        else:
            plan = variant.plan
            assert plan is not None
            self._session = session = self._attach(optimizer, plan, weight)
            self.trained.no_sync = session.no_sync
            try:
                yield self.model
            finally:
                self._session, self.trained.no_sync = None, nullcontext
                session.detach()

    def _attach(
        self, optimizer: Optimizers | None, plan: Plan, weight: Callable[[], float] | None = None
    ) -> Session:  # fmt: skip
        return runtime.attach(
            self.model, optimizer, plan, self.world.group, sync=False, timeout_s=self._timeout_s, drift=False,
            guard=False, weight=weight, compile=self.trained.compile,
        )  # fmt: skip

    def _wrap(self, variant: BucketVariant) -> DistributedDataParallel:
        if variant.hook == POWERSGD and self.world.backend == "gloo":
            # PowerSGD sends further messages when one has come. Over gloo those of several buckets go out in an order
            # that differs between ranks, which ends the process; so there is one bucket, or none of it.
            dtypes = {parameter.dtype for parameter in self.model.parameters() if parameter.requires_grad}
            if len(dtypes) > 1:
                raise InputError(
                    "PowerSGD over gloo with gradients of several dtypes, and so several buckets, would fail"
                )
            variant = replace(variant, cap_mib=ONE_BUCKET_MIB)
        with attribute_user_errors(f"{self.trained.name}: DistributedDataParallel(model)"):
            model = DistributedDataParallel(
                self.model,
                process_group=self.world.group,
                find_unused_parameters=self.unused,
                init_sync=False,
                **self._limits(variant.cap_mib),
            )
        if variant.hook == "fp16":
            model.register_comm_hook(self.world.group, default_hooks.fp16_compress_hook)
        elif variant.hook == "rounding":
            model.register_comm_hook(RoundingState(self.world.group, {}), rounding_hook)
        elif variant.hook == POWERSGD:
            state = powerSGD_hook.PowerSGDState(
                self.world.group, matrix_approximation_rank=1, start_powerSGD_iter=WARM_UP_STEPS - 1
            )
            model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        return model

    def _limits(self, cap_mib: float | None) -> dict[str, Any]:
        """Return DDP's arguments for a bucket size in MiB of what the model stands for; None is DDP's default."""
        if self._shrink == 1.0:
            return {"bucket_cap_mb": cap_mib}
        if cap_mib is not None:
            return {"bucket_cap_mb": cap_mib / self._shrink}
        # DDP's own two limits, of which only the second one is an argument of its own.
        return {"bucket_cap_mb_list": [limit / MIB / self._shrink for limit in (FIRST_BUCKET_BYTES, BUCKET_BYTES)]}

    def distinct(
        self, caps: Sequence[tuple[float, BucketVariant]], variants: Sequence[BucketVariant]
    ) -> list[tuple[float, BucketVariant]]:
        """Return the bucket sizes whose buckets of this model differ from DDP's default's and earlier ones'."""
        parameters = trainable_parameters(self.model)
        plan = next(one.plan for one in variants if one.name == PLAN)
        assert plan is not None
        # DDP follows the order of readiness, but where it searches for unused parameters.
        order = list(reversed(parameters)) if self.unused else plan.gradients
        sizes_bytes = [
            round(parameters[name].numel() * parameters[name].element_size() * self._shrink) for name in order
        ]
        dtypes = [hash(parameters[name].dtype) for name in order]
        wanted = distinct_caps(sizes_bytes, dtypes, [cap for cap, _ in caps])
        return [(cap, variant) for cap, variant in caps if cap in wanted]

    def alone(self, plan: Plan, *, brief: bool = False) -> float:
        """Return the microseconds of a plan's messages with nothing else to do: median of rounds on the slowest rank.

        The first exchange of a new group takes a quarter longer: it is left out, unless it is long (`brief`).
        """
        # Of a sharded step messages are the halves of all-reduces; norms and operators belong to optimizers.
        session = self._attach(None, replace(plan, updates=None))
        try:
            # Long steps have little warm-up.
            repeats = 1 if brief else min(ALONE_REPEATS, 2 * self._warm_up_steps - 1)
            bench = replace(self.bench, progress=Progress())
            times_us = bench.times_us([session._exchange_alone], repeats, "messages alone", warm_up=not brief)
        finally:
            session.detach()
        return float(median_of_slowest(times_us)[0])


@contextmanager
def named_plan(variant: BucketVariant) -> Iterator[None]:
    """Name the plan that does not fit, on all ranks alike.

    Raises:
        PlanMismatch: the plan to judge does not fit the model or the ranks.
        InputError: that of a strategy, or one of several plans, does not.
    """
    try:
        yield
    except PlanMismatch as error:
        if variant.name == PLAN:
            raise
        raise InputError(f"{'--plan' if variant.given else '--strategy'} {variant.name}: {error}") from error


def compare_rank(
    spec: str, lineup: Lineup, rounds: Rounds, device: str, show_progress: bool, timeout_s: float | None = None
) -> Measured:
    """Measure a job on this rank; every rank calls it.

    Args:
        spec: the job's name.
        lineup: the variants; bucket sizes of DDP whose buckets are those of another one count once.
        rounds: of blocks.
        device: `cpu` or `cuda`.
        show_progress: whether the first rank shows bars.
        timeout_s: deadline of every wait; default 300 s.

    Raises:
        InputError: the job or the plan is wrong.
        CommunicationError: another rank died or missed the deadline.
    """
    built = build(spec, device)
    with joined(None, timeout_s) as world:
        if world.ranks > 1:
            world.broadcast([*exchanged_parameters(built.model), *exchanged_buffers(built.model)])
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(SEED + 1 + world.rank)  # ranks drop out other activations, as those of DDP's users do
        bench = Bench(world, built.device, Progress(show_progress and world.rank == 0))
        return measure_all(VariantRunner(TrainedJob(built), bench, timeout_s), lineup, rounds)


def measure_all(runner: VariantRunner, lineup: Lineup, rounds: Rounds, choice: Sweep = Sweep()) -> Measured:
    """Find DDP's best bucket size by `choice`, then measure it among the variants of a lineup."""
    variants = list(lineup.variants)
    runner.check(variants)
    runner.warm_up(variants[0])
    default = next(variant for variant in variants if variant.name == DDP)
    rivals: dict[float | None, Record[BucketVariant]] = {
        cap: Record(variant) for cap, variant in runner.distinct(lineup.caps, variants)
    }
    if rivals:
        tried = {None: Record(default), **rivals}
        every, final = (Rounds(count=count, steps=choice.steps) for count in (choice.rounds, choice.final_rounds))
        runner.interleave(list(tried.values()), every, "DDP's best bucket size")
        tried = {cap: tried[cap] for cap in _fastest(runner.world, tried)[: choice.finalists]}
        runner.interleave(list(tried.values()), final, "the fastest of them")
        best = _fastest(runner.world, tried)[0]
        if best is not None:
            variants.insert(variants.index(default) + 1, rivals[best].variant)
    return runner.measure(variants, rounds)


def _fastest(world: World, tried: dict[float | None, Record[BucketVariant]]) -> list[float | None]:
    """Return the bucket sizes by the mean over ranks of the median step, the same on every rank."""
    medians = {cap: statistics.median(chain.from_iterable(record.step_us)) for cap, record in tried.items()}
    everyone = world.gather(medians, "DDP's best bucket size")
    return sorted(medians, key=lambda cap: statistics.fmean(rank[cap] for rank in everyone))
