"""A rank of `planner compare --learn`: contestants train on from block to block, each from the same start.

Each has a model of its own as long as memory lasts, so that blocks of steps are interleaved. Where it does not, and in
a script, which has one model, they train one after the other.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field

import torch
from torch import Tensor

from planner.comparison.contestants import Learn
from planner.comparison.learners import JobSource, Source
from planner.comparison.measure import WARM_UP_STEPS, Measured, Record, Runner, VariantRunner, named_plan
from planner.comparison.same import LOSS_TOLERANCE
from planner.comparison.variants import DDP, NO_COMMUNICATION, BucketVariant, Rounds
from planner.documents.text import pluralize
from planner.profile.bench import Bench, Progress, synchronize
from planner.profile.step import joined
from runtime.checks.topology import adapt
from runtime.comm.shared_memory import available_bytes
from runtime.errors import InputError, PlanMismatch
from runtime.monitor.preserve import generators, restore_generators
from runtime.optimizers.kinds import each_of
from runtime.session.session import Session

BLOCKS = 10
"""Largest number of interleaved blocks that a contestant's steps are divided into."""
LEAST_BLOCK_STEPS = 5
PROBE_STEPS = 6
"""Number of timed steps of each contestant from which the time of all is estimated; the first half counts once."""
MEMORY_SHARE = 0.8
"""Share of the free memory that models of all contestants may take."""


@dataclass
class LearnedRecord(Record[BucketVariant]):
    """The measurements of a contestant on one rank; `losses` has the blocks of all seeds, in order."""

    metrics: list[float] = field(default_factory=list)
    """The evaluation metric at the end of each seed; empty if there is none."""


@dataclass(frozen=True)
class LearnedRank(Measured):
    """Everything that one rank saw."""

    records: Sequence[LearnedRecord]
    estimated_s: float = 0.0
    took_s: float = 0.0
    one_by_one: str | None = None
    """Reason why contestants trained one after the other; None: they were interleaved."""


class Contestant:
    """One variant that trains the steps of one seed; between blocks it is left alone."""

    def __init__(self, variant: BucketVariant, source: Source, seed: int, *, unused: bool) -> None:
        """Attach or wrap a model at the start of a seed; every rank calls it."""
        self.times_us: list[float] = []
        self.losses: list[float | None] = []
        self.begun: list[int] = []
        """Number of the first step of each block."""
        self.trained = source.trained(seed)
        self.runner = VariantRunner(self.trained, source.bench, source.timeout_s)
        self.runner.unused = unused
        self._optimizer, self._device = self.trained.optimizer(), source.bench.device
        self._communication = ExitStack()
        with ExitStack() as start:
            start.enter_context(self.trained.restored(self._optimizer))
            start.callback(self._communication.close)
            self.trained.model.zero_grad(set_to_none=True)
            with named_plan(variant):
                communicating = self.runner.communicating(variant, self._optimizer)
                self._forward = self._communication.enter_context(communicating)
                check_compresses(variant, self.runner._session)
            self._start = start.pop_all()
        source.seed_generators(seed)
        self._generators = generators()

    def advance(self, steps: int) -> str:
        """Make further steps, and return a digest of their batches."""
        restore_generators(self._generators)
        done = len(self.times_us)
        self.begun.append(done)
        digests = []
        for number in range(done, done + steps):
            digests.append(self.trained.prepare(number))
            synchronize(self._device)
            start = time.perf_counter()
            self.losses.append(self.trained.step(self._forward, self._optimizer, number))
            synchronize(self._device)
            self.times_us.append((time.perf_counter() - start) * 1e6)
        self._generators = generators()
        return "\n".join(digests)

    def close(self, *, judged: bool = True) -> float | None:
        """Make the model plain again, and return its metric if it is `judged`."""
        del self._forward  # DDP's hooks stay on the parameters until it is gone
        with closing(self._start):
            self._communication.close()
            return self.trained.metric() if judged else None

    @property
    def size_bytes(self) -> int:
        """Memory of weights, buffers, gradients, a residual of each, and the optimizer's state."""
        model = self.trained.model
        states = [state for one in each_of(self._optimizer) for state in one.state.values()]
        held = [*model.parameters(), *model.buffers()]
        held += [one for state in states for one in state.values() if isinstance(one, Tensor)]
        held += 2 * [parameter for parameter in model.parameters() if parameter.requires_grad]
        return sum(tensor.numel() * tensor.element_size() for tensor in held)


