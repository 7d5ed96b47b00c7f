"""Local updaters (LAP-SGD, LPP-SGD, and local SGD as their synchronous relative): what a minibatch takes a rank.

A rank's updaters together get through one minibatch in `minibatch_us` on average: measured over numbers of updaters,
with full backwards, in quiet and while ranks average without pause. That is the step here, because a rank of a
synchronous plan gets through one minibatch in a step. Making the minibatch is in it, as the updater does that, while
other steps begin with one that is there: who compares adds it to those (`batch_prep_us`). Two things change the rate in
training:

- Averagings. One begins when so many updates have been made since the last one began, and takes as long as its message;
  for that share of the time, minibatches take as long as beside averagings. Nobody waits (but in local SGD).
- Partial backwards, in every other minibatch after the first tenth. They save a rank what they leave out, as a share of
  a minibatch of one updater alone; updaters that are done sooner take more minibatches.

Without measurements (another cluster's profile, say) an updater is taken to use the whole device: several get no more
done than one, and a layer's gradients of weights cost half of its backward.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np

from planner.documents.local_async import LayerBackward, LocalAsyncProfile, UpdaterRate
from planner.documents.text import format_significant, ms, pluralize
from planner.ir import Mode, Schedule, format_indices, parse_indices
from planner.model.modes import synchronous
from planner.model.problem import Problem
from planner.model.reasons import PlanWords
from runtime.plan import Accuracy, LocalAsyncSpec, Plan, combinations
from runtime.plan.predicted import UpdatersPoint
from runtime.plan.timeline import UPDATER, Span, Timeline

DEFAULTS = LocalAsyncSpec(updaters=1)
"""Fractions of training that plans ask for: the paper's."""

SHOWN, DRAWN = 4, 32
"""Minibatches of each updater that a timeline shows, and of how many updaters."""


GROWTH = 0.03
"""Share by which each further updater has to raise the throughput."""


@dataclass(frozen=True, kw_only=True)
class LocalUpdaters(Mode):
    """Local updaters of each rank share its model, and ranks average their models, in the schedule's buckets, beside
    them.

    >>> str(LocalUpdaters(count=4, stops=(2, 3), then_every=8))
    'updaters 4 every 1,8 blocks 0-1;2'
    >>> str(LocalUpdaters(count=1, average_every=16, waits=True))
    'updaters 1 wait every 16,16'
    """

    name: ClassVar[str] = combinations.LOCAL_UPDATERS
    accuracy: ClassVar[Accuracy] = "relaxed"

    count: int
    stops: tuple[int, ...] | None = None
    """Ends of blocks: gradients [0, stops[0]) are the first one (LPP-SGD). None: all update all (LAP-SGD)."""
    average_every: int = 1
    """Updates of a rank between averagings in the first half of training."""
    then_every: int = 16
    """The same in the second half."""
    waits: bool = False
    """Whether updaters wait for averagings, as local SGD does."""

    @property
    def blocks(self) -> tuple[range, ...]:
        """Gradients of each block; none where all update the full model."""
        stops = self.stops or ()
        return tuple(range(start, stop) for start, stop in pairwise((0, *stops)))

    def __str__(self) -> str:
        text = f"updaters {self.count}{' wait' if self.waits else ''} every {self.average_every},{self.then_every}"
        return f"{text} blocks {';'.join(map(format_indices, self.blocks))}" if self.stops is not None else text

    @classmethod
    def parse(cls, line: str) -> Mode | None:
        match = _TEXT.fullmatch(line)
        if match is None:
            return None
        count, waits, every, then_every, text = match.groups()
        blocks = [parse_indices(block) for block in text.split(";")] if text else []
        stops = tuple(block[-1] + 1 for block in blocks) or None
        mode = cls(
            count=int(count),
            stops=stops,
            average_every=int(every),
            then_every=int(then_every),
            waits=waits is not None,
        )
        return mode if str(mode) == line else None  # blocks that do not follow one another


_TEXT = re.compile(
    r"updaters ([1-9][0-9]{0,8})( wait)? every ([1-9][0-9]{0,8}),([1-9][0-9]{0,8})(?: blocks ([0-9,;-]+))?"
)


def updaters_of(schedule: Schedule) -> LocalUpdaters:
    """Return the mode. Raises ValueError for a schedule of another one."""
    if not isinstance(schedule.mode, LocalUpdaters):
        raise ValueError("the schedule has no updaters")
    return schedule.mode


