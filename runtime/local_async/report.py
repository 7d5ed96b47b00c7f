"""Records of minibatches and averagings, and the report of a run with local updaters."""

from __future__ import annotations

import statistics
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from runtime.comm.world import World
from runtime.local_async.races import Races
from runtime.plan.timeline import UPDATER, Span

KEPT = 4096
"""Number of minibatches of each updater, and of averagings, whose times are kept."""
STALEST = 256
"""Staleness of the histogram's last entry, which counts greater ones, too."""


@dataclass(frozen=True, kw_only=True)
class Averaging:
    """One averaging of models, as seen by one rank; times by the machine's monotonic clock, in seconds."""

    start_s: float
    """Begin of the snapshot."""
    sent_s: float
    """End of the snapshot, which is sent now."""
    end_s: float
    """Time at which the difference was added."""
    updates: int
    """Updates of this rank since the averaging before."""
    distance: float
    """‖average − snapshot‖ / ‖average‖: how far this rank was from the mean of all."""


@dataclass
class Averagings:
    """Number of averagings, and the last ones."""

    rounds: int = 0
    last: deque[Averaging] = field(default_factory=lambda: deque(maxlen=KEPT))

    def add(self, averaging: Averaging) -> None:
        """Note an averaging."""
        self.rounds += 1
        self.last.append(averaging)


class Times(NamedTuple):
    """One minibatch, by the machine's monotonic clock, in seconds."""

    number: int
    start_s: float
    batch_s: float
    """Time at which the minibatch was loaded."""
    gradient_s: float
    """Time at which its gradient, of a snapshot taken since, was computed."""
    end_s: float
    """Time at which the shared model was updated."""
    partial: bool


@dataclass
class Result:
    """Records of one updater's minibatches."""

    updater: int
    numbers: array[int] = field(default_factory=lambda: array("q"))
    losses: array[float] = field(default_factory=lambda: array("d"))
    ends_s: array[float] = field(default_factory=lambda: array("d"))
    staleness: list[int] = field(default_factory=lambda: [0] * (STALEST + 1))
    times: deque[Times] = field(default_factory=lambda: deque(maxlen=KEPT))
    start_s: float = 0.0
    peak_bytes: int = 0

    def add(self, times: Times, loss: float, stale: int = 0) -> None:
        """Note a minibatch; `stale`: updates of others between its snapshot and its update."""
        self.numbers.append(times.number)
        self.losses.append(loss)
        self.ends_s.append(times.end_s)
        self.staleness[min(stale, STALEST)] += 1
        self.times.append(times)

    @property
    def seconds(self) -> float:
        """Time from the start of the first minibatch to the end of the last, in seconds."""
        return self.ends_s[-1] - self.start_s if self.ends_s else 0.0


@dataclass(frozen=True, kw_only=True)
class UpdaterReport:
    """Minibatches and times of one updater."""

    updater: int
    minibatches: int
    partial: int = 0
    """Minibatches for its block alone."""
    samples: int = 0
    seconds: float = 0.0
    """Time from the start of its first minibatch to the end of its last; 0 if unknown."""
    peak_bytes: int = 0
    """Largest resident memory of its process; 0 if unknown."""
    lost: str | None = None

    @property
    def minibatches_per_s(self) -> float:
        return self.minibatches / self.seconds if self.seconds > 0.0 else 0.0

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.seconds if self.seconds > 0.0 else 0.0

    def __str__(self) -> str:
        text = f"updater {self.updater}: {self.minibatches} minibatches"
        if self.partial:
            text += f" ({self.partial} of its block)"
        if self.seconds > 0.0:
            text += f", {self.minibatches_per_s:.1f} minibatches/s, {self.samples_per_s:.1f} samples/s"
        return text + (f"; {self.lost}" if self.lost else "")


