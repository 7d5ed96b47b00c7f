"""How fast concurrent updaters are on this device: one rank, no averaging."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from runtime.errors import EnvironmentFailure, InputError
from runtime.local_async.job import LocalJob
from runtime.local_async.preparing import made
from runtime.local_async.shared import Layout, SharedModel, make_memory
from runtime.local_async.updater import SAMPLES, Result
from runtime.local_async.updaters import LONGEST_WATCH_S, Orders, Updaters, check_start_method
from runtime.plan import LocalAsyncSpec
from runtime.world import MIN_TIMEOUT_S

WARMUP = 3
START_TIMEOUT_S = 300.0


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """What a number of updaters did while all of them were at work."""

    updaters: int
    minibatches_per_s: float
    """Of all together."""
    samples_per_s: float
    peak_bytes: int
    """Largest resident memory of an updater."""
    updates: int
    """So many were counted."""


def measure_throughput(
    job: Callable[[], LocalJob],
    updaters: int,
    *,
    blocks: Sequence[Sequence[str]] | None = None,
    minibatches: int = 20,
    rank: int = 0,
    begin: Callable[[], None] = lambda: None,
    start_method: str = "spawn",
    timeout_s: float = MIN_TIMEOUT_S,
) -> Throughput:
    """Lets updaters share a model on this rank for a while.

    Args:
        job: see `run_local_async`; its model is made anew, and thrown away.
        updaters: how many at once.
        blocks: of LPP-SGD, whose minibatches alternate from the first one on; None: LAP-SGD.
        minibatches: of each updater on average, beside `WARMUP` before.
        rank: whose minibatches they take.
        begin: called when all updaters are ready; they go when it returns: a barrier, where ranks measure at once.
        start_method: see `run_local_async`.
        timeout_s: an updater whose minibatch takes longer is given up.

    Raises:
        InputError: the model's tensors cannot be shared, or an updater raised it.
        EnvironmentFailure: an updater was lost.
    """
    problem = check_start_method(start_method)
    if updaters < 1:
        problem = f"updaters: found {updaters}, expected at least 1; correct it"
    if problem is not None:
        raise InputError(problem)
    model = made(job).model
    layout = Layout.of(model)
    handle, memory = make_memory(model, layout)
    SharedModel(model, layout, memory)
    spec = LocalAsyncSpec(
        updaters=updaters, blocks=None if blocks is None else tuple(map(tuple, blocks)), full_fraction=0.0
    )
    steps = updaters * (WARMUP + minibatches)
    them = Updaters(
        Orders(make=job, memory=handle, layout=layout, spec=spec, steps=steps, rank=rank, start_method=start_method)
    )
    try:
        them.start()
        problem = them.await_ready(START_TIMEOUT_S)
        if problem is not None:
            raise them.error or EnvironmentFailure(problem)
        begin()
        them.go(timeout_s)
        while not them.over:
            them.watch(LONGEST_WATCH_S)
        if them.error is not None or them.lost:
            told = "; ".join(f"updater {number} {why}" for number, why in them.lost.items())
            raise them.error or EnvironmentFailure(f"measuring {updaters} updaters: {told}")
        done, samples = them.done, sum(them.counts(number)[SAMPLES] for number in range(updaters))
        return _summed(them.results, samples / done if done else 0.0)
    finally:
        them.end()


def _summed(results: Sequence[Result], samples_each: float) -> Throughput:
    """Updates per second from when the last updater was warm until the first one had nothing left to do."""
    warm = [one.ends_s[min(WARMUP, len(one.ends_s)) - 1] for one in results if one.ends_s]
    start_s, end_s = max(warm), min(one.ends_s[-1] for one in results if one.ends_s)
    counted = sum(start_s < moment <= end_s for one in results for moment in one.ends_s)
    if end_s <= start_s:  # one was done before another had begun: all that they did counts
        start_s, end_s = min(one.start_s for one in results), max(one.ends_s[-1] for one in results if one.ends_s)
        counted = sum(len(one.ends_s) for one in results)
    speed = counted / (end_s - start_s)
    return Throughput(
        updaters=len(results),
        minibatches_per_s=speed,
        samples_per_s=speed * samples_each,
        peak_bytes=max(one.peak_bytes for one in results),
        updates=counted,
    )
