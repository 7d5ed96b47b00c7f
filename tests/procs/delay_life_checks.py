"""What the ranks of the tests of plans with delay do: checkpoints, changes of plans, guards, and users' habits."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import local_async_jobs
import torch
import torch.distributed as dist
from delay_checks import CHECKS as DELAY_CHECKS
from delay_checks import FEW, Net, attach, batch, close, expected_of, net_loss, plan_of, train
from delay_reference import Sgd
from delay_state_checks import CHECKS as STATE_CHECKS
from delay_workers_checks import CHECKS as WORKER_CHECKS
from step_checks import raised
from torch import Tensor, nn

import runtime
from planner.jobs.training import Trainer, build, weights_sha256
from runtime.delay.delayed import Delayed
from runtime.modes import distance_guard
from runtime.monitor import pace
from runtime.plan import CompressorSpec, DelaySpec, PlanBucket
from runtime.session.session import Session


def _started(spec: DelaySpec = FEW) -> tuple[nn.Module, torch.optim.Optimizer, Session]:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-3)
    return model, optimizer, attach(model, optimizer, spec, 2)


def resumed() -> dict[str, bool]:
    """A checkpoint in the warm-up, at a pull and between two changes nothing, bit for bit."""
    results = {}
    for k, at in ((1, 9), (2, 3), (2, 10), (2, 11), (3, 11), (3, 13)):
        spec = DelaySpec(steps=k, warmup_steps=6)
        straight, optimizer, session = _started(spec)
        train(straight, optimizer, net_loss, range(20))
        session.detach()
        model, optimizer, session = _started(spec)
        train(model, optimizer, net_loss, range(at))
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), session.state_dict()))
        session.detach()
        model, optimizer, session = _started(spec)
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        session.load_state_dict(saved[2])
        train(model, optimizer, net_loss, range(at, 20))
        results[f"k={k} at {at}"] = session.step == 20 and close(model.parameters(), list(straight.parameters()), 0.0)
        session.detach()
    return results


def elsewhere() -> dict[str, bool]:
    """Other ranks, buckets, or no state of a run with delay are refused; all ranks' states are as good as one's own."""
    model, optimizer, session = _started()
    train(model, optimizer, net_loss, range(11))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, session.state_dict())
    session.detach()
    rank, own = dist.get_rank(), everyone[dist.get_rank()]
    other = own["delay"] | {"buckets": [[name for name, _ in model.named_parameters()]]}
    wrong: Mapping[str, tuple[Any, str]] = {
        "an exact plan's": ({"plan": "x", "ranks": dist.get_world_size()}, "found no state of a run with delay"),
        "another delay's": (
            own | {"delay": own["delay"] | {"spec": {"steps": 9}}},
            "with the delay {'steps': 9}",
        ),
        "another rank's": (everyone[rank - 1], f"this is rank {rank} of {len(everyone)}; expected its own"),
        "some ranks'": (everyone[1:], "expected its own, or those of all ranks in order: go on as the run began"),
        "of a run with one rank": ([everyone[0] | {"ranks": 1}], "found the states of ranks [0] of 1, this is rank"),
        "other workers'": (own | {"delay": own["delay"] | {"workers": 9}}, "a run with 9 workers, expected"),
        "other buckets'": (own | {"delay": other}, "found the state of a run with other buckets, expected those of"),
        "nothing": ({}, "found no state of a run with delay"),
    }
    model, optimizer, session = _started()
    results = {}
    for what, (state, words) in wrong.items():
        said = raised(lambda state=state: session.load_state_dict(state))
        results[f"{what} is refused"] = said.startswith("InputError") and words in said
    session.load_state_dict(everyone)
    results["all ranks'"] = session.step == 11
    session.detach()
    return results


def not_finite() -> dict[str, bool]:
    """A gradient that is not finite on one rank is no step of the global weights, on all ranks alike."""
    model, optimizer, session = _started()
    train(model, optimizer, net_loss, range(9))
    with session.global_weights():
        before = [p.detach().clone() for p in model.parameters()]
    optimizer.zero_grad()
    factor = float("nan") if dist.get_rank() == 0 else 1.0
    (net_loss(model, dist.get_rank(), 9) * factor).backward()
    with session.global_weights():
        same = close(model.parameters(), before, 0.0)
    session.detach()
    return {"skipped": same}


def left() -> dict[str, bool]:
    """A change of plans ends the delay: weights and momenta are the global ones everywhere, and no update is lost."""
    model, optimizer, session = _started()
    train(model, optimizer, net_loss, range(10))
    session.switch(plan_of(model, None, 4), at_step=11)
    train(model, optimizer, net_loss, range(10, 11))
    reference = expected_of(Net, net_loss, FEW, Sgd(lambda _: 0.02, 0.9, 1e-3), 11)
    results = {"global at once": close(model.parameters(), reference.weights, 1e-9)}
    plain = replace(FEW, warmup_steps=1000)
    reference.spec, reference.local = plain, [[w.clone() for w in reference.weights] for _ in reference.local]
    for step in range(11, 15):
        reference.step(step)
    train(model, optimizer, net_loss, range(11, 15))
    results["goes on with its momentum"] = close(model.parameters(), reference.weights, 1e-9)
    model, optimizer, session = _started()
    train(model, optimizer, net_loss, range(10))
    session.switch(plan_of(model, None, 4))  # after the optimizer's step
    reference = expected_of(Net, net_loss, FEW, Sgd(lambda _: 0.02, 0.9, 1e-3), 10)
    results["at once: global"] = close(model.parameters(), reference.weights, 1e-9)
    reference.spec, reference.local = plain, [[w.clone() for w in reference.weights] for _ in reference.local]
    reference.step(10)
    train(model, optimizer, net_loss, range(10, 11))
    results["at once: goes on"] = close(model.parameters(), reference.weights, 1e-9)
    results["at once: nothing of the delay is saved"] = "delay" not in session.state_dict()
    session.detach()
    model, optimizer, session = _started()
    train(model, optimizer, net_loss, range(2))
    session.switch(plan_of(model, None, 1))  # in the warm-up
    train(model, optimizer, net_loss, range(2, 9))
    alone = expected_of(Net, net_loss, plain, Sgd(lambda _: 0.02, 0.9, 1e-3), 9)
    results["in the warm-up: none begins"] = close(model.parameters(), alone.weights, 1e-9)
    results["delays cannot begin late"] = "whose warm-up begins with a run" in raised(
        lambda: session.switch(plan_of(model, FEW))
    )
    session.detach()
    return results


def guarded() -> dict[str, bool]:
    """Ranks that are too far from each other shorten the delay, then go on without, all at one step."""
    model, optimizer, session = _started(DelaySpec(steps=4, warmup_steps=8))
    seen = []
    with (
        warnings.catch_warnings(record=True) as caught,
        patch.multiple(distance_guard, MOVEMENT_BOUND=0.0, SHARE_BOUND=0.0, PULLS=2),
    ):
        warnings.simplefilter("always")
        for step in range(60):
            train(model, optimizer, net_loss, range(step, step + 1))
            assert isinstance(session._mode, Delayed)
            seen.append((session._mode.steps, session._mode.stage))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (seen, [p.detach() for p in model.parameters()]))
    texts = [str(one.message) for one in caught if one.category is runtime.AccuracyWarning]
    session.detach()
    return {
        "alike": all(one[0] == seen for one in everyone),
        "shortened, then synchronous": list(dict.fromkeys(k for k, _ in seen)) == [4, 2, 1, 0],
        "said on rank 0": (len(texts) == 3 and "every 2 steps" in texts[0] and "steps are synchronous" in texts[2])
        if dist.get_rank() == 0
        else not texts,
        "same weights at the end": all(close(one[1], everyone[0][1], 0.0) for one in everyone),
        "stage": seen[-1][1] == "synchronous",
    }


def _valley(steps: int, lr: float, k: int, *, guard: bool) -> tuple[float, list[str], str]:
    """(distance from the valley's floor, what was said, the stage) after some steps down a noisy quadratic valley."""
    model = nn.Linear(8, 1, bias=False, dtype=torch.float64)
    with torch.no_grad():
        model.weight.fill_(3.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    plan = plan_of(model, DelaySpec(steps=k, warmup_steps=48))
    session = runtime.attach(model, optimizer, plan, drift=False, guard=guard)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(steps):
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(dist.get_rank() + 9 * step)
            noise = torch.randn(1, 8, dtype=torch.float64, generator=generator)
            (0.5 * (model.weight - 1.0 + 0.02 * noise) ** 2).sum().backward()
            optimizer.step()
    assert isinstance(session._mode, Delayed)
    with session.global_weights():
        apart = float((model.weight.detach() - 1.0).norm())
    said, stage = [str(one.message) for one in caught if one.category is runtime.AccuracyWarning], session._mode.stage
    session.detach()
    return apart, said, stage


def diverging() -> dict[str, bool]:
    """A learning rate that is right, and ten times that, which only synchronous steps stand."""
    if dist.get_world_size() != 2:
        return {"two ranks show it": True}
    results = {}
    for k in (1, 2, 3, 4):
        apart, said, stage = _valley(100, 0.02, k, guard=True)
        results[f"k={k}: a healthy run is left alone"] = not said and stage == "delayed" and apart < 0.5
    for k in (1, 2):
        apart, said, stage = _valley(200, 0.2, k, guard=True)
        last = ["steps are synchronous" in text for text in said[-1:]]
        results[f"k={k}: what diverges is stopped"] = stage == "synchronous" and last == [True] * (dist.get_rank() == 0)
        results[f"k={k}: and gets well"] = apart < 0.5
        results[f"k={k}: without the guard it does not"] = not _valley(200, 0.2, k, guard=False)[0] < 1e3
    return results


class Told:
    """A clock that says what it is told, in microseconds."""

    now_us = 0.0

    def mark(self) -> float:
        """Now."""
        return self.now_us

    def between_us(self, start: float, end: float) -> float:
        """How long that was."""
        return end - start


@patch.multiple(pace, TURNS=4)
def paced() -> dict[str, bool]:
    """Delayed steps that take longer than the warm-up's are given up by all ranks at one step; shorter ones are not."""
    results = {}
    for name, early_us, late_us in (("slower", 5e3, 15e3), ("faster", 25e3, 5e3)):
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-3)
        exact = plan_of(model, None, 4)
        session = attach(model, optimizer, DelaySpec(steps=2, warmup_steps=28), 2, fallback=exact)
        delay = session._mode
        assert isinstance(delay, Delayed)
        clock = delay.pace._clock = Told()
        stages: list[str] = []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(50):
                train(model, optimizer, net_loss, range(step, step + 1))
                clock.now_us += early_us if delay.stage == "warm-up" else late_us
                stages.append(delay.stage)
        said = [str(one.message) for one in caught if one.category is runtime.FallbackWarning]
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (stages, [p.detach() for p in model.parameters()]))
        alike = all(seen == stages and close(weights, everyone[0][1], 0.0) for seen, weights in everyone)
        verdict = delay.pace.verdict
        assert verdict is not None
        if name == "slower":
            results["slower: all go back"] = alike and stages[-1] == "synchronous" and not verdict.good
            results["slower: rank 0 says so"] = ["are not faster" in text for text in said] == [True] * (
                dist.get_rank() == 0
            )
            results["slower: to the exact plan"] = session.plan == exact
        else:
            results["faster: stays"] = stages[-1] == "delayed" and verdict.good and not said
        session.detach()
    return results


