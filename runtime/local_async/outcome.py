"""Puts together what a rank and its updaters leave: the report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from runtime.comm.world import World
from runtime.local_async.averaging import Averager
from runtime.local_async.report import Averaging, LocalReport, UpdaterReport
from runtime.local_async.updater import DONE, PARTIAL, SAMPLES, Result
from runtime.local_async.updaters import Updaters
from runtime.plan.timeline import UPDATER, Span


def run_report(
    updaters: Updaters, averager: Averager | None, world: World, notes: Sequence[str] = ()
) -> LocalReport:  # fmt: skip
    """Of a run with updaters."""
    results = {one.updater: one for one in updaters.results}
    reports = [
        _updater(number, updaters.counts(number), results.get(number), updaters.lost.get(number))
        for number in range(updaters.orders.spec.updaters)
    ]
    short = updaters.orders.steps - updaters.done
    notes = [*notes, f"{short} minibatches were not done"] if short else list(notes)
    return make_report(
        world, updaters.orders.steps, updaters.done, reports, list(results.values()), averager, tuple(notes)
    )


def make_report(
    world: World, steps: int, done: int, updaters: Sequence[UpdaterReport], results: Sequence[Result],
    averager: Averager | None, notes: tuple[str, ...] = (),
) -> LocalReport:  # fmt: skip
    """Of any run."""
    worked = [one for one in results if one.ends_s]
    histogram = [sum(column) for column in zip(*(one.staleness for one in results), strict=True)]
    while histogram and not histogram[-1]:
        histogram.pop()
    averagings = () if averager is None else tuple(averager.averagings)
    return LocalReport(
        rank=world.rank,
        ranks=world.ranks,
        steps=steps,
        minibatches=done,
        seconds=max(one.ends_s[-1] for one in worked) - min(one.start_s for one in worked) if worked else 0.0,
        updaters=tuple(updaters),
        staleness=tuple(histogram),
        rounds=0 if averager is None else averager.rounds,
        averagings=averagings,
        spans=tuple(sorted((*_minibatches(results), *_averagings(averagings)), key=lambda span: span.start_us)),
        notes=notes,
    )


def _updater(number: int, counts: Sequence[int], result: Result | None, lost: str | None) -> UpdaterReport:
    return UpdaterReport(
        updater=number,
        minibatches=counts[DONE],
        partial=counts[PARTIAL],
        samples=counts[SAMPLES],
        seconds=result.ends_s[-1] - result.start_s if result is not None and result.ends_s else 0.0,
        peak_bytes=result.peak_bytes if result is not None else 0,
        lost=lost,
    )


def _minibatches(results: Sequence[Result]) -> Iterator[Span]:
    for one in results:
        resource = f"{UPDATER}{one.updater}"
        for times in one.times:
            block = " of the block" if times.partial else ""
            marks = (times.start_s, times.batch_s, times.gradient_s, times.end_s)
            for task, start_s, end_s in zip(("batch", f"gradient{block}", "update"), marks, marks[1:], strict=False):
                yield Span(
                    task=f"{task} {times.number}", resource=resource, start_us=start_s * 1e6, end_us=end_s * 1e6
                )  # fmt: skip


def _averagings(averagings: Sequence[Averaging]) -> Iterator[Span]:
    for one in averagings:
        yield Span(task="snapshot", resource="network", start_us=one.start_s * 1e6, end_us=one.sent_s * 1e6)
        yield Span(
            task="all_reduce, addition", resource="network", start_us=one.sent_s * 1e6, end_us=one.end_s * 1e6
        )  # fmt: skip
