"""Merging where compute and network slow each other down: the best found, by labels.

After a prefix of buckets the step is in a state (time, compute progress): earlier is better, and more progress is
better, so a prefix keeps several labels that do not dominate one another. With enough labels this is exact; with a
bound on their number it is a heuristic, and the factor-free optimum (`planner.search.merge`) is the lower bound.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from planner.ir import TIE
from planner.model.problem import Factors
from planner.model.simulator import Overlap, State
from planner.search.merge import MergeProblem

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
    """Where each bucket of the best schedule found stops.

    Args:
        problem: the merge problem; costs and ready times are those of an uncontended machine.
        overlap: contention factors.
        labels: labels to keep per prefix, at most.
        known: schedules whose boundaries are looked at in any case, where they have few.
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
    stops, label = [], last
    while label > 0:
        stops.append(int(grid[prefix[label]]))
        label = int(origin[label])
    return tuple(reversed(stops))


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


def end_us(problem: MergeProblem, overlap: Overlap, stops: tuple[int, ...]) -> float:
    """When the last bucket ends."""
    ends = np.array(stops)
    sent = _sent(problem, overlap, np.append(0, ends[:-1]), ends)
    ready_us: list[float] = problem.ready_us[ends - 1].tolist()
    state = State(0.0, 0.0)
    for ready, (cost_us, compute, network) in zip(ready_us, sent, strict=True):
        state = overlap.send(state, ready, cost_us, (compute, network))[2]
    return state.time_us


def _sent(
    problem: MergeProblem, overlap: Overlap, starts: NDArray[np.int64], stops: NDArray[np.int64]
) -> list[tuple[float, float, float]]:
    """(time on an idle machine, factor of compute, of the network) of each bucket."""
    factors = [np.broadcast_to(factor, starts.shape).tolist() for factor in overlap.factors(starts, stops)]
    return list(zip(problem.cost_us(starts, stops).tolist(), *factors, strict=True))


def improve(problem: MergeProblem, overlap: Overlap, stops: tuple[int, ...]) -> tuple[int, ...]:
    """Local search: drops a boundary, from the front, where the step gets no longer, or moves it where it gets shorter.

    The number of bucket evaluations that full replays would take is bounded; the result is never worse.
    """
    replay = _Replay(problem, overlap)
    best_us, work, changed = replay.begin(stops), LOCAL_WORK, True
    while changed and work > 0:
        changed, k = False, 0
        while k < len(stops) - 1 and work > 0:
            dropped = False
            trials = list(_neighbours(stops, k))
            replay.look_up(stops, k, trials)
            for trial in trials:
                work -= len(trial)
                trial_us = replay.end_us(trial, k)
                fewer = len(trial) < len(stops) and trial_us <= best_us * (1.0 + TIE)
                if fewer or trial_us < best_us * (1.0 - TIE):
                    stops, best_us, changed, dropped = trial, min(trial_us, best_us), True, fewer
                    replay.begin(stops)
                    break
            k += not dropped
    return stops


class _Replay:
    """`end_us` for many neighbours of one schedule: what they have in common is computed once."""

    def __init__(self, problem: MergeProblem, overlap: Overlap) -> None:
        self._problem, self._overlap = problem, overlap
        self._ready_us: list[float] = problem.ready_us.tolist()
        self._sent: dict[tuple[int, int], tuple[float, float, float]] = {}
        self._before: list[tuple[float, float]] = []
        """(time, progress) before each bucket."""

    def begin(self, stops: tuple[int, ...]) -> float:
        """Takes a schedule whose neighbours will be asked for; returns its end."""
        self._fetch(set(zip((0, *stops[:-1]), stops, strict=True)))
        self._before = [(0.0, 0.0)]
        for start, stop in zip((0, *stops[:-1]), stops, strict=True):
            self._before.append(self._run(self._before[-1], start, (stop,)))
        return self._before[-1][0]

    def look_up(self, stops: tuple[int, ...], k: int, trials: Sequence[tuple[int, ...]]) -> None:
        """Costs of the buckets that only schedules without boundary k, or with it elsewhere, have."""
        low, high = stops[k - 1] if k else 0, stops[k + 1]
        moved = {trial[k] for trial in trials}
        self._fetch({(low, place) for place in moved} | {(place, high) for place in moved if place < high})

    def _fetch(self, buckets: set[tuple[int, int]]) -> None:
        missing = sorted(buckets - self._sent.keys())
        if missing:
            starts, stops = np.array(missing).T
            self._sent.update(zip(missing, _sent(self._problem, self._overlap, starts, stops), strict=True))

    def end_us(self, trial: tuple[int, ...], k: int) -> float:
        """The end of a neighbour whose buckets before `k` are those of the schedule."""
        return self._run(self._before[k], trial[k - 1] if k else 0, trial[k:])[0]

    def _run(self, before: tuple[float, float], start: int, stops: tuple[int, ...]) -> tuple[float, float]:
        """`Overlap.send` for buckets in a row: (time, progress) at the end."""
        time_us, progress_us = before
        compute_end_us = self._overlap.compute_end_us
        for stop in stops:
            cost_us, compute, network = self._sent[start, stop]
            wait_us = self._ready_us[stop - 1] - progress_us
            if wait_us > 0.0:
                time_us, progress_us = time_us + wait_us, progress_us + wait_us
            stretched_us = cost_us * network
            shared_us = (compute_end_us - progress_us) * compute
            if shared_us >= stretched_us:
                time_us, progress_us = time_us + stretched_us, progress_us + stretched_us / compute
            else:
                time_us, progress_us = time_us + shared_us + cost_us - shared_us / network, compute_end_us
            start = stop
        return time_us, progress_us


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
