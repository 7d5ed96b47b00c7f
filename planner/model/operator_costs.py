"""Costs of a matrix optimizer's stateless operator (Muon's Newton–Schulz): computed by every rank, or by owners.

Shared, each rank computes its own matrices of the first message, sends the results, computes those of the second one
meanwhile, and so on. Then the optimizer's step runs on all ranks in the order in which it calls the operator: it waits
for a result that is not there, and computes what is left on all ranks. What an optimizer does apart from the operator
is divided over all gradients by bytes; the part of gradients without an operator comes last. Where compute and messages
slow each other down, messages are counted as slowed throughout, and compute while there is a message.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import groupby, zip_longest
from operator import add, sub

import numpy as np

from planner.documents.text import ms, pluralize
from planner.ir import OperatorShares
from planner.model.problem import Curve, Problem
from runtime.plan import OperatorPlan, UpdatePlan

HALVINGS = 40
"""Steps of the search for a lower bound."""


@dataclass(frozen=True)
class SharedUpdate:
    """An update with shared operators: times from its beginning."""

    update_us: float
    computed_us: float
    """End of the longest share."""


@dataclass(frozen=True, eq=False)
class OperatorCosts:
    """Operators of a problem, as numbers by matrix, in the order of the step's calls."""

    names: tuple[str, ...]
    operator_us: tuple[float, ...]
    result_bytes: tuple[int, ...]
    apply_us: tuple[float, ...]
    """Remaining work of the step on each."""
    last_us: float
    """Work of the step on gradients without an operator."""
    ranks: int
    curve: Curve
    """Time of an all-gather over the bytes of its result."""
    slowed: float
    """Factor of messages while ranks compute."""
    compute_slowed: float = 1.0
    """Factor of compute while there is a message."""
    before_us: tuple[float, ...] = ()
    """Work of an owner before it calls the operator; empty: none."""
    inside: tuple[int, Curve] | None = None
    """Number of ranks of a node, and the time of an all-gather inside of one; None: all gather every message."""
    kinds: tuple[int, ...] = ()
    """Shape and group of each matrix, by number: an owner computes those of one message as a stack; empty: none."""
    saved_us: tuple[float, ...] = ()
    """Time that each matrix of a stack saves, but the first; 0: none is made of its kind."""

    @classmethod
    def of(cls, problem: Problem) -> OperatorCosts | None:
        """Return the costs of a problem; None where the optimizer has no operator or there is one rank."""
        profile = problem.profile.compute.operator
        if profile is None or problem.ranks == 1:
            return None
        listed, node = {name: shape for shape in profile.shapes for name in shape.parameters}, problem.node_costs
        sizes = {gradient.name: gradient.size_bytes for gradient in problem.profile.compute.gradients}
        total_us = sum(shape.operator_us for shape in listed.values())
        rest_us = max(0.0, problem.update_us - total_us)
        all_bytes = max(1, sum(sizes.values()))
        # The step calls operators in the order of registration, which is about the reverse of readiness.
        names = tuple(name for name in reversed(sizes) if name in listed)
        apply_us = tuple(rest_us * sizes[name] / all_bytes for name in names)
        saved_us = tuple(listed[name].saved_us for name in names)
        return cls(
            names=names,
            operator_us=tuple(listed[name].operator_us for name in names),
            result_bytes=tuple(listed[name].result_bytes for name in names),
            apply_us=apply_us,
            last_us=max(0.0, rest_us - sum(apply_us)),
            ranks=problem.ranks,
            curve=problem.all_gather.curve,
            slowed=problem.contention.network if problem.contended else 1.0,
            compute_slowed=problem.contention.compute if problem.contended else 1.0,
            before_us=tuple(listed[name].before_us for name in names),
            inside=None if node is None else (problem.cost.cluster.ranks_per_node, node.gather.curve),
            kinds=tuple(profile.shapes.index(listed[name]) for name in names) if any(saved_us) else (),
            saved_us=saved_us,
        )

    @property
    def count(self) -> int:
        return len(self.names)

    @cached_property
    def scopes(self) -> tuple[tuple[int, Curve], ...]:
        """Ranks that share a message's matrices, and the time of its all-gather: all ranks, and those of a node."""
        return (self.ranks, self.curve), *((self.inside,) if self.inside else ())

    def scope(self, inside: bool) -> tuple[int, Curve]:
        """Return the one of `scopes` of a message that goes to all ranks or stays inside of nodes."""
        return self.scopes[-1] if inside else self.scopes[0]

    @cached_property
    def of_node(self) -> OperatorCosts:
        """Costs of one node by itself, where messages may stay inside of nodes."""
        ranks, curve = self.scope(inside=True)
        return replace(self, ranks=ranks, curve=curve, inside=None)

    @cached_property
    def replicated_us(self) -> float:
        """Time of the operators if every rank computes all."""
        return sum(self.operator_us)

    @cached_property
    def owner_us(self) -> tuple[float, ...]:
        """Time of each operator on its owner."""
        return tuple(map(sum, zip_longest(self.operator_us, self.before_us, fillvalue=0.0)))

    @cached_property
    def unshared_us(self) -> float:
        """Time of the update if every rank computes all."""
        return self.replicated_us + sum(self.apply_us) + self.last_us

    def message_bytes(self, shares: OperatorShares) -> list[int]:
        """Return the gathered bytes of each message: from each rank as many as the most that one of them has."""
        sizes = []
        for number, members in enumerate(shares.messages):
            ranks, _ = self.scope(number in shares.inside)
            own = [0] * ranks
            for matrix in members:
                own[shares.owners[matrix]] += self.result_bytes[matrix]
            sizes.append(ranks * max(own))
        return sizes

    def gathers_us(self, shares: OperatorShares) -> list[float]:
        """Return the time of each message."""
        sizes = np.array(self.message_bytes(shares), dtype=np.float64)
        if not len(sizes):
            return []
        times_us = self.curve(sizes)
        _, curve = self.scope(inside=True)
        for number in shares.inside:
            times_us[number] = curve(sizes[number : number + 1])[0]
        found: list[float] = (times_us * self.slowed).tolist()
        return found

    def stacks(self, shares: OperatorShares) -> list[list[int]]:
        """Return the matrices of each stack."""
        found: dict[tuple[int, int, int], list[int]] = {}
        for number, members in enumerate(shares.messages if self.kinds else ()):
            for i in members:
                if self.saved_us[i]:
                    found.setdefault((number, shares.owners[i], self.kinds[i]), []).append(i)
        return [stack for stack in found.values() if len(stack) > 1]

    def update(self, shares: OperatorShares) -> SharedUpdate:
        """Return the times of an update with these owners and messages."""
        if shares.inside and len(shares.inside) == len(shares.messages):  # every node alike
            return self.of_node.update(replace(shares, inside=()))
        done, free_us, busy = [0.0] * self.ranks, {True: 0.0, False: 0.0}, list[tuple[float, float]]()
        arrival: dict[int, float] = {}
        stacked = {matrix for stack in self.stacks(shares) for matrix in stack[1:]}
        for number, (members, time_us) in enumerate(zip(shares.messages, self.gathers_us(shares), strict=True)):
            inside = number in shares.inside
            ranks, _ = self.scope(inside)
            work_us = [0.0] * ranks
            for matrix in members:
                saved_us = self.saved_us[matrix] if matrix in stacked else 0.0
                work_us[shares.owners[matrix]] += self.owner_us[matrix] - saved_us
            everyone = work_us * (self.ranks // len(work_us))  # every node alike, if inside
            if busy:
                done = [self._computed(*one, busy) for one in zip(done, everyone, strict=True)]
            else:
                done = list(map(add, done, everyone))
            start_us = max(free_us[inside], *done)
            free_us[inside] = start_us + time_us
            if self.compute_slowed != 1.0:
                busy = _with_interval(busy, start_us, free_us[inside])
            arrival.update(dict.fromkeys(members, free_us[inside]))
        now_us = computed_us = max(done)
        for matrix in range(self.count):
            if shares.owners[matrix] >= 0:
                now_us, left_us = max(now_us, arrival[matrix]), self.apply_us[matrix]
            else:
                left_us = self.operator_us[matrix] + self.apply_us[matrix]
            now_us = self._computed(now_us, left_us, busy)
        return SharedUpdate(self._computed(now_us, self.last_us, busy), computed_us)

    def _computed(self, start_us: float, work_us: float, busy: Sequence[tuple[float, float]]) -> float:
        """Return when work ends that begins at `start_us`, slowed during these times of messages."""
        if not busy or busy[-1][1] <= start_us:
            return start_us + work_us
        for begin_us, end_us in busy:
            if end_us <= start_us:
                continue
            free_us = max(0.0, begin_us - start_us)
            if work_us <= free_us:
                break
            start_us, work_us = start_us + free_us, work_us - free_us
            if (slow_us := self.compute_slowed * work_us) <= end_us - start_us:
                return start_us + slow_us
            work_us -= (end_us - start_us) / self.compute_slowed
            start_us = end_us
        return start_us + work_us

    @cached_property
    def bound_us(self) -> float:
        """Lower bound of the update over all owners and messages."""
        rest_us = sum(self.apply_us) + self.last_us
        least = replace(self, operator_us=tuple(map(sub, self.operator_us, self.saved_us))) if self.kinds else self
        return min(self.unshared_us, max(least._relaxed_us(rest_us), least._counted_us(rest_us)))

    def _counted_us(self, rest_us: float) -> float:
        """Lower bound of the update by counting: of the k · ranks + 1 longest operators, k + 1 are on one rank, which
        then sends the last of them, or one is on all ranks with an even part of the others.
        """
        order = sorted(range(self.count), key=lambda i: -self.operator_us[i])
        least_bytes = np.minimum.accumulate([float(self.result_bytes[matrix]) for matrix in order])
        sent_us = (np.min([curve(ranks * least_bytes) for ranks, curve in self.scopes], axis=0) * self.slowed).tolist()
        after_us, bounds_us = min(self.apply_us) + self.last_us, [0.0]
        for k, place in enumerate(range(0, self.count, self.ranks)):
            least_us = self.operator_us[order[place]]
            owned_us = (k + 1) * least_us + max(rest_us, sent_us[place] + after_us)
            on_all_us = rest_us + least_us + (self.replicated_us - least_us) / self.ranks
            bounds_us.append(min(owned_us, on_all_us))
        return max(bounds_us)

    def _relaxed_us(self, rest_us: float) -> float:
        """Lower bound of the update so that both the longest rank's operators and the messages are within it.

        A rank computes at least what is left on all ranks and an even part of what is shared; links carry at least the
        results of the rank with most of them, from all that share, from the end of the shortest operator on, by a line
        that no message is below.
        """
        lines = [(ranks, *self._line_us(ranks, curve)) for ranks, curve in self.scopes]
        low_us, high_us = rest_us + self.replicated_us / self.ranks, rest_us + self.replicated_us
        for _ in range(HALVINGS):
            update_us, left_us = 0.5 * (low_us + high_us), self.replicated_us
            computed_us = rest_us + left_us
            for ranks, byte_us, apart_us in lines:  # the more ranks share, the more is saved
                shared_us = self._shareable_us(max(0.0, update_us - apart_us) / byte_us / ranks, ranks)
                shared_us = min(left_us, shared_us)
                left_us, computed_us = left_us - shared_us, computed_us - shared_us * (1.0 - 1.0 / ranks)
            low_us, high_us = (low_us, update_us) if computed_us <= update_us else (update_us, high_us)
        return low_us

    def _line_us(self, ranks: int, curve: Curve) -> tuple[float, float]:
        """Return the time of a byte, and that outside of all bytes, by a line that no message of these is below."""
        sizes = np.geomspace(1.0, max(2.0, 2.0 * ranks * sum(self.result_bytes)), 200)
        times_us = curve(sizes) * self.slowed
        byte_us = max(1e-12, float((np.diff(times_us) / np.diff(sizes)).min()))
        message_us = max(0.0, float((times_us - byte_us * sizes).min()))
        return byte_us, message_us + min(self.operator_us) + min(self.apply_us) + self.last_us

    def _shareable_us(self, rank_bytes: float, ranks: int) -> float:
        """Return at most the time of operators whose results fit into `rank_bytes` on each rank: as many of one size as
        a rank has room for, and parts of them, those with the most time for their bytes first.
        """
        time_us, left, room = 0.0, ranks * rank_bytes, dict[int, int]()
        for matrix in self.by_density:
            size = self.result_bytes[matrix]
            if room.setdefault(size, ranks * int(rank_bytes / size * (1.0 + 1e-9))) <= 0:
                continue
            room[size] -= 1
            part = min(1.0, left / size)
            time_us, left = time_us + part * self.operator_us[matrix], left - part * size
            if left <= 0.0:
                break
        return time_us

    @cached_property
    def by_density(self) -> list[int]:
        """Matrices, those with the most time for the bytes of their results first, of equal ones the last called."""
        return sorted(range(self.count), key=lambda i: (-self.operator_us[i] / self.result_bytes[i], -i))


def _with_interval(busy: Sequence[tuple[float, float]], start_us: float, end_us: float) -> list[tuple[float, float]]:
    """Return disjoint intervals, in order, with one more, joined with those that overlap it."""
    over = [one for one in busy if one[0] < end_us and start_us < one[1]]
    joined = min([start_us, *(begin for begin, _ in over)]), max([end_us, *(end for _, end in over)])
    return sorted([*(one for one in busy if one not in over), joined])


@lru_cache(maxsize=16)
def operator_costs(problem: Problem) -> OperatorCosts | None:
    """Return the costs of the operators of a problem, computed once for each."""
    return OperatorCosts.of(problem)


def operator_sizes(problem: Problem) -> tuple[int, int]:
    """Return the number of matrices whose operator ranks can share, and of ranks of a node, 0 unless messages may stay
    inside of nodes.
    """
    costs = operator_costs(problem)
    return (0, 0) if costs is None else (costs.count, costs.inside[0] if costs.inside else 0)


def defect(shares: OperatorShares, sizes: tuple[int, int], ranks: int) -> str | None:
    """Return what is wrong with owners and messages of operators of these `operator_sizes`; None where all is well."""
    matrices, of_node = sizes
    if len(shares.owners) != matrices:
        return f"operators of {len(shares.owners)} matrices have owners, but there are {matrices}"
    odd = next((rank for rank in shares.owners if not -1 <= rank < ranks), None)
    if odd is not None:
        return f"operators are computed by rank {odd}, but there are {ranks} ranks"
    sent = sorted(matrix for members in shares.messages for matrix in members)
    owned = [matrix for matrix, owner in enumerate(shares.owners) if owner >= 0]
    if sent != owned or not all(shares.messages):
        return f"messages hold the matrices {sent}, but those with an owner are {owned}"
    if max(shares.inside, default=-1) >= len(shares.messages):
        return f"message {max(shares.inside)} is inside nodes, but there are {len(shares.messages)}"
    local = max((shares.owners[matrix] for number in shares.inside for matrix in shares.messages[number]), default=-1)
    if local >= of_node and shares.inside:
        return f"operators are computed by rank {local} of each node, but {of_node} ranks of a node can share them"
    return None


def describe_operators(problem: Problem, updates: UpdatePlan | None) -> list[str]:
    """Return what the reader of a plan should know about operators; nothing where there are none."""
    optimizer, profile = problem.profile.compute.optimizer, problem.profile.compute.operator
    if updates is not None and updates.step is not None and updates.step.sharded:
        return []
    if optimizer is not None and optimizer.unit == "matrix" and profile is None:
        return [
            f"{optimizer.name}: every rank repeats its work on whole matrices, which owners cannot compute in a "
            f"drop-in plan: it names no operator without state; --allow sharded-step lets owners update them"
        ]
    plan, costs = updates.operator if updates else None, operator_costs(problem)
    if plan is None or costs is None or profile is None or plan.replicated_us is None:
        return []
    origin = f" ({profile.estimated})" if profile.estimated else ""
    every = (
        f"{profile.optimizer}'s operators of {costs.count} matrices take {ms(costs.replicated_us)} on every rank"
        f"{origin}, and the update {ms(plan.replicated_us)}"
    )
    if not plan.owners:
        return [f"{every}; nothing to gain from owners: {plan.method or 'messages take longer than they save'}"]
    left = costs.count - len(plan.owners)
    kept = f", {left} small ones on all ranks" if left else ""
    near = f", {len(plan.inside)} of them inside nodes" if plan.inside else ""
    stacks = f", {len(plan.batched)} of them in stacks of equal shapes, with equal bits" if plan.batched else ""
    gap = (plan.shared_us or 0.0) / plan.bound_us - 1.0 if plan.bound_us else 0.0
    return [
        f"{every}; owners compute {len(plan.owners)}{kept}{stacks}, results come in "
        f"{pluralize(len(plan.messages), 'message')} ({ms(plan.gather_us or 0.0)}{near}): the update takes "
        f"{ms(plan.shared_us or 0.0)}, at most {max(0.0, gap):.1%} above the least possible"
    ]


def shares_of(problem: Problem, plan: OperatorPlan | None) -> OperatorShares | None:
    """Return the shares that a plan has by name; None without owners, or where one is of no operator of the problem, or
    messages stay inside of nodes that the problem does not have.
    """
    costs = operator_costs(problem)
    if costs is None or plan is None or not plan.owners or not plan.owners.keys() <= set(costs.names):
        return None
    place = {name: matrix for matrix, name in enumerate(costs.names)}
    shares = OperatorShares(
        tuple(plan.owners.get(name, -1) for name in costs.names),
        tuple(tuple(place[name] for name in members) for members in plan.messages), tuple(plan.inside or ()),
    )  # fmt: skip
    return shares if defect(shares, operator_sizes(problem), costs.ranks) is None else None


def by_message(
    costs: OperatorCosts, owners: Sequence[int], message: Sequence[int], inside: Container[int] = ()
) -> OperatorShares:
    """Return shares from the number of each matrix's message; those without an owner have any. `inside`: numbers of
    messages that stay inside of nodes.
    """
    owned = sorted((message[matrix], matrix) for matrix in range(costs.count) if owners[matrix] >= 0)
    groups = {number: tuple(matrix for _, matrix in of) for number, of in groupby(owned, key=lambda one: one[0])}
    near = tuple(place for place, number in enumerate(groups) if number in inside)
    return OperatorShares(tuple(owners), tuple(groups.values()), near)
