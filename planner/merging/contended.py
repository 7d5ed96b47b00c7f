"""Merging where compute and network slow each other down: the best found, by labels.

After a prefix of buckets the step is in a state (time, compute progress): earlier is better, and more progress is
better, so a prefix keeps several labels that do not dominate one another. With enough labels this is exact; with a
bound on their number it is a heuristic, and the factor-free optimum (`planner.merging.exact`) is the lower bound.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from planner.merging.exact import TIE, MergeProblem
from planner.simulator import Overlap, State

Floats = NDArray[np.float64]

LOCAL_WORK = 4_000
"""Buckets that a local search may evaluate (some 0.1 s)."""

MAX_GRID = 5_000
"""Boundaries that labels look at, evenly spaced; the local search looks between them."""

LABEL_WORK = 60_000_000
"""Pairs of (label, boundary) to look at: sets how many labels a prefix may keep (about a second at the most)."""


def merge_contended(problem: MergeProblem, overlap: Overlap, labels: int) -> tuple[int, ...]:
    """Where each bucket of the best schedule found stops.

    Args:
        problem: the merge problem; costs and ready times are those of an uncontended machine.
        overlap: contention factors.
        labels: labels to keep per prefix, at most; fewer for many gradients.
    """
    stride = -(-problem.count // MAX_GRID)
    grid = [*range(0, problem.count, stride), problem.count]
    width = int(np.clip(2 * LABEL_WORK / len(grid) ** 2, 1, min(labels, problem.count)))
    time_us = np.full((len(grid), width), np.inf)
    progress_us = np.zeros((len(grid), width))
    origin = np.zeros((len(grid), width), dtype=np.int64)
    time_us[0, 0] = 0.0
    for g, stop in enumerate(grid[1:], start=1):
        cost_us = np.repeat(problem.cost_us(slice(0, stop, stride), stop), width)
        ready_us = float(problem.ready_us[stop - 1])
        ends = _send_all(time_us[:g].ravel(), progress_us[:g].ravel(), ready_us, cost_us, overlap)
        kept = _best_labels(*ends, width)
        time_us[g, : kept.size], progress_us[g, : kept.size] = ends[0][kept], ends[1][kept]
        origin[g, : kept.size] = kept
    return tuple(grid[g] for g in _walk_back(origin, width))


def _send_all(
    time_us: Floats, progress_us: Floats, ready_us: float, cost_us: Floats, overlap: Overlap
) -> tuple[Floats, Floats]:
    """`Overlap.send` for many states at once: (time, progress) at the end."""
    wait_us = np.maximum(0.0, ready_us - progress_us)
    progress_us = progress_us + wait_us
    shared_us = np.minimum((overlap.compute_end_us - progress_us) * overlap.compute, cost_us * overlap.network)
    end_us = time_us + wait_us + shared_us + cost_us - shared_us / overlap.network
    return end_us, np.minimum(progress_us + shared_us / overlap.compute, overlap.compute_end_us)


def _best_labels(time_us: Floats, progress_us: Floats, width: int) -> NDArray[np.int64]:
    """Indices of at most `width` labels, earliest first, none of which another one dominates."""
    if width == 1:
        return np.array([int(time_us.argmin())])
    # More than this many earliest labels never matter in practice, and a full sort would cost most of the run time.
    pool = min(time_us.size, 8 * width)
    nearest = np.argpartition(time_us, pool - 1)[:pool] if pool < time_us.size else np.arange(time_us.size)
    order = nearest[np.lexsort((nearest, -progress_us[nearest], time_us[nearest]))]
    order = order[np.isfinite(time_us[order])]
    furthest = np.maximum.accumulate(progress_us[order])
    new = np.concatenate([[True], progress_us[order][1:] > furthest[:-1]])
    frontier = order[new]
    # Spread over the frontier, both ends included: the earliest alone are near-copies of one another.
    return np.asarray(frontier[np.unique(np.linspace(0, frontier.size - 1, width).astype(np.int64))])


def _walk_back(origin: NDArray[np.int64], width: int) -> tuple[int, ...]:
    stops, i, label = [], len(origin) - 1, 0
    while i > 0:
        stops.append(i)
        i, label = divmod(int(origin[i, label]), width)
    return tuple(reversed(stops))


def end_us(problem: MergeProblem, overlap: Overlap, stops: tuple[int, ...]) -> float:
    """When the last bucket ends."""
    state, start = State(0.0, 0.0), 0
    for stop in stops:
        _, _, state = overlap.send(state, float(problem.ready_us[stop - 1]), float(problem.cost_us(start, stop)))
        start = stop
    return state.time_us


def improve(problem: MergeProblem, overlap: Overlap, stops: tuple[int, ...]) -> tuple[int, ...]:
    """Local search: drops a boundary, from the front, where the step gets no longer, or moves it where it gets shorter.

    Each trial replays the step, so the number of bucket evaluations is bounded; the result is never worse.
    """
    best_us, work, changed = end_us(problem, overlap, stops), LOCAL_WORK, True
    while changed and work > 0:
        changed, k = False, 0
        while k < len(stops) - 1 and work > 0:
            dropped = False
            for trial in _neighbours(stops, k):
                work -= len(trial)
                trial_us = end_us(problem, overlap, trial)
                fewer = len(trial) < len(stops) and trial_us <= best_us * (1.0 + TIE)
                if fewer or trial_us < best_us * (1.0 - TIE):
                    stops, best_us, changed, dropped = trial, min(trial_us, best_us), True, fewer
                    break
            k += not dropped
    return stops


def _neighbours(stops: tuple[int, ...], k: int) -> Iterator[tuple[int, ...]]:
    """Schedules without boundary k, or with it moved by powers of two between its neighbours."""
    yield stops[:k] + stops[k + 1 :]
    low, high = stops[k - 1] if k else 0, stops[k + 1]
    step = 1
    while step < high - low:
        for moved in (stops[k] - step, stops[k] + step):
            if low < moved < high:
                yield (*stops[:k], moved, *stops[k + 1 :])
        step *= 2