def defect(schedule: Schedule, gradients: int) -> str | None:
    """Return what is wrong with updaters, averagings or blocks: too few, or blocks that are no partition."""
    updaters = updaters_of(schedule)
    if min(updaters.count, updaters.average_every, updaters.then_every) < 1:
        return "there has to be an updater, and an update between averagings"
    if updaters.stops is None:
        return None
    if not all(updaters.blocks) or updaters.stops[-1:] != (gradients,):
        return f"blocks have to hold each of {gradients} gradients once, and none may be empty"
    return "there are more blocks than updaters" if len(updaters.blocks) > updaters.count else None


def critical_path(problem: Problem, schedule: Schedule) -> dict[str, float]:
    """Return the shares of kinds of task of one updater, which waits for nothing but its previous minibatch."""
    spans = simulate(problem, schedule).on(f"{UPDATER}0")
    total_us = sum(span.duration_us for span in spans) or 1.0
    kinds = dict.fromkeys(span.task.partition(" ")[0] for span in spans)
    return {
        kind: sum(span.duration_us for span in spans if span.task.partition(" ")[0] == kind) / total_us
        for kind in kinds
    }


def message_bytes(problem: Problem, schedule: Schedule) -> dict[str, float]:
    """Return the bytes of the whole model times its averagings."""
    often = averagings_a_minibatch(problem, schedule)
    return {network: often * size for network, size in synchronous.message_bytes(problem, schedule).items()}


def assumptions(problem: Problem) -> tuple[list[str], bool]:
    """Return whether throughput was measured, and what is in it."""
    notes = []
    if problem.profile.local_async is None:
        notes.append("updaters get no more done than one process (throughput not measured)")
    if batch_prep_us(problem) > 0.0:
        notes.append("with making the minibatch, which other steps leave out")
    return notes, False


def plan_fields(problem: Problem, schedule: Schedule) -> dict[str, Any]:
    """Return LAP-SGD, LPP-SGD or local SGD, with the paper's fractions."""
    updaters, gradients = updaters_of(schedule), problem.profile.compute.gradients
    blocks = tuple(tuple(gradients[index].name for index in block) for block in updaters.blocks)
    spec = LocalAsyncSpec(
        updaters=updaters.count,
        blocks=blocks or None,
        average_every=updaters.average_every,
        then_every=updaters.then_every,
        synchronous=updaters.waits or None,
    )
    return {"local_async": spec, "cuts": None}  # updaters call the model as it is


def describe(plan: Plan) -> PlanWords | None:
    """Return the description of a plan: what updaters share, and how often models are averaged."""
    spec = plan.local_async
    if spec is None:
        return None
    blocks = "" if spec.blocks is None else f" and {pluralize(len(spec.blocks), 'block')}, interleaved"
    full = "" if spec.blocks is None else f"; the first {spec.full_fraction:.0%} of minibatches update the full model"
    short = f"{pluralize(spec.updaters, 'local updater')} on the full model{blocks}"
    return PlanWords(
        short=short,
        line=f"{short}; models are averaged after every {pluralize(spec.average_every, 'update')} of a rank, in the "
        f"last {1.0 - spec.switch_fraction:.0%} of training after every {spec.then_every}{full}",
        paragraph=f"{pluralize(spec.updaters, 'updater')} of each rank work on its model at once, and ranks average "
        f"their models beside them: a step is what a rank takes for a minibatch on average; the time line shows some "
        f"minibatches of each updater, late in training.",
        makes_batches=True,
    )


def explain(problem: Problem, schedule: Schedule, timeline: Timeline) -> list[str]:
    """Return of each message what it is a part of, and its time."""
    updaters = updaters_of(schedule)
    times_us = problem.bucket_cost_us([bucket.gradients for bucket in schedule.buckets])
    every = f"{pluralize(updaters.average_every, 'update')}, later every {updaters.then_every}"
    what = "the model, averaged" if len(schedule.buckets) == 1 else "a part of the model, averaged"
    return [f"{what} beside updaters every {every}; {ms(time_us)} alone" for time_us in times_us]


