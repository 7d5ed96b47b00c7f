"""Search for the modules that FSDP2 gathers together, keeps and prefetches under a limit of memory.

Groups are runs of units in the order of forward; what is in no unit, or tied to another one, is the root's. Up to
`EXACT_UNITS` units every wrapping of the class is decided on, most of them unseen: keeping more parameters never makes
a step longer, and what is kept takes no less than what is freed and comes back without a buffer. With more units
partitions are searched from runs of equal length by moving their borders.

Effort is counted in simulated steps, never timed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

from planner.fsdp2.program import GATHER, SCATTER, Shape, host_program
from planner.fsdp2.simulator import Costs, Executor, Step, simulate
from runtime.plan import FullyShardPlan
from runtime.plan.fully_sharded import ROOT, contains

EXACT_UNITS = 8
"""2 · 3^7 ways to group and keep them, for each way to fetch."""
MOST_STEPS = 4_000
"""Simulated, where there are more units."""
TIE = 1e-9


class Ahead(NamedTuple):
    """Prefetch depths, the same for all groups."""

    forward: int = 0
    """Groups prefetched in forward; 0: FSDP2's own rule."""
    backward: int = 1
    """Groups prefetched in backward; 1 is FSDP2's own rule."""
    buffers: int = 1
    """Reduce-scatters under way."""


class Choice(NamedTuple):
    """One wrapping: the first unit of each group, the groups that are kept (by number), and how far is fetched."""

    starts: tuple[int, ...]
    kept: frozenset[int]
    ahead: Ahead
    parted: frozenset[int] = frozenset()
    """Groups that every node keeps in parts (by number), where nodes have several ranks."""

    def keeping(self, kept: frozenset[int]) -> Choice:
        """Return the same wrapping with these groups kept whole."""
        return self._replace(kept=kept, parted=self.parted - kept)


class Point(NamedTuple):
    """Step time and peak memory of a wrapping."""

    iteration_us: float
    peak_bytes: int


@dataclass(frozen=True, kw_only=True)
class Found:
    """The best wrapping."""

    plan: FullyShardPlan
    step: Step
    bound_us: float
    """No wrapping of the class takes less."""
    exact: bool
    """Whether all were decided on."""


def aheads_of(executor: Executor) -> tuple[Ahead, ...]:
    """Return the ways to fetch that are looked at, those that take least memory first."""
    if executor == "accelerator":  # where one group ahead is FSDP2's own rule, at less memory
        return tuple(Ahead(*ways) for ways in product((0, 2), (1, 2), (1, 2)))
    if executor == "hosts":
        return tuple(Ahead(*ways) for ways in product((0, 1, 2), (1, 2), (1, 2)))
    return (Ahead(),)


class Wrappings:
    """The class of wrappings of one model, and what each comes to."""

    def __init__(
        self, shape: Shape, costs: Costs, executor: Executor, shard_ranks: int | None = None,
        node_ranks: int | None = None,
    ) -> None:  # fmt: skip
        """`node_ranks`: of a node, where its ranks may keep parameters in parts after forward."""
        self.shape, self.costs, self.executor, self.shard_ranks = shape, costs, executor, shard_ranks
        self.node_ranks = node_ranks
        self.units = groupable_units(shape)
        self.aheads = aheads_of(executor)
        self.known: dict[Choice, Point] = {}

    def plan(self, choice: Choice, *, root_freed: bool = False) -> FullyShardPlan:
        """Return a wrapping as FSDP2 applies it."""
        ends = (*choice.starts[1:], len(self.units))
        groups = tuple(tuple(self.units[a:b]) for a, b in zip(choice.starts, ends, strict=True))
        names = [group[0] for group in groups]
        reshard: dict[str, bool | int] = {name: number not in choice.kept for number, name in enumerate(names)}
        reshard |= {names[number]: self.node_ranks or True for number in choice.parted}
        if root_freed:
            reshard[ROOT] = True
        return with_ahead(
            FullyShardPlan(groups=groups, reshard_after_forward=reshard, shard_ranks=self.shard_ranks), choice.ahead
        )

    def point(self, choice: Choice) -> Point:
        if choice not in self.known:
            step = simulate(self.shape, self.plan(choice), self.costs, self.executor, bars=False)
            self.known[choice] = Point(step.iteration_us, step.peak_bytes)
        return self.known[choice]

    def least_bytes(self, choice: Choice, undecided: int) -> int:
        """Return a peak that no way to treat the first so many groups is below; of the others it is the choice's."""
        plan = self.plan(choice)
        unbuffered = frozenset(group[0] for group in plan.groups[:undecided])
        return self.peak_bytes(plan, unbuffered)

    def freed(self, starts: tuple[int, ...]) -> Point:
        """Return what a partition comes to of which nothing is kept."""
        return self.point(Choice(starts, frozenset(), Ahead()))

    def peak_bytes(self, plan: FullyShardPlan, unbuffered: frozenset[str] = frozenset()) -> int:
        """Return a wrapping's peak, without its step; `unbuffered` as of `host_program`."""
        return host_program(self.shape, plan, waits=self.executor == "hosts", unbuffered=unbuffered).peak_bytes

    def partitions(self) -> Iterator[tuple[int, ...]]:
        """Yield every way to cut the chain of units, whole first."""
        count = len(self.units)
        for cuts in product((False, True), repeat=max(0, count - 1)):
            yield (0, *(place for place, cut in enumerate(cuts, start=1) if cut)) if count else ()