def check_compresses(variant: BucketVariant, session: Session | None) -> None:
    """Raise PlanMismatch, on all ranks alike, where ranks on one node leave out compression between nodes."""
    plan = variant.plan
    if session is None or plan is None:
        return
    executed = adapt(plan, session._world, session._parameters).buckets
    if count := sum(now.dense and not planned.dense for now, planned in zip(executed, plan.buckets, strict=True)):
        raise PlanMismatch(
            f"{pluralize(count, 'bucket')} would be sent uncompressed, for these ranks are on one node, and the plan "
            f"compresses between nodes: expected its nodes; run it there with torchrun, or with --emulate "
            f"HOSTSxRANKS@RATE"
        )


def counted_us(variant: BucketVariant, times_us: Sequence[float], begun: Sequence[int]) -> list[float]:
    """Return the times that count, of a seed's steps behind the exact first ones: of a variant whose steps repeat the
    mean over whole cycles, else those of single steps but for the first ones of blocks, which begin at `begun`.
    """
    first = 0 if variant.plan is None else variant.plan.first_steps
    if variant.cycle:
        first += variant.least_warm_up
        whole = (len(times_us) - first) // variant.cycle * variant.cycle
        return [statistics.fmean(times_us[first : first + whole])]
    cold = {start + number for start in begun for number in range(WARM_UP_STEPS)}
    return [time_us for number, time_us in enumerate(times_us) if number >= first and number not in cold]