@patch.multiple(distance_guard, MOVEMENT_BOUND=1e9)
def habits() -> dict[str, bool]:
    """Steps that are left out, accumulated gradients, unused parameters, closures."""
    model, optimizer, session = _started(DelaySpec(steps=1, warmup_steps=2))
    train(model, optimizer, net_loss, range(5))
    for step in range(5, 9):  # no optimizer's step, on one rank alone
        optimizer.zero_grad()
        net_loss(model, dist.get_rank(), step).backward()
        if dist.get_rank() != 0:
            optimizer.step()
    with session.no_sync():
        net_loss(model, dist.get_rank(), 9).backward()
    results = {"accumulating is no step": session.step == 9}
    train(model, optimizer, net_loss, range(10, 12))
    model.two.requires_grad_(True)
    optimizer.zero_grad()
    model.one(batch(0, 0)[0]).sum().backward()
    results["unused stay none"] = model.two.weight.grad is None
    optimizer.step()
    results["closures are refused"] = "found a closure" in raised(lambda: optimizer.step(lambda: 0.0))
    with session.global_weights():
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, [p.detach() for p in model.parameters()])
    results["global weights are the same"] = all(close(one, everyone[0], 0.0) for one in everyone)
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    results["new groups are refused"] = "2 groups of parameters" in raised(optimizer.step)
    session.detach()
    return results