def groupable_units(shape: Shape) -> tuple[str, ...]:
    """Return the leaves that can be grouped: those with parameters, none of which another module has too."""
    tied = {module for weight in shape.units.weights if len(weight.modules) > 1 for module in weight.modules}
    own = [weight.modules[0] for weight in shape.units.weights]
    return tuple(
        leaf.module
        for leaf in shape.leaves
        if any(_holds(leaf.module, module) for module in own)
        and not any(_holds(leaf.module, module) for module in tied)
    )


def _holds(unit: str, module: str) -> bool:
    return module == unit or contains(unit, module)


def with_ahead(plan: FullyShardPlan, ahead: Ahead) -> FullyShardPlan:
    """Return the wrapping with prefetches of groups in the order of forward, and its reverse."""
    names = [group[0] for group in plan.groups]

    def prefetched(order: list[str], most: int) -> dict[str, tuple[str, ...]]:
        return {name: after for at, name in enumerate(order, 1) if (after := tuple(order[at : at + most]))}

    return replace(
        plan, forward_prefetch=prefetched(names, ahead.forward),
        backward_prefetch=prefetched(names[::-1], ahead.backward) if ahead.backward > 1 else {},
        reduce_scatter_max_input_buffers=ahead.buffers if ahead.buffers > 1 else None,
    )  # fmt: skip


def search(wrappings: Wrappings, limit_bytes: int | None = None, exact_units: int = EXACT_UNITS) -> Found | None:
    """Return the fastest wrapping whose peak is at most the limit; of equally fast ones that with the least memory.

    None where none is that small.
    """
    limit = math.inf if limit_bytes is None else limit_bytes
    exact = len(wrappings.units) <= exact_units
    best = _enumerated(wrappings, limit) if exact else _searched(wrappings, limit)
    if best is None:
        return None
    plan = wrappings.plan(best)
    step = simulate(wrappings.shape, plan, wrappings.costs, wrappings.executor)
    proven = exact and not wrappings.costs.contended
    bound_us = step.iteration_us if proven else lower_bound_us(wrappings)
    return Found(plan=plan, step=step, bound_us=min(bound_us, step.iteration_us), exact=proven)


def _better(one: Point, other: Point | None) -> bool:
    if other is None:
        return True
    margin = TIE * max(1.0, other.iteration_us)
    if abs(one.iteration_us - other.iteration_us) <= margin:
        return one.peak_bytes < other.peak_bytes
    return one.iteration_us < other.iteration_us


def _enumerated(wrappings: Wrappings, limit: float) -> Choice | None:
    """Decide on every partition, way to fetch and set of kept groups."""
    every = [
        Choice(starts, frozenset(range(len(starts))), ahead)
        for starts in wrappings.partitions()
        for ahead in wrappings.aheads
    ]
    every.sort(key=lambda choice: (wrappings.point(choice), choice.starts, choice.ahead))
    best: Choice | None = None
    for choice in every:
        if best is not None and _worse(wrappings.point(choice), wrappings.point(best)):
            break  # those behind take as long at the least, whatever they keep
        best = _keeping(wrappings, choice, limit, best)
    return best


def _worse(bound: Point, best: Point) -> bool:
    """Return whether wrappings bounded by `bound` cannot be better than `best`, not even by memory."""
    return bound.iteration_us > best.iteration_us + TIE * max(1.0, best.iteration_us)


