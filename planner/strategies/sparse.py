"""Selected elements of every gradient: SLGS, one top-k at the end of backward (TopK-SGD); LAGS-SGD (Shi et al., ECAI
2020), one bucket per layer, its ratio by Eq. 19: as little compression as hides.
"""

from __future__ import annotations

import numpy as np

from planner.cost.sparse import selected_elements
from planner.ir import Bucket, Schedule
from planner.model.codecs import TopK, codec_of
from planner.model.compression import DEFAULT_MAX_RATIO, MAX_RATIO
from planner.model.problem import Problem
from planner.search.lags import layer_wise
from planner.strategies.arguments import density, positive_number
from runtime.plan.names import numbered
from runtime.plan.transports import FLAT, NAIVE_ALL_GATHER, Transport

DEFAULT_DENSITY = 0.001


def slgs(problem: Problem, argument: str | None = None) -> Schedule:
    """One bucket of which a share of the elements travels: `slgs:D`, by default 0.001."""
    return _one_bucket(problem, DEFAULT_DENSITY if argument is None else density("slgs", argument), FLAT)


def naive_all_gather(problem: Problem, argument: str | None = None) -> Schedule:
    """The same with CommLib's NaiveAG, which sends values and indices apart: `naive_all_gather:D`."""
    share = DEFAULT_DENSITY if argument is None else density("naive_all_gather", argument)
    return _one_bucket(problem, share, NAIVE_ALL_GATHER)


def _one_bucket(problem: Problem, share: float, transport: Transport) -> Schedule:
    numel = int(problem.numel.sum())
    if problem.ranks == 1 or numel == 0:
        return Schedule.from_boundaries([problem.count])
    bucket = Bucket(tuple(range(problem.count)), transport, TopK(selected_elements(share, numel)))
    return Schedule(buckets=(bucket,))


def lags(problem: Problem, argument: str | None = None) -> Schedule:
    """Every layer by Eq. 19; `lags:CU` sets the largest ratio c_u, by default 1000."""
    max_ratio = DEFAULT_MAX_RATIO
    if argument is not None:
        max_ratio = positive_number("lags", argument, "times of compression", at_most=MAX_RATIO, at_least=1.0)
    return layer_wise(problem, np.full(problem.count, max_ratio))


def ratios(problem: Problem, schedule: Schedule) -> dict[str, float]:
    """Layer → c, its elements over those that travel. A name that comes back later is numbered: `conv`, `conv#2`."""
    result: dict[str, float] = {}
    layers = [problem.profile.compute.gradients[bucket.gradients[0]].layer for bucket in schedule.buckets]
    for name, bucket in zip(numbered(layers), schedule.buckets, strict=True):
        result[name] = codec_of(bucket).ratio(problem, bucket)
    return result
