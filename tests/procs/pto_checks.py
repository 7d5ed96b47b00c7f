"""What the ranks of the PTO tests do: norms shared, against norms that every rank computes for itself."""

from __future__ import annotations

import copy
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from session_checks import convnet, digest, images, plan_of
from step_checks import raised
from torch import Tensor, nn
from torch.nn import functional

import planner
import runtime
from runtime.errors import InputError
from runtime.optimizers import LAMB, LARS, LayerwiseOptimizer
from runtime.optimizers.pto import parallel_tensor_op
from runtime.plan import NormPlan, UpdatePlan

STEPS = 4

MAKERS: dict[str, Callable[[Any], LayerwiseOptimizer]] = {
    "lars": lambda parameters: LARS(parameters, lr=0.3, weight_decay=1e-3, trust_coefficient=0.02),
    "lars nesterov": lambda parameters: LARS(parameters, lr=0.3, nesterov=True, exclude_1d=False),
    "lars plain": lambda parameters: LARS(parameters, lr=0.3, momentum=0.0),
    "lamb": lambda parameters: LAMB(parameters, lr=0.02),
    "lamb everywhere": lambda parameters: LAMB(parameters, lr=0.02, exclude_1d=False, bias_correction=False),
}

SHAPES = ((300, 20), (20,), (64, 3, 3, 3), (), (50, 50), (0, 4), (1, 1), (7, 1000))


def layers(dtype: torch.dtype) -> list[nn.Parameter]:
    """The same on every rank."""
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def run(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], first: int = 0, lacking: int = -1) -> None:
    """Some steps with gradients that are the same on every rank; one parameter may lack its own."""
    for step in range(first, first + STEPS):
        generator = torch.Generator().manual_seed(100 + step)
        for index, parameter in enumerate(parameters):
            gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            parameter.grad = None if index == lacking else gradient
        optimizer.step()


def same(one: list[nn.Parameter], other: list[nn.Parameter]) -> bool:
    """Bit for bit."""
    return all(map(torch.equal, one, other))


def bits_as_alone() -> dict[str, bool]:
    """Every optimizer and dtype: shared, alone, and going on after sharing has ended."""
    results = {}
    for name, make in MAKERS.items():
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            for lacking in (-1, 4):
                shared, alone = layers(dtype), layers(dtype)
                optimizer, reference = make(shared), make(alone)
                optimizer.share_norms(timeout_s=30)
                assert optimizer.sharing is not None
                run(optimizer, shared, lacking=lacking)
                run(reference, alone, lacking=lacking)
                equal = same(shared, alone)
                optimizer.stop_sharing()
                run(optimizer, shared, first=STEPS)
                run(reference, alone, first=STEPS)
                results[f"{name} {dtype} {lacking}"] = equal and same(shared, alone)
    return results


def states_know_nothing_of_it() -> bool:
    """A state of a run that shared norms goes on without, and the reverse."""
    shared, alone = layers(torch.float32), layers(torch.float32)
    first, second = MAKERS["lamb"](shared), MAKERS["lamb"](alone)
    first.share_norms()
    run(first, shared)
    run(second, alone)
    one, other = first.state_dict(), copy.deepcopy(second.state_dict())
    first.load_state_dict(other)
    second.load_state_dict(one)
    run(first, shared, first=STEPS)
    run(second, alone, first=STEPS)
    first.stop_sharing()
    return same(shared, alone)


def shares() -> dict[str, Any]:
    """Who computes what, and what travels."""
    optimizer = LARS(layers(torch.float32), lr=0.1)
    optimizer.share_norms()
    split = optimizer.sharing
    assert split is not None
    found = {"owners": split.owners, "mine": split.mine, "bytes": split.message_bytes}
    again = raised(optimizer.share_norms)
    optimizer.stop_sharing()
    return {**found, "again": again, "none": optimizer.sharing is None}


def misfits() -> dict[str, str]:
    """Ranks that hold other layers, or call with other tensors."""
    parameters = layers(torch.float32)
    mine = parameters if dist.get_rank() == 0 else parameters[:-1]
    tensors = [torch.ones(4), torch.ones(2 + dist.get_rank())]

    def stacked(own: list[Tensor]) -> Tensor:
        return torch.stack([tensor.sum() for tensor in own])

    return {
        "layers": raised(lambda: LARS(mine, lr=0.1).share_norms(timeout_s=20)),
        "tensors": raised(lambda: parallel_tensor_op(stacked, tensors, timeout_s=20)),
        "owner": raised(lambda: parallel_tensor_op(stacked, tensors[:1], owners=[7])),
        "owners": raised(lambda: parallel_tensor_op(stacked, tensors[:1], owners=[0, 1])),
        "rows": raised(lambda: parallel_tensor_op(lambda own: torch.zeros(9), [torch.ones(1)] * dist.get_world_size())),
        "deadline": raised(lambda: parallel_tensor_op(stacked, tensors[:1], timeout_s=0.0)),
    }


