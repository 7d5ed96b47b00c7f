"""Search for the owners of a matrix optimizer's operators, and the messages in which results are gathered.

Jointly over three choices: how many matrices are shared (those with the most time for their bytes, in steps), how many
messages they are sent in, and in which order. Owners follow the longest first, each to the least loaded rank, or to the
one whose message is the emptiest; then single matrices are moved while the update gets shorter. Effort is counted.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from planner.ir import OperatorShares
from planner.model.operators import OperatorCosts, by_message, operator_costs, updated_by
from planner.model.problem import Problem

MOST_MESSAGES = (1, 2, 3, 4, 6, 8, 12, 16)
"""Numbers of messages that are tried."""
CUTS = 8
"""Numbers of shared matrices that are tried."""
MOVES = 30_000
"""Matrices times evaluations of the local search."""
NEAR = 1e-6
"""Least relative gain of a move."""


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
    best: OperatorShares | None = None
    best_us = costs.unshared_us
    for shares in _starts(costs):
        update_us = costs.update(shares).update_us
        if update_us < best_us * (1.0 - NEAR):
            best, best_us = shares, update_us
    if best is not None and best_us > costs.bound_us * (1.0 + NEAR):
        best, best_us = _moved(costs, best, best_us)
    return OwnerSearch(best, best_us, min(best_us, costs.bound_us))


def _starts(costs: OperatorCosts) -> Iterator[OperatorShares]:
    """Yield schedules over numbers of matrices, numbers of messages, and both orders."""
    order = sorted(range(costs.count), key=lambda i: (-costs.operator_us[i] / costs.result_bytes[i], i))
    by_time = sorted(range(costs.count), key=lambda i: (-costs.operator_us[i], i))
    seen: set[frozenset[int]] = set()
    for ranking in (by_time, order):
        for cut in range(CUTS, 0, -1):
            chosen = frozenset(ranking[: math.ceil(costs.count * cut / CUTS)])
            if chosen in seen:
                continue
            seen.add(chosen)
            owners = longest_first_owners(costs, sorted(chosen, key=by_time.index))
            for messages in MOST_MESSAGES:
                if messages > len(chosen):
                    break
                yield in_messages(costs, owners, messages)
                if messages > 1:
                    yield in_messages(costs, owners, messages, longest=True)


def longest_first_owners(costs: OperatorCosts, order: Sequence[int]) -> list[int]:
    """Return the rank of each matrix, in this order to the least loaded one; −1 for those that are not in it."""
    owners, loads = [-1] * costs.count, [(0.0, 0, rank) for rank in range(costs.ranks)]
    for matrix in order:
        load_us, size_bytes, rank = heapq.heappop(loads)
        owners[matrix] = rank
        heapq.heappush(loads, (load_us + costs.operator_us[matrix], size_bytes + costs.result_bytes[matrix], rank))
    return owners


def in_messages(costs: OperatorCosts, owners: Sequence[int], count: int, *, longest: bool = False) -> OperatorShares:
    """Return shares in about `count` messages of equal work: each rank's matrices in the order of the step's calls, or
    the longest first.
    """
    total_us = [0.0] * costs.ranks
    for matrix, owner in enumerate(owners):
        if owner >= 0:
            total_us[owner] += costs.operator_us[matrix]
    done_us, message = [0.0] * costs.ranks, [0] * costs.count
    order = range(costs.count) if not longest else sorted(range(costs.count), key=lambda i: (-costs.operator_us[i], i))
    most_us = max(total_us)
    for matrix in order:
        if (owner := owners[matrix]) < 0:
            continue
        middle_us = done_us[owner] + 0.5 * costs.operator_us[matrix]
        message[matrix] = min(count - 1, int(count * middle_us / most_us)) if most_us > 0.0 else 0
        done_us[owner] += costs.operator_us[matrix]
    return by_message(costs, owners, message)


def _moved(costs: OperatorCosts, shares: OperatorShares, best_us: float) -> tuple[OperatorShares, float]:
    """Change the owner or message of single matrices, exchange two owners, or merge messages, while that is shorter."""
    owners, message = list(shares.owners), [0] * costs.count
    for number, members in enumerate(shares.messages):
        for matrix in members:
            message[matrix] = number
    left, again = max(20, MOVES // costs.count), True
    while again and left > 0:
        again = False
        for matrix in range(costs.count):
            for owner, number in _changes(costs, owners, message, matrix):
                left -= 1
                before = owners[matrix], message[matrix]
                owners[matrix], message[matrix] = owner, number
                update_us = updated_by(costs, by_message(costs, owners, message))
                if update_us < best_us * (1.0 - NEAR):
                    best_us, again = update_us, True
                else:
                    owners[matrix], message[matrix] = before
                if left <= 0:
                    break
            for other in range(matrix) if left > 0 else ():
                if owners[matrix] == owners[other] or costs.operator_us[matrix] == costs.operator_us[other]:
                    continue
                left -= 1
                _swap(owners, message, matrix, other)
                update_us = updated_by(costs, by_message(costs, owners, message))
                if update_us < best_us * (1.0 - NEAR):
                    best_us, again = update_us, True
                else:
                    _swap(owners, message, matrix, other)
                if left <= 0:
                    break
    return by_message(costs, owners, message), best_us


def _swap(owners: list[int], message: list[int], one: int, other: int) -> None:
    owners[one], owners[other] = owners[other], owners[one]
    message[one], message[other] = message[other], message[one]


def _changes(
    costs: OperatorCosts, owners: Sequence[int], message: Sequence[int], matrix: int
) -> Iterator[tuple[int, int]]:
    """Yield other owners and messages of a matrix: on all ranks, the least loaded rank, all ranks where there are few,
    and other messages.
    """
    here, number = owners[matrix], message[matrix]
    if here >= 0:
        yield -1, number
    ranks = range(costs.ranks)
    if costs.ranks * costs.count > 64:
        loads_us = [0.0] * costs.ranks
        for other, owner in enumerate(owners):
            if owner >= 0:
                loads_us[owner] += costs.operator_us[other]
        ranks = range((least := min(ranks, key=loads_us.__getitem__)), least + 1)
    numbers = range(max(message) + 2) if costs.count <= 8 else (number - 1, number, number + 1)
    for rank in (here, *ranks) if here >= 0 else ranks:
        for other in numbers:
            if other >= 0 and (rank, other) != (here, number):
                yield rank, other
