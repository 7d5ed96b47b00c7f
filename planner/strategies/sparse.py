"""Selected elements of every gradient: SLGS, one top-k at the end of backward (TopK-SGD); LAGS-SGD (Shi et al., ECAI
2020), each layer's ratio by Eq. 19: as little compression as hides; small layers merged by its buffer (Section 5).
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from planner.cost.sparse import selected_elements
from planner.ir import Bucket, Schedule
from planner.model.codecs import TopK, codec_of
from planner.model.compression import DEFAULT_MAX_RATIO, MAX_RATIO
from planner.model.problem import Problem
from planner.search.lags import DEFAULT_BUFFER, fill_buffers, layer_wise
from planner.strategies.strategy import number_and_count, share, strategy
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


MAX_BUFFER = 10**8


@strategy(
    number_and_count(
        "MAX_RATIO:BUFFER", "times of compression", MAX_RATIO, "selected elements that fill the buffer", MAX_BUFFER
    ),
    accuracy="bounded",
)
def lags(problem: Problem, setting: tuple[float] | tuple[float, int] = (DEFAULT_MAX_RATIO,)) -> Schedule:
    """Return layers with ratios by Eq. 19, up to c_u, by default 1000; a message is sent when the buffer is full.

    Args:
        problem: the step.
        setting: c_u and, if given, the selected elements that fill the buffer, by default 2048; 0: a bucket per layer.
    """
    max_ratio, buffer = (*setting, DEFAULT_BUFFER)[:2]
    by_layer = layer_wise(problem, np.full(problem.count, max_ratio), by_layer=buffer > 0)
    return fill_buffers(problem, by_layer, buffer) if buffer else by_layer


def ratios(problem: Problem, schedule: Schedule) -> dict[str, float]:
    """Return by layer c, its elements over those that are sent; repeated names are numbered: `conv`, `conv#2`."""
    names, gradients = problem.layers_by_name, problem.profile.compute.gradients
    layers: list[str] = []
    found: list[float] = []
    for bucket in schedule.buckets:
        codec, members = codec_of(bucket), bucket.gradients
        first = [members[0]]
        if isinstance(codec, TopK) and codec.ks is not None:
            first += [index for before, index in pairwise(members) if names[index] != names[before]]
            found += [numel / k for numel, k in zip(problem.layer_elements(bucket), codec.ks, strict=True)]
        else:
            found.append(codec.ratio(problem, bucket))
        layers += [gradients[index].layer for index in first]
    return dict(zip(numbered(layers), found, strict=True))
