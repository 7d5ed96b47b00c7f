"""What ranks do with `planner.attach(model, optimizer)`: against DDP, with all kinds of caches, as a link changes."""

from __future__ import annotations

import gc
import json
import os
import tempfile
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from drift_checks import DELAY_S, linked, model, profile_of
from export_checks import MODELS
from interplay_harness import SGD, Chain, Side, compare, loss_of, mlp, outcome, ranks_agree, steps, told, with_ddp
from step_checks import raised
from torch import nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

import planner
from planner.decide.strategies import make_schedule
from planner.documents.profile import parse_profile
from planner.emit.lower import lower
from planner.model.modes import outer_steps
from planner.model.problem import make_problem
from planner.online import candidates, deciding, measuring, opening, pilot, trials
from planner.online.attach import PlannedSession
from planner.online.cache import Cache, Key, Remembered
from planner.profile import step as measured_step
from runtime.checks.plan import model_fingerprint
from runtime.errors import CacheWarning
from runtime.modes import distance_guard
from runtime.monitor.verdict import Verdict
from runtime.plan import Plan, PlanBucket
from runtime.plan.document import CompressorSpec, DelaySpec, LocalAsyncSpec, StepPlan, UpdatePlan


class Given:
    """In place of the process that decides: one message per gradient, once it was asked twice."""

    made = 0

    def __init__(self, request: dict[str, Any]) -> None:
        Given.made += 1
        problem = make_problem(parse_profile(request["profile"]))
        self._answer = {
            "plan": lower(problem, make_schedule(problem, "wfbp")).to_document(),
            "others_us": [1e9] * len(request["others"]),
        }
        self._asked = 0

    def poll(self) -> dict[str, Any] | None:
        self._asked += 1
        return self._answer if self._asked > 1 else None

    def close(self) -> None: ...


def always(good: bool) -> Callable[..., Verdict | None]:
    """A trial of four rounds with this end."""

    def judge(rounds: list[Any], *_: Any) -> Verdict | None:
        return None if len(rounds) < 4 else Verdict(good=good, step_us=1.0, other_us=2.0, text=f"good: {good}")

    return judge


@contextmanager
def hurried(good: bool | None = True, **changes: Any) -> Iterator[Path]:
    """Inside, planning has no budget, decides at once, and remembers in a folder of rank 0's that is given."""
    Given.made = 0
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    values: dict[str, Any] = {"LINKS_SHARE": 1e9, "POLL_S": 1e-6, "WATCH_S": 1e-6, "Decision": Given, "MOST_TRIALS": 1}
    values["TRIAL_BUDGET"] = 1e9
    values["FAR_OFF"] = 1e9  # what is given predicts nothing
    values |= {} if good is None else {"judge": always(good)}
    environment = {"PLANNER_CACHE": str(Path(folder[0]) / f"rank{dist.get_rank()}")}
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, environment))
        for name, value in (values | changes).items():
            module = next(one for one in (pilot, candidates, trials, measuring) if hasattr(one, name))
            stack.enter_context(mock.patch.object(module, name, value))
        yield Path(environment["PLANNER_CACHE"])


def online(net: nn.Module | None = None, **options: Any) -> Side:
    """A side without a plan."""
    net = mlp() if net is None else net
    optimizer = SGD(net.parameters())
    return Side(net, net, optimizer, planner.attach(net, optimizer, timeout_s=60, **options))


def session_of(side: Side) -> PlannedSession:
    assert isinstance(side.session, PlannedSession)
    return side.session


def with_accumulation(side: Side, count: int) -> None:
    """Steps of which every seventh accumulates two micro-batches."""
    for step in range(count):
        side.optimizer.zero_grad()
        if step % 7 == 0:
            with side.no_sync():
                loss_of(side, 10_000 + step).backward()
        loss_of(side, step).backward()
        nn.utils.clip_grad_norm_(side.model.parameters(), 1.0)
        side.optimizer.step()


