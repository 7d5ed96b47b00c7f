"""What every rank does for `planner compare`: contestants train by turns, each from the same weights."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import runtime
from planner.comparison.contestants import DDP, PLAN, Contestant, distinct_caps
from planner.comparison.same import Apart, FirstStep
from planner.comparison.trained import Trained, TrainedJob
from planner.jobs.training import SEED, blaming, build
from planner.profile.progress import Progress, make_progress
from planner.profile.step import TIMEOUT_S
from runtime.checks.plan import trainable_parameters
from runtime.comm.world import World, first_line
from runtime.errors import CommunicationError, InputError, PlanMismatch
from runtime.monitor.preserve import generators, restore_generators
from runtime.plan import Plan

WARM_UP_STEPS = 3
"""Of each block: DDP lays its buckets out again after the first step, PowerSGD begins with the third."""

SWEEP_ROUNDS, SWEEP_STEPS = 2, 3
"""How DDP's bucket size is chosen …"""

FINALISTS, FINAL_ROUNDS = 3, 3
"""… with so many further rounds of the fastest ones; the chosen one is measured once more with the others."""

ALONE_REPEATS = 5

ONE_BUCKET_MIB = 2.0**33


@dataclass
class Record:
    """What one rank saw of one contestant."""

    contestant: Contestant
    step_us: list[list[float]] = field(default_factory=list)
    """By round."""
    losses: list[list[float | None]] = field(default_factory=list)
    """Of all steps, by round; None where the step does not say."""
    apart: list[Apart] = field(default_factory=list)
    """By round, how far its first step was from DDP's: of exact contestants, without the round that DDP's is of."""
    alone_us: float | None = None
    """All its messages without a backward beside them."""
    failure: str | None = None
    """Why it could not be measured."""


@dataclass(frozen=True)
class Measured:
    """Everything that one rank measured."""

    records: list[Record]
    backward_us: float
    """Of the bare loop; 0 where nothing called its forward."""