@dataclass(frozen=True, kw_only=True)
class LocalReport:
    """A run with local updaters, by one rank."""

    rank: int
    ranks: int
    """Number of ranks."""
    steps: int
    """Minibatches that were asked of the rank."""
    minibatches: int
    """Updates that were done; fewer than `steps` where updaters were lost or the run was stopped."""
    seconds: float
    """Time from the start of the first minibatch to the end of the last."""
    updaters: tuple[UpdaterReport, ...]
    staleness: tuple[int, ...] = ()
    """Entry i: minibatches with i updates of other updaters between their snapshot and their own update."""
    outdated: int = 0
    """Updates of gradients from weights before the last averaging, which was added between snapshot and update."""
    races: Races | None = None
    """Updates that were lost by races, counted on a probe; None without updaters."""
    rounds: int = 0
    """Number of averagings of the models of all ranks."""
    averagings: tuple[Averaging, ...] = ()
    """The last averagings."""
    spans: tuple[Span, ...] = field(default=(), repr=False)
    """The last minibatches and averagings: resources `updater 0`, … and `network`; microseconds of the machine's
    monotonic clock, by which ranks of one machine can be laid side by side."""
    notes: tuple[str, ...] = ()

    @property
    def samples(self) -> int:
        """Samples of all updates of this rank."""
        return sum(updater.samples for updater in self.updaters)

    @property
    def samples_per_s(self) -> float:
        """Samples of this rank per second."""
        return self.samples / self.seconds if self.seconds > 0.0 else 0.0

    @property
    def minibatches_per_s(self) -> float:
        """Minibatches of this rank per second."""
        return self.minibatches / self.seconds if self.seconds > 0.0 else 0.0

    @property
    def mean_staleness(self) -> float:
        """Mean number of updates of other updaters between a minibatch's snapshot and its own update."""
        done = sum(self.staleness)
        return sum(index * count for index, count in enumerate(self.staleness)) / done if done else 0.0

    def __str__(self) -> str:
        lines = [
            f"rank {self.rank} of {self.ranks}: {self.minibatches} of {self.steps} minibatches in {self.seconds:.2f} s"
            f", {self.minibatches_per_s:.1f} minibatches/s, {self.samples_per_s:.1f} samples/s"
        ]
        lines += [f"  {updater}" for updater in self.updaters]
        if len(self.updaters) > 1:
            total = sum(self.staleness)
            shown = [
                f"{index}: {count / total:.0%}" for index, count in enumerate(self.staleness) if count * 100 >= total
            ]
            listed = ", ".join(shown[:12]) + (", …" if len(shown) > 12 else "")
            lines.append(f"  staleness (updates between snapshot and update): {listed}")
        if self.averagings:
            took_ms = statistics.median(one.end_s - one.start_s for one in self.averagings) * 1e3
            updates = statistics.fmean(one.updates for one in self.averagings)
            distances = [one.distance for one in self.averagings]
            lines.append(
                f"  {self.rounds} averagings, of the last {len(distances)}: median {took_ms:.2f} ms, every "
                f"{updates:.1f} updates, distance from the mean of all {statistics.fmean(distances):.2e} on average, "
                f"{max(distances):.2e} at most"
            )
        if self.races is not None and len(self.updaters) > 1:
            races = self.races
            lines.append(
                f"  lost by races: {races.lost:,} of {races.additions:,} additions to a probe ({races.share:.2%}; of "
                f"one element at most {races.worst:.2%}); {self.outdated} of {self.minibatches} updates from weights "
                f"before the last averaging"
            )
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])


def make_report(
    world: World, steps: int, updaters: Sequence[UpdaterReport], results: Sequence[Result], averagings: Averagings
) -> LocalReport:
    """Return the report of any run of `steps` minibatches."""
    done = sum(updater.minibatches for updater in updaters)
    worked = [one for one in results if one.ends_s]
    histogram = [sum(column) for column in zip(*(one.staleness for one in results), strict=True)]
    while histogram and not histogram[-1]:
        histogram.pop()
    spans: list[Span] = []

    def add(task: str, resource: str, start_s: float, end_s: float) -> None:
        spans.append(Span(task=task, resource=resource, start_us=start_s * 1e6, end_us=end_s * 1e6))

    for one in results:
        for times in one.times:
            block = " of the block" if times.partial else ""
            marks = (times.start_s, times.batch_s, times.gradient_s, times.end_s)
            for task, start_s, end_s in zip(("batch", f"gradient{block}", "update"), marks, marks[1:], strict=False):
                add(f"{task} {times.number}", f"{UPDATER}{one.updater}", start_s, end_s)
    for averaging in averagings.last:
        add("snapshot", "network", averaging.start_s, averaging.sent_s)
        add("all_reduce, addition", "network", averaging.sent_s, averaging.end_s)
    return LocalReport(
        rank=world.rank,
        ranks=world.ranks,
        steps=steps,
        minibatches=done,
        seconds=max(one.ends_s[-1] for one in worked) - min(one.start_s for one in worked) if worked else 0.0,
        updaters=tuple(updaters),
        staleness=tuple(histogram),
        rounds=averagings.rounds,
        averagings=tuple(averagings.last),
        spans=tuple(sorted(spans, key=lambda span: span.start_us)),
        notes=(f"{steps - done} minibatches were not done",) if done < steps else (),
    )
