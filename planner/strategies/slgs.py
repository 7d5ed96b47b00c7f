"""SLGS: one top-k over all gradients at the end of backward, gathered as values and indices (TopK-SGD)."""

from __future__ import annotations

from planner.cost.sparse import selected_elements
from planner.ir import Bucket, Schedule
from planner.model.problem import Problem
from planner.strategies.arguments import density

DEFAULT_DENSITY = 0.001


def slgs(problem: Problem, argument: str | None = None) -> Schedule:
    """One bucket of which a share of the elements travels: `slgs:D`, by default 0.001."""
    return _one_bucket(problem, DEFAULT_DENSITY if argument is None else density("slgs", argument), "flat")


def naive_all_gather(problem: Problem, argument: str | None = None) -> Schedule:
    """The same with CommLib's NaiveAG, which sends values and indices apart: `naive_all_gather:D`."""
    share = DEFAULT_DENSITY if argument is None else density("naive_all_gather", argument)
    return _one_bucket(problem, share, "naive_all_gather")


def _one_bucket(problem: Problem, share: float, algorithm: str) -> Schedule:
    numel = int(problem.numel.sum())
    if problem.ranks == 1 or numel == 0:
        return Schedule.from_boundaries([problem.count])
    bucket = Bucket(
        gradients=tuple(range(problem.count)),
        collective="sparse",
        algorithm=algorithm,
        compressor="topk",
        k=selected_elements(share, numel),
    )
    return Schedule(buckets=(bucket,))
