"""What the two ranks of the tests of local updaters do, all in one start of processes."""

from __future__ import annotations

import errno
import os
import pickle
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import local_async_jobs as jobs
import torch
import torch.distributed as dist
from local_async_reference import reference
from torch import Tensor, nn

import runtime
import runtime.local_async.preparing as preparing
import runtime.local_async.run as running
from runtime.errors import CommunicationError, PlannerError
from runtime.local_async import LocalRun, run_local_async
from runtime.local_async.averaging import Averager
from runtime.local_async.memory import AtomicCounter
from runtime.local_async.races import Races
from runtime.plan import LocalAsyncSpec, PlanBucket

K1 = {"average_every": 1, "then_every": 1}
DEADLINE_S = 20.0
PROBED = sum(parameter.numel() for parameter in jobs.Net().parameters() if parameter.requires_grad)
"""Elements of the probe of races: as many as a small model has."""


def trained(
    job: Any,
    spec: LocalAsyncSpec | None,
    steps: int,
    gradients: tuple[tuple[str, ...], ...] = jobs.LAYERS,
    **options: Any,
) -> LocalRun:
    """On both ranks, with few imports."""
    usual: dict[str, Any] = {"timeout_s": DEADLINE_S, "start_method": "forkserver"}
    plan = jobs.plan_of(spec, ranks=2, buckets=tuple(PlanBucket(gradients=names) for names in gradients))
    return run_local_async(job, plan, steps, **(usual | options))


def ranks_equal(model: nn.Module) -> bool:
    """Whether all ranks hold the same bits, buffers too."""
    found: list[dict[str, Tensor]] = [{}] * dist.get_world_size()
    dist.all_gather_object(found, jobs.tensors_of(model))
    return all(torch.equal(tensor, other[name]) for other in found for name, tensor in found[0].items())


def in_forced_order() -> dict[str, bool]:
    """K = 1, two updaters on each of two ranks, in the order of `TURNS`: as the sequential reference."""
    counter = AtomicCounter()
    turns = jobs.Turns(counter, "average")
    average = running._Parent._average

    def in_turn(rank: Any, averager: Averager) -> bool:
        updaters = rank._updaters
        turns.wait()
        while updaters.shared.begun.value != updaters.done + 2:  # who has updated has the next minibatch
            time.sleep(0.0005)
        last = average(rank, averager)
        turns.over()
        return last

    running._Parent._average = in_turn  # type: ignore[method-assign]
    try:
        spec = LocalAsyncSpec(updaters=2, **K1)
        run = trained(partial(jobs.in_turns, counter, os.getpid()), spec, sum("update" in t for t in jobs.TURNS))
    finally:
        running._Parent._average = average  # type: ignore[method-assign]
    found, expected = jobs.tensors_of(run.model), reference(jobs.TURNS, 2)[dist.get_rank()]
    results = {name: _close(tensor, expected[name]) for name, tensor in found.items() if tensor.is_floating_point()}
    moved = reference((), 2)[0]
    return results | {
        "equal": ranks_equal(run.model),
        "trained": not any(_close(found[name], moved[name]) for name in ("hidden.weight", "norm.running_mean")),
        "rounds": run.report.rounds in (6, 7),
        "staleness": run.report.staleness == (3, 3),
        "outdated": run.report.outdated == 3,  # updates of the turns that have an averaging since their snapshot
        "nothing lost": run.report.races == Races(additions=PROBED * (6 + run.report.rounds), lost=0, worst=0.0),
    }


def _close(found: Tensor, expected: Tensor) -> bool:
    return torch.allclose(found, expected, rtol=1e-5, atol=1e-6)


STRATEGIES = {
    "mb_sgd": None,
    "l_sgd": LocalAsyncSpec(updaters=1, synchronous=True, average_every=4, then_every=4),
    "pl_sgd": LocalAsyncSpec(updaters=1, synchronous=True, then_every=4),
    "lap": LocalAsyncSpec(updaters=2, then_every=4),
    "lpp": LocalAsyncSpec(updaters=2, blocks=jobs.LAYERS, then_every=4),
}


