"""How fast: profiled, predicted, trained by turns in one start of the ranks; what updaters do beside averagings."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
from torch import Tensor

from benchmarks.local_async.jobs import DEADLINE_S, spec
from planner.decide.strategies import make_schedule
from planner.emit.lower import lower
from planner.ir import Schedule
from planner.jobs.on_rank import local_job, profile_rank
from planner.jobs.training import build
from planner.model.modes import step_us
from planner.model.modes.local_updaters import (
    LocalUpdaters,
    Work,
    batch_prep_us,
    closed_form_saved_backwards,
    saved_backwards,
    speed_up,
    updaters_of,
)
from planner.model.problem import Problem, make_problem
from runtime.checks.plan import trainable_parameters
from runtime.comm.world import World
from runtime.local_async import LocalReport, run_local_async
from runtime.local_async.partial import partial_backward
from runtime.monitor.preserve import preserved
from runtime.plan.timeline import UPDATER, Span

NUMBERS = (2, 4)
"""Of updaters."""
BEGINNING = 0.05
"""Share of a run that does not count: processes begin to work one after the other."""


def names() -> list[str]:
    """Strategies that are trained."""
    return ["mb_sgd", *(f"{way}:{count}" for count in NUMBERS for way in ("lap", "lpp"))]


@dataclass(frozen=True)
class Seen:
    """One strategy: a rank's time for a minibatch."""

    name: str
    predicted_us: float
    measured_us: list[float]
    """By round; the mean over ranks."""

    @property
    def median_us(self) -> float:
        return statistics.median(self.measured_us)

    @property
    def error(self) -> float:
        """predicted / measured − 1."""
        return self.predicted_us / self.median_us - 1.0


@dataclass(frozen=True)
class Partial:
    """One block: what its partial backward takes by the profile, and as measured afterwards."""

    updaters: int
    block: int
    gradients: int
    profiled_us: float
    measured_us: float
    profiled_share: float
    """Of a full backward."""
    measured_share: float
    """Likewise, of full ones that were timed by turns with it: what the machine did since the profile is in both."""


@dataclass(frozen=True)
class Saving:
    """What blocks save."""

    updaters: int
    saved_backwards: float
    closed_form: float
    speed_up: float
    """How many minibatches are done in the time of one where full and partial backwards alternate, by the profile."""
    predicted: float
    """LPP over LAP in samples per second, of the whole training, as predicted."""
    measured: float
    """The median of rounds."""

    @property
    def kept(self) -> float:
        """Of the predicted gain, what was measured."""
        return (self.measured - 1.0) / (self.predicted - 1.0) if self.predicted > 1.0 else 1.0


@dataclass(frozen=True)
class Beside:
    """What the updaters of a rank did while it averaged, in a run that averages without pause at first."""

    strategy: str
    averagings: int
    averaging_us: float
    """Median."""
    busy: float
    """Of the time that averagings took, the share in which an updater was at work on a minibatch; the least of all."""
    updates: float
    """Updates that the rank's updaters finished within one averaging, on average."""
    minibatch_us: tuple[float, float]
    """Median of an updater's minibatches that overlap averagings, and of those that do not."""
    longest_pause_us: float
    """Between two minibatches of an updater."""


@dataclass(frozen=True)
class Result:
    """All of one model on one cluster."""

    model: str
    emulation: str
    batch: int
    seen: list[Seen]
    partials: list[Partial]
    savings: list[Saving]
    beside: list[Beside]
    spans: list[Span]
    """Of rank 0, in its last run with blocks."""

    def of(self, name: str) -> Seen:
        """By name."""
        return next(one for one in self.seen if one.name == name)


def measure_rank(model: str, emulation: str, steps: int, rounds: int) -> Result:
    """On every rank; all return the same but for spans."""
    world = World.join(None, DEADLINE_S)
    profile = profile_rank(spec(model), "cpu", show_progress=False, updaters=max(NUMBERS))
    problem = make_problem(profile)
    schedules = {name: make_schedule(problem, name) for name in names()}
    plans = {name: lower(problem, schedule) for name, schedule in schedules.items()}
    times_us: dict[str, list[float]] = {name: [] for name in names()}
    reports: dict[str, LocalReport] = {}
    for turn in range(rounds):
        for name in names() if turn % 2 == 0 else reversed(names()):
            run = run_local_async(partial(local_job, spec(model), "cpu"), plans[name], steps, timeout_s=DEADLINE_S)
            everyone: list[float] = world.gather(_minibatch_us(run.ends_s), "comparing runs")
            times_us[name].append(statistics.fmean(everyone))
            reports[name] = run.report
    seen = [Seen(name, _minibatch_of(problem, schedules[name]), times_us[name]) for name in names()]
    partials = _partials(model, problem, world)
    savings = [_saving(problem, count, times_us) for count in NUMBERS]
    beside = [_beside(name, reports[name]) for name in names() if name != "mb_sgd"]
    world.leave()
    samples = profile.world.batch_per_rank or 0
    return Result(model, emulation, samples, seen, partials, savings, beside, list(reports[names()[-1]].spans))