def other_optimizers() -> dict[str, bool]:
    """Whatever trains the weights in place of the attached optimizer is refused on all ranks, in the warm-up too."""
    results = {}
    for stage, spec in {"warm-up": FEW, "delayed": DelaySpec(steps=2, warmup_steps=0)}.items():
        model, optimizer, session = _started(spec)
        other = torch.optim.SGD(model.parameters(), lr=0.1)
        with warnings.catch_warnings(action="ignore"):
            said = raised(lambda model=model, other=other: train(model, other, net_loss, range(1)))
        results[f"{stage}: another one"] = "found a step of another optimizer (SGD) that holds one.weight" in said
        train(model, optimizer, net_loss, range(1, 3))
        optimizer.param_groups[0]["params"] = optimizer.param_groups[0]["params"][1:]
        results[f"{stage}: other parameters"] = "found other parameters in the optimizer's groups" in raised(
            optimizer.step
        )
        session.detach()
        train(model, other, net_loss, range(2))  # nobody is in the way any more
        for by in ("data", "no_grad"):
            model, optimizer, session = _started(spec)
            train_by_hand = partial(_by_hand, model, through_data=by == "data")
            train_by_hand(range(1))
            results[f"{stage}: by hand, {by}"] = "and the optimizer given to attach made no step" in raised(
                lambda hand=train_by_hand: hand(range(1, 2))
            )
            session.detach()
    return results


