"""Merging where compute and network slow each other down: the best found, by labels.

After a prefix of buckets the step is in a state (time, compute progress): earlier is better, and more progress is
better, so a prefix keeps several labels that do not dominate one another. With enough labels this is exact; with a
bound on their number it is a heuristic, and the factor-free optimum (`planner.search.merge`) is the lower bound.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from planner.model.problem import Factors
from planner.model.replay import Replay
from planner.model.step import Overlap
from planner.search.local_search import choice_of, local_search, stops_of
from planner.search.merge import MergeProblem, walk

Floats = NDArray[np.float64]

LOCAL_WORK = 4_000
"""Buckets that a local search may evaluate (some 0.1 s)."""

MAX_GRID = 200
"""Places that labels look at, evenly spaced, beside boundaries of known schedules; the local search looks between."""


SPARSE_LABELS = 16
"""Labels that a prefix may keep where gradients are more than the grid: there, places matter more than labels."""

FEW = 60
"""Boundaries of a known schedule that are added to the grid."""


def merge_contended(
    problem: MergeProblem, overlap: Overlap, labels: int, known: Sequence[tuple[int, ...]] = ()
) -> tuple[int, ...]:
    """Where each bucket of the best schedule found stops; a prefix keeps so many labels at the most.

    Costs and ready times are those of an uncontended machine. Boundaries of `known` schedules are looked at in any
    case, where they are few.
    """
    stride = -(-problem.count // MAX_GRID)
    grid = _grid(problem.count, np.arange(0, problem.count, stride), [stops for stops in known if len(stops) <= FEW])
    found = _search(problem, overlap, labels, grid)
    if stride == 1:
        return found
    # Once more around what was found: the best boundaries are seldom on the grid.
    best = min([found, *known], key=lambda stops: (end_us(problem, overlap, stops), len(stops)))
    reach = max(1, min(stride, MAX_GRID // (2 * len(best))))
    near = (np.array(best)[:, None] + np.arange(-reach, reach + 1)[None, :]).ravel()
    again = _search(problem, overlap, labels, _grid(problem.count, near[: 2 * MAX_GRID], [found]))
    return min([found, again], key=lambda stops: (end_us(problem, overlap, stops), len(stops)))


def _grid(count: int, places: NDArray[np.int64], schedules: Sequence[tuple[int, ...]]) -> NDArray[np.int64]:
    """Places where buckets may stop, from 0 to `count`, sorted."""
    inside = places[(places > 0) & (places < count)]
    return np.unique(np.concatenate([[0], inside, *map(np.array, schedules), [count]]))


def _search(problem: MergeProblem, overlap: Overlap, labels: int, grid: NDArray[np.int64]) -> tuple[int, ...]:
    """The program over labels, with boundaries on the grid. Labels lie one prefix after the other."""
    width = min(labels, problem.count if problem.count <= MAX_GRID else SPARSE_LABELS)
    time_us, progress_us = np.zeros((2, 1 + (len(grid) - 1) * width))
    prefix, origin = np.zeros((2, len(time_us)), dtype=np.int64)
    used = 1
    for g, stop in enumerate(grid[1:].tolist(), start=1):
        of = prefix[:used]
        cost_us = problem.cost_us(grid[:g], stop)[of]
        compute, network = (f[of] if isinstance(f, np.ndarray) else f for f in overlap.factors(grid[:g], stop))
        ready_us = float(problem.ready_us[stop - 1])
        ends = _send_all(
            time_us[:used], progress_us[:used], ready_us, cost_us, compute, network, overlap.compute_end_us
        )
        kept = _best_labels(*ends, width)
        new = slice(used, used + kept.size)
        time_us[new], progress_us[new], prefix[new], origin[new] = ends[0][kept], ends[1][kept], g, kept
        last, used = used, used + kept.size
    return tuple(grid[prefix[walk(origin, last)]].tolist())


def _send_all(
    time_us: Floats, progress_us: Floats, ready_us: float, cost_us: Floats, compute: Factors, network: Factors,
    compute_end_us: float,
) -> tuple[Floats, Floats]:  # fmt: skip
    """`Overlap.send` for many states at once: (time, progress) at the end."""
    wait_us = np.maximum(0.0, ready_us - progress_us)
    progress_us = progress_us + wait_us
    shared_us = np.minimum((compute_end_us - progress_us) * compute, cost_us * network)
    end_us = time_us + wait_us + shared_us + cost_us - shared_us / network
    return end_us, np.minimum(progress_us + shared_us / compute, compute_end_us)


def _best_labels(time_us: Floats, progress_us: Floats, width: int) -> NDArray[np.int64]:
    """Indices of at most `width` labels, earliest first, none of which another one dominates."""
    if width == 1:
        return np.array([int(time_us.argmin())])
    # More than this many earliest labels never matter in practice, and a full sort would cost most of the run time.
    pool = min(time_us.size, 8 * width)
    nearest = np.argpartition(time_us, pool - 1)[:pool] if pool < time_us.size else np.arange(time_us.size)
    order = nearest[np.lexsort((nearest, -progress_us[nearest], time_us[nearest]))]
    furthest = np.maximum.accumulate(progress_us[order])
    new = np.concatenate([[True], progress_us[order][1:] > furthest[:-1]])
    frontier = order[new]
    if frontier.size <= width:
        return np.asarray(frontier)
    # Spread over the frontier, both ends included: the earliest alone are near-copies of one another.
    return np.asarray(frontier[np.unique(np.linspace(0, frontier.size - 1, width).astype(np.int64))])


def replay(problem: MergeProblem, overlap: Overlap) -> Replay:
    """When the last bucket of schedules ends: a state is (time, compute progress)."""
    ready, compute_end_us = problem.ready_us.tolist(), overlap.compute_end_us

    def costs(starts: NDArray[np.int64], stops: NDArray[np.int64]) -> list[tuple[float, ...]]:
        factors = [np.broadcast_to(factor, starts.shape).tolist() for factor in overlap.factors(starts, stops)]
        return list(zip(problem.cost_us(starts, stops).tolist(), *factors, strict=True))

    def send(before: tuple[float, float], start: int, stop: int, cost: tuple[float, ...]) -> tuple[float, float]:
        """`Overlap.send`, which this is called too often for."""
        (time_us, progress_us), (cost_us, compute, network) = before, cost
        wait_us = ready[stop - 1] - progress_us
        if wait_us > 0.0:
            time_us, progress_us = time_us + wait_us, progress_us + wait_us
        stretched_us = cost_us * network
        shared_us = (compute_end_us - progress_us) * compute
        if shared_us >= stretched_us:
            return time_us + stretched_us, progress_us + stretched_us / compute
        return time_us + shared_us + cost_us - shared_us / network, compute_end_us

    return Replay(costs, send, lambda state: state[0], (0.0, 0.0))


def end_us(problem: MergeProblem, overlap: Overlap, stops: tuple[int, ...]) -> float:
    return replay(problem, overlap).begin(choice_of(stops))


def improve(problem: MergeProblem, overlap: Overlap, stops: tuple[int, ...]) -> tuple[int, ...]:
    """The best found by moving and dropping boundaries; never worse."""
    judge, reach = replay(problem, overlap), problem.count
    return stops_of(local_search(choice_of(stops), judge, LOCAL_WORK, then="go_on", reach=reach))