def strategies() -> dict[str, bool]:
    """Every way to train ends with equal models, having seen each minibatch once."""
    results = {}
    for name, spec in STRATEGIES.items():
        run = trained(jobs.scheduled, spec, 30)
        report = run.report
        results[f"{name}: equal"] = ranks_equal(run.model)
        results[f"{name}: counted"] = list(run.numbers) == list(range(30)) and report.samples == 150
        results[f"{name}: finite"] = all(
            bool(tensor.isfinite().all()) for tensor in jobs.tensors_of(run.model).values()
        )
        results[f"{name}: partial"] = any(one.partial for one in report.updaters) == (name == "lpp")
        results[f"{name}: rounds"] = _rounds_fit(name, report.rounds)
    return results


def _rounds_fit(name: str, rounds: int) -> bool:
    """Averagings of 30 minibatches, K = 1 until the 15th and 4 from there on, or always 4."""
    exact = {"mb_sgd": 0, "l_sgd": 8, "pl_sgd": 15 + 4}
    return rounds == exact[name] if name in exact else 1 <= rounds <= 31


def post_local_is_minibatch_sgd() -> dict[str, bool]:
    """While every step is averaged, post-local SGD is minibatch SGD: means of models move by means of gradients."""
    names = (("2.bias", "2.weight", "0.bias", "0.weight"),)
    mean = trained(jobs.normless, None, 12, names).model
    local = trained(jobs.normless, LocalAsyncSpec(updaters=1, synchronous=True, **K1), 12, names).model
    pairs = zip(jobs.tensors_of(mean).values(), jobs.tensors_of(local).values(), strict=True)
    return {"close": all(_close(one, other) for one, other in pairs)}


def stress(updaters: int = 2, steps: int = 300) -> dict[str, bool]:
    """Nothing is lost or done twice, while both ranks average all the time."""
    run = trained(jobs.calm, LocalAsyncSpec(updaters=updaters, **K1), steps)
    report = run.report
    return {
        "each minibatch once": list(run.numbers) == list(range(steps)),
        "counts agree": sum(one.minibatches for one in report.updaters) == report.minibatches == steps,
        "samples agree": report.samples == 5 * steps,
        "staleness counted": sum(report.staleness) == steps,
        "averaged": report.rounds >= 2,
        "races counted": report.races is not None
        and report.races.additions == PROBED * (steps + report.rounds)
        and 0.0 <= report.races.share <= report.races.worst < 1.0,
        "equal": ranks_equal(run.model),
        "learnt": sum(run.losses[-50:]) < sum(run.losses[:50]),
    }


def slow_network() -> dict[str, bool]:
    """While an averaging takes long, updaters go on: minibatches begin and end inside it."""
    exchange = Averager._exchange

    def slowly(averager: Averager, meanwhile: Any) -> None:
        until = time.monotonic() + 0.3
        while time.monotonic() < until:
            meanwhile(0.02)
        exchange(averager, meanwhile)

    Averager._exchange = slowly  # type: ignore[method-assign]
    try:
        report = trained(jobs.plain, LocalAsyncSpec(updaters=2, **K1), 600).report
    finally:
        Averager._exchange = exchange  # type: ignore[method-assign]
    spans = [span for span in report.spans if span.resource == "network" and span.duration_us > 0.25e6]
    inside = [
        sum(
            s.start_us >= long.start_us and s.end_us <= long.end_us and s.task.startswith("gradient")
            for s in report.spans
        )
        for long in spans
    ]
    return {"some": bool(spans), "inside": max(inside, default=0) > 2}


