"""How long a step is, from what its buckets ask of compute and network, event by event.

A bucket is selected from when its gradients are ready, which makes backward longer; its phases travel, each network
taking them sorted by bucket + phase, then bucket; what has arrived is unpacked after backward. `steps_end_us` is that
where nothing slows anything; `Replay` is for many neighbours of one schedule, of which it computes what they have in
common once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Candidate = tuple[tuple[int, int], ...]
"""(stop, form) of each bucket; what a form is, the caller knows."""


class Work(NamedTuple):
    """What a bucket asks of compute and network."""

    ready_us: float
    """When its gradients are ready, without selection."""
    phases: Sequence[tuple[str, float]]
    """(network, time) one after the other."""
    select_us: float = 0.0
    unpack_us: float = 0.0


def messages_end_us(works: Sequence[Work]) -> tuple[list[float], float]:
    """When each bucket's last phase ends, and what selection adds to backward; buckets are in order of readiness."""
    delay_us, done_us = 0.0, []
    for work in works:
        delay_us += work.select_us
        done_us.append(work.ready_us + delay_us)
    free_us: dict[str, float] = {}
    most = max(len(work.phases) for work in works)
    # A wave holds what has one sum of bucket and phase: the order that plans give to each network.
    for wave in range(len(works) + most - 1):
        for index in range(max(0, wave - most + 1), min(wave, len(works) - 1) + 1):
            phases = works[index].phases
            if wave - index < len(phases):
                network, time_us = phases[wave - index]
                done_us[index] = free_us[network] = max(done_us[index], free_us.get(network, 0.0)) + time_us
    return done_us, delay_us


def steps_end_us(works: Sequence[Work], compute_end_us: float) -> float:
    """When everything has ended but the update, where compute and networks do not slow each other down."""
    done_us, delay_us = messages_end_us(works)
    end_us = compute_end_us + delay_us
    for work, arrived_us in zip(works, done_us, strict=True):
        end_us = max(end_us, arrived_us) + work.unpack_us if work.unpack_us else end_us
    return max(end_us, *done_us)


Costs = Callable[[NDArray[np.int64], NDArray[np.int64]], Sequence[tuple[float, ...]]]
"""(starts, stops) → what each bucket [start, stop) costs."""


class Replay:
    """The ends of many neighbours of one choice: what they have in common is computed once.

    `costs` of buckets are looked up many at once; `send` leads from a state (at first `first`) to that after a bucket;
    `end` is when a choice ends that leaves a state.
    """

    def __init__(
        self,
        costs: Costs,
        send: Callable[[Any, int, int, tuple[float, ...]], Any],
        end: Callable[[Any], float],
        first: Any,
    ) -> None:
        self._costs, self._send, self._end, self._first = costs, send, end, first
        self._known: dict[tuple[int, int], tuple[float, ...]] = {}
        self._before = [first]

    def begin(self, choice: Candidate) -> float:
        """Takes a choice whose neighbours will be asked for; returns its end."""
        self.look_up((choice,), 0)
        self._before = [self._first]
        for place in pairwise((0, *(stop for stop, _ in choice))):
            self._before.append(self._send(self._before[-1], *place, self._known[place]))
        return self._end(self._before[-1])

    def look_up(self, trials: Sequence[Candidate], index: int, buckets: int | None = None) -> None:
        """Costs of the buckets from `index` on (so many of them) that are not known yet."""
        wanted: set[tuple[int, int]] = set()
        for trial in trials:
            bounds = [0 if index == 0 else trial[index - 1][0], *(stop for stop, _ in trial[index:][:buckets])]
            wanted.update(pairwise(bounds))
        if missing := sorted(wanted - self._known.keys()):
            self._known.update(zip(missing, self._costs(*np.array(missing).T), strict=True))

    def end_us(self, trial: Candidate, index: int) -> float:
        """The end of a neighbour whose buckets before `index` are those of the choice."""
        state, start = self._before[index], 0 if index == 0 else trial[index - 1][0]
        for stop, _ in trial[index:]:
            state = self._send(state, start, stop, self._known[start, stop])
            start = stop
        return self._end(state)
