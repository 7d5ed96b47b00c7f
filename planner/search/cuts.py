"""Cuts of a compiled graph and its buckets together, on one network without contention.

A region's gradients are ready at once when its backward has ended, so a bucket that spans regions gains nothing by the
cuts inside of it: each region is sent as soon as it is ready, in one bucket, or in several where that costs less. With
c the end of backward and f the end of messages behind a region, a further region with backward b, a cut that costs s
and messages of T gives c' = c + b + s and f' = max(f, c') + T. Fewer is better in both, and what a cut adds to forward
moves both, so labels (c, f) of which none is better in both than another are exact. One front is kept for each number
of cuts, so that the caller sees what each further cut wins.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.model.problem import Problem

MOST_CUTS = 48
"""Largest number of cuts that is looked at."""


@dataclass(frozen=True)
class _Label:
    computed_us: float
    sent_us: float
    stop: int
    before: _Label | None = None

    @property
    def end_us(self) -> float:
        return max(self.computed_us, self.sent_us)


def best_cuts(problem: Problem) -> list[tuple[float, tuple[str, ...]]]:
    """Return, by the number of cuts from 0, (end of the last message, modules) of the best choice.

    The end is in microseconds from the start of forward; modules are in the order of backward. Graph breaks of the
    model's own may end regions, too, and cost nothing.
    """
    compiled = problem.profile.compute.compiled
    breaks = {0} if compiled is None else {0, *compiled.breaks}
    cuts = {} if compiled is None else {cut.after: cut for cut in compiled.cuts if cut.after not in breaks}
    stops = (*sorted(breaks | cuts.keys()), problem.count)
    ready_us = np.array([problem.forward_us, *problem.ready_us.tolist()])[list(stops)]
    sent_us = _message_times(problem, stops)
    last = len(stops) - 1
    fronts: list[list[_Label]] = [[] for _ in stops]
    fronts[0] = [_Label(problem.forward_us, 0.0, 0)]
    found: list[tuple[float, tuple[str, ...]]] = []

    def extended(stop: int, backward_us: float = 0.0, forward_us: float = 0.0) -> list[_Label]:
        labels = []
        for label in (label for front in fronts[:stop] for label in front):
            computed_us = label.computed_us + float(ready_us[stop] - ready_us[label.stop]) + backward_us
            ended_us = max(label.sent_us, computed_us) + float(sent_us[label.stop, stop])
            labels.append(_Label(computed_us + forward_us, ended_us + forward_us, stop, label))
        return _front(labels)

    for _ in range(min(MOST_CUTS, len(cuts)) + 1):
        for stop in range(1, last):
            if stops[stop] in breaks:
                fronts[stop] = extended(stop)
        if ended := extended(last):
            best = min(ended, key=lambda label: label.end_us)
            path = [cuts[stops[stop]].module for stop in _path(best.before) if stops[stop] in cuts]
            found.append((best.end_us, tuple(path)))
        following: list[list[_Label]] = [[] for _ in stops]
        for stop in range(1, last):
            if (cut := cuts.get(stops[stop])) is not None:
                following[stop] = extended(stop, cut.backward_us, cut.forward_us)
        fronts = following
    return found


def _message_times(problem: Problem, stops: tuple[int, ...]) -> NDArray[np.float64]:
    """Return the time of the gradients from one stop to another, in the buckets that take the shortest in all."""
    count = len(stops)
    times_us = np.zeros((count, count))
    for stop in range(1, count):
        times_us[:stop, stop] = problem.range_cost_us(np.array(stops[:stop]), np.full(stop, stops[stop]))
        for start in reversed(range(stop - 1)):
            middle = slice(start + 1, stop)
            best_us = float(np.min(times_us[start, middle] + times_us[middle, stop]))
            times_us[start, stop] = min(float(times_us[start, stop]), best_us)
    return times_us


def _front(labels: list[_Label]) -> list[_Label]:
    """Return the labels of which no other one is better in both."""
    kept: list[_Label] = []
    for label in sorted(labels, key=lambda one: (one.computed_us, one.sent_us)):
        if not kept or label.sent_us < kept[-1].sent_us:
            kept.append(label)
    return kept


def _path(label: _Label | None) -> list[int]:
    stops: list[int] = []
    while label is not None and label.stop:
        stops.append(label.stop)
        label = label.before
    return stops[::-1]
