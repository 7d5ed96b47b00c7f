"""Outer steps (DiLoCo): how seldom workers have to talk, for steps as long as without communication.

Legal for relaxed plans, where `outer` is allowed. For every period H and delay t, the merge search cuts layers into
fragments, whose messages take least longer than t steps; t is the smallest number of steps whose step is within 0.2 %
of the shortest. H is the smallest whose predicted step is within 2 % of one without communication between workers, for
fewer local steps harm less; 8 bits are taken where they allow a smaller H, or make the step shorter where no H is
sufficient. Workers are nodes, if these have several ranks; nodes with a sharded step, where that is allowed, and
ranks as workers, which are more, have to make the step 2 % shorter, or to fit where others do not. Asks the cost model
for all-reduces of ranges of gradients, and for their halves inside and between nodes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from planner.documents.text import mib, ms, pluralize
from planner.ir import GAIN, Codec, Dense, Schedule
from planner.model.codecs import Wire
from planner.model.compression import NARROWED
from planner.model.modes import outer_steps, sharded, step_us
from planner.model.outer_load import NODE, RANK, SHARDED_NODE, Worker, possible_workers
from planner.model.owned import whole_gradients
from planner.model.problem import Problem
from planner.passes.base import Bound, Candidate, Pass, check_count
from planner.passes.joint import Codecs, compress_of
from planner.strategies.diloco import MAX_PERIOD, NEAR_SHORTEST, best_cut
from runtime.plan import Accuracy
from runtime.plan.interfaces import OUTER

DEFAULT_MAX_PERIOD = 64


@dataclass(frozen=True, kw_only=True)
class Outer(Pass):
    name: ClassVar[str] = "outer"
    what: ClassVar[str] = "outer steps"
    accuracy: ClassVar[Accuracy] = "relaxed"
    interface: ClassVar[str] = OUTER

    max_period: int = 0
    """The largest H that may be chosen; 0: 64."""
    compress: str = ""
    """Names of encodings, as for `joint`; 8 bits are looked at where `wire` is among them."""
    memory_mib: float = 0.0
    """Memory of a rank; 0: what the profile has. Encodings that need more are left out."""
    step: str = "auto"
    """Whether the optimizer step may be sharded inside nodes that are workers: `auto`, or `never`."""

    known_values: ClassVar = {"step": ("auto", "never")}

    @property
    def codecs(self) -> Codecs:
        return compress_of(self.compress)

    def apply(self, schedule: Schedule, problem: Problem) -> Candidate:
        """Return the smallest sufficient H with its fragments, else the schedule as it was.

        Raises:
            InputError: the largest period is out of range.
        """
        largest = check_max_period(self.max_period or DEFAULT_MAX_PERIOD)
        workers, now_us = self._workers(problem), step_us(problem, schedule)
        alone_us = min(outer_steps.compute_us(problem, worker) for worker in workers)
        if problem.ranks == 1:
            return Candidate(schedule=schedule, why_not="one rank alone has no other worker")
        if now_us * (1.0 - GAIN) <= alone_us:
            return Candidate(
                schedule=schedule,
                why_not=f"outer steps: nothing to gain, stay synchronous: the exact step of {ms(now_us)} is within "
                f"{GAIN:.0%} of {ms(alone_us)} without communication",
            )
        limit_bytes = sharded.memory_bytes(problem, self.memory_mib) or math.inf
        every = {
            (worker, name): smallest_period(problem, codec, largest, worker)
            for worker in workers
            for name, codec in self._encodings(problem).items()
        }
        found = {key: one for key, one in every.items() if needed_bytes(problem, one) <= limit_bytes}
        if not found:
            need = mib(min(needed_bytes(problem, one) for one in every.values()))
            return Candidate(schedule=schedule, why_not=f"outer steps need {need} of memory, and a rank has less")
        best = [
            min(of_worker, key=lambda one: _order(problem, one))
            for worker in workers
            if (of_worker := [one for (who, _), one in found.items() if who == worker])
        ]
        chosen = best[0]
        for other in best[1:]:
            # A larger H would shorten the step of the fewest workers to one without communication between them.
            least_us = outer_steps.alone_us(problem, chosen) if _near(problem, chosen) else step_us(problem, chosen)
            if step_us(problem, other) <= least_us * (1.0 - GAIN):
                chosen = other
        if not step_us(problem, chosen) < now_us:
            return Candidate(schedule=schedule)
        return Candidate(
            schedule=chosen,
            memory_bytes=needed_bytes(problem, chosen) or None,
            notes=(*worker_notes(problem, chosen, best), *notes(problem, chosen, largest, found)),
            bound=Bound(
                step_us=alone_us, method="each period simulated with several cuts",
                note="the bound is a step without communication",
            ),
        )  # fmt: skip

    def _workers(self, problem: Problem) -> tuple[Worker, ...]:
        """Return what may be a worker; of equal parts of a step every element has to be updated by itself."""
        found = possible_workers(problem)
        shares = self.step == "auto" and sharded.can_share(problem) and not whole_gradients(problem)
        return (NODE, SHARDED_NODE, RANK) if NODE in found and shares else found

    def _encodings(self, problem: Problem) -> dict[str, Codec]:
        found: dict[str, Codec] = {"dense": Dense()}
        if Wire in self.codecs and all(one.dtype in NARROWED for one in problem.profile.compute.gradients):
            found["int8"] = Wire("int8")
        return found


def _near(problem: Problem, schedule: Schedule) -> bool:
    """Tell whether a step is within 2 % of one without communication between workers."""
    return step_us(problem, schedule) <= outer_steps.alone_us(problem, schedule) * (1.0 + GAIN)


def needed_bytes(problem: Problem, schedule: Schedule) -> int:
    """Return a rank's bytes of weights, gradients, state and known activations (0 where the state is unknown), with
    anchors, outer momenta, residuals and the messages of the largest fragment.
    """
    wide = np.maximum(problem.size_bytes, 4 * problem.numel)
    momenta = 0.0 if outer_steps.mode_of(schedule).mean else 1.0 / problem.ranks
    copies = momenta + (1.0 / problem.ranks if schedule.buckets[0].codec.exact else 2.0)
    fragments = outer_steps.fragments_of(schedule)
    largest = max(sum(int(wide[list(schedule.buckets[one].gradients)].sum()) for one in ones) for ones in fragments)
    known = sharded.replicated_bytes(problem)
    if outer_steps.mode_of(schedule).worker == SHARDED_NODE:
        known = sharded.sharded_bytes(problem, schedule, problem.cost.cluster.ranks_per_node)
    return 0 if known is None else known + math.ceil(copies * float(wide.sum())) + largest


def _order(problem: Problem, schedule: Schedule) -> tuple[bool, float]:
    """Return what schedules are chosen by: the smallest H that is sufficient, else the shortest step."""
    near = _near(problem, schedule)
    return not near, outer_steps.mode_of(schedule).every if near else step_us(problem, schedule)


def check_max_period(value: object) -> int:
    """Return the largest H. Raises InputError where it is none."""
    return check_count(value, "--max-period", "steps", MAX_PERIOD)


def smallest_period(problem: Problem, codec: Codec, largest: int, worker: Worker = RANK) -> Schedule:
    """Return the best schedule of the smallest H within 2 % of no communication; if there is none, of the largest."""
    low, high = 1, largest
    if not _near(problem, best_cut(problem, high, codec, worker)):
        return best_cut(problem, high, codec, worker)
    while low < high:  # a larger H never has a longer mean step
        middle = (low + high) // 2
        if _near(problem, best_cut(problem, middle, codec, worker)):
            high = middle
        else:
            low = middle + 1
    return best_cut(problem, high, codec, worker)


def worker_notes(problem: Problem, chosen: Schedule, best: Sequence[Schedule]) -> list[str]:
    """Return what a worker is and why; nothing on nodes of one rank.

    Args:
        problem: the step.
        chosen: the schedule of the plan.
        best: those of each kind of worker that fits into memory.
    """
    cluster, mode = problem.cost.cluster, outer_steps.mode_of(chosen)
    if cluster.ranks_per_node == 1:
        return []
    who = f"the {cluster.ranks} ranks" if mode.worker == RANK else f"the {cluster.nodes} {_NAMES[mode.worker]}"
    if problem.node_costs is None:
        why = "all share one node" if cluster.nodes == 1 else "costs of intra-node and inter-node links are not known"
        return [f"workers are {who}: {why}"]
    times = []
    for one in best:
        mode, need = outer_steps.mode_of(one), needed_bytes(problem, one)
        memory = f", {mib(need)} a rank" if need else ""
        inside_us = outer_steps.alone_us(problem, one) - outer_steps.compute_us(problem)
        averages = f", {ms(inside_us)} of it to average inside nodes" if mode.worker == NODE else ""
        times.append(
            f"with {_NAMES[mode.worker]} {ms(step_us(problem, one))} a step{averages} (H = {mode.every}{memory})"
        )
    rule = f"each has to save {GAIN:.0%} over those before it" if best[1:] else "others do not fit into memory"
    return [f"workers are {who}: {', '.join(times)}; {rule}"]


_NAMES: Mapping[Worker, str] = {
    NODE: "nodes", SHARDED_NODE: "nodes with a sharded optimizer step", RANK: "ranks"
}  # fmt: skip


def notes(problem: Problem, chosen: Schedule, largest: int, found: Mapping[tuple[Worker, str], Schedule]) -> list[str]:
    """Return what readers of a plan with this schedule should know: why H, t, fragments and the encoding."""
    mode, alone_us = outer_steps.mode_of(chosen), outer_steps.alone_us(problem, chosen)
    codec = chosen.buckets[0].codec
    periods = sorted({1, *(2**power for power in range(1, 14) if 2**power <= largest), mode.every})
    cuts = {every: best_cut(problem, every, codec, mode.worker) for every in periods}
    times = ", ".join(f"{every}: {ms(step_us(problem, one))}" for every, one in cuts.items())
    near = "the smallest" if _near(problem, chosen) else f"the largest allowed (--max-period {largest}), and none is"
    others = ", ".join(
        f"{name} needs H = {outer_steps.mode_of(one).every}"
        if _near(problem, one)
        else f"{name} takes {ms(step_us(problem, one))} with H = {largest}"
        for (worker, name), one in found.items()
        if worker == mode.worker
    )
    rule = "blocking rounds take the mean of weights" if mode.mean else "outer lr 0.7 and momentum 0.9 are DiLoCo's"
    return [
        f"outer steps: workers train alone, and fragments of their weights are averaged after every {mode.every} steps",
        f"mean step by H, simulated: {times}; H = {mode.every} is {near} within {GAIN:.0%} of {ms(alone_us)} without "
        f"communication{'' if mode.worker == RANK else ' between nodes'}",
        f"{pluralize(len(mode.fragments), 'fragment')}, cut between layers by the merge search, taken "
        f"{pluralize(mode.late, 'step')} later: fewer, or earlier, make the step longer by more than "
        f"{NEAR_SHORTEST:.1%}",
        f"sent {codec}: {others}",
        f"the first {outer_steps.WARMUP_STEPS} steps are synchronous; {rule}",
    ]
