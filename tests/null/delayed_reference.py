"""Delayed synchronization once more, step by step on the clock: plainly, and without the planner's simulator."""

from __future__ import annotations

from planner.model.delay_load import StepWork


def starts_us(load: StepWork, k: int, steps: int, network_free_us: float = 0.0) -> list[float]:
    """When each step begins, and when the last one ends; no contention. Steps 0, k, 2k, … pull."""
    now_us, free_us = 0.0, network_free_us
    inside_free_us = spread_free_us = 0.0
    pushed_us = dict.fromkeys(range(len(load.ready_us)), 0.0)
    pulled_us = 0.0
    starts = [now_us]
    for step in range(steps):
        clock_us, done_us, packed_us = now_us + load.forward_us, load.forward_us, {}
        for bucket in sorted(pushed_us, key=lambda index: load.ready_us[index]):
            clock_us += load.ready_us[bucket] - done_us
            done_us = load.ready_us[bucket]
            clock_us = max(clock_us, pushed_us[bucket]) + (load.pack_us[bucket] if load.pack_us else 0.0)
            packed_us[bucket] = clock_us
        if load.scatter_us:  # inside the node, in the order of buckets
            for bucket in pushed_us:
                scattered_us = max(inside_free_us, packed_us[bucket]) + load.scatter_us[bucket]
                packed_us[bucket], inside_free_us = scattered_us, scattered_us + load.gather_us[bucket]
            clock_us = max(clock_us, inside_free_us)
        now_us = max(clock_us, pulled_us) + load.local_update_us + (load.take_us if pulled_us else 0.0)
        for bucket in pushed_us:
            free_us = pushed_us[bucket] = max(free_us, packed_us[bucket]) + load.push_us[bucket]
        pulled_us = 0.0
        free_us += load.owner_us
        if step % k == 0:
            for bucket in pushed_us:
                pulled_us = free_us = free_us + load.pull_us[bucket]
                if load.spread_us:
                    pulled_us = spread_free_us = max(spread_free_us, free_us) + load.spread_us[bucket]
        starts.append(now_us)
    return starts


def mean_us(load: StepWork, k: int, cycles: int) -> tuple[float, float]:
    """The mean step of the second half of many cycles: from an idle network, and from one that is far behind."""
    behind_us = 3.0 * (max(load.ready_us) + load.local_update_us + sum(load.push_us) + sum(load.pull_us))
    means = []
    for head_us in (0.0, behind_us):
        starts = starts_us(load, k, 2 * cycles * k, head_us)
        means.append((starts[-1] - starts[cycles * k]) / (cycles * k))
    return means[0], means[1]