def operations() -> dict[str, bool]:
    """`parallel_tensor_op` by itself: scalars, rows, pairs of tensors, more ranks than tensors, none, other dtypes."""
    ranks = dist.get_world_size()
    tensors = [torch.arange(1.0 + size) for size in (5, 0, 9, 2, 7, 3, 1)]
    norms = parallel_tensor_op(lambda own: torch.stack([tensor.norm() for tensor in own]), tensors)
    pairs = [(tensor, -tensor) for tensor in tensors]
    rows = parallel_tensor_op(
        lambda own: torch.stack([torch.stack([a.sum(), b.sum()]) for a, b in own]).double(),
        pairs,
        shape=(2,),
        dtype=torch.float64,
    )  # fmt: skip  (two on their way at once)
    calls: list[int] = []

    def counting(own: list[Tensor]) -> Tensor:
        calls.append(len(own))
        return torch.tensor([tensor.numel() for tensor in own])

    counts = parallel_tensor_op(counting, tensors[:1], owners=[ranks - 1], dtype=torch.int64)
    group = dist.new_group([0, 1], timeout=timedelta(seconds=30))
    part = True
    if dist.get_rank() < 2:
        of_two = parallel_tensor_op(lambda own: torch.stack([t.sum() for t in own]), tensors, group).wait()
        part = torch.equal(of_two, torch.stack([tensor.sum() for tensor in tensors]))
    return {
        "scalars": torch.equal(norms.wait(), torch.stack([tensor.norm() for tensor in tensors])),
        "rows": torch.equal(rows.wait()[:, 1], -torch.stack([tensor.sum() for tensor in tensors]).double()),
        "few": counts.wait().tolist() == [6] and calls == ([1] if dist.get_rank() == ranks - 1 else []),
        "none": parallel_tensor_op(counting, [], dtype=torch.int64).wait().tolist() == [],
        "a part of the ranks": part,
    }


def elements() -> dict[str, bool]:
    """Long tensors over ranks: elementwise results, one result for each part, pairs, fewer elements than ranks."""
    tensors = [torch.arange(1.0 + size) for size in (10, 1, 0)] + [torch.arange(12.0).view(3, 4).t()]
    roots = parallel_tensor_op(lambda own: [part.sqrt() for part in own], tensors, split="elements", shape=None)
    pairs = parallel_tensor_op(
        lambda own: [(a * b).double().sum() for a, b in own], [(one, one) for one in tensors], split="elements",
        dtype=torch.float64,
    )  # fmt: skip
    alike = parallel_tensor_op(lambda own: [2 * own[0], 3 * own[1]], [tensors[0]] * 2, split="elements", shape=None)
    wholes = parallel_tensor_op(lambda own: [tensor.neg() for tensor in own], tensors, shape=None)
    return {
        "elementwise": all(map(torch.equal, roots.wait_each(), (tensor.sqrt() for tensor in tensors))),
        "a row for each part": pairs.wait().shape == (4, dist.get_world_size())
        and pairs.wait().sum(1).tolist() == [float(tensor.double().square().sum()) for tensor in tensors],
        "one tensor": torch.equal(alike.wait(), torch.stack([2 * tensors[0], 3 * tensors[0]])),
        "whole tensors": all(map(torch.equal, wholes.wait_each(), (tensor.neg() for tensor in tensors))),
    }


def one_raises() -> dict[str, Any]:
    """The last rank's operation raises: all ranks raise at once, and the next operation is as any other."""
    last, tensors = dist.get_world_size() - 1, [torch.ones(9), torch.ones(4), torch.ones(5)]
    begun = time.monotonic()

    def failing(own: list[Tensor]) -> Tensor:
        if dist.get_rank() == last:
            raise InputError("no such norm")
        return sums(own)

    def sums(own: list[Tensor]) -> Tensor:
        return torch.stack([tensor.sum() for tensor in own])

    found = {
        split: raised(lambda split=split: parallel_tensor_op(failing, tensors, split=split, timeout_s=60).wait())
        for split in ("tensors", "elements")
    }
    after = parallel_tensor_op(sums, tensors, timeout_s=60).wait().tolist()
    misfits = {
        "split": raised(lambda: parallel_tensor_op(sums, tensors, split="layers")),  # type: ignore[arg-type]
        "owners of elements": raised(lambda: parallel_tensor_op(sums, tensors, split="elements", owners=[0, 0, 0])),
        "sizes": raised(lambda: parallel_tensor_op(sums, [(tensors[0], tensors[1])], split="elements")),
    }
    return {**found, **misfits, "after": after, "took_s": time.monotonic() - begun}


def with_pto(plan: runtime.Plan, model: nn.Module, ranks: int) -> runtime.Plan:
    """The plan, with norms shared by turns."""
    names = [name for name, parameter in model.named_parameters() if parameter.ndim > 1]
    norms = NormPlan(
        shares=tuple(tuple(names[rank::ranks]) for rank in range(ranks)), replicated_us=900.0, shared_us=400.0
    )
    return runtime.Plan(**{**vars(plan), "updates": UpdatePlan(norms=norms)})


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, first: int = 0) -> None:
    """Steps of a session's model, each rank with images of its own."""
    for step in range(first, first + steps):
        optimizer.zero_grad()
        inputs, targets = images(step)
        functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()