def _by_hand(model: nn.Module, steps: range, *, through_data: bool) -> None:
    for step in steps:
        model.zero_grad()
        net_loss(model, dist.get_rank(), step).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                (parameter.data if through_data else parameter).sub_(parameter.grad, alpha=0.1)


def moved() -> dict[str, bool]:
    """Weights that a script puts in place for good are refused while ranks are delayed; for a while they may be."""
    model, optimizer, session = _started()
    assert isinstance(model, Net)
    train(model, optimizer, net_loss, range(2))
    model.one.weight.data = model.one.weight.data.clone()  # in the warm-up every rank has the same weights
    train(model, optimizer, net_loss, range(2, 9))
    before, average = model.one.weight.data, torch.zeros_like(model.one.weight)
    model.one.weight.data = average
    model(batch(0, 0)[0])
    net_loss(model, dist.get_rank(), 9).backward()
    said = raised(optimizer.step)
    model.one.weight.data = before
    optimizer.step()
    train(model, optimizer, net_loss, range(10, 12))
    session.switch(plan_of(model, None))
    model.one.weight.data = average
    train(model, optimizer, net_loss, range(12, 13))
    session.detach()
    return {"refused": "one.weight.data was replaced since the last step" in said, "goes on": bool(average.any())}


def untouched() -> dict[str, bool]:
    """Parameters that no rank uses any more stay what they were, here and at their owners; a backward that fails on all
    ranks is no step."""
    model, optimizer, session = _started()
    train(model, optimizer, net_loss, range(8))
    with session.global_weights():
        before = [p.detach().clone() for p in model.two.parameters()]
    for step in range(8, 14):
        optimizer.zero_grad()
        model.one(batch(dist.get_rank(), step)[0]).square().mean().backward()
        optimizer.step()
    with session.global_weights():
        results = {"unused stay": close(model.two.parameters(), before, 0.0)}
        weights = [p.detach().clone() for p in model.parameters()]
    handle = model.one.weight.register_hook(_fail)
    optimizer.zero_grad()
    with contextlib.suppress(ArithmeticError):
        net_loss(model, dist.get_rank(), 14).backward()
    handle.remove()
    with session.global_weights():
        results["no step"] = close(model.parameters(), weights, 0.0)
    train(model, optimizer, net_loss, range(14, 18))
    session.detach()
    return results


