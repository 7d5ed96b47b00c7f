"""Number partitioning: which rank does what, so that the largest share of the work is small. Torch-free.

What planner finds is exact or says how far from it (`planner.search.partition`); this is the rule without a solver.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def longest_first(costs: Sequence[float], parts: int) -> tuple[int, ...]:
    """Return the part that each item goes to, by Graham's LPT rule: the longest first, each to the least loaded part.

    The largest load is at most 4/3 − 1/(3·parts) of the least possible. Among equals the first item and the first part
    are taken, so that equal costs give equal answers everywhere.

    Args:
        costs: of the items, at least 0.
        parts: their number, at least 1.

    >>> longest_first([3.0, 1.0, 2.0, 2.0], 2)
    (0, 0, 1, 1)
    """
    loads = [(0.0, 0, part) for part in range(parts)]
    owners = [0] * len(costs)
    for item in sorted(range(len(costs)), key=lambda item: -costs[item]):
        load, count, part = heapq.heappop(loads)
        owners[item] = part
        # Items that cost nothing are spread, too: results of all parts are sent, padded to the most that one has.
        heapq.heappush(loads, (load + costs[item], count + 1, part))
    return tuple(owners)


def loads_of(costs: Sequence[float], owners: Sequence[int], parts: int) -> list[float]:
    """Return the load of each part; items whose owner is negative are in none.

    >>> loads_of([3.0, 1.0, 2.0], (0, 1, 1), 3)
    [3.0, 3.0, 0.0]
    """
    loads = [0.0] * parts
    for cost, owner in zip(costs, owners, strict=True):
        if owner >= 0:
            loads[owner] += cost
    return loads