def switch_inside() -> dict[str, bool]:
    """500 steps with measuring, a trial and a switch inside; then a run that begins with what was found."""
    reference = with_ddp(mlp())
    with_accumulation(reference, 500)
    expected = outcome(reference)
    reference.close()
    results = {}
    for good in (True, False):
        with hurried(good) as folder:
            side = online(drift=False)
            session, first = session_of(side), session_of(side).plan
            with_accumulation(side, 500)
            story = session._pilot.story if session._pilot else []
            found = outcome(side)
            results |= {f"{good}: {what}": right for what, right in compare(expected, found).items()}
            results[f"{good}: tried: {story}"] = any(f"good: {good}" in line for line in story)
            results[f"{good}: kept"] = (len(session.plan.buckets) == 6) == good and len(first.buckets) == 1
            results[f"{good}: once"] = Given.made == (dist.get_rank() == 0)
            kept = session.plan
            side.close()
            again = online(drift=False)
            results[f"{good}: planned from step 1"] = session_of(again).plan.buckets == kept.buckets
            with_accumulation(again, 500)
            results |= {f"{good}, again: {what}": right for what, right in compare(expected, outcome(again)).items()}
            results[f"{good}: nothing to decide"] = Given.made == (dist.get_rank() == 0)
            text = session_of(again).explain(folder / "page.html")
            results[f"{good}: explained: {text}"] = "planned from the first step" in text and "a step every" in text
            results[f"{good}: page"] = (folder / "page.html").exists() == (dist.get_rank() == 0)
            again.close()
    return results


