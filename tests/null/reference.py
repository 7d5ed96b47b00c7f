"""The contract's formulas once more, written plainly and independently: slow, without arrays, without the planner."""

from __future__ import annotations

import itertools
import math
import statistics
from bisect import bisect_right
from collections.abc import Iterator, Sequence

from planner.model.problem import Problem

DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}

Stops = tuple[int, ...]


def message_us(problem: Problem, size_bytes: float) -> float:
    """Time of one message: samples where there are any, else the line."""
    cluster = problem.cost.cluster
    if cluster.samples:
        return interpolate(cluster.samples["all_reduce"], size_bytes)
    assert cluster.collectives is not None
    line = cluster.collectives["all_reduce"]
    return line.alpha_us + line.beta_us_per_byte * size_bytes


def interpolate(samples: Sequence[tuple[float, float]], size_bytes: float) -> float:
    """Piecewise linear; duplicates by median; the end segments go on with slope ≥ 0; never below 0."""
    sizes = sorted({size for size, _ in samples})
    times = [statistics.median(time for size, time in samples if size == wanted) for wanted in sizes]
    if len(sizes) == 1:
        return times[0]
    left = min(max(bisect_right(sizes, size_bytes) - 1, 0), len(sizes) - 2)
    slope = (times[left + 1] - times[left]) / (sizes[left + 1] - sizes[left])
    if size_bytes < sizes[0]:
        return max(0.0, times[0] - max(slope, 0.0) * (sizes[0] - size_bytes))
    if size_bytes > sizes[-1]:
        return times[-1] + max(slope, 0.0) * (size_bytes - sizes[-1])
    return times[left] + slope * (size_bytes - sizes[left])


def message_sizes(problem: Problem, gradients: Sequence[int]) -> list[int]:
    """Bytes of a bucket's messages, one for each dtype."""
    sizes: dict[str, int] = {}
    for index in gradients:
        gradient = problem.profile.compute.gradients[index]
        sizes[gradient.dtype] = sizes.get(gradient.dtype, 0) + gradient.numel * DTYPE_BYTES[gradient.dtype]
    return list(sizes.values())


def bucket_us(problem: Problem, gradients: Sequence[int]) -> float:
    """One message per dtype; their sum."""
    return sum(message_us(problem, size_bytes) for size_bytes in message_sizes(problem, gradients))


def slowed(problem: Problem, gradients: Sequence[int]) -> tuple[float, float]:
    """(compute, network) while a bucket is on its way: its messages one after the other, each with its own factors."""
    contention = problem.contention
    if contention.by_size is None:
        return contention.compute, contention.network
    sizes = message_sizes(problem, gradients)
    known = sorted(contention.by_size)
    factors = [tuple(_between(known, size, column) for column in (1, 2)) for size in sizes]
    if len(factors) == 1:
        return factors[0][0], factors[0][1]
    idle_us = [message_us(problem, size) for size in sizes]
    busy_us = [us * network for us, (_, network) in zip(idle_us, factors, strict=True)]
    if sum(busy_us) == 0.0:
        return 1.0, 1.0
    computed_us = [us / compute for us, (compute, _) in zip(busy_us, factors, strict=True)]
    return sum(busy_us) / sum(computed_us), sum(busy_us) / sum(idle_us)


def _between(known: Sequence[tuple[float, float, float]], size_bytes: int, column: int) -> float:
    """Speeds lie on lines over the logarithm of the size."""
    at = math.log2(max(size_bytes, 1))
    if at <= math.log2(known[0][0]):
        return known[0][column]
    for low, high in itertools.pairwise(known):
        left, right = math.log2(low[0]), math.log2(high[0])
        if left <= at < right:
            share = (at - left) / (right - left)
            return 1.0 / ((1.0 - share) / low[column] + share / high[column])
    return known[-1][column]


def ready_us(problem: Problem) -> list[float]:
    """forward_us + sum(backward_us[0..i])."""
    steps = itertools.accumulate(gradient.backward_us for gradient in problem.profile.compute.gradients)
    return [problem.profile.compute.forward_us + step for step in steps]


def network_end_us(problem: Problem, buckets: Sequence[Sequence[int]]) -> float:
    """When the last bucket ends, by the recurrence of the contract."""
    ready, end_us = ready_us(problem), 0.0
    for gradients in buckets:
        end_us = max(end_us, ready[max(gradients)]) + bucket_us(problem, gradients)
    return end_us


def iteration_us(problem: Problem, buckets: Sequence[Sequence[int]]) -> float:
    """Length of the step without contention."""
    return max(network_end_us(problem, buckets), ready_us(problem)[-1]) + problem.profile.compute.update_us


