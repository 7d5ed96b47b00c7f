"""What every rank does for `planner compare`: contestants train by turns, each from the same weights."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import runtime
from planner.comparison.contestants import DDP, PLAN, Contestant
from planner.profile.step import TIMEOUT_S
from planner.progress import Progress, make_progress
from planner.training import KEPT_BATCHES, BuiltJob, blaming, build
from runtime.errors import CommunicationError, InputError, PlanMismatch
from runtime.plan import Plan
from runtime.world import World, first_line

WARM_UP_STEPS = 3
"""Of each block: DDP lays its buckets out again after the first step, PowerSGD begins with the third."""

SWEEP_ROUNDS, SWEEP_STEPS = 2, 3
"""How DDP's bucket size is chosen; the chosen one is measured again with the others."""

ALONE_REPEATS = 5

ONE_BUCKET_MIB = 2.0**33


@dataclass
class Record:
    """What one rank saw of one contestant."""

    contestant: Contestant
    step_us: list[list[float]] = field(default_factory=list)
    """By round."""
    losses: list[list[float]] = field(default_factory=list)
    """Of all steps, by round."""
    alone_us: float | None = None
    """All its messages without a backward beside them."""
    failure: str | None = None
    """Why it could not be measured."""


@dataclass(frozen=True)
class Measured:
    """Everything that one rank measured."""

    records: list[Record]
    backward_us: float
    """Of the bare loop."""