def _minibatch_of(problem: Problem, schedule: Schedule) -> float:
    """Predicted, with making it, as all are measured here."""
    return step_us(problem, schedule) + (0.0 if isinstance(schedule.mode, LocalUpdaters) else batch_prep_us(problem))


def _minibatch_us(ends_s: Sequence[float]) -> float:
    first = max(1, round(BEGINNING * len(ends_s)))
    return (ends_s[-1] - ends_s[first]) / (len(ends_s) - 1 - first) * 1e6


def _saving(problem: Problem, count: int, times_us: dict[str, list[float]]) -> Saving:
    schedule, whole = make_schedule(problem, f"lpp:{count}"), make_schedule(problem, f"lap:{count}")
    updaters = updaters_of(schedule)
    ratios = [lap / lpp for lap, lpp in zip(times_us[f"lap:{count}"], times_us[f"lpp:{count}"], strict=True)]
    return Saving(
        updaters=count,
        saved_backwards=saved_backwards(problem, updaters),
        closed_form=closed_form_saved_backwards(count),
        speed_up=speed_up(problem, updaters),
        predicted=step_us(problem, whole) / step_us(problem, schedule),
        measured=statistics.median(ratios),
    )


REPEATS = 15


def _partials(model: str, problem: Problem, world: World) -> list[Partial]:
    """Each block's backward, on all ranks at once, as when they were profiled."""
    built = build(spec(model), "cpu")
    parameters = trainable_parameters(built.model)
    names = [gradient.name for gradient in problem.profile.compute.gradients]
    whole, blocks = range(problem.count), list(_blocks(problem))
    turns: list[list[float]] = []
    with preserved(built.model):
        batch = built.batch(0)
        for _ in range(1 + REPEATS):
            world.gather(None, "beginning to time blocks")
            order = [whole, *(block for _, _, block in blocks)]
            tensors = [[parameters[names[at]] for at in block] for block in order]
            turns.append([_backward_us(built.loss(built.model, batch), them) for them in tensors])
    everyone: list[list[list[float]]] = world.gather(turns[1:], "comparing blocks")
    times_us = np.array(everyone)  # (ranks, repeats, blocks + 1)
    measured_us = np.median(times_us, axis=(0, 1))
    shares = np.median(times_us / times_us[:, :, :1], axis=(0, 1))
    work = Work.of(problem)
    return [
        Partial(
            updaters=count,
            block=index,
            gradients=len(block),
            profiled_us=work.partial_us(block),
            measured_us=float(measured_us[at]),
            profiled_share=work.partial_us(block) / work.backward.full_us,
            measured_share=float(shares[at]),
        )
        for at, (count, index, block) in enumerate(blocks, 1)
    ]


def _blocks(problem: Problem) -> Iterator[tuple[int, int, range]]:
    for count in NUMBERS:
        updaters = updaters_of(make_schedule(problem, f"lpp:{count}"))
        for index, block in enumerate(updaters.blocks):
            yield count, index, block


def _backward_us(loss: Tensor, block: Sequence[Tensor]) -> float:
    started = time.perf_counter()
    partial_backward(loss, block)
    return (time.perf_counter() - started) * 1e6


def _beside(name: str, report: LocalReport) -> Beside:
    minibatches = {
        f"{UPDATER}{one.updater}": _minibatches(report.spans, f"{UPDATER}{one.updater}") for one in report.updaters
    }
    known_from = max(one[0][0] for one in minibatches.values())
    until = min(one[-1][1] for one in minibatches.values())
    averaged = [
        (one.start_s * 1e6, one.end_s * 1e6)
        for one in report.averagings
        if one.start_s * 1e6 >= known_from and one.end_s * 1e6 <= until
    ]
    total_us = sum(end - start for start, end in averaged)
    busy = [sum(_common_us(pair, ours) for pair in averaged) / total_us for ours in minibatches.values()]
    every = [pair for ours in minibatches.values() for pair in ours]
    with_one = [end - start for start, end in every if any(start < b and a < end for a, b in averaged)]
    without = [end - start for start, end in every if not any(start < b and a < end for a, b in averaged)]
    pauses = [after[0] - before[1] for ours in minibatches.values() for before, after in pairwise(ours)]
    return Beside(
        strategy=name,
        averagings=report.rounds,
        averaging_us=statistics.median(end - start for start, end in averaged),
        busy=min(busy),
        updates=sum(any(a < end <= b for a, b in averaged) for _, end in every) / len(averaged),
        minibatch_us=(statistics.median(with_one), statistics.median(without) if without else 0.0),
        longest_pause_us=max(pauses),
    )