def refusals() -> dict[str, str]:
    """One rank's trouble is told to all, before an updater is started."""
    rank = dist.get_rank()
    cases: dict[str, Any] = {
        "steps": lambda: trained(jobs.plain, LocalAsyncSpec(updaters=1), 5 + rank),
        "some plans": lambda: trained(jobs.plain, LocalAsyncSpec(updaters=2) if rank else None, 5),
        "one attaches": attached_by_one,
        "loss": lambda: trained(jobs.plain if rank else jobs.odd_loss, LocalAsyncSpec(updaters=1), 5),
        "memory": in_little_memory,
        "shared memory": lambda: without_shared_memory(LocalAsyncSpec(updaters=1)),
        "synchronous": lambda: without_shared_memory(STRATEGIES["l_sgd"]),
        "updater": lambda: trained(partial(jobs.odd_updater, rank, os.getpid()), LocalAsyncSpec(updaters=1), 5),
    }
    return {name: _message(case) for name, case in cases.items()}


def attached_by_one() -> None:
    """Rank 0 trains in its own loop."""
    if dist.get_rank():
        trained(jobs.plain, LocalAsyncSpec(updaters=2), 5)
    else:
        runtime.attach(jobs.Net(), None, jobs.plan_of(None, ranks=2))


def in_little_memory() -> LocalRun:
    """On a machine with 1 MiB left."""
    available = preparing.available_bytes
    preparing.available_bytes = lambda: 2**20
    try:
        return trained(jobs.plain, LocalAsyncSpec(updaters=3), 5)
    finally:
        preparing.available_bytes = available


def without_shared_memory(spec: LocalAsyncSpec | None) -> LocalRun:
    """On rank 1 the system gives none."""
    allocate = os.posix_fallocate

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    os.posix_fallocate = full if dist.get_rank() else allocate
    try:
        return trained(jobs.plain, spec, 5)
    finally:
        os.posix_fallocate = allocate


def _message(call: Any) -> str:
    try:
        call()
    except PlannerError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def raising() -> str:
    """What a rank says when an updater of rank 1 raises in the middle of a run."""
    folder = Path(os.environ["LOCAL_ASYNC_FOLDER"], f"raising-{dist.get_rank()}")
    folder.mkdir()
    fault = "raise" if dist.get_rank() == 1 else "none"
    return _message(lambda: trained(partial(jobs.faulty, fault, str(folder)), LocalAsyncSpec(updaters=2, **K1), 400))


def stopping() -> dict[str, Any]:
    """Rank 1 loses an updater, and all stop."""
    folder = Path(os.environ["LOCAL_ASYNC_FOLDER"], f"stopping-{dist.get_rank()}")
    folder.mkdir()
    fault = "kill" if dist.get_rank() == 1 else "none"
    spec = LocalAsyncSpec(updaters=2, **K1)
    run = trained(partial(jobs.faulty, fault, str(folder)), spec, 4000, on_lost="stop")
    return {"minibatches": run.report.minibatches, "equal": ranks_equal(run.model), "report": str(run.report)}


def killed() -> str:
    """Rank 1 is killed in the middle of a run; what rank 0 says."""
    if dist.get_rank() == 1:
        average = Averager.average

        def dying(averager: Averager, *arguments: Any, **options: Any) -> list[int]:
            if averager.record.rounds == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            return average(averager, *arguments, **options)

        Averager.average = dying  # type: ignore[method-assign]
    return _message(lambda: trained(jobs.plain, LocalAsyncSpec(updaters=2, **K1), 100_000))


def pair_checks(folder: str) -> None:
    """Everything that two ranks can show; each writes what it found. Ends with the death of rank 1."""
    os.environ["LOCAL_ASYNC_FOLDER"] = folder
    found: dict[str, Any] = {}
    checks = (
        in_forced_order,
        strategies,
        post_local_is_minibatch_sgd,
        stress,
        slow_network,
        refusals,
        raising,
        stopping,
    )
    for check in (*checks, killed):
        found[check.__name__] = check()
        Path(folder, f"rank{dist.get_rank()}").write_bytes(pickle.dumps(found))
    raise CommunicationError(found["killed"])