def sessions() -> dict[str, Any]:
    """Plans turn sharing on and off; weights are those of a plan without, and the report says what norms took."""
    results: dict[str, Any] = {}
    for name in ("lars", "lamb"):
        digests, ranks = [], dist.get_world_size()
        for pto in (False, True):
            model = convnet()
            optimizer = MAKERS[name](model.parameters())
            plain = plan_of(model, 3)
            plan = with_pto(plain, model, ranks) if pto else plain
            session = runtime.attach(model, optimizer, plan)
            results[f"{name} on"] = optimizer.sharing is not None
            train(model, optimizer, 3)
            report = session.report()
            if pto:
                assert report.norms is not None
                results[f"{name} report"] = str(report.norms).partition(": ")[0], report.norms.measured_us > 0.0
            session.switch(plain if pto else with_pto(plain, model, ranks))
            train(model, optimizer, 2, first=3)
            results[f"{name} switched {pto}"] = optimizer.sharing is not None
            session.detach()
            assert optimizer.sharing is None
            train_alone = digest(model)
            digests.append(train_alone)
        results[name] = digests[0] == digests[1]
    return results


def users_choice() -> dict[str, bool]:
    """A plan that says nothing of norms leaves alone what the user chose; one that does takes it over."""
    model = convnet()
    optimizer = MAKERS["lars"](model.parameters())
    optimizer.share_norms()
    chosen = optimizer.sharing
    session = runtime.attach(model, optimizer, plan_of(model, 3))
    train(model, optimizer, 1)
    report = session.report()
    kept = optimizer.sharing is chosen and report.norms is not None and report.norms.shared
    session.switch(with_pto(plan_of(model, 3), model, dist.get_world_size()))
    taken = optimizer.sharing is not None and optimizer.sharing is not chosen
    session.detach()
    ended = optimizer.sharing is None
    optimizer.stop_sharing()
    return {"kept": kept, "taken": taken, "ended": ended}


def profiled() -> dict[str, Any]:
    """From a profile to a session, on this machine's own times and where gathers are free."""
    model = convnet()
    optimizer = MAKERS["lars"](model.parameters())
    before = digest(model)

    def step() -> None:
        inputs, targets = images(0)
        functional.cross_entropy(model(inputs), targets).backward()

    profile = planner.profile_step(model, step, optimizer, timeout_s=60)
    norms, cluster = profile.compute.norms, profile.cluster
    assert norms is not None
    assert cluster is not None
    free = replace(cluster, samples={**(cluster.samples or {}), "all_gather": ((64.0, 0.0), (1e6, 0.0))})
    plan = planner.optimize(profile, free)
    assert plan.updates is not None
    session = runtime.attach(model, optimizer, plan)
    shared = optimizer.sharing is not None
    train(model, optimizer, 2)
    said = str(session.report())
    session.detach()
    return {
        "as found": before == digest(convnet()),
        "optimizer": norms.optimizer,
        "layers": sorted(layer.name for layer in norms.layers),
        "times": all(layer.norm_us > 0.0 for layer in norms.layers),
        "shared": shared,
        "said": said.splitlines()[2],
    }


def plan_misfits() -> dict[str, str]:
    """Plans that share norms, and optimizers or models that they do not fit."""
    model, ranks = convnet(), dist.get_world_size()
    plan = with_pto(plan_of(model, 3), model, ranks)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    lars = LARS(model.parameters(), lr=0.1)

    def shared(*shares: tuple[str, ...]) -> runtime.Plan:
        return runtime.Plan(**{**vars(plan), "updates": UpdatePlan(norms=NormPlan(shares=shares))})

    names = plan.updates.norms.shares  # type: ignore[union-attr]
    assert names is not None
    return {
        "optimizer": raised(lambda: runtime.attach(model, sgd, plan, timeout_s=20)),
        "none": raised(lambda: runtime.attach(model, None, plan, timeout_s=20)),
        "ranks": raised(lambda: runtime.attach(model, lars, shared(("0.weight",)), timeout_s=20)),
        "unknown": raised(lambda: runtime.attach(model, lars, shared(("nowhere",), *names[1:]), timeout_s=20)),
        "twice": raised(lambda: runtime.attach(model, lars, shared(names[1], *names[1:]), timeout_s=20)),
    }


def everything() -> dict[str, Any]:
    """All of the above in one start of processes."""
    checks: list[Callable[[], Any]] = [
        *(bits_as_alone, states_know_nothing_of_it, shares, misfits, operations, elements, one_raises),
        *(sessions, users_choice, plan_misfits, profiled),
    ]
    return {check.__name__: check() for check in checks}


def one_dies(folder: str) -> None:
    """The last rank dies between two steps; the others hear of it in the next one, and note it in a file."""
    parameters = layers(torch.float32)
    optimizer = LARS(parameters, lr=0.1)
    optimizer.share_norms(timeout_s=3)
    run(optimizer, parameters)
    if dist.get_rank() == dist.get_world_size() - 1:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.5)
    Path(folder, f"rank{dist.get_rank()}").write_text(raised(lambda: run(optimizer, parameters)))
