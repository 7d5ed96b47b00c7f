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
from planner.strategies.strategy import number, share, strategy
from runtime.plan.names import numbered
from runtime.plan.transports import FLAT, NAIVE_ALL_GATHER, Transport

DEFAULT_DENSITY = 0.001


@strategy(share(), accuracy="bounded")
def slgs(problem: Problem, density: float = DEFAULT_DENSITY) -> Schedule:
    """Return one bucket, of which a share of the elements is sent, by default 0.001."""
    return _one_bucket(problem, density, FLAT)


@strategy(share(), accuracy="bounded")
def naive_all_gather(problem: Problem, density: float = DEFAULT_DENSITY) -> Schedule:
    """Return the bucket of `slgs`, sent by CommLib's NaiveAG, which sends values and indices in two messages."""
    return _one_bucket(problem, density, NAIVE_ALL_GATHER)


def _one_bucket(problem: Problem, density: float, transport: Transport) -> Schedule:
    numel = int(problem.numel.sum())
    if problem.ranks == 1 or numel == 0:
        return Schedule.from_boundaries([problem.count])
    bucket = Bucket(tuple(range(problem.count)), transport, TopK(selected_elements(density, numel)))
    return Schedule(buckets=(bucket,))


@strategy(number("MAX_RATIO", "times of compression", at_most=MAX_RATIO, at_least=1.0), accuracy="bounded")
def lags(problem: Problem, max_ratio: float = DEFAULT_MAX_RATIO) -> Schedule:
    """Return a bucket for each layer with a ratio by Eq. 19, up to c_u, by default 1000."""
    return layer_wise(problem, np.full(problem.count, max_ratio))


def ratios(problem: Problem, schedule: Schedule) -> dict[str, float]:
    """Return by layer c, its elements over those that are sent; repeated names are numbered: `conv`, `conv#2`."""
    result: dict[str, float] = {}
    layers = [problem.profile.compute.gradients[bucket.gradients[0]].layer for bucket in schedule.buckets]
    for name, bucket in zip(numbered(layers), schedule.buckets, strict=True):
        result[name] = codec_of(bucket).ratio(problem, bucket)
    return result