def _minibatches(spans: Sequence[Span], updater: str) -> list[tuple[float, float]]:
    """(start, end) of each minibatch of an updater: from `batch` to `update`."""
    mine = [span for span in spans if span.resource == updater]
    starts = [span.start_us for span in mine if span.task.startswith("batch")]
    ends = [span.end_us for span in mine if span.task.startswith("update")]
    return list(zip(starts, ends, strict=True))


def _common_us(pair: tuple[float, float], others: Sequence[tuple[float, float]]) -> float:
    """For how long of an interval others, which do not overlap, are going on."""
    return sum(max(0.0, min(pair[1], end) - max(pair[0], start)) for start, end in others)


def speed_lines(results: Sequence[Result]) -> Iterator[str]:
    """What was predicted and measured, by strategy."""
    yield "| model | strategy | predicted, ms a rank's minibatch | measured | error | samples/s of all | MB-SGD = 1 |"
    yield "| --- " * 7 + "|"
    for result in results:
        for one in result.seen:
            against = result.of("mb_sgd").median_us / one.median_us
            rate = _ranks(result) * result.batch * 1e6 / one.median_us
            yield (
                f"| {result.model} | `{one.name}` | {one.predicted_us / 1e3:.2f} | {one.median_us / 1e3:.2f} "
                f"| {one.error:+.1%} | {rate:,.0f} | {against:.2f} |"
            )


def _ranks(result: Result) -> int:
    hosts, per_host = result.emulation.split("@")[0].split("x")
    return int(hosts) * int(per_host)


def saving_lines(results: Sequence[Result]) -> Iterator[str]:
    """What blocks save, and their partial backwards."""
    yield "| model | updaters | backwards saved | (c − 1)/2 | LPP over LAP, predicted | measured | of the gain |"
    yield "| --- " * 7 + "|"
    for result in results:
        for one in result.savings:
            yield (
                f"| {result.model} | {one.updaters} | {one.saved_backwards:.2f} | {one.closed_form:.2f} "
                f"| {one.predicted:.3f} | {one.measured:.3f} | {one.kept:.0%} |"
            )
    yield ""
    yield (
        "| model | updaters | block | gradients | partial backward by the profile, ms | measured | error "
        "| of a full one by the profile | measured |"
    )
    yield "| --- " * 9 + "|"
    for result in results:
        for part in result.partials:
            error = part.profiled_us / part.measured_us - 1.0
            yield (
                f"| {result.model} | {part.updaters} | {part.block} | {part.gradients} "
                f"| {part.profiled_us / 1e3:.2f} | {part.measured_us / 1e3:.2f} | {error:+.1%} "
                f"| {part.profiled_share:.1%} | {part.measured_share:.1%} |"
            )


def beside_lines(results: Sequence[Result]) -> Iterator[str]:
    """That averaging stops nobody."""
    yield (
        "| model | strategy | averagings | one takes, ms | updates meanwhile | updaters at work meanwhile "
        "| a minibatch during one, ms | during none | longest pause of an updater |"
    )
    yield "| --- " * 9 + "|"
    for result in results:
        for one in result.beside:
            beside_us, alone_us = one.minibatch_us
            yield (
                f"| {result.model} | `{one.strategy}` | {one.averagings} | {one.averaging_us / 1e3:.1f} "
                f"| {one.updates:.1f} | {one.busy:.1%} | {beside_us / 1e3:.1f} | {alone_us / 1e3:.1f} "
                f"| {one.longest_pause_us / 1e3:.2f} |"
            )


def write_trace(path: Path, spans: Sequence[Span]) -> None:
    """Chrome trace events of a run: a thread for each updater, and one for averagings."""
    begin_us = min(span.start_us for span in spans)
    threads = {name: number for number, name in enumerate(dict.fromkeys(span.resource for span in spans))}
    events: list[dict[str, object]] = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": tid, "args": {"name": name}}
        for name, tid in threads.items()
    ]
    events += [
        {"ph": "X", "name": span.task, "pid": 0, "tid": threads[span.resource], "ts": span.start_us - begin_us,
         "dur": span.duration_us}
        for span in spans
    ]  # fmt: skip
    path.write_text(json.dumps({"traceEvents": events}), encoding="utf-8")