@dataclass(frozen=True, kw_only=True)
class Work:
    """Times of a minibatch's parts, each alone on the device."""

    stops: tuple[int, ...]
    """Ends of layers, in gradients."""
    before_us: float
    """Time before backward: making the minibatch, and forward."""
    backward: BlockProblem
    """Times of backward by layer."""
    update_us: tuple[float, ...]
    """Time of the update by layer."""
    curve: tuple[UpdaterRate, ...]

    @classmethod
    @lru_cache(maxsize=8)
    def of(cls, problem: Problem) -> Work:
        """Return measured work, else what follows from a step."""
        measured = problem.profile.local_async or _assumed(problem)
        inputs = [measured.loss_us, *(layer.grad_input_us for layer in measured.layers[:-1])]
        weights = [layer.grad_weight_us for layer in measured.layers]
        return cls(
            before_us=measured.batch_us + measured.forward_us,
            stops=tuple(np.cumsum([layer.gradients for layer in measured.layers]).tolist()),
            backward=BlockProblem(input_us=np.cumsum(inputs).tolist(), weight_us=weights),
            update_us=tuple(layer.update_us for layer in measured.layers),
            curve=measured.curve,
        )

    @property
    def alone_us(self) -> float:
        """Time of a minibatch of one updater with a full backward, by its parts."""
        return self.before_us + self.backward.full_us + sum(self.update_us)

    def rate(self, updaters: int) -> UpdaterRate:
        """Return the rate of a number of updaters, interpolated between measured ones; constant beyond the largest."""
        counts = [point.updaters for point in self.curve]

        def between(values: list[float]) -> float:
            return float(np.interp(updaters, counts, values))

        quiet_us = between([point.minibatch_us for point in self.curve])
        beside = [point.averaging_us for point in self.curve]
        known = [value for value in beside if value is not None]
        averaging_us = between(known) if len(known) == len(beside) else None
        return UpdaterRate(updaters=updaters, minibatch_us=quiet_us, averaging_us=averaging_us)

    def partial_us(self, block: range) -> float:
        """Return the partial backward of a block, given in gradients; it may begin and end inside layers."""
        held = list(self._held(block))
        return self.backward.input_us[held[-1][0]] + sum(self.backward.weight_us[at] * share for at, share in held)

    def block_update_us(self, block: range) -> float:
        return sum(self.update_us[at] * share for at, share in self._held(block))

    def saved_us(self, block: range) -> float:
        """Return what a minibatch with the block alone saves: a part of backward and of the update."""
        return self.backward.full_us - self.partial_us(block) + sum(self.update_us) - self.block_update_us(block)

    def _held(self, block: range) -> Iterator[tuple[int, float]]:
        """Yield the layers of a block and the share of their gradients that it has."""
        before = 0
        for layer, stop in enumerate(self.stops):
            held = len(range(max(before, block.start), min(stop, block.stop)))
            if held:
                yield layer, held / (stop - before)
            before = stop


def _assumed(problem: Problem) -> LocalAsyncProfile:
    """Return what follows from a step: each layer's backward in halves, and one updater that keeps the device busy."""
    gradients, compute = problem.profile.compute.gradients, problem.profile.compute
    elements = max(1, int(problem.numel.sum()))
    layers = []
    for start, stop in problem.layer_runs:
        run = gradients[start:stop]
        half_us = sum(gradient.backward_us for gradient in run) / 2.0
        update_us = compute.update_us * int(problem.numel[start:stop].sum()) / elements
        layers.append(
            LayerBackward(
                layer=run[0].layer,
                gradients=len(run),
                grad_weight_us=half_us,
                grad_input_us=half_us,
                update_us=update_us,
            )
        )
    whole_us = problem.compute_end_us + problem.update_us
    alone = UpdaterRate(updaters=1, minibatch_us=max(whole_us, 1e-3))
    # Of the gradients that are ready last, no gradient of inputs is formed: all of their time is for weights.
    last = replace(layers[-1], grad_weight_us=2.0 * layers[-1].grad_weight_us, grad_input_us=0.0)
    return LocalAsyncProfile(forward_us=problem.forward_us, loss_us=0.0, layers=(*layers[:-1], last), curve=(alone,))


def averaging_us(problem: Problem, schedule: Schedule) -> float:
    """Return the time of an averaging's messages, during updates unless updaters wait; 0 on one rank."""
    return sum(_messages_us(problem, schedule))


def _messages_us(problem: Problem, schedule: Schedule) -> list[float]:
    """Return the time of each bucket's message; none on one rank."""
    if problem.ranks == 1:
        return []
    buckets = [bucket.gradients for bucket in schedule.buckets]
    times_us, factors = problem.bucket_cost_us(buckets), problem.bucket_factors(buckets)
    if updaters_of(schedule).waits:
        return times_us
    return [time_us * slowed for time_us, (_, slowed) in zip(times_us, factors, strict=True)]


def step_us(problem: Problem, schedule: Schedule) -> float:
    """Return a rank's mean time for a minibatch, over a whole training."""
    updaters = updaters_of(schedule)
    return sum(share * _phase_us(problem, schedule, every, partial) for share, every, partial in phases(updaters))


