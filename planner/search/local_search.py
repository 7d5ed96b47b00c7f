"""The local search over buckets: forms changed, boundaries dropped or moved, as long as the step gets shorter.

A step that is no longer is taken where its rank is lower (fewer buckets, less compression), too. The effort is counted
in buckets, not timed, so that equal inputs give equal plans; the result is never worse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from planner.ir import TIE
from planner.model.replay import Candidate, Replay

Stops = tuple[int, ...]


def neighbours(choice: Candidate, index: int, forms: int = 1, reach: int = 16) -> Iterator[Candidate]:
    """Bucket `index` in another form, merged with the next one, or ending up to `reach` elsewhere, by powers of two."""
    stop, form = choice[index]
    for other in range(forms):
        if other != form:
            yield (*choice[:index], (stop, other), *choice[index + 1 :])
    if index + 1 == len(choice):
        return
    following = choice[index + 1]
    for other in sorted({form, following[1]}):
        yield (*choice[:index], (following[0], other), *choice[index + 2 :])
    before, distance = choice[index - 1][0] if index else 0, 1
    while distance <= min(reach, following[0] - before):
        for place in (stop - distance, stop + distance):
            if before < place < following[0]:
                yield (*choice[:index], (place, form), *choice[index + 1 :])
        distance *= 2


def local_search(
    choice: Candidate,
    judge: Replay | Callable[[Candidate], float | None],
    work: int,
    *,
    forms: int = 1,
    rank: Callable[[Candidate], Any] = len,
    then: Literal["restart", "stay", "go_on"] = "restart",
    reach: int = 16,
) -> Candidate:
    """The best choice found from one.

    Args:
        choice: where to begin.
        judge: the end of a choice; infinite for one that cannot be, None for one that takes no effort to know so.
        work: buckets that may be evaluated.
        forms: how many forms a bucket may have.
        rank: what is to be small among steps that are no longer; asked for possible choices alone.
        then: where to look on after a better choice: from the first bucket, at this one, or at the next boundary.
        reach: how far a boundary is moved at the most.
    """
    replay = judge if isinstance(judge, Replay) else None
    best_us = (judge.begin(choice) if isinstance(judge, Replay) else judge(choice)) or 0.0
    best_rank, improved = rank(choice), True
    while improved and work > 0:
        improved, index = False, 0
        while index < len(choice) and work > 0:
            found, trials = False, list(neighbours(choice, index, forms, reach))
            if replay is not None:
                replay.look_up(trials, index, 2)
            for trial in trials:
                end_us = judge.end_us(trial, index) if isinstance(judge, Replay) else judge(trial)
                if end_us is None:
                    continue
                work -= len(trial)
                shorter = end_us < best_us * (1.0 - TIE)
                if shorter or (end_us <= best_us * (1.0 + TIE) and rank(trial) < best_rank):
                    found, dropped = True, len(trial) < len(choice)
                    choice, best_us, best_rank = trial, min(end_us, best_us), rank(trial)
                    break
                if then == "restart" and work <= 0:
                    break
            improved |= found
            if found and replay is not None:
                replay.begin(choice)
            if found and then == "restart":
                break
            stays = found and (then == "stay" or dropped)
            index += not stays
    return choice


def moved(stops: Stops, judge: Replay | Callable[[Candidate], float], work: int) -> Stops:
    """Boundaries moved or dropped while that makes the step shorter."""
    return stops_of(local_search(choice_of(stops), judge, work, rank=lambda _: 0))


def choice_of(stops: Sequence[int]) -> Candidate:
    """Buckets that end there, in form 0."""
    return tuple((stop, 0) for stop in stops)


def stops_of(choice: Candidate) -> Stops:
    return tuple(stop for stop, _ in choice)