def _slowly(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
    """Compile nothing."""
    time.sleep(0.4)
    return graph.forward


def cuts_of_a_compiled_model() -> dict[str, bool]:
    """Other cuts are tried after bucket sizes; the buckets that follow keep the cuts, and so does the cache."""
    reference = with_ddp(mlp())
    steps(reference, range(300))
    expected = outcome(reference)
    reference.close()
    results = {}
    for good in (True, False):
        with hurried(good, COMPILE_BUDGET=1e9):
            side = online(Chain(*mlp()), drift=False, compile="aot_eager")
            session = session_of(side)
            steps(side, range(300))
            story = session._pilot.story if session._pilot else []
            results |= {f"{good}: {what}": right for what, right in compare(expected, outcome(side)).items()}
            results[f"{good}: the cost is reported: {story}"] = any("compiled in" in line for line in story)
            kept, cuts = session.plan, ("2", "4") if good else None
            results[f"{good}: {kept.cuts}, {len(kept.buckets)}"] = (
                kept.cuts == cuts and (len(kept.buckets) == 6) == good
            )
            results[f"{good}: alike"] = ranks_agree((kept.digest(), story))
            side.close()
            again = online(Chain(*mlp()), drift=False, compile="aot_eager")
            results[f"{good}: remembered"] = session_of(again).plan.cuts == cuts
            again.close()
            plain = online(drift=False)
            results[f"{good}: not where nothing is compiled"] = session_of(plain).plan.cuts is None
            plain.close()
    with hurried():
        side = online(Chain(*mlp()), drift=False, compile={"backend": _slowly})
        steps(side, range(3))
        planning = session_of(side)._pilot
        results["compiling was in the first step"] = planning is not None and planning._run.compile_us > 2e5
        side.close()
    with hurried(COMPILE_BUDGET=1e9, GAIN=-1e9):  # 8 bits are tried at once, and stay
        side = online(Chain(*mlp()), drift=False, compile="eager", accuracy="bounded")
        steps(side, range(200))
        planning = session_of(side)._pilot
        results[f"bounded: {planning and planning.story}"] = planning is not None and (
            any("other cuts" in line for line in planning.story) and ranks_agree(planning.story)
        )
        side.close()
    return results


def buckets_like_ddp() -> dict[str, bool]:
    """Of four models, after DDP has rebuilt its own."""
    results = {}
    for name, (make, batch) in MODELS.items():
        torch.manual_seed(0)
        net, x = make(), batch()
        names = {parameter: name for name, parameter in net.named_parameters()}
        wrapped, sent = DistributedDataParallel(net), []

        def record(_: None, bucket: dist.GradBucket, sent: Any = sent, names: Any = names) -> Any:
            sent.append(tuple(names[parameter] for parameter in bucket.parameters()))
            done: Future[torch.Tensor] = Future()
            done.set_result(bucket.buffer())
            return done

        record.__annotations__.clear()
        wrapped.register_comm_hook(None, record)
        for _ in range(3):
            sent.clear()
            wrapped(x).sum().backward()
        del wrapped
        with mock.patch.dict(os.environ, {"PLANNER": "off"}):
            side = online(net)
            for _ in range(3):
                net(x).sum().backward()
            planned = [bucket.gradients for bucket in session_of(side).plan.buckets]
            side.close()
        results[f"{name}: {planned} {sent}"] = planned == sent
    return results


ENDS = ("the run goes on with", "it is the present one")
"""How a search may end: by a trial, or with a plan that is what the run began with."""


def decided_for_real() -> dict[str, bool]:
    """By the process, with its real trial; how it ends is the machine's affair. Steps have two micro-batches."""
    with hurried(None, Decision=candidates.Decision, WORTH_TRYING=-1e9, MOST_TRIALS=2, POLL_S=0.02) as folder:
        side = online(model())
        session = session_of(side)

        def train(step: int) -> None:
            with side.no_sync():
                loss_of(side, 10_000 + step).backward()
            steps(side, range(step, step + 1))

        for step in range(20_000):
            train(step)
            if session._pilot and any(end in line for line in session._pilot.story for end in ENDS):
                break
        for later in range(step + 1, step + 4):  # right behind a switch no step of the plan has been measured
            train(later)
        story = session._pilot.story if session._pilot else []
        text = session.explain(folder.parent / "page.html")
        page = (folder.parent / "page.html").read_text() if dist.get_rank() == 0 else ""
        side.close()
    return {
        f"{story}": any(any(end in line for end in ENDS) for line in story), "alike": ranks_agree(story),
        f"per step: {text}": "times are of a step of 2 micro-batches" in text,
        "page: where it comes from": "written by hand" not in page,
    }  # fmt: skip


def compiled_unused_and_dropped() -> dict[str, bool]:
    """A compiled model, one of which a part is used in every other step, and a session that nobody detaches."""

    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.always, self.rest, self.calls = mlp(), nn.Linear(3, 3), 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            y: torch.Tensor = self.always(x)
            return y if self.calls % 2 else self.rest(y)

    def compiled() -> nn.Module:
        return torch.compile(mlp(), backend="eager")  # type: ignore[return-value]

    def partly() -> nn.Module:
        torch.manual_seed(0)
        return Sometimes()

    results: dict[str, bool] = {}
    for name, make, options in (("compiled", compiled, {}), ("unused", partly, {"find_unused_parameters": True})):
        reference = with_ddp(make(), **options)
        steps(reference, range(100))
        expected = outcome(reference)
        reference.close()
        with hurried(CAPS_MIB=(1e-4, 25.0), FAR_OFF=0.0):
            side = online(make())
            steps(side, range(100))
            results |= {f"{name}: {what}": right for what, right in compare(expected, outcome(side)).items()}
            known = session_of(side)._pilot
            results[f"{name}: planned"] = known is not None and any("it is tried" in line for line in known.story)
            side.close()
            sizes = (
                any("other sizes of buckets are tried" in line for line in known.story) if known is not None else False
            )
            results["other sizes tried"] = results.get("other sizes tried", False) or sizes
    with hurried():
        side = online()
        steps(side, range(5))
        held = weakref.ref(session_of(side))
        del side
        gc.collect()
        results["freed"] = held() is None
    return results


def caught(action: Callable[[], Any]) -> tuple[Any, list[str]]:
    """What an action returns, and the warnings about caches that it gives."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        value = action()
    return value, [str(one.message) for one in found if issubclass(one.category, CacheWarning)]


def caches() -> dict[str, bool]:
    """Spoiled, of another rank, unwritable, deleted: the run goes on, and rank 0 says so once."""
    results: dict[str, bool] = {}
    with hurried() as folder:
        side = online()
        steps(side, range(150))
        kept = session_of(side).plan
        side.close()
        dist.barrier()
        if dist.get_rank() == 0:
            [path] = folder.iterdir()
            whole = path.read_text()
            path.write_text(whole[: len(whole) // 2])
        results["only rank 0 writes"] = folder.exists() == (dist.get_rank() == 0)

        def train() -> Plan:
            side = online()
            first = session_of(side).plan
            steps(side, range(150))
            side.close()
            return first

        first, said = caught(train)
        results[f"spoiled: {said}"] = len(said) == (dist.get_rank() == 0)
        results["begins with DDP's"] = len(first.buckets) == 1
        first, said = caught(train)
        results[f"written anew: {said}"] = not said and len(first.buckets) == len(kept.buckets)
        if dist.get_rank() == 1:  # another cache, with another plan
            folder.mkdir()
            document = json.loads(whole_of(folder.parent / "rank0"))
            document["plan"]["buckets"] = [
                {"gradients": [n for b in document["plan"]["buckets"] for n in b["gradients"]]}
            ]
            (folder / next((folder.parent / "rank0").iterdir()).name).write_text(json.dumps(document))
        first, said = caught(train)
        results[f"rank 0's counts: {said}"] = not said and len(first.buckets) == len(kept.buckets)
        dist.barrier()
        if dist.get_rank() == 0:
            for path in folder.iterdir():
                path.unlink()
            folder.rmdir()
            folder.write_text("a file in its place")
        dist.barrier()
        first, said = caught(train)
        results[f"unwritable: {said}"] = len(said) == (dist.get_rank() == 0) and len(first.buckets) == 1
    return results


def whole_of(folder: Path) -> str:
    [path] = folder.iterdir()
    return path.read_text()


def ways() -> dict[str, bool]:
    """PLANNER, explicit plans, and what is refused."""
    results: dict[str, bool] = {}
    with hurried():
        for way in ("off", "report"):
            with mock.patch.dict(os.environ, {"PLANNER": way}):
                side = online()
                steps(side, range(150))
                session = session_of(side)
                story = " ".join(session._pilot.story) if session._pilot else ""
                results[f"{way}: DDP's buckets"] = len(session.plan.buckets) == 1
                results[f"{way}: {story}"] = ("PLANNER=auto would try it" in story) == (way == "report")
                text = session.explain(None)
                results[f"{way}, explained: {text}"] = "planner profile" not in text and "profile again" not in text
                side.close()
        side = online()
        for count in (0, 3):
            steps(side, range(count))
            text = session_of(side).explain(None)
            more = f"now, after {count} steps: the first steps warm up"
            results[f"short run, says what is missing: {text}"] = more in text and f"{12 - count} more steps" in text
            results[f"short run, nothing empty: {text}"] = "nothing is predicted of them" in text and "│" not in text
            results[f"short run, no figures of no steps: {text}"] = ("no step of this plan was seen" in text) == (
                count == 0
            )
        side.close()
        with mock.patch.dict(os.environ, {"PLANNER": "fast" if dist.get_rank() == 0 else "auto"}):
            said = raised(online)
        results |= told(said, ["PLANNER: found 'fast', expected one of: off, report, auto"])
        net = mlp()
        profile = profile_of(net)
        plan = lower(make_problem(profile), make_schedule(make_problem(profile), "wfbp"))
        side = online(net, plan=plan)
        results["a plan is executed"] = session_of(side).plan == plan and session_of(side)._pilot is None
        side.close()
        lossy = replace(plan, accuracy="bounded", fallback=plan)
        results |= told(raised(lambda: online(plan=lossy, accuracy="exact")), ["accuracy is bounded, expected at most"])
        results |= told(raised(lambda: online(accuracy="relaxed")), ["planner profile --for relaxed"])
        results |= told(raised(lambda: online(accuracy="bounded", compress="all")), ["expected wire or none"])
        results |= told(raised(lambda: online(compress="wire")), ["compress: found 'wire' with accuracy='exact'"])
        results |= told(raised(lambda: online(nn.Linear(2, 2 + dist.get_rank()))), ["ranks hold different models"])
        results |= told(raised(lambda: online(DistributedDataParallel(mlp()))), ["wrapped in DistributedDataParallel"])
        side = online()
        session_of(side).switch(plan)
        steps(side, range(150))
        results["the caller decides"] = session_of(side).plan == plan and Given.made <= 2
        side.close()
    return results


def interrupted() -> dict[str, bool]:
    """Ctrl-C on all ranks in the middle of a trial, training can go on; an end right behind a trial."""
    done = 40
    reference = with_ddp(mlp())
    steps(reference, range(200))
    expected = outcome(reference)
    reference.close()
    results: dict[str, bool] = {}
    with hurried() as folder:
        side = online()
        session = session_of(side)
        steps(side, range(done))
        pilots = session._pilot
        story = list(pilots.story) if pilots else []
        results[f"in a trial: {story}"] = "is tried" in story[-1] and "good" not in story[-1]
        loss = loss_of(side, done)

        def interrupt(_: torch.Tensor) -> None:
            raise KeyboardInterrupt

        handle = next(side.model.parameters()).register_hook(interrupt)
        try:
            loss.backward()
        except KeyboardInterrupt:
            results["interrupted"] = True
        handle.remove()
        dist.barrier()
        steps(side, range(done, 200))
        results |= compare(expected, outcome(side))
        results["it went on"] = len(session.plan.buckets) == 6
        side.close()
    with hurried() as folder:
        side = online()
        story = known.story if (known := session_of(side)._pilot) else []
        for step in range(200):
            steps(side, range(step, step + 1))
            if any("good" in line for line in story):
                break
        side.close()
        side = online()
        results["what a run found that ended early"] = len(session_of(side).plan.buckets) == 6
        steps(side, range(60))
        story = known.story if (known := session_of(side)._pilot) else []
        results[f"is where the next goes on: {story}"] = any("measured" in line for line in story)
        side.close()
        left = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
        results[f"nothing half-written: {left}"] = not any(name.endswith(".tmp") for name in left)
    return results


def slowed_link() -> dict[str, bool]:
    """A remembered plan of many messages, whose start-up time rises in the run: planned again, and faster."""
    reference = with_ddp(model())
    steps(reference, range(600))
    expected = outcome(reference)
    reference.close()
    results: dict[str, bool] = {}
    with linked() as link, hurried(None, Decision=candidates.Decision, POLL_S=0.02, MOST_TRIALS=2) as folder:
        net = model()
        problem = make_problem(profile_of(net))
        plan = lower(problem, make_schedule(problem, "wfbp"))
        side = online(model(), plan=plan)
        steps(side, range(60))
        step_us = session_of(side).report().every_us
        side.close()
        if dist.get_rank() == 0:
            remember(folder, net, plan, step_us)
        side = online(net)
        session = session_of(side)
        results["begins with what is remembered"] = len(session.plan.buckets) == len(plan.buckets)
        steps(side, range(100))
        link.delay_s = DELAY_S / 2
        slow_us = 0.0
        for step in range(100, 600):
            steps(side, range(step, step + 1))
            if step == 140:
                slow_us = session.report().iteration_us
        results |= compare(expected, outcome(side))
        story = session._pilot.story if session._pilot else []
        results[f"planned again: {story}"] = any("planned again" in line for line in story)
        results[f"merged: {len(session.plan.buckets)}"] = len(session.plan.buckets) < len(plan.buckets)
        results[f"faster: {slow_us} {session.report().iteration_us}"] = session.report().iteration_us < slow_us
        side.close()
    return results


def remember(
    folder: Path, net: nn.Module, plan: Plan, step_us: float, kind: type[torch.optim.Optimizer] = torch.optim.SGD,
    allow: tuple[str, ...] = (),
) -> None:  # fmt: skip
    """Leave a plan as an earlier run would have."""
    known = replace(plan, model=replace(plan.model, fingerprint=model_fingerprint(net)))
    wanted = Key(
        model=model_fingerprint(net), ranks=2, nodes=1, backend="gloo", device="cpu", cores=os.cpu_count() or 0,
        torch=torch.__version__, planner=planner.__version__, accuracy="exact", allow=allow,
        optimizer=f"{kind.__module__}.{kind.__qualname__}",
    )  # fmt: skip
    Cache(folder).write(Remembered(key=wanted, plan=known, profile=None, step_us=step_us, story=()))


def plans_of_others() -> dict[str, bool]:
    """What the cache holds is no plan that this run could have found: a warning, and DDP's buckets on all ranks."""
    problem = make_problem(profile_of(mlp()))
    plan = lower(problem, make_schedule(problem, "wfbp"))
    narrow = CompressorSpec(name="wire", dtype="bfloat16")
    first, *rest = plan.buckets
    sharded = replace(plan, interface=("sharded-step",), updates=UpdatePlan(step=StepPlan(sharded=True)))
    sgd, adafactor, allow = torch.optim.SGD, torch.optim.Adafactor, ("sharded-step",)
    spoiled: dict[str, tuple[Plan, type[torch.optim.Optimizer], tuple[str, ...]]] = {
        "bounded": (replace(plan, accuracy="bounded", buckets=(replace(first, compressor=narrow), *rest)), sgd, ()),
        "narrow, and says exact": (replace(plan, buckets=(replace(first, compressor=narrow), *rest)), sgd, ()),
        "relaxed": (replace(plan, accuracy="relaxed", delay=DelaySpec(steps=2)), sgd, ()),
        "delayed, and says exact": (replace(plan, delay=DelaySpec(steps=2)), sgd, ()),
        "local updaters": (replace(plan, accuracy="relaxed", local_async=LocalAsyncSpec(updaters=2)), sgd, ()),
        "sharded": (sharded, sgd, ()),
        "sharded, for another optimizer": (sharded, adafactor, allow),
        "no collective": (replace(plan, buckets=(replace(first, collective="all_reduse"), *rest)), sgd, ()),
        "no algorithm": (replace(plan, buckets=(replace(first, algorithm="librar"), *rest)), sgd, ()),
        "a gradient less": (replace(plan, buckets=tuple(rest)), sgd, ()),
    }
    results: dict[str, bool] = {}
    with hurried() as folder:
        for name, (left, kind, allowed) in spoiled.items():
            if dist.get_rank() == 0:
                remember(folder, mlp(), left, 1.0, kind, allowed)

            def train(kind: type[torch.optim.Optimizer] = kind, allowed: tuple[str, ...] = allowed) -> Plan:
                net = mlp()
                side = Side(net, net, (held := kind(net.parameters(), lr=0.01)), None)
                side.session = planner.attach(net, held, timeout_s=60, allow=allowed)
                steps(side, range(2))
                found = session_of(side).plan
                side.close()
                return found

            found, said = caught(train)
            results[f"{name}: {said}"] = len(said) == (dist.get_rank() == 0)
            results[f"{name}: DDP's buckets"] = len(found.buckets) == 1 and found.accuracy == "exact"
    return results


def other_ranks(folder: str, measured_on: int | None, good: bool = True) -> dict[str, bool]:
    """A run whose cache is empty; or one that finds there what a run on so many ranks measured, and tries its plan."""
    torch.set_num_threads(1)
    reference = with_ddp(mlp())
    steps(reference, range(150))
    expected = outcome(reference)
    reference.close()
    mine = folder if dist.get_rank() == 0 else f"{folder}/of_rank_{dist.get_rank()}"
    with hurried(good), mock.patch.dict(os.environ, {"PLANNER_CACHE": mine}):
        side = online(drift=False)
        session = session_of(side)
        results = {"begins with DDP's": len(session.plan.buckets) == 1}
        marks = []
        for step in range(150):
            steps(side, range(step, step + 1))
            marks.append(session.plan.predicted is not None and session.plan.predicted.extrapolated is True)
        story = session._pilot.story if session._pilot else []
        results |= compare(expected, outcome(side), tolerance=1e-5) | {"alike": ranks_agree([story, marks])}
        says = f"measured by an earlier run on {measured_on} ranks, extrapolated to 2, until it is measured here"
        results[f"said: {story}"] = any(says in line for line in story) == (measured_on is not None)
        # What has won is not tried again; what has lost is, once it is decided on what was measured here.
        tried = sum("it is tried" in line for line in story)
        results[f"tried: {tried}"] = tried == (2 if measured_on is not None and not good else 1)
        results["marked in its trial"] = any(marks) == (measured_on is not None)
        results["not marked once it is measured here"] = not marks[-1]
        results["kept where it is faster"] = (len(session.plan.buckets) == 6) == good
        side.close()
        again = online(drift=False)
        results["the next run knows"] = session_of(again).plan.buckets == session.plan.buckets
        again.close()
    return results


class Here:
    """In place of the process that decides: decides at once."""

    def __init__(self, request: dict[str, Any]) -> None:
        self._answer = deciding.decide(request)

    def poll(self) -> dict[str, Any]:
        return self._answer

    def close(self) -> None: ...


def wide() -> nn.Module:
    """A model of 270 KB."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 3))


SLOW_S_PER_BYTE = 1.5e-7


def decide(side: Side, session: PlannedSession) -> None:
    """Train until the run has decided, at most 400 steps."""
    for step in range(400):
        steps(side, range(step, step + 1))
        if session._pilot is None or session._pilot.stage is None:
            break


def bounded_on_a_slow_link() -> dict[str, bool]:
    """The run ends with narrow buckets, which the next run of the class begins with."""
    results: dict[str, bool] = {}
    with linked() as link, hurried(None, Decision=Here, POLL_S=1e-6, MOST_TRIALS=1) as folder:
        link.s_per_byte = SLOW_S_PER_BYTE
        side = online(wide(), accuracy="bounded", drift=False)
        session = session_of(side)
        assert session._pilot is not None
        decide(side, session)
        steps(side, range(400, 405))
        found, story = session.plan, session._pilot.story
        dtypes = {bucket.compressor.dtype for bucket in found.buckets if not bucket.dense}
        results[f"narrow: {dtypes} {story}"] = found.accuracy == "bounded" and bool(dtypes - {None})
        first = [line.partition(": ")[2] for line in story[:2]]
        results[f"8 bits before anything is timed: {first}"] = "with DDP's buckets in int8" in first[0]
        results["no low rank, no top-k"] = {bucket.compressor.name for bucket in found.buckets} <= {"none", "wire"}
        results["alike"] = ranks_agree([story, found.digest()])
        results["against the best exact plan"] = found.fallback is not None and found.fallback.accuracy == "exact"
        summary = session._pilot.summary(ended=False)
        results[f"chose what took the least time: {summary}"] = "the bounded plan" in summary or "in int8" in summary
        whole = tuple(PlanBucket(gradients=one.gradients, size_bytes=one.size_bytes) for one in found.buckets)
        relaxed = replace(found, buckets=whole)
        with mock.patch.object(session._monitor, "judge", side_effect=[relaxed, *[None] * 9]):
            steps(side, range(405, 410))
        session._pilot._run.take_guarded()
        harmed = {name for one in found.buckets if not one.dense for name in one.gradients}
        results["what did harm stays whole"] = session._pilot._run.harmed == harmed
        side.close()
        again = online(wide(), accuracy="bounded", drift=False)
        first = session_of(again).plan
        steps(again, range(60))
        results["the next run begins with it"] = first.buckets == found.buckets == session_of(again).plan.buckets
        results["and tries nothing"] = session_of(again)._monitor.trial is None
        again.close()
        exact = online(wide(), drift=False)
        results["exact runs do not"] = session_of(exact).plan.accuracy == "exact"
        exact.close()
        files = len(list(folder.glob("*.json"))) if folder.exists() else 0
        results[f"one file: {files}"] = files == (dist.get_rank() == 0)
    return results


def bounded_on_a_fast_link() -> dict[str, bool]:
    """A link that takes 3 ms a message of any size: narrow messages win nothing, and the run stays exact."""
    results: dict[str, bool] = {}
    with linked() as link, hurried(None, Decision=Here, POLL_S=1e-6, MOST_TRIALS=1, FAR_OFF=1e9):
        link.delay_s = 0.003
        side = online(accuracy="bounded", drift=False)
        session = session_of(side)
        assert session._pilot is not None
        decide(side, session)
        results[f"exact: {session._pilot.story}"] = session.plan.accuracy == "exact" and session._pilot.stage is None
        results["alike"] = ranks_agree([session._pilot.story, session.plan.digest()])
        side.close()
    return results


def bounded_is_reported() -> dict[str, bool]:
    """PLANNER=report, without a class: what bounded plans would bring; nothing is switched."""
    results: dict[str, bool] = {}
    environment = mock.patch.dict(os.environ, {"PLANNER": "report"})
    with environment, linked() as link, hurried(None, Decision=Here, POLL_S=1e-6, FAR_OFF=1e9):
        link.s_per_byte = SLOW_S_PER_BYTE
        side = online(wide(), drift=False)
        steps(side, range(90))
        session = session_of(side)
        story = session._pilot.story if session._pilot else []
        results[f"reported: {story}"] = any("accuracy='bounded' would try it" in line for line in story)
        results["exact"] = session.plan.accuracy == "exact"
        side.close()
    return results


def outer_on_a_slow_link() -> dict[str, bool]:
    """The run finds outer steps, behind their synchronous ones, and the next run of the class begins with them."""
    results: dict[str, bool] = {}
    with ExitStack() as stack:
        for module in (opening, measured_step):
            stack.enter_context(mock.patch.object(module, "count_nodes", return_value=dist.get_world_size()))
        stack.enter_context(mock.patch.object(outer_steps, "WARMUP_STEPS", 60))
        link = stack.enter_context(linked())
        stack.enter_context(hurried(None, Decision=Here, POLL_S=1e-6, MOST_TRIALS=1))
        link.s_per_byte = SLOW_S_PER_BYTE
        side = online(wide(), accuracy="relaxed", allow="outer", drift=False)
        session = session_of(side)
        assert session._pilot is not None
        for step in range(800):
            steps(side, range(step, step + 1))
            if session._pilot.stage is None:
                break
        steps(side, range(800, 801))
        found, story = session.plan, session._pilot.story
        steps(side, range(801, 805 + 2 * (found.outer.every if found.outer else 0)))
        results[f"outer: {story}"] = found.outer is not None and session._mode.own_weights
        results["behind steps that the guard has measured"] = bool(session._mode.period.distances.base)
        results["not in its synchronous steps"] = session.step > 60
        results["alike"] = ranks_agree([story, found.digest()])
        results["against the best exact plan"] = found.fallback is not None and found.fallback.accuracy == "exact"
        run = session._pilot._run
        stack.enter_context(mock.patch.multiple(distance_guard, MOVEMENT_BOUND=0.0, SHARE_BOUND=0.0, PULLS=1))
        steps(side, range(1000, 1050 + 5 * (found.outer.every if found.outer else 0)))
        run.take_guarded()
        results["the guard ends them for good"] = run.too_far and session.plan == found.fallback == run.present
        results["what they saved is gone"] = run.ratio == run.exact_ratio
        side.close()
        again = online(wide(), accuracy="relaxed", allow="outer", drift=False)
        results["the next run begins with it"] = session_of(again).plan.outer == found.outer
        again.close()
    return results


CHECKS: dict[str, Callable[[], dict[str, bool]]] = {
    check.__name__: check
    for check in (
        switch_inside, cuts_of_a_compiled_model, compiled_unused_and_dropped, buckets_like_ddp, decided_for_real,
        caches, ways, interrupted,
        slowed_link, plans_of_others, bounded_on_a_slow_link, bounded_on_a_fast_link, bounded_is_reported,
        outer_on_a_slow_link,
    )
}  # fmt: skip


def run(names: list[str]) -> dict[str, dict[str, bool]]:
    """Return what the checks of these names found."""
    torch.set_num_threads(1)
    return {name: CHECKS[name]() for name in names}