def phases(updaters: LocalUpdaters) -> Iterator[tuple[float, int, bool]]:
    """Yield (share of all minibatches, updates between averagings, whether blocks alternate) as training proceeds."""
    first_partial = DEFAULTS.full_fraction if updaters.stops is not None else 1.0
    switch = DEFAULTS.switch_fraction
    edges = sorted({0.0, first_partial, switch, 1.0})
    for start, stop in pairwise(edges):
        every = updaters.average_every if start < switch else updaters.then_every
        yield stop - start, every, start >= first_partial


def _phase_us(problem: Problem, schedule: Schedule, every: int, partial: bool) -> float:
    updaters = updaters_of(schedule)
    rate, sent_us = Work.of(problem).rate(updaters.count), averaging_us(problem, schedule)
    shorter = speed_up(problem, updaters) if partial else 1.0
    quiet_us = rate.minibatch_us / shorter
    if updaters.waits:
        return quiet_us + sent_us / every
    if rate.averaging_us is None or sent_us <= 0.0:
        return quiet_us
    beside_us = max(quiet_us, rate.averaging_us / shorter)
    # While one averaging lasts, minibatches take `beside_us`; the next begins after `every` of them at the soonest.
    within = sent_us / beside_us
    if within >= every:
        return beside_us
    return (sent_us + (every - within) * quiet_us) / every


def batch_prep_us(problem: Problem) -> float:
    """Return a rank's time to make one minibatch, which is part of measured updaters and of no step."""
    measured = problem.profile.local_async
    return 0.0 if measured is None else measured.batch_us


def averagings_a_minibatch(problem: Problem, schedule: Schedule) -> float:
    """Return the averagings of a rank's model for each of its minibatches, over a whole training."""
    updaters, sent_us, often = updaters_of(schedule), averaging_us(problem, schedule), 0.0
    if problem.ranks == 1:
        return 0.0
    for share, every, partial in phases(updaters):
        between = every if updaters.waits else max(every, sent_us / _phase_us(problem, schedule, every, partial))
        often += share / between
    return often


def speed_up(problem: Problem, updaters: LocalUpdaters) -> float:
    """Return the speed-up of minibatches where full backwards alternate with partial ones."""
    work = Work.of(problem)
    if updaters.stops is None:
        return 1.0
    total = 0.0
    for block, sharing in zip(updaters.blocks, updaters_per_block(updaters.count, len(updaters.blocks)), strict=True):
        saved = work.saved_us(block) / work.alone_us if work.alone_us > 0.0 else 0.0
        total += sharing / (1.0 - saved / 2.0)
    return total / updaters.count


def saved_backwards(problem: Problem, updaters: LocalUpdaters) -> float:
    """Return what one partial backward of each updater saves in all, in full backwards."""
    work = Work.of(problem)
    full_us = work.backward.full_us
    sharing = updaters_per_block(updaters.count, max(1, len(updaters.blocks)))
    pairs = zip(updaters.blocks, sharing, strict=False)
    saved_us = sum(count * (full_us - work.partial_us(block)) for block, count in pairs)
    return saved_us / full_us if full_us > 0.0 else 0.0


def closed_form_saved_backwards(updaters: int) -> float:
    """Return it by the paper's count: block i of c equal ones costs i/c of a full backward, so c of them (c + 1)/2."""
    return (updaters - 1) / 2.0


def simulate(problem: Problem, schedule: Schedule) -> Timeline:
    """Return some minibatches of each updater in the last part of training, and concurrent averagings.

    `iteration_us` is that of the whole training. Updaters are drawn as if they shared the device evenly.
    """
    updaters = updaters_of(schedule)
    *_, (_, every, partial) = phases(updaters)
    each_us = _phase_us(problem, schedule, every, False) * updaters.count
    work = Work.of(problem)
    stretch = each_us / work.alone_us if work.alone_us > 0.0 else 1.0
    spans: list[Span] = []
    for index in range(min(updaters.count, DRAWN)):
        block = updaters.blocks[index % len(updaters.blocks)] if partial else None
        spans += _drawn(work, f"{UPDATER}{index}", block, stretch)
    spans += _averagings(problem, schedule, every, max(span.end_us for span in spans))
    return Timeline(
        spans=tuple(sorted(spans, key=lambda span: (span.start_us, span.end_us, span.resource))),
        iteration_us=step_us(problem, schedule),
        forward_us=problem.forward_us,
        backward_us=problem.backward_us,
        update_us=problem.update_us,
    )


