"""What the contract says of sparse buckets once more, plainly and by trying everything, without the planner's code."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import reference

from planner.model.problem import Problem


class Sent(NamedTuple):
    """A bucket: its gradients, and k of each run of one layer, or None where it is dense."""

    members: range
    ks: tuple[int, ...] | None


def gather_us(problem: Problem, k: int) -> float:
    """Recursive doubling over ranks that have a node each, 8 bytes per selected element."""
    link, ranks = problem.cost.cluster.inter, problem.ranks
    assert link is not None
    total_bytes = ranks * 8 * k
    return math.ceil(math.log2(ranks)) * link.alpha_us + (ranks - 1) / ranks * link.beta_us_per_byte * total_bytes


def line_us(problem: Problem, field: str, members: Sequence[int], k: int) -> float:
    """`sparsify` or `unpack` of a bucket of float32, of which k elements are sent."""
    line = getattr(problem.cost.cluster, field)
    numel = sum(problem.profile.compute.gradients[index].numel for index in members)
    if line is None:
        return 0.0
    rows = sorted(line.by_density or [(1.0, line.alpha_us, line.beta_us_per_byte)])
    density, alphas_us, betas = zip(*rows, strict=True)
    alpha_us, beta = (float(np.interp(k / max(1, numel), density, column)) for column in (alphas_us, betas))
    return alpha_us + beta * (4 * numel)


def step_us(problem: Problem, buckets: Sequence[Sent]) -> float:
    """One compute and one network resource, without contention."""
    gradients = problem.profile.compute.gradients
    clock_us, network_us, arrivals = problem.profile.compute.forward_us, 0.0, []
    for members, ks in buckets:
        clock_us += sum(gradients[index].backward_us for index in members)
        if ks is None:
            network_us = max(network_us, clock_us) + reference.bucket_us(problem, members)
            continue
        clock_us += line_us(problem, "sparsify", members, sum(ks))
        network_us = max(network_us, clock_us) + gather_us(problem, sum(ks))
        arrivals.append((network_us, members, sum(ks)))
    for arrived_us, members, k in arrivals:
        clock_us = max(clock_us, arrived_us) + line_us(problem, "unpack", members, k)
    return max(clock_us, network_us) + problem.profile.compute.update_us


def layer_of(problem: Problem, index: int) -> str:
    """By the gradient's name."""
    name = problem.profile.compute.gradients[index].name
    return name.rsplit(".", 1)[0]


def sparse(problem: Problem, limits: Sequence[float], members: range, ratio: float) -> Sent | None:
    """A bucket at a ratio; None where a layer has two limits, or no elements, or nothing may be left out."""
    ks = []
    for _, run in itertools.groupby(members, key=lambda index: layer_of(problem, index)):
        indices = list(run)
        numels = [problem.profile.compute.gradients[index].numel for index in indices]
        if len({limits[index] for index in indices}) > 1 or 0 in numels:
            return None
        ks.append(math.ceil(sum(numels) / min(ratio, limits[indices[0]])))
    return Sent(members, tuple(ks)) if any(limits[index] > 1.0 for index in members) else None


def choices(problem: Problem, limits: Sequence[float], ratios: Sequence[float]) -> Iterator[list[Sent]]:
    """Every way to cut the gradients into buckets, each dense or at one of the ratios."""
    for stops in reference.all_stops(problem.count):
        forms: list[list[Sent]] = []
        for members in reference.buckets_of(stops):
            found = [sparse(problem, limits, members, ratio) for ratio in ratios]
            forms.append([Sent(members, None), *(bucket for bucket in found if bucket)])
        yield from map(list, itertools.product(*forms))


def order(problem: Problem, buckets: Sequence[Sent]) -> tuple[float, float, int, tuple[int, ...]]:
    """Among equally long steps: smallest largest ratio, largest sum of densities, fewest buckets, earliest stops."""
    largest, densities = 1.0, 0.0
    for members, ks in buckets:
        if ks is None:
            densities += len(members)
            continue
        runs = [list(run) for _, run in itertools.groupby(members, key=lambda index: layer_of(problem, index))]
        for run, k in zip(runs, ks, strict=True):
            numel = sum(problem.profile.compute.gradients[index].numel for index in run)
            largest, densities = max(largest, numel / k), densities + len(run) * k / numel
    return largest, -round(densities, 6), len(buckets), tuple(bucket.members[-1] + 1 for bucket in buckets)


def best(
    problem: Problem, limits: Sequence[float], ratios: Sequence[float]
) -> tuple[float, tuple[float, float, int, tuple[int, ...]]]:
    """(shortest step, order of the best of the shortest) by trying everything."""
    times = [(step_us(problem, choice), choice) for choice in choices(problem, limits, ratios)]
    best_us = min(time_us for time_us, _ in times)
    equals = [choice for time_us, choice in times if time_us <= best_us * (1.0 + 1e-12)]
    return best_us, min(order(problem, choice) for choice in equals)