def _fail(_gradient: Tensor) -> None:
    raise ArithmeticError("on purpose")


def without_warm_up() -> dict[str, bool]:
    """It is said, on one rank, unless nothing is to be guarded."""
    said, cost = [], runtime.AccuracyCostWarning
    for guard in (True, False):
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            plan = plan_of(model, DelaySpec(steps=1, warmup_steps=0))
            runtime.attach(model, optimizer, plan, drift=False, guard=guard).detach()
        said.append(
            [
                one.category is runtime.AccuracyWarning and "500" in str(one.message)
                for one in caught
                if one.category is not cost
            ]
        )
    return {"said": said == [[True] if dist.get_rank() == 0 else [], []]}


def refused() -> dict[str, bool]:
    """What a plan with delay cannot be, in words."""
    model = Net()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    topk = CompressorSpec(name="topk", density=0.5)
    bucket = PlanBucket(
        gradients=tuple(n for n, _ in model.named_parameters()), collective="sparse", algorithm="flat", compressor=topk
    )
    cases: dict[str, tuple[DelaySpec, Any, dict[str, Any]]] = {
        "AdamW": (FEW, torch.optim.AdamW(model.parameters()), {}),
        "no optimizer": (FEW, None, {}),
        "SGD with dampening": (FEW, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5, dampening=0.1), {}),
        "SGD with maximize": (FEW, torch.optim.SGD(model.parameters(), lr=0.1, maximize=True), {}),
        "the delay has steps 0 and warmup_steps 4": (replace(FEW, steps=0), sgd, {}),
        'expected "relaxed"': (FEW, sgd, {"accuracy": "exact"}),
        "expected a multiple of its 3 steps, such as 6": (DelaySpec(steps=3, warmup_steps=4), sgd, {}),
        "is 'sgd'; expected 'glu': leave it out (what was 'sgd' is alpha 1 with beta 0)": (
            replace(FEW, local_update="sgd"),
            sgd,
            {},
        ),
        "is sent by sparse/naive_all_gather": (FEW, sgd, {"buckets": (replace(bucket, algorithm="naive_all_gather"),)}),
        "SGD with fused": (FEW, torch.optim.SGD(model.parameters(), lr=0.1, fused=True), {}),
        "the gradient one.weight, whose parameter is not in": (
            FEW,
            torch.optim.SGD([model.one.bias, *model.two.parameters()], lr=0.1),
            {},
        ),
    }
    results = {}
    for words, (spec, optimizer, changes) in cases.items():
        found = raised(lambda o=optimizer, s=spec, c=changes: attach(model, o, s, **c))
        results[words] = found.startswith("PlanMismatch") and words in found
    return results


def run_by_planner() -> dict[str, bool]:
    """`planner run` past the warm-up ends with one hash on all ranks, whose own weights differ."""
    ranks = dist.get_world_size()
    plan = local_async_jobs.plan_of(None, ranks, accuracy="relaxed", delay=DelaySpec(steps=3, warmup_steps=3))
    job = f"{Path(local_async_jobs.__file__).with_name('local_async_job.py')}:job"
    trainer = Trainer(build(job, "cpu"), plan)
    for step in range(8):
        trainer.step(trainer.built.batch(step))
    own = weights_sha256(trainer.built.model)
    everyone: list[Any] = [None] * ranks
    dist.all_gather_object(everyone, (trainer.close().weights_sha256, own))
    return {"one hash": len({one[0] for one in everyone}) == 1, "own weights": len({one[1] for one in everyone}) > 1}


CHECKS: dict[str, Callable[[], dict[str, bool]]] = DELAY_CHECKS | WORKER_CHECKS | STATE_CHECKS | {
    check.__name__: check
    for check in (
        resumed, elsewhere, not_finite, left, guarded, diverging, paced, habits, other_optimizers, moved, untouched,
        without_warm_up, refused, run_by_planner,
    )
}  # fmt: skip


@patch.multiple(pace, TURNS=10**6)
def run(names: list[str]) -> dict[str, dict[str, bool]]:
    """Return what these checks found, in one start of ranks; how long steps take says nothing unless it is set."""
    return {name: CHECKS[name]() for name in names}
