"""Final metrics of synchronous and delayed training after the same number of steps."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from benchmarks.delay.updaters import DcAsgd, LocalUpdate, local_update, sgd, train_asgd
from benchmarks.lags.accuracy import plan_of
from benchmarks.learning import Outcome, Task, learn
from planner.documents.text import pluralize
from planner.model.modes.delayed import delay_spec
from runtime.delay.delayed import Delayed
from runtime.modes import distance_guard
from runtime.monitor import pace
from runtime.plan import DelaySpec, Plan

TASKS = ("digits, ResNet-20", "characters, LSTM")
"""Those that are trained with SGD and momentum."""


WARMUPS = {"60 steps": 0.0, "a third": 1 / 3, "two thirds": 2 / 3}
"""Shares of synchronous steps, with those of other ways the warm-up curve of Fig. 4."""


@dataclass(frozen=True)
class Way:
    """A delay that follows so large a share of synchronous steps, rounded to a multiple of 60, which 1 to 5 divide."""

    delay: DelaySpec | None
    warmup_share: float = 0.5
    update: Callable[[], LocalUpdate] | None = None
    """Makes the local update; None: GLU."""
    asynchronous: bool = False
    """Whether it is ASGD, without plan and warm-up."""


PUBLISHED = DelaySpec(steps=4)
PLAIN = replace(PUBLISHED, alpha=1.0, beta=0.0)
SYNCHRONOUS = "synchronous"
WAYS = {
    SYNCHRONOUS: Way(None),
    **{f"k = {k}": Way(delay_spec(k)) for k in range(1, 6)},
    "k = 4, α = 2, β = 0.5": Way(PUBLISHED),
    "k = 4, plain local SGD": Way(PLAIN),
    "k = 4, local SGD of the rate itself": Way(replace(PLAIN, local_lr_scale=1.0), update=lambda: sgd),
    "k = 4, DC-ASGD-a": Way(replace(PLAIN, local_lr_scale=1.0), update=DcAsgd),
    "ASGD": Way(None, asynchronous=True),
    "k = 4, a sixth synchronous": Way(delay_spec(4), 1 / 6),
    **{f"k = 4, {name} synchronous": Way(delay_spec(4), share) for name, share in WARMUPS.items()},
}


@dataclass(frozen=True)
class Stale(Outcome):
    """One run, and how far ranks were apart."""

    distance: float | None
    """Median over pulls of how far ranks are from the global weights, over what the warm-up moved them by."""
    share: float | None
    """Likewise, as a share of the weights."""


def _plan(model: torch.nn.Module, steps: int, way: Way) -> Plan:
    plan = plan_of(model)
    if way.delay is None:
        return plan
    warmup = max(60, round(steps * way.warmup_share / 60) * 60)
    return Plan(
        model=plan.model, world=plan.world, accuracy="relaxed", buckets=plan.buckets,
        delay=replace(way.delay, warmup_steps=warmup),
    )  # fmt: skip


def train(task: Task, seed: int, way: str) -> Stale:
    """One run on this rank."""
    distance_guard.MOVEMENT_BOUND, pace.TURNS = math.inf, sys.maxsize // 100  # what delay does by itself
    found = WAYS[way]
    if found.asynchronous:
        return Stale(task.name, seed, way, task.metric(train_asgd(task, seed, dist.get_world_size())), None, None)
    with local_update(None if found.update is None else found.update()):
        model, session = learn(task, seed, lambda model, _: _plan(model, task.steps, found))
    with session.global_weights():
        metric = task.metric(model)
    delay = session._mode if isinstance(session._mode, Delayed) else None
    samples = list(delay.distances.samples) if delay else []
    session.detach()
    relative, share = (
        statistics.median(values) if values else None
        for values in ([one.relative for one in samples], [one.share for one in samples])
    )
    return Stale(task.name, seed, way, metric, relative, share)


def lines(outcomes: list[Stale]) -> Iterator[str]:
    """One row per task and way."""
    yield "| task | way | metric, mean over seeds (range) | against synchronous | distance: × warm-up, share |"
    yield "| --- " * 5 + "|"
    for name in dict.fromkeys(outcome.task for outcome in outcomes):
        whole = {o.seed: o.metric for o in outcomes if o.task == name and o.way == SYNCHRONOUS}
        for way in WAYS:
            found = [o for o in outcomes if o.task == name and o.way == way]
            if not found:
                continue
            metrics = [o.metric for o in found]
            mean, first = statistics.fmean(metrics), statistics.fmean(whole[o.seed] for o in found)
            fewer = f" ({pluralize(len(found), 'seed')})" if len(found) < len(whole) else ""
            far = [(o.distance, o.share) for o in found if o.distance is not None and o.share is not None]
            told = " and ".join(f"{statistics.fmean(column):.3g}" for column in zip(*far, strict=True))
            yield (
                f"| {name} | {way}{fewer} | {mean:.4f} ({min(metrics):.4f} to {max(metrics):.4f}) "
                f"| {mean / first - 1.0:+.2%} | {told} |"
            )