def contended_iteration_us(problem: Problem, buckets: Sequence[Sequence[int]]) -> float:
    """Length of the step with contention: from event to event, each resource at its speed of the moment."""
    ready = ready_us(problem)
    waiting = [
        (ready[max(gradients)], bucket_us(problem, gradients), slowed(problem, gradients)) for gradients in buckets
    ]
    time_us, computed_us, left_us, factors = 0.0, 0.0, None, (1.0, 1.0)
    while waiting or left_us is not None or computed_us < ready[-1]:
        if left_us is None and waiting and waiting[0][0] <= computed_us:
            _, left_us, factors = waiting.pop(0)
        computing = computed_us < ready[-1]
        both = computing and left_us is not None
        compute_factor, network_factor = factors if both else (1.0, 1.0)
        events = []
        if left_us is not None:
            events.append(("sent", left_us * network_factor))
        if computing:
            goal_us = min([r for r in ready if r > computed_us])
            events.append(("ready", (goal_us - computed_us) * compute_factor))
        event, step_us = min(events, key=lambda item: item[1])
        time_us += step_us
        if computing:
            computed_us = goal_us if event == "ready" else computed_us + step_us / compute_factor
        if left_us is not None:
            left_us = None if event == "sent" else left_us - step_us / network_factor
    return time_us + problem.profile.compute.update_us


def all_stops(count: int) -> Iterator[Stops]:
    """Every way to cut `count` gradients into contiguous buckets, as the stops of the buckets."""
    for cuts in itertools.product((False, True), repeat=count - 1):
        yield (*(index + 1 for index, cut in enumerate(cuts) if cut), count)


def buckets_of(stops: Sequence[int]) -> list[range]:
    """The gradients of each bucket."""
    return [range(start, stop) for start, stop in zip((0, *stops[:-1]), stops, strict=True)]


def cost_table(problem: Problem) -> list[list[float]]:
    """`table[start][stop]`: time of the bucket [start, stop)."""
    count = len(problem.profile.compute.gradients)
    return [
        [bucket_us(problem, range(start, stop)) if stop > start else 0.0 for stop in range(count + 1)]
        for start in range(count)
    ]


def best_stops(problem: Problem, tie: float = 1e-12) -> tuple[Stops, float]:
    """The optimum by trying everything: earliest end, then fewest buckets, then the earliest boundaries."""
    table, ready = cost_table(problem), ready_us(problem)
    ends: list[tuple[float, Stops]] = []
    for stops in all_stops(len(ready)):
        end_us, start = 0.0, 0
        for stop in stops:
            end_us = max(end_us, ready[stop - 1]) + table[start][stop]
            start = stop
        ends.append((end_us, stops))
    best_us = min(ends)[0]
    _, stops = min((len(stops), stops) for end_us, stops in ends if end_us <= best_us * (1.0 + tie))
    return stops, best_us


def earliest_end_us(problem: Problem) -> float:
    """The optimum's end by the textbook program f(i) = min over j < i of max(f(j), r_i) + T(j, i), for one dtype."""
    sizes = [gradient.numel * DTYPE_BYTES[gradient.dtype] for gradient in problem.profile.compute.gradients]
    before = [0, *itertools.accumulate(sizes)]
    finish_us = [0.0]
    for stop, ready in enumerate(ready_us(problem), start=1):
        finish_us.append(
            min(
                max(finish_us[start], ready) + message_us(problem, before[stop] - before[start])
                for start in range(stop)
            )
        )
    return finish_us[-1]


def mg_wfbp_stops(problem: Problem, start_up_us: float) -> Stops:
    """Algorithm 1 of the paper to the letter: layers 1..L in forward order, all starts computed anew after a merge."""
    gradients, ready = problem.profile.compute.gradients, ready_us(problem)
    runs = [list(run) for _, run in itertools.groupby(range(len(gradients)), key=lambda i: gradients[i].layer)]
    layers = len(runs)
    members = {layer: runs[layers - layer] for layer in range(1, layers + 1)}  # layer L is first in backward
    done = {layer: ready[members[layer][-1]] for layer in members}
    merged_with = dict(members)

    def starts_us() -> dict[int, float]:
        starts, free_us = {}, 0.0
        for layer in range(layers, 0, -1):
            starts[layer] = max(free_us, done[layer])
            free_us = starts[layer] + (bucket_us(problem, merged_with[layer]) if merged_with[layer] else 0.0)
        return starts

    starts = starts_us()
    for layer in range(layers, 1, -1):
        if done[layer - 1] < starts[layer] + start_up_us:
            merged_with[layer - 1] = merged_with[layer] + merged_with[layer - 1]
            merged_with[layer] = []
            starts = starts_us()
    return tuple(merged_with[layer][-1] + 1 for layer in range(layers, 0, -1) if merged_with[layer])