def _keeping(wrappings: Wrappings, choice: Choice, limit: float, best: Choice | None) -> Choice | None:
    """Decide which of a partition's groups are kept, the last ones first: branch and bound over time and memory."""
    count = len(choice.starts)

    def look(kept: frozenset[int], parted: frozenset[int], left: int) -> None:
        """Groups from `left` on are decided: the others, all kept, bound the time."""
        nonlocal best
        least = choice._replace(kept=kept, parted=parted)
        if left and limit < math.inf and wrappings.least_bytes(least, left) > limit:
            return
        most = choice._replace(kept=kept | frozenset(range(left)), parted=parted)
        if best is not None and _worse(wrappings.point(most), wrappings.point(best)):
            return
        if left:
            look(kept | {left - 1}, parted, left - 1)
            if wrappings.node_ranks:
                look(kept, parted | {left - 1}, left - 1)
            look(kept, parted, left - 1)
            return
        point = wrappings.point(least)
        if point.peak_bytes <= limit and _better(point, None if best is None else wrappings.point(best)):
            best = least

    look(frozenset(), frozenset(), count)
    return best


def _searched(wrappings: Wrappings, limit: float) -> Choice | None:
    """Move borders, from runs of equal length, while that helps; of kept groups the last ones are tried first."""
    count = len(wrappings.units)
    smallest = min(_small_partitions(wrappings), key=lambda one: wrappings.freed(one).peak_bytes)
    starts = {smallest, *(tuple(range(0, count, length)) for length in range(1, count + 1))}
    begun: list[Choice] = []
    for cut in sorted(starts, key=lambda one: (len(one), one)):
        for ahead in wrappings.aheads:
            found = _kept_behind(wrappings, Choice(cut, frozenset(), ahead), limit)
            if found is None:
                continue
            begun.append(found)
            if wrappings.node_ranks:
                parted = found._replace(parted=frozenset(range(len(cut))) - found.kept)
                begun += [parted] if wrappings.point(parted).peak_bytes <= limit else []
    if not begun:
        return None
    begun.sort(key=lambda choice: (wrappings.point(choice), choice.starts))
    best = begun[0]
    for choice in begun[:3]:
        climbed = _climb(wrappings, choice, limit)
        if _better(wrappings.point(climbed), wrappings.point(best)):
            best = climbed
    return best


def _kept_behind(wrappings: Wrappings, choice: Choice, limit: float) -> Choice | None:
    """Keep as many of the last groups as fit; None where not even none does."""
    groups = len(choice.starts)
    fits = choice.keeping(frozenset())
    if wrappings.point(fits).peak_bytes > limit:
        fits = choice.keeping(frozenset({groups - 1}))
        return fits if wrappings.point(fits).peak_bytes <= limit else None
    low, high = 0, groups
    while low < high:
        middle = (low + high + 1) // 2
        tried = choice.keeping(frozenset(range(groups - middle, groups)))
        if wrappings.point(tried).peak_bytes <= limit:
            low, fits = middle, tried
        else:
            high = middle - 1
    return fits


def _climb(wrappings: Wrappings, start: Choice, limit: float) -> Choice:
    """Take better neighbours while there are any: a border more or less or moved, a group kept or freed."""
    best, spent = start, len(wrappings.known) + MOST_STEPS // 3
    improved = True
    while improved and len(wrappings.known) < spent:
        improved = False
        for neighbour in _neighbours(wrappings, best, limit):
            point = wrappings.point(neighbour)
            if point.peak_bytes <= limit and _better(point, wrappings.point(best)):
                best, improved = neighbour, True
                break
            if len(wrappings.known) >= spent:
                break
    return best


def _neighbours(wrappings: Wrappings, choice: Choice, limit: float) -> Iterator[Choice]:
    count, cuts = len(wrappings.units), set(choice.starts)
    for ahead in wrappings.aheads:
        if ahead != choice.ahead and (found := _kept_behind(wrappings, choice._replace(ahead=ahead), limit)):
            yield found
    moved: list[set[int]] = [cuts ^ {place} for place in range(1, count)]
    moved += [
        cuts - {place} | {place + way} for place in sorted(cuts - {0}) for way in (-1, 1)
        if 0 < place + way < count and place + way not in cuts
    ]  # fmt: skip
    for one in moved:
        found = _kept_behind(wrappings, Choice(tuple(sorted(one)), frozenset(), choice.ahead), limit)
        if found is not None:
            yield found
    groups = range(len(choice.starts))
    for number in groups:
        yield choice.keeping(choice.kept ^ {number})
        if wrappings.node_ranks:
            yield choice._replace(kept=choice.kept - {number}, parted=choice.parted ^ {number})
    for into in set(groups) - choice.kept:
        for out in sorted(choice.kept):
            yield choice.keeping(choice.kept - {out} | {into})


