"""Search for the owners of a matrix optimizer's operators, and the messages in which results are gathered.

Jointly over three choices: how many matrices are shared (those with the most time for their bytes, in steps), how many
messages they are sent in, and in which order. Owners follow the longest first, each to the least loaded rank, or to the
one whose message is the emptiest; then single matrices are moved while the update gets shorter. Effort is counted.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, combinations, combinations_with_replacement, product

from planner.ir import OperatorShares
from planner.model.operator_costs import OperatorCosts, by_message, operator_costs
from planner.model.problem import Problem
from runtime.plan.lpt import loads_of

MOST_MESSAGES = (1, 2, 3, 4, 6, 8, 12, 16)
"""Numbers of messages that are tried."""
CUTS = 8
"""Numbers of shared matrices that are tried."""
KINDS, ROOMS, FEW_MESSAGES = 6, 24, (1, 2, 4)
"""Sizes of results whose sums are tried as most bytes of a rank; such sums, and numbers of messages with each."""
MOVES = 300_000
"""Matrices times evaluations of the local search."""
NEAR = 1e-6
"""Least relative gain of a move."""
HOPELESS = 1.2
"""Schedules that take this much longer than the best are not moved."""

Place = tuple[int, int, int]
"""(matrix, owner, message)."""


@dataclass(frozen=True)
class OwnerSearch:
    """The best owners that were found."""

    shares: OperatorShares | None
    """None: every rank computes all, as nothing is gained."""
    update_us: float
    bound_us: float
    method: str = "longest first over numbers of matrices and messages, then moves"


def best_owners(problem: Problem) -> OwnerSearch | None:
    """Return the best owners and messages of a problem; None where the optimizer has no operator, or on one rank."""
    costs = operator_costs(problem)
    return None if costs is None else _search(costs)


@lru_cache(maxsize=16)
def _search(costs: OperatorCosts) -> OwnerSearch:
    starts = [_built(costs)]
    options = [] if costs.inside is None else list(_inside(costs))
    for mixed in (False, True) if options else ():
        some = (one for one in options if (len(one.inside) < len(one.messages)) == mixed)
        starts.append(_best(costs, some, None, costs.unshared_us))
    best, best_us = min(starts, key=lambda one: one[1])
    if best_us > costs.bound_us * (1.0 + NEAR):
        tried = [(one, us) for one, us in starts if one is not None and us <= best_us * HOPELESS]
        moved = [_moved(costs, one, us, MOVES // len(tried)) for one, us in tried]
        best, best_us = min([(best, best_us), *moved], key=lambda one: one[1])
    return OwnerSearch(best, best_us, min(best_us, costs.bound_us))


def _built(costs: OperatorCosts) -> tuple[OperatorShares | None, float]:
    """Return the best schedule in which all ranks gather every message, before moves, and its time."""
    best, best_us = _best(costs, chain(_starts(costs), _fillings(costs)), None, costs.unshared_us)
    if best is not None:
        best, best_us = _halved(costs, best, best_us)
        best, best_us = _best(costs, list(_cuts(costs, best.owners)), best, best_us)
    return best, best_us


def _best(
    costs: OperatorCosts, options: Iterable[OperatorShares], best: OperatorShares | None, best_us: float
) -> tuple[OperatorShares | None, float]:
    """Return the best of the options and of what is known."""
    for shares in options:
        update_us = costs.update(shares).update_us
        if update_us < best_us * (1.0 - NEAR):
            best, best_us = shares, update_us
    return best, best_us


def _inside(costs: OperatorCosts) -> Iterator[OperatorShares]:
    """Yield schedules with messages inside of nodes: all, or those of matrices with less time for their bytes, or more,
    than the ones that all ranks share.
    """
    node = costs.of_node
    if (found := _built(node)[0]) is not None:
        yield replace(found, inside=tuple(range(len(found.messages))))
    cuts = sorted({costs.count * cut // CUTS for cut in range(CUTS + 1)})
    by_density = costs.by_density
    for (start, stop), messages, order in product(combinations(cuts, 2), FEW_MESSAGES, (by_density, by_density[::-1])):
        parts = order[:start], order[start:stop]
        far_order, near_order = (sorted(part, key=lambda i: (-costs.operator_us[i], i)) for part in parts)
        near = in_messages(node, longest_first_owners(node, near_order), messages, longest=True)
        loads_us = loads_of([node.operator_us[i] for i in near_order], [near.owners[i] for i in near_order], node.ranks)
        far_owners = longest_first_owners(costs, far_order, loads=loads_us * (costs.ranks // node.ranks))
        far = in_messages(costs, far_owners, messages, longest=True)
        inside = range(len(far.messages), len(far.messages) + len(near.messages))
        yield OperatorShares(tuple(map(max, far.owners, near.owners)), far.messages + near.messages, tuple(inside))


def _starts(costs: OperatorCosts) -> Iterator[OperatorShares]:
    """Yield schedules over numbers of matrices, numbers of messages, and both orders."""
    # The step calls the last ones late: meanwhile it computes what is on all ranks.
    last = range(costs.count)[::-1]
    by_time = sorted(range(costs.count), key=lambda i: (-costs.operator_us[i], i))
    cuts = [math.ceil(costs.count * cut / CUTS) for cut in range(CUTS, 0, -1)]
    for chosen in dict.fromkeys(frozenset(of[:cut]) for of in (by_time, costs.by_density, last) for cut in cuts):
        yield from _sharing(costs, chosen)


def _sharing(costs: OperatorCosts, chosen: Collection[int]) -> Iterator[OperatorShares]:
    """Yield schedules in which owners compute these matrices, over numbers of messages and both orders."""
    for owners in _owners(costs, sorted(chosen, key=lambda i: (-costs.operator_us[i], i))):
        for messages in MOST_MESSAGES:
            if messages > len(chosen):
                break
            yield in_messages(costs, owners, messages)
            if messages > 1:
                yield in_messages(costs, owners, messages, longest=True)


def _fillings(costs: OperatorCosts) -> Iterator[OperatorShares]:
    """Yield schedules in which no rank sends more than some bytes, for all of which every message has room."""
    sizes = sorted(set(costs.result_bytes))
    sizes = [sizes[place * len(sizes) // KINDS] for place in range(KINDS)] if len(sizes) > KINDS else sizes
    few = {sum(of) for number in range(1, 5) for of in combinations_with_replacement(sizes, number)}
    most = 2.0 * sum(costs.result_bytes) / costs.ranks
    rooms = [room for room in sorted(few) if room <= most]
    for room in rooms[:: max(1, len(rooms) // ROOMS)]:
        owners = _filled(costs, room)
        for messages in FEW_MESSAGES:
            yield in_messages(costs, owners, messages, longest=True)


def _filled(costs: OperatorCosts, room: int) -> list[int]:
    """Return owners of at most `room` bytes of results each, rank after rank, by most time for their bytes."""
    owners, left = [-1] * costs.count, list(costs.by_density)
    for rank in range(costs.ranks):
        free, others = room, list[int]()
        for matrix in left:
            if costs.result_bytes[matrix] <= free:
                owners[matrix] = rank
                free -= costs.result_bytes[matrix]
            else:
                others.append(matrix)
        left = others
    return owners


def _halved(costs: OperatorCosts, best: OperatorShares, best_us: float) -> tuple[OperatorShares, float]:
    """Change the number of shared matrices, the last ones in the order of calls, by steps that get half as large."""
    count, step = sum(owner >= 0 for owner in best.owners), costs.count // CUTS // 2
    while step >= 1:
        for number in (count - step, count + step):
            for shares in _sharing(costs, range(costs.count)[-number:]) if 0 < number <= costs.count else ():
                update_us = costs.update(shares).update_us
                if update_us < best_us * (1.0 - NEAR):
                    best, best_us, count = shares, update_us, number
        step //= 2
    return best, best_us


def _cuts(costs: OperatorCosts, owners: Sequence[int]) -> Iterator[OperatorShares]:
    """Yield messages that grow (the network begins early) or shrink (the last one is short), in both orders."""
    for messages in MOST_MESSAGES[1:]:
        for grows, longest in product((True, False), (True, False)):
            yield in_messages(costs, owners, messages, longest=longest, grows=grows)


def _owners(costs: OperatorCosts, order: Sequence[int]) -> list[list[int]]:
    """Return owners of even loads, and of even bytes where those are others."""
    by_bytes = sorted(order, key=lambda i: -costs.result_bytes[i])
    found = [longest_first_owners(costs, order), longest_first_owners(costs, by_bytes, costs.result_bytes)]
    return found if found[0] != found[1] else found[:1]


def longest_first_owners(
    costs: OperatorCosts, order: Sequence[int], weights: Sequence[float] | None = None,
    loads: Sequence[float] | None = None,
) -> list[int]:  # fmt: skip
    """Return the rank of each matrix, in this order to the one of least time (or `weights`); −1 for those that are not
    in it. `loads`: what ranks have already.
    """
    owners, known = [-1] * costs.count, loads or [0.0] * costs.ranks
    heap = [(load, 0, rank) for rank, load in enumerate(known)]
    heapq.heapify(heap)
    weights = costs.operator_us if weights is None else weights
    for matrix in order:
        load, size_bytes, rank = heapq.heappop(heap)
        owners[matrix] = rank
        heapq.heappush(heap, (load + weights[matrix], size_bytes + costs.result_bytes[matrix], rank))
    return owners


def in_messages(
    costs: OperatorCosts, owners: Sequence[int], count: int, *, longest: bool = False, grows: bool | None = None
) -> OperatorShares:
    """Return shares in about `count` messages.

    Args:
        costs: the operators.
        owners: rank of each matrix, or −1.
        count: number of messages.
        longest: each rank's longest first; default: in the order of the step's calls.
        grows: work of the messages: growing evenly (True) or shrinking (False); default: equal.
    """
    done_us, message = [0.0] * costs.ranks, [0] * costs.count
    order = range(costs.count) if not longest else sorted(range(costs.count), key=lambda i: (-costs.operator_us[i], i))
    most_us = max(loads_of(costs.operator_us, owners, costs.ranks))
    for matrix in order:
        if (owner := owners[matrix]) < 0:
            continue
        middle_us = done_us[owner] + 0.5 * costs.operator_us[matrix]
        place = middle_us / most_us if most_us > 0.0 else 0.0
        place = place if grows is None else math.sqrt(place) if grows else 1.0 - math.sqrt(max(0.0, 1.0 - place))
        message[matrix] = min(count - 1, int(count * place))
        done_us[owner] += costs.operator_us[matrix]
    return by_message(costs, owners, message)


def _moved(costs: OperatorCosts, shares: OperatorShares, best_us: float, moves: int) -> tuple[OperatorShares, float]:
    """Change the owner or message of single matrices, exchange two owners, or merge messages, while that is shorter."""
    # Every place in the order has two numbers: of a message of all ranks, and of one inside of nodes.
    owners, message, inside = list(shares.owners), [0] * costs.count, range(1, 10**9, 2)
    for number, members in enumerate(shares.messages):
        for matrix in members:
            message[matrix] = 2 * number + (number in shares.inside)
    left, again = max(20, moves // costs.count), True
    while again and left > 0:
        again = False
        for matrix in range(costs.count):
            for change in _changes(costs, owners, message, matrix):
                left -= 1
                before = [(one, owners[one], message[one]) for one, *_ in change]
                _put(owners, message, change)
                update_us = costs.update(by_message(costs, owners, message, inside)).update_us
                if update_us < best_us * (1.0 - NEAR):
                    best_us, again = update_us, True
                else:
                    _put(owners, message, before)
                if left <= 0:
                    break
    return by_message(costs, owners, message, inside), best_us


def _put(owners: list[int], message: list[int], change: Sequence[Place]) -> None:
    for matrix, owner, number in change:
        owners[matrix], message[matrix] = owner, number


def _changes(
    costs: OperatorCosts, owners: Sequence[int], message: Sequence[int], matrix: int
) -> Iterator[Sequence[Place]]:
    """Yield other owners and messages of a matrix: on all ranks, the least loaded rank, all ranks where there are few,
    and other messages, as `_moved` numbers them; then exchanges with earlier matrices.
    """
    here, number = owners[matrix], message[matrix]
    if here >= 0:
        yield [(matrix, -1, number)]
    ranks: Sequence[int] = range(costs.ranks)
    if costs.ranks * costs.count > 64:
        loads_us = [0.0] * costs.ranks
        for other, owner in enumerate(owners):
            if owner >= 0:
                step, _ = costs.scope(message[other] % 2 == 1)
                for rank in range(owner, costs.ranks, step):
                    loads_us[rank] += costs.operator_us[other]
        ranks = [min(range(of), key=loads_us.__getitem__) for of, _ in costs.scopes]
    place = number // 2
    numbers = range(2 * (max(message) // 2) + 4) if costs.count <= 8 else range(2 * place - 2, 2 * place + 4)
    for rank in (here, *ranks) if here >= 0 else ranks:
        for other in numbers:
            inside = other % 2 == 1
            known = other >= 0 and (costs.inside is not None or not inside)
            if known and rank < costs.scope(inside)[0] and (rank, other) != (here, number):
                yield [(matrix, rank, other)]
    for one in range(matrix):
        if owners[matrix] != owners[one] and costs.operator_us[matrix] != costs.operator_us[one]:
            yield [(matrix, owners[one], message[one]), (one, owners[matrix], message[matrix])]