def _drawn(work: Work, resource: str, block: range | None, stretch: float) -> Iterator[Span]:
    """Forward, backward and update of an updater's next minibatches; every other one with its block alone."""
    update_us, full_us, at_us = sum(work.update_us), work.backward.full_us, 0.0
    in_full = [("forward", work.before_us), ("backward", full_us), ("update", update_us)]
    for minibatch in range(SHOWN):
        tasks = in_full
        if block is not None and minibatch % 2:
            tasks = [("forward", work.before_us), ("backward of a block", work.partial_us(block)),
                     ("update of a block", work.block_update_us(block))]  # fmt: skip
        for name, alone_us in tasks:
            end_us = at_us + alone_us * stretch
            yield Span(
                task=f"{name} {minibatch}" if minibatch else name, resource=resource, start_us=at_us, end_us=end_us
            )
            at_us = end_us


def _averagings(problem: Problem, schedule: Schedule, every: int, until_us: float) -> Iterator[Span]:
    """Yield the messages of averagings as often as updates allow; the last may end after the minibatches shown."""
    times_us, at_us = _messages_us(problem, schedule), 0.0
    pause_us = max(sum(times_us), every * _phase_us(problem, schedule, every, False))
    while pause_us > 0.0 and times_us and at_us < until_us:
        start_us = at_us
        for index, time_us in enumerate(times_us):
            task = f"bucket {index} average"
            yield Span(task=task, resource="network", start_us=start_us, end_us=start_us + time_us, bucket=index)
            start_us += time_us
        at_us += pause_us


@dataclass(frozen=True, kw_only=True)
class BlockProblem:
    """Times of backward by layer, in readiness order."""

    input_us: Sequence[float]
    """Time to reach each layer from the loss; never decreasing."""
    weight_us: Sequence[float]
    """Time of each layer's gradients of weights."""

    def cost_us(self, start: int, stop: int) -> float:
        """Return the partial backward of the block [start, stop)."""
        return self.input_us[stop - 1] + sum(self.weight_us[start:stop])

    @property
    def full_us(self) -> float:
        return self.cost_us(0, len(self.weight_us))


def updaters_per_block(updaters: int, blocks: int) -> list[int]:
    """Return the number of updaters of each block: updater i has block i modulo their number."""
    return [(updaters - block - 1) // blocks + 1 for block in range(blocks)]


def notes(problem: Problem, schedule: Schedule, points: Sequence[UpdatersPoint], exact_us: float) -> list[str]:
    """Return what readers of a plan with this schedule should know.

    Args:
        problem: the step.
        schedule: local updaters.
        points: what each number of updaters would give.
        exact_us: a minibatch of a rank, its preparation included, with the best plan that synchronizes in every step.
    """
    updaters, found_us = updaters_of(schedule), step_us(problem, schedule)
    samples = problem.profile.world.batch_per_rank  # where the profile says how many a minibatch has
    rates = [
        f"{problem.ranks * (samples or 1) * 1e6 / time_us:,.4g} {'samples' if samples else 'minibatches'}/s"
        for time_us in (found_us, exact_us)
    ]
    found = [
        f"{pluralize(updaters.count, 'updater')} of each rank share its model without locks, and ranks average their "
        f"models beside them; a step here is what a rank takes for a minibatch",
        f"predicted {rates[0]} from all ranks; the best plan that synchronizes in every step: {rates[1]}",
        "a rank's time for a minibatch by updaters, LAP-SGD and LPP-SGD: "
        + ", ".join(
            f"{point.updaters}: {format_significant(point.lap_us / 1000)} and {ms(point.lpp_us)}"
            f"{'' if point.fits else ' (more than fits into memory)'}"
            for point in points
        )
        + f"; each updater has to bring {GROWTH:.0%} more",
    ]
    if batch_prep_us(problem) > 0.0:
        found.append(
            f"making a minibatch takes a rank {ms(batch_prep_us(problem))}: it is in the times of "
            f"updaters, and added to the step of the plan that they are compared with"
        )
    if updaters.stops is not None:
        work = Work.of(problem)
        parts = ", ".join(f"{work.partial_us(block) / work.backward.full_us:.0%}" for block in updaters.blocks)
        saved, closed = saved_backwards(problem, updaters), closed_form_saved_backwards(updaters.count)
        found.append(
            f"after the first tenth every other minibatch updates a block only: "
            f"{pluralize(len(updaters.blocks), 'block')} whose partial backwards take {parts} of a full one; one of "
            f"each updater saves {saved:.2f} full backwards, where (c − 1)/2 = {closed:.2f} would be saved with blocks "
            f"that cost alike"
        )
    found.append(
        "what updaters cost in accuracy was measured with torch.optim.SGD: they are offered with no other optimizer; "
        "`planner run` trains so, and `runtime.local_async.run_local_async` in a script"
    )
    return found