def least_memory(wrappings: Wrappings) -> tuple[FullyShardPlan, Point]:
    """Return the wrapping that takes the least memory: nothing kept, the root's neither.

    One group may be kept: at the peak its parameters can take less than they and the buffer of their gather.
    """
    options = []
    for starts in _small_partitions(wrappings):
        kept = [frozenset[int](), *(frozenset({number}) for number in range(len(starts)))]
        options += [
            wrappings.plan(Choice(starts, some, Ahead()), root_freed=freed) for some in kept for freed in (False, True)
        ]
    peaks = [wrappings.peak_bytes(plan) for plan in options]

    def point(plan: FullyShardPlan) -> Point:
        step = simulate(wrappings.shape, plan, wrappings.costs, wrappings.executor, bars=False)
        return Point(step.iteration_us, step.peak_bytes)

    lowest = min(peaks)
    least = [plan for plan, peak in zip(options, peaks, strict=True) if peak == lowest]
    return min(((plan, point(plan)) for plan in least), key=lambda one: one[1].iteration_us)


def _small_partitions(wrappings: Wrappings) -> list[tuple[int, ...]]:
    """Return partitions of which one takes the least memory: all, or of many units the one where no merge takes less.

    Every unit alone is not always the least: FSDP2 holds the gradient of a group's last parameter while the group's are
    reduce-scattered, which of a group with one parameter are all.
    """
    count = len(wrappings.units)
    if count <= EXACT_UNITS:
        return list(wrappings.partitions())

    parameters = [
        sum(weight.trainable and _holds(unit, weight.modules[0]) for weight in wrappings.shape.units.weights)
        for unit in wrappings.units
    ]
    best = tuple(range(count))
    borders = [place for place in range(1, count) if 1 in parameters[place - 1 : place + 1]]
    for place in borders:
        merged = tuple(start for start in best if start != place)
        best = min(merged, best, key=lambda one: wrappings.freed(one).peak_bytes)
    return [best]


def lower_bound_us(wrappings: Wrappings) -> float:
    """Return what no wrapping of the class is shorter than: of two times the longer, and the update.

    Computation, behind the first gather and before the last reduce-scatter, each of at least one unit; and the cheapest
    way to send everything once, gathered in forward and reduce-scattered.
    """
    shape, costs = wrappings.shape, wrappings.costs
    plan = FullyShardPlan(groups=tuple((unit,) for unit in wrappings.units), shard_ranks=wrappings.shard_ranks)
    gathered, scattered = group_bytes(shape, plan)
    root_gather, root_scatter = gathered.pop(), scattered.pop()
    ends = [0.0]
    for last in range(1, len(gathered) + 1):
        ends.append(min(
            ends[first] + costs.gather_us(sum(gathered[first:last])) + _scatter(costs, sum(scattered[first:last]))
            for first in range(last)
        ))  # fmt: skip
    root_us = (costs.gather_us(root_gather) if root_gather else 0.0) + _scatter(costs, root_scatter)
    network_us = ends[-1] + root_us
    compute_us = sum(leaf.forward_us + leaf.backward_us for leaf in shape.leaves)
    if gathered and not root_gather and wrappings.units[0] == shape.leaves[0].module:
        compute_us += _cheapest(costs.gather_us, gathered) + _cheapest(lambda size: _scatter(costs, size), scattered)
    elif root_gather:
        compute_us += costs.gather_us(root_gather)
    return max(network_us, compute_us) + costs.update_us


def _scatter(costs: Costs, size_bytes: float) -> float:
    return costs.scatter_us(size_bytes) if size_bytes else 0.0


def _cheapest(cost: Callable[[float], float], sizes: Sequence[int]) -> float:
    """Return the least cost of a group that begins with the first unit."""
    return min(cost(sum(sizes[:last])) for last in range(1, len(sizes) + 1))


def group_bytes(shape: Shape, plan: FullyShardPlan) -> tuple[list[int], list[int]]:
    """Return the bytes that each group gathers, and those that it reduce-scatters; the root's are the last."""
    gathered, scattered = [0] * len(plan.names), [0] * len(plan.names)
    for action in host_program(shape, plan).actions:
        if action.kind == GATHER:
            gathered[action.group] = action.size_bytes
        elif action.kind == SCATTER:
            scattered[action.group] = action.size_bytes
    return gathered, scattered