class Contest:
    """One model on this rank, trained by one contestant after the other, each block from the first weights."""

    def __init__(
        self, built: BuiltJob, world: World, timeout_s: float | None, warm_up_steps: int = WARM_UP_STEPS
    ) -> None:
        self.built, self.world, self._timeout_s, self._warm_up_steps = built, world, timeout_s, warm_up_steps
        self._start = [tensor.detach().clone() for tensor in self._state()]
        self._batches = [built.batch(step) for step in range(KEPT_BATCHES)]
        self._unused = False
        self.backward_us: list[float] = []

    def _state(self) -> list[Tensor]:
        return [*self.built.model.parameters(), *self.built.model.buffers()]

    def block(self, record: Record, steps: int) -> None:
        """Warm-up and so many steps of one contestant, after which the model is as it was."""
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
                with self._trained(contestant, self._optimizer()):
                    pass
            except PlanMismatch as error:
                if contestant.name == PLAN:
                    raise
                raise InputError(f"--strategy {contestant.name}: {error}") from error

    def warm_up(self, bare: Contestant) -> None:
        """What is slow only once; whether parameters go unused."""
        self.block(Record(bare), 1)
        self.backward_us.clear()

    def measure(self, records: list[Record], rounds: int, steps: int, progress: Progress) -> Measured:
        """Rounds of blocks of all contestants by turns, then their messages alone; fills and returns the records."""
        for record in progress.track(list(_turns(records, rounds)), "measuring in turn"):
            if record.failure is None:
                self.block(record, steps)
        for record in records:
            if record.contestant.plan is not None and not record.contestant.delay and record.failure is None:
                record.alone_us = self.alone(record.contestant.plan)
        backward_us = statistics.median(self.backward_us)
        return Measured(records, max(self.world.gather(backward_us, "the time of backward")))

    def _block(self, record: Record, steps: int) -> None:
        model = self.built.model
        with torch.no_grad():
            for tensor, start in zip(self._state(), self._start, strict=True):
                tensor.copy_(start)
        model.zero_grad(set_to_none=True)
        optimizer = self._optimizer()
        times: list[float] = []
        losses: list[float] = []
        with self._trained(record.contestant, optimizer) as forward:
            self.world.gather(None, "the start of a block")
            for step in range(self._warm_up_steps + record.contestant.in_turns(steps)):
                losses.append(self._step(forward, optimizer, step, record.contestant.kind, times))
                self._unused = self._unused or any(p.requires_grad and p.grad is None for p in model.parameters())
        measured = times[self._warm_up_steps :]
        # Steps of a delay differ from each other: what counts is their mean over whole turns of k.
        record.step_us.append([statistics.fmean(measured)] * steps if record.contestant.delay else measured)
        record.losses.append(losses)

    def _optimizer(self) -> torch.optim.Optimizer:
        trained = (parameter for parameter in self.built.model.parameters() if parameter.requires_grad)
        return self.built.job.optimizer(trained)

    def _step(
        self, forward: nn.Module, optimizer: torch.optim.Optimizer, step: int, kind: str, times: list[float]
    ) -> float:
        batch = self._batches[step % KEPT_BATCHES]
        self.built.synchronize()
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = self.built.loss(forward, batch)
        begin = time.perf_counter()
        self.built.backward(loss, in_ddp=kind == "ddp")
        if kind == "bare" and step >= self._warm_up_steps:
            self.backward_us.append((time.perf_counter() - begin) * 1e6)
        optimizer.step()
        self.built.synchronize()
        times.append((time.perf_counter() - start) * 1e6)
        return float(loss.detach())

    @contextmanager
    def _trained(self, contestant: Contestant, optimizer: torch.optim.Optimizer) -> Iterator[nn.Module]:
        """What to call in place of the model, while its gradients travel as the contestant says."""
        if contestant.kind == "bare":
            yield self.built.model
        elif contestant.kind == "ddp":
            wrapped = [self._wrap(contestant)]
            try:
                yield wrapped[0]
            finally:
                wrapped.clear()
                gc.collect()  # its hooks stay on the parameters until it is gone
        else:
            assert contestant.plan is not None
            session = runtime.attach(
                self.built.model, optimizer, delayed_at_once(contestant.plan), sync=False, timeout_s=self._timeout_s,
                guard=False,
            )  # fmt: skip
            try:
                yield self.built.model
            finally:
                session.detach()

    def _wrap(self, contestant: Contestant) -> DistributedDataParallel:
        if contestant.hook == "powersgd" and self.world.backend == "gloo":
            contestant = self._in_one_bucket(contestant)
        with blaming(f"{self.built.spec}: DistributedDataParallel(model)"):
            model = DistributedDataParallel(
                self.built.model,
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

    def _in_one_bucket(self, contestant: Contestant) -> Contestant:
        """PowerSGD sends further messages when one has come. Over gloo those of several buckets go out in an order that
        differs between ranks, which ends the process; so there is one bucket, or none of it.
        """
        dtypes = {parameter.dtype for parameter in self.built.model.parameters() if parameter.requires_grad}
        if len(dtypes) > 1:
            raise InputError("PowerSGD over gloo with gradients of several dtypes, and so several buckets, would fail")
        return replace(contestant, cap_mib=ONE_BUCKET_MIB)

    def alone(self, plan: Plan) -> float:
        """Microseconds in which a plan's messages pass when nothing else happens: the median of some rounds, over
        ranks the slowest."""
        if plan.sharded:  # its messages are the halves of all-reduces
            plan = replace(plan, updates=None)
        session = runtime.attach(self.built.model, None, plan, sync=False, timeout_s=self._timeout_s, guard=False)
        times = []
        try:
            for _ in range(min(ALONE_REPEATS, self._warm_up_steps + 2)):  # long steps have little warm-up
                self.world.gather(None, "messages alone")
                self.built.synchronize()
                start = time.perf_counter()
                session.exchange_alone()
                self.built.synchronize()
                times.append((time.perf_counter() - start) * 1e6)
        finally:
            session.detach()
            self.built.model.zero_grad(set_to_none=True)
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
        caps: bucket sizes of DDP to try, each with what takes part if it is the best.
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
        contest = Contest(built, world, timeout_s)
        contest.check(contestants)
        contest.warm_up(contestants[0])
        records = [Record(contestant) for contestant in _with_best(contest, contestants, caps, shown)]
        return contest.measure(records, rounds, steps, shown)
    finally:
        world.leave()


def delayed_at_once(plan: Plan) -> Plan:
    """The plan without the synchronous steps that its run begins with, where it has a delay: these are not measured."""
    return plan if plan.delay is None else replace(plan, delay=replace(plan.delay, warmup_steps=0))


def _turns(records: Sequence[Record], rounds: int) -> Iterator[Record]:
    """Each round begins with another contestant, so that none always follows the same one."""
    for number in range(rounds):
        shift = number % len(records)
        yield from records[shift:]
        yield from records[:shift]


def _with_best(
    contest: Contest, contestants: Sequence[Contestant], caps: Sequence[tuple[float, Contestant]], progress: Progress
) -> list[Contestant]:
    """The contestants with DDP's best bucket size after its default."""
    if len(caps) < 2:
        return list(contestants)
    sweep = {cap: Record(contestant) for cap, contestant in caps}
    for record in progress.track(list(_turns(list(sweep.values()), SWEEP_ROUNDS)), "DDP's best bucket size"):
        contest.block(record, SWEEP_STEPS)
    medians = {
        cap: statistics.median(chain.from_iterable(record.step_us)) for cap, record in sweep.items() if record.step_us
    }
    everyone = contest.world.gather(medians, "DDP's best bucket size")
    best = min(medians, key=lambda cap: statistics.fmean(rank[cap] for rank in everyone))
    chosen = dict(caps)[best]
    after = next(index for index, contestant in enumerate(contestants) if contestant.name == DDP) + 1
    return [*contestants[:after], chosen, *contestants[after:]]