class LearningRunner(Runner[BucketVariant]):
    """Contestants that train on from block to block."""

    def __init__(self, source: Source, learn: Learn) -> None:
        super().__init__(source.bench)
        self._source, self._learn = source, learn
        self._open: dict[str, Contestant] = {}
        self._seed, self._unused = 0, False
        self._first: dict[int, tuple[str, str, float | None]] = {}
        """Number of the first step of a block → the contestant that came first, the digest of its batches, its loss."""
        self.size_bytes = 0

    def block(self, record: Record[BucketVariant], steps: int) -> None:
        """Make this number of steps of one contestant; every rank calls it."""
        assert isinstance(record, LearnedRecord)
        name = record.variant.name
        if name not in self._open:
            self._open[name] = Contestant(record.variant, self._source, self._seed, unused=self._unused)
        contestant = self._open[name]
        start = len(contestant.losses)
        digest = contestant.advance(steps)
        losses = contestant.losses[start:]
        record.losses.append(losses)
        problem = self._problem(record.variant, start, digest, losses)
        over = len(contestant.losses) >= self._learn.steps
        constant = name == DDP and over and len({*contestant.losses}) == 1
        seen = self.world.gather((problem, constant), f"the end of a block of {name}")
        if found := next((problem for problem, _ in seen if problem is not None), None):
            raise InputError(found)
        if all(constant for _, constant in seen):
            raise InputError(
                f"{self._source.name}: found the same loss, {losses[0] or 0.0:.6g}, in all {self._learn.steps} steps "
                f"with DDP, expected one that training changes; correct the job's loss, optimizer or batches"
            )
        if over:
            record.step_us.append(counted_us(record.variant, contestant.times_us, contestant.begun))
            metric = self._open.pop(name).close()
            if metric is not None:
                record.metrics.append(metric)

    def _problem(
        self, variant: BucketVariant, start: int, digest: str, losses: Sequence[float | None]
    ) -> str | None:  # fmt: skip
        """Return in what a block's batches, or its first loss, differ from those of the contestant that came first; or
        that there is no loss, or DDP's is not finite.
        """
        name, rank, loss = variant.name, self.world.rank, losses[0]
        for number, one in enumerate(losses):
            if one is None:
                return (
                    f"{self._source.name}: found no loss with {name} in step {start + number + 1}, expected a number "
                    f"or a tensor of one element; return it"
                )
            if name == DDP and not math.isfinite(one):
                return (
                    f"{self._source.name}: found a loss of {one} with DDP in step {start + number + 1} of seed "
                    f"{self._seed + 1}, expected finite ones; lower the learning rate, or correct the job"
                )
        first, expected, expected_loss = self._first.setdefault(start, (name, digest, loss))
        if digest != expected:
            pairs = zip(digest.split("\n"), expected.split("\n"), strict=True)
            step = start + next(number for number, (mine, theirs) in enumerate(pairs) if mine != theirs)
            return (
                f"{self._source.name}: batch({step}, {rank}) differs between {first} and {name}, expected equal "
                f"batches in every call, or losses cannot be compared: make it depend on (step, rank) alone"
            )
        other = variant.shares is not None or (variant.plan is not None and variant.plan.rounds_weights)
        if start or loss is None or expected_loss is None or other:
            return None
        if not abs(loss - expected_loss) <= LOSS_TOLERANCE * max(abs(expected_loss), 1e-5) and loss == loss:
            return (
                f"{self._source.name}: from the same weights and batch the first loss is {expected_loss:.6g} with "
                f"{first} and {loss:.6g} with {name} on rank {rank}, expected equal ones: batches or the loss depend "
                f"on something that is kept between calls"
            )
        return None

    def estimate_s(self, variants: Sequence[BucketVariant]) -> float:
        """Return the seconds that all seeds will take, from a few timed steps of each contestant; the same on all
        ranks.
        """
        self._find_unused()
        total_s = 0.0
        for variant in variants:
            start_s = time.perf_counter()
            contestant = Contestant(variant.steady, self._source, 0, unused=self._unused)
            self._open[variant.name] = contestant
            opened_s = time.perf_counter() - start_s
            steps_s = []
            for _ in range(PROBE_STEPS):
                start_s = time.perf_counter()
                contestant.advance(1)
                steps_s.append(time.perf_counter() - start_s)
            self.size_bytes = max(self.size_bytes, contestant.size_bytes)
            start_s = time.perf_counter()
            self._open.pop(variant.name).close()
            closed_s = time.perf_counter() - start_s
            first, later = steps_s[: PROBE_STEPS // 2], steps_s[PROBE_STEPS // 2 :]
            total_s += opened_s + closed_s + sum(first)
            total_s += (self._learn.steps - len(first)) * statistics.median(later)
        found: float = max(self.world.gather(self._learn.seeds * total_s, "estimating the time"))
        return found

    def _find_unused(self) -> None:
        """Find out whether parameters go unused, which DDP has to know."""
        trained = self._source.trained(0)
        runner = VariantRunner(trained, self.bench, self._source.timeout_s, warm_up_steps=0)
        runner.warm_up(BucketVariant(name=NO_COMMUNICATION, kind="no_communication"))
        self._unused = runner.unused

    def close(self) -> None:
        """Make the models of contestants plain that an error has left open."""
        while self._open:
            self._open.popitem()[1].close(judged=False)

    def measure(self, variants: Sequence[BucketVariant], *, one_by_one: bool) -> list[LearnedRecord]:
        """Train all contestants, seed by seed."""
        records = [LearnedRecord(variant) for variant in variants]
        steps = self._learn.steps
        count = 1 if one_by_one else max(1, min(BLOCKS, steps // LEAST_BLOCK_STEPS))
        rest = steps % count
        for seed in range(self._learn.seeds):
            self._seed = seed
            self._first.clear()
            what = f"learning, seed {seed + 1} of {self._learn.seeds}"
            if rest:
                self.interleave(records, Rounds(count=1, steps=rest), what)
            self.interleave(records, Rounds(count=count, steps=steps // count), what)
        return records


def learn_all(source: Source, variants: Sequence[BucketVariant], learn: Learn) -> LearnedRank:
    """Estimate the time, say it, and train all contestants; every rank calls it."""
    world = source.bench.world
    with closing(LearningRunner(source, learn)) as runner:
        estimated_s = runner.estimate_s(variants)
        free_bytes = free_memory_bytes(source.bench.device, world.ranks)
        reason = source.one_by_one or memory_reason(runner.size_bytes, len(variants), free_bytes)
        one_by_one = next(filter(None, world.gather(reason, "comparing memory")), None)
        if source.bench.progress.show:
            names = ", ".join(variant.name for variant in variants)
            source.bench.progress.announce(
                f"{learn.steps} steps of {names} from {pluralize(learn.seeds, 'seed')} take about {estimated_s:.0f} s"
                + (f", one contestant after the other: {one_by_one}" if one_by_one else "")
            )
        start_s = time.perf_counter()
        records = runner.measure(variants, one_by_one=one_by_one is not None)
    took_s = max(world.gather(time.perf_counter() - start_s, "comparing times"))
    return LearnedRank(records, estimated_s=estimated_s, took_s=took_s, one_by_one=one_by_one)


def memory_reason(size_bytes: int, count: int, free_bytes: int) -> str | None:
    """Return why `count` models of this size do not fit into the free memory of a rank at once, or None."""
    if size_bytes * count <= MEMORY_SHARE * free_bytes:
        return None
    return (
        f"{count} models with their optimizers take about {size_bytes * count / 2**30:.1f} GiB on a rank, which has "
        f"{free_bytes / 2**30:.1f} GiB free"
    )


def free_memory_bytes(device: torch.device, ranks: int) -> int:
    """Return this rank's share of the free memory of its device."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]
    return available_bytes() // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", ranks)))


def learn_rank(
    spec: str, variants: Sequence[BucketVariant], learn: Learn, device: str, show_progress: bool,
    timeout_s: float | None = None,
) -> LearnedRank:  # fmt: skip
    """Train a job on this rank; every rank calls it. Arguments and errors as of `compare_rank`."""
    with joined(None, timeout_s) as world:
        target = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device("cpu")
        bench = Bench(world, target, Progress(show_progress and world.rank == 0))
        source = JobSource(spec, device, learn.start, bench, timeout_s, learn.steps)
        return learn_all(source, variants, learn)