class Contest:
    """One model on this rank, trained by one contestant after the other, each block from the same state."""

    def __init__(
        self, trained: Trained, world: World, timeout_s: float | None, warm_up_steps: int = WARM_UP_STEPS
    ) -> None:
        """The state that blocks begin with is the present one, that of the random generators included."""
        self.trained, self.world, self._timeout_s, self._warm_up_steps = trained, world, timeout_s, warm_up_steps
        self.model = trained.model
        self._device = next(self.model.parameters()).device
        self._generators = generators()
        self._missing = self._unused = False
        self._first_step = FirstStep(trainable_parameters(self.model))
        self.backward_us: list[float] = []

    def block(self, record: Record, steps: int) -> None:
        """Warm-up and so many steps of one contestant, after which everything is as it was."""
        try:
            self._block(record, steps)
            failure = None
        except CommunicationError:
            raise
        except (InputError, RuntimeError) as error:
            if record.contestant.hook is None:
                raise
            failure = first_line(error)  # not every hook works with every backend and device
        failures = self.world.gather(failure, f"the end of a block of {record.contestant.name}")
        record.failure = next(filter(None, failures), None)

    def check(self, contestants: Sequence[Contestant]) -> None:
        """Attaches each plan once, before anything is measured.

        Raises:
            PlanMismatch: the plan to judge does not fit the model or the ranks; on all ranks alike.
            InputError: a strategy's does not.
        """
        planned = [contestant for contestant in contestants if contestant.kind == "plan"]
        for contestant in sorted(planned, key=lambda one: one.name != PLAN):
            try:
                optimizer = self.trained.optimizer()
                with self.trained.restored(optimizer), self._travelling(contestant, optimizer):
                    pass
            except PlanMismatch as error:
                if contestant.name == PLAN:
                    raise
                raise InputError(f"--strategy {contestant.name}: {error}") from error

    def warm_up(self, bare: Contestant) -> None:
        """What is slow only once; whether parameters go unused."""
        self.block(Record(bare), 1)
        self._unused = any(self.world.gather(self._missing, "comparing the first step"))
        self.backward_us.clear()

    def measure(self, records: list[Record], rounds: int, steps: int, progress: Progress) -> Measured:
        """Rounds of blocks of all contestants by turns, then their messages alone; fills and returns the records."""
        for record in progress.track(list(_turns(records, rounds)), "measuring in turn"):
            if record.failure is None:
                self.block(record, steps)
        for record in records:
            if record.contestant.plan is not None and not record.contestant.delay and record.failure is None:
                with self.trained.restored(self.trained.optimizer()):
                    record.alone_us = self.alone(record.contestant.plan)
        backward_us = statistics.median(self.backward_us) if self.backward_us else 0.0
        return Measured(records, max(self.world.gather(backward_us, "the time of backward")))

    def _block(self, record: Record, steps: int) -> None:
        contestant = record.contestant
        times: list[float] = []
        losses: list[float | None] = []
        optimizer = self.trained.optimizer()
        with self.trained.restored(optimizer):
            self.model.zero_grad(set_to_none=True)
            with self._travelling(contestant, optimizer) as forward, self._watched(contestant, optimizer):
                self.world.gather(None, "the start of a block")
                restore_generators(self._generators)  # the same masks for everyone, whatever was drawn on the way here
                if _is_reference(contestant) and not self._first_step.taken:
                    self._first_step.begin()
                for step in range(self._warm_up_steps + contestant.in_turns(steps)):
                    self._synchronize()
                    start = time.perf_counter()
                    loss = self.trained.step(forward, optimizer, step, in_ddp=contestant.kind == "ddp")
                    self._synchronize()
                    times.append((time.perf_counter() - start) * 1e6)
                    losses.append(loss)
                    if step == 0:
                        self._look(record)
        measured = times[self._warm_up_steps :]
        # Steps of a delay differ from each other: what counts is their mean over whole turns of k.
        record.step_us.append([statistics.fmean(measured)] * steps if contestant.delay else measured)
        record.losses.append(losses)

    def _look(self, record: Record) -> None:
        """After the first step of a block."""
        contestant = record.contestant
        if self._first_step.taken and contestant.exact and contestant.kind != "bare":
            record.apart.append(self._first_step.compare())
        elif _is_reference(contestant):
            self._first_step.take_ddp()

    def _synchronize(self) -> None:
        """Waits until the device has done what it was told; before a clock is read."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    @contextmanager
    def _watched(self, contestant: Contestant, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Of the bare loop: the time from the end of forward to the optimizer's step; whether all have gradients."""
        if contestant.kind != "bare":
            yield
            return
        ends: list[float] = []

        def note(*_: Any) -> None:
            if ends:
                self.backward_us.append((time.perf_counter() - ends[-1]) * 1e6)
                ends.clear()
            self._missing |= any(p.requires_grad and p.grad is None for p in self.model.parameters())

        handles = [
            self.model.register_forward_hook(lambda *_: ends.append(time.perf_counter())),
            optimizer.register_step_pre_hook(note),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def _travelling(self, contestant: Contestant, optimizer: torch.optim.Optimizer) -> Iterator[nn.Module]:
        """What to call in place of the model, while its gradients travel as the contestant says."""
        if contestant.kind == "bare":
            self.trained.no_sync = nullcontext
            yield self.model
        elif contestant.kind == "ddp":
            wrapped = [self._wrap(contestant)]
            self.trained.no_sync = wrapped[0].no_sync
            try:
                yield wrapped[0]
            finally:
                wrapped.clear()
                self.trained.no_sync = nullcontext
                gc.collect()  # its hooks stay on the parameters until it is gone
        else:
            assert contestant.plan is not None
            session = runtime.attach(
                self.model, optimizer, delayed_at_once(contestant.plan), self.world.group, sync=False,
                timeout_s=self._timeout_s, guard=False,
            )  # fmt: skip
            self.trained.no_sync = session.no_sync
            try:
                yield self.model
            finally:
                self.trained.no_sync = nullcontext
                session.detach()

    def _wrap(self, contestant: Contestant) -> DistributedDataParallel:
        if contestant.hook == "powersgd" and self.world.backend == "gloo":
            # PowerSGD sends further messages when one has come. Over gloo those of several buckets go out in an order
            # that differs between ranks, which ends the process; so there is one bucket, or none of it.
            dtypes = {parameter.dtype for parameter in self.model.parameters() if parameter.requires_grad}
            if len(dtypes) > 1:
                raise InputError(
                    "PowerSGD over gloo with gradients of several dtypes, and so several buckets, would fail"
                )
            contestant = replace(contestant, cap_mib=ONE_BUCKET_MIB)
        with blaming(f"{self.trained.name}: DistributedDataParallel(model)"):
            model = DistributedDataParallel(
                self.model,
                process_group=self.world.group,
                bucket_cap_mb=contestant.cap_mib,
                find_unused_parameters=self._unused,
                init_sync=False,
            )
        if contestant.hook == "fp16":
            model.register_comm_hook(self.world.group, default_hooks.fp16_compress_hook)
        elif contestant.hook == "powersgd":
            state = powerSGD_hook.PowerSGDState(
                self.world.group, matrix_approximation_rank=1, start_powerSGD_iter=WARM_UP_STEPS - 1
            )
            model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        return model

    def distinct(
        self, caps: Sequence[tuple[float, Contestant]], contestants: Sequence[Contestant]
    ) -> list[tuple[float, Contestant]]:
        """The bucket sizes that give other buckets of this model than DDP's default and those before them."""
        parameters = trainable_parameters(self.model)
        plan = next(one.plan for one in contestants if one.name == PLAN)
        assert plan is not None
        # DDP follows the order of readiness, but where it searches for unused parameters.
        order = list(reversed(parameters)) if self._unused else plan.gradients
        sizes_bytes = [parameters[name].numel() * parameters[name].element_size() for name in order]
        dtypes = [hash(parameters[name].dtype) for name in order]
        wanted = distinct_caps(sizes_bytes, dtypes, [cap for cap, _ in caps])
        return [(cap, contestant) for cap, contestant in caps if cap in wanted]

    def alone(self, plan: Plan) -> float:
        """Microseconds in which a plan's messages pass when nothing else happens: the median of some rounds, over
        ranks the slowest."""
        if plan.sharded:  # its messages are the halves of all-reduces
            plan = replace(plan, updates=None)
        session = runtime.attach(
            self.model, None, plan, self.world.group, sync=False, timeout_s=self._timeout_s, guard=False
        )
        times = []
        try:
            for _ in range(min(ALONE_REPEATS, self._warm_up_steps + 2)):  # long steps have little warm-up
                self.world.gather(None, "messages alone")
                self._synchronize()
                start = time.perf_counter()
                session.exchange_alone()
                self._synchronize()
                times.append((time.perf_counter() - start) * 1e6)
        finally:
            session.detach()
        everyone: list[list[float]] = self.world.gather(times, "messages alone")
        slowest = [max(of_ranks) for of_ranks in zip(*everyone, strict=True)]
        return float(statistics.median(slowest))


def compare_rank(
    spec: str,
    contestants: Sequence[Contestant],
    caps: Sequence[tuple[float, Contestant]],
    rounds: int,
    steps: int,
    device: str,
    show_progress: bool,
    timeout_s: float | None = None,
) -> Measured:
    """Measures on this rank; every rank calls it.

    Args:
        spec: the job.
        contestants: all but DDP's best bucket size; the first is the bare loop.
        caps: bucket sizes of DDP to try, each with what takes part if it is the best; those that give the buckets of
            another one count once.
        rounds: each contestant has one block in each.
        steps: measured ones of a block.
        device: `cpu` or `cuda`.
        show_progress: whether the first rank shows how far it has got.
        timeout_s: deadline of every wait; default 300 s.

    Raises:
        InputError: the job or the plan is wrong.
        CommunicationError: another rank died or missed the deadline.
    """
    built = build(spec, device)
    world = World.join(None, TIMEOUT_S if timeout_s is None else timeout_s)
    shown = make_progress(show=show_progress and world.rank == 0)
    try:
        if world.ranks > 1:
            world.broadcast([*built.model.parameters(), *built.model.buffers()])
        seed_generators(SEED + 1 + world.rank)  # ranks drop out other activations, as those of DDP's users do
        return measure_all(Contest(TrainedJob(built), world, timeout_s), contestants, caps, rounds, steps, shown)
    finally:
        world.leave()


def measure_all(
    contest: Contest,
    contestants: Sequence[Contestant],
    caps: Sequence[tuple[float, Contestant]],
    rounds: int,
    steps: int,
    progress: Progress,
) -> Measured:
    """See `compare_rank`; the contest is between these contestants and DDP's best bucket size."""
    contest.check(contestants)
    contest.warm_up(contestants[0])
    records = [Record(contestant) for contestant in _with_best(contest, contestants, caps, progress)]
    return contest.measure(records, rounds, steps, progress)


def _is_reference(contestant: Contestant) -> bool:
    """Whether it is plain DDP, with whatever buckets."""
    return contestant.kind == "ddp" and contestant.hook is None


def delayed_at_once(plan: Plan) -> Plan:
    """The plan without the synchronous steps that its run begins with, where it has a delay: these are not measured."""
    return plan if plan.delay is None else replace(plan, delay=replace(plan.delay, warmup_steps=0))


def _turns(records: Sequence[Record], rounds: int) -> Iterator[Record]:
    """Each round begins with another contestant, so that none always follows the same one."""
    for number in range(rounds):
        shift = number % len(records)
        yield from records[shift:]
        yield from records[:shift]


def seed_generators(seed: int) -> None:
    """Python's, numpy's and torch's."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def _with_best(
    contest: Contest, contestants: Sequence[Contestant], caps: Sequence[tuple[float, Contestant]], progress: Progress
) -> list[Contestant]:
    """The contestants with DDP's fastest bucket size after its default, where it is not the default."""
    default = next(contestant for contestant in contestants if contestant.name == DDP)
    rivals: dict[float | None, Record] = {
        cap: Record(contestant) for cap, contestant in contest.distinct(caps, contestants)
    }
    if not rivals:
        return list(contestants)
    tried = {None: Record(default), **rivals}
    turns = list(_turns(list(tried.values()), SWEEP_ROUNDS))
    for record in progress.track(turns, "DDP's best bucket size"):
        contest.block(record, SWEEP_STEPS)
    finalists = {cap: tried[cap] for cap in _fastest(contest.world, tried)[:FINALISTS]}
    for record in progress.track(list(_turns(list(finalists.values()), FINAL_ROUNDS)), "the fastest of them"):
        contest.block(record, SWEEP_STEPS)
    best = _fastest(contest.world, finalists)[0]
    if best is None:
        return list(contestants)
    after = contestants.index(default) + 1
    return [*contestants[:after], rivals[best].contestant, *contestants[after:]]


def _fastest(world: World, tried: dict[float | None, Record]) -> list[float | None]:
    """The bucket sizes by the mean over ranks of the median step, the same on every rank."""
    medians = {cap: statistics.median(chain.from_iterable(record.step_us)) for cap, record in tried.items()}
    everyone = world.gather(medians, "DDP's best bucket size")
    return sorted(medians, key=lambda cap: statistics.fmean(rank[cap] for rank in everyone))
