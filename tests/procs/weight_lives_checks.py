"""What the ranks of the tests of weights do in scripts that are hard on them, each against one process in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from session_checks import plan_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from weight_checks import EQUAL, Net, difference, loss_of, samples, sent_by, trained
from weight_checks import alone as one_process

import runtime
from runtime.errors import CommunicationError, InputError
from runtime.plan import CompressorSpec, Plan
from runtime.plan.transports import FLAT

PLANS: dict[str, Callable[[nn.Module], Plan]] = {name: EQUAL[name] for name in ("plain", "sharded", "late gather")}
STEPS, LR = 4, 0.1
Samples = tuple[Tensor, Tensor]


def joined(parts: Sequence[Samples]) -> Samples:
    """All samples of some batches."""
    return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])


def pair(
    plan: Callable[[nn.Module], Plan], net: Callable[[], nn.Module] = Net, fixed: int = 0, **options: Any
) -> tuple[Any, ...]:
    """A model, its optimizer, of all but the last `fixed` parameters, and its session; and the same alone."""
    model = net()
    reference = copy.deepcopy(model)
    given = ([*one.parameters()] for one in (model, reference))
    optimizer, alone = (torch.optim.SGD(one[: len(one) - fixed], lr=LR, momentum=0.9) for one in given)
    return model, optimizer, runtime.attach(model, optimizer, plan(model), guard=False, **options), reference, alone


def ended(session: Any, model: nn.Module, reference: nn.Module) -> float:
    """The session is detached: the difference of weights."""
    session.wait_for_weights()
    session.detach()
    return difference(model, reference)


def zero_in_a_micro_batch(plan: Callable[[nn.Module], Plan]) -> float:
    """One rank's micro-batch counts nothing and is not a number; the rank changes from step to step."""
    model, optimizer, session, reference, alone = pair(plan)
    ranks = dist.get_world_size()
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(3):
            x, y = samples(dist.get_rank(), 3 * step + micro)
            out = micro == 1 and dist.get_rank() == step % ranks
            session.weight(0 if out else len(x))
            with session.no_sync() if micro < 2 else nullcontext():
                (loss_of(model, x * torch.nan if out else x, y, rare=micro == 0) / 3).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        alone.zero_grad()
        number = 0
        for micro in range(3):
            given = [samples(one, 3 * step + micro) for one in range(ranks) if micro != 1 or one != step % ranks]
            whole = joined(given)
            number += len(whole[0])
            (loss_of(reference, *whole, rare=micro == 0) * len(whole[0])).backward()
        for parameter in reference.parameters():
            parameter.grad /= number
        nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        alone.step()
    return ended(session, model, reference)


def scaled(plan: Callable[[nn.Module], Plan]) -> float:
    """Infinite gradients skip the step on all ranks, unless they are of a rank of weight 0."""
    model, optimizer, session, reference, alone = pair(plan)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    for step in range(STEPS):
        x, y = samples(rank, step)
        bad = rank == last and step in (1, 2)
        optimizer.zero_grad()
        session.weight(0 if bad and step == 1 else len(x))
        scaler.scale(loss_of(model, x * (torch.inf if bad else 1.0), y)).backward()
        scaler.step(optimizer)
        scaler.update()
        if step != 2:
            alone.zero_grad()
            whole = joined([samples(one, step) for one in range(last + 1) if step != 1 or one != last])
            loss_of(reference, *whole).backward()
            alone.step()
    return ended(session, model, reference)


class Checkpointed(Net):
    """Its middle is computed again in backward, in a backward of its own."""

    def forward(self, x: Tensor, rare: bool = False) -> Tensor:
        """Outputs of the last layer."""
        hidden = torch.tanh(self.first(x))
        return self.last(checkpoint(lambda one: torch.tanh(self.rare(one)), hidden, use_reentrant=True))


def checkpointed(plan: Callable[[nn.Module], Plan]) -> float:
    """Weights of a backward in which another one runs."""
    model, optimizer, session, reference, alone = pair(plan, Checkpointed)
    for step in range(STEPS):
        optimizer.zero_grad()
        alone.zero_grad()
        x, y = samples(dist.get_rank(), step)
        session.weight(len(x))
        loss_of(model, x, y).backward()
        optimizer.step()
        loss_of(reference, *joined([samples(one, step) for one in range(dist.get_world_size())])).backward()
        alone.step()
    return ended(session, model, reference)


def kept() -> float:
    """A script that accumulates two micro-batches, and never zeroes its gradients."""
    model, _, session, reference, _ = pair(PLANS["plain"])
    for step in range(3):
        for micro in range(2):
            x, y = samples(dist.get_rank(), 2 * step + micro)
            session.weight(len(x))
            with nullcontext() if micro else session.no_sync():
                (loss_of(model, x, y, rare=micro == 0) / 2).backward()
        ranks = range(dist.get_world_size())
        given = [joined([samples(one, 2 * step + micro) for one in ranks]) for micro in range(2)]
        number = sum(len(x) for x, _ in given)
        for micro, whole in enumerate(given):
            (loss_of(reference, *whole, rare=micro == 0) * len(whole[0]) / number).backward()
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    found = max(float((a.grad - b.grad).abs().max()) for a, b in pairs if a.grad is not None and b.grad is not None)
    session.detach()
    return found


def switched() -> float:
    """Plans change in the middle of a run with weights, between micro-batches."""
    model, optimizer, session, reference, alone = pair(PLANS["plain"])
    ranks = range(dist.get_world_size())

    for step in range(6):
        optimizer.zero_grad()
        for micro in range(2):
            x, y = samples(dist.get_rank(), 2 * step + micro)
            session.weight(len(x))
            with nullcontext() if micro else session.no_sync():
                (loss_of(model, x, y) / 2).backward()
            if micro == 0 and step in (1, 3):
                session.switch(PLANS["sharded" if step == 1 else "plain"](model))
        optimizer.step()
        alone.zero_grad()
        loss_of(reference, *joined([samples(one, 2 * step + micro) for one in ranks for micro in range(2)])).backward()
        alone.step()
    return ended(session, model, reference)


def by_lbfgs() -> float:
    """Line search by the loss of all samples; one rank counts nothing, and its loss is not a number."""
    model = nn.Linear(7, 3).double()
    with torch.no_grad():
        model.weight.fill_(0.1)
        model.bias.zero_()
    reference = copy.deepcopy(model)
    options: dict[str, Any] = {"max_iter": 4, "line_search_fn": "strong_wolfe"}
    optimizer, alone = (torch.optim.LBFGS(one.parameters(), **options) for one in (model, reference))
    session = runtime.attach(model, optimizer, plan_of(model, 1))
    rank, last = dist.get_rank(), dist.get_world_size() - 1

    def closure() -> Tensor:
        optimizer.zero_grad()
        x, y = samples(rank, 0)
        session.weight(0 if rank == last else len(x))
        loss = loss_of(model, x * (torch.nan if rank == last else 1.0), y)
        loss.backward()
        return loss

    def closure_alone() -> Tensor:
        alone.zero_grad()
        loss = loss_of(reference, *joined([samples(one, 0) for one in range(last)]))
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
        alone.step(closure_alone)
    return ended(session, model, reference)


def residuals_keep_what_is_not_sent() -> float:
    """Top-k of weighed gradients: what is sent and what is left are all of them."""
    model = Net()
    session = runtime.attach(
        model, None, sent_by(FLAT, CompressorSpec(name="topk", density=0.3), model), guard=False
    )  # fmt: skip
    rank, ranks = dist.get_rank(), dist.get_world_size()
    names = [name for name, _ in model.named_parameters()]
    sent, given, unit = torch.zeros(()), torch.zeros(()), 0.0

    def flat(of: Sequence[Tensor | None]) -> Tensor:
        pairs = zip(of, model.parameters(), strict=True)
        return torch.cat([(torch.zeros_like(p) if one is None else one).flatten() for one, p in pairs])

    for step in range(5):
        if step == 2:  # one that counts nothing on any rank is refused, and loses nothing
            session.weight(0)
            with suppress(InputError):
                loss_of(model, *samples(rank, step)).backward()
        counts = [len(samples(one, step)[0]) for one in range(ranks)]
        unit = unit or sum(counts) / ranks
        for one in range(ranks):
            own = torch.autograd.grad(loss_of(model, *samples(one, step), rare=True), list(model.parameters()))
            given = given + flat(own) * counts[one] / unit
        model.zero_grad()
        session.weight(counts[rank])
        loss_of(model, *samples(rank, step), rare=True).backward()
        sent = sent + flat([p.grad for p in model.parameters()]) * sum(counts) / unit
    residuals = session.state_dict()["carried"]["residuals"]
    mine = flat([residuals.get(name) for name in names]).clone()
    dist.all_reduce(mine)
    session.detach()
    return float((sent + ranks * mine - given).abs().max() / given.abs().max())


def batches_of_micro_batches() -> float:
    """Unlike numbers of batches, of which two make a step."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    counts = [3 + 2 * one for one in range(ranks)]
    model, optimizer, session, reference, alone = pair(PLANS["sharded"])
    number = 0
    for number, (x, y) in enumerate(session.batches([samples(rank, step) for step in range(counts[rank])])):
        session.weight(len(x))
        with nullcontext() if number % 2 else session.no_sync():
            (loss_of(model, x, y) / 2).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    for step in range((number + 1) // 2):
        both = (2 * step, 2 * step + 1)
        given = [samples(one, micro) for micro in both for one in range(ranks) if micro < counts[one]]
        alone.zero_grad()
        loss_of(reference, *joined(given)).backward()
        alone.step()
    return ended(session, model, reference)


def fail(_: Tensor) -> None:
    """End a backward."""
    raise ValueError("of the script")


def after_an_exception(where: str) -> float:
    """A backward that fails on one rank, in the first step of unlike weights, which all ranks leave out by a vote: at a
    gradient of a layer, or at the `input`, behind all that are sent; or on all ranks in a `part` of the model.
    """
    model, optimizer, session, reference, alone = pair(PLANS["plain"])
    ranks = range(dist.get_world_size())

    for step in range(STEPS):
        x, y = samples(dist.get_rank(), step, equal=step == 0)
        fails = step == 1 and (dist.get_rank() == 0 or where == "part")
        optimizer.zero_grad()
        session.weight(len(x))
        called = nn.Sequential(model.first, nn.Tanh(), model.last) if where == "part" else model
        given = x.clone().requires_grad_() * 1.0
        loss = loss_of(called, given, y)
        hook = (given if where == "input" else model.first.weight).register_hook(fail) if fails else None
        went = torch.ones(())
        with suppress(ValueError, CommunicationError):
            went.zero_()
            loss.backward()
            went.fill_(1)
        if hook is not None:
            hook.remove()
        dist.all_reduce(went, op=dist.ReduceOp.MIN)
        if not went:
            continue
        optimizer.step()
        alone.zero_grad()
        loss_of(reference, *joined([samples(one, step, equal=step == 0) for one in ranks])).backward()
        alone.step()
    return ended(session, model, reference)


def left_out(plan: Callable[[nn.Module], Plan]) -> float:
    """A micro-batch of three fails on all ranks at its first gradient, and is left out."""
    model, optimizer, session, reference, alone = pair(plan)
    ranks = range(dist.get_world_size())

    for step in range(STEPS):
        micros = [[samples(one, 3 * step + micro, equal=step < 2) for one in ranks] for micro in range(3)]
        optimizer.zero_grad()
        for micro, given in enumerate(micros):
            x, y = given[dist.get_rank()]
            hooks = [one.register_hook(fail) for one in model.parameters()] if micro == 1 and step % 2 else []
            session.weight(len(x))
            with nullcontext() if micro == 2 else session.no_sync(), suppress(ValueError):
                (loss_of(model, x, y) / (3 - step % 2)).backward()
            for hook in hooks:
                hook.remove()
        optimizer.step()
        alone.zero_grad()
        whole = [joined(given) for given in (micros[::2] if step % 2 else micros)]
        loss_of(reference, *joined(whole)).backward()
        alone.step()
    return ended(session, model, reference)


def batches_begun_later() -> float:
    """Batches that are asked for before equal weights, and go on without any."""
    model, optimizer, session, reference, alone = pair(PLANS["plain"])
    ranks, rank = dist.get_world_size(), dist.get_rank()
    later = session.batches([samples(rank, 2 + step) for step in range(ranks - rank)])
    for step in range(2 + ranks):
        x, y = samples(rank, step, equal=True) if step < 2 else next(later)
        optimizer.zero_grad()
        if step < 2:
            session.weight(len(x))
        loss_of(model, x, y).backward()
        optimizer.step()
        alone.zero_grad()
        given = [samples(one, step, equal=step < 2) for one in range(ranks) if step - 2 < ranks - one]
        torch.stack([loss_of(reference, *one) for one in given]).mean().backward()
        alone.step()
    left = len(list(later))
    session.detach()
    return difference(model, reference) + left


def buffers(plan: Callable[[nn.Module], Plan]) -> float:
    """Statistics come from the lowest rank with a positive weight, with accumulation too."""
    model = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    session = runtime.attach(model, optimizer, plan(model), guard=False)
    rank = dist.get_rank()
    expected = nn.BatchNorm1d(5).double()
    for _ in range(2):
        optimizer.zero_grad()
        for micro in range(2):
            x = torch.full((2, 7), 1.0 + rank + 10 * micro).double() + torch.arange(2.0)[:, None]
            session.weight(0 if rank == 0 else 2)
            with nullcontext() if micro else session.no_sync():
                (model(x).sum() / 2).backward()
            expected(model[0](x - rank + 1).detach())
        optimizer.step()
    session.wait_for_weights()
    found = model[1].running_mean - expected.running_mean
    session.detach()
    return float(found.abs().max())


def begun_again() -> float:
    """A script that zeroes what it has accumulated, in place or not, and begins the step again."""
    model, optimizer, session, reference, alone = pair(PLANS["plain"], fixed=1)
    ranks = range(dist.get_world_size())
    for step in range(STEPS):
        with session.no_sync():
            x, y = samples(dist.get_rank(), 50 + step)
            session.weight(len(x))
            loss_of(model, x, y).backward()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        x, y = samples(dist.get_rank(), step)
        session.weight(len(x))
        loss_of(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
        alone.zero_grad()
        loss_of(reference, *joined([samples(one, step) for one in ranks])).backward()
        alone.step()
    return ended(session, model, reference)


def unequal_later(plan: Callable[[nn.Module], Plan], how: str = "") -> float:
    """Numbers of samples that are equal at first, of which ranks send nothing, then are not on all ranks but one, and
    are again; `how`: from then on gradients are kept, accumulated, or kept for a part of the model that is called.
    """
    model, optimizer, session, reference, alone = pair(plan)
    for step in range(STEPS + 2):
        later, ranks = step >= 2, range(dist.get_world_size())
        micros = [
            [samples(one, 2 * step + micro, equal=one == 0 or step not in (2, 3)) for one in ranks]
            for micro in range(2 if later and how == "accumulated" else 1)
        ]
        if not (later and how in ("kept", "part")):
            optimizer.zero_grad()
            alone.zero_grad()
        number = sum(len(x) for given in micros for x, _ in given)
        for micro, given in enumerate(micros, 1):
            x, y = given[dist.get_rank()]
            session.weight(len(x))
            with nullcontext() if micro == len(micros) else session.no_sync():
                called = nn.Sequential(model.first, nn.Tanh(), model.last) if later and how == "part" else model
                (loss_of(called, x, y) / len(micros)).backward()
            whole = joined(given)
            (loss_of(reference, *whole) * len(whole[0]) / number).backward()
        optimizer.step()
        alone.step()
    apart = ended(session, model, reference)
    session.weight(1 + dist.get_rank())  # of no step: ignored
    return apart


def asked_and_given() -> float:
    """A function asks for the weight, but for backwards whose weight is given."""
    model, optimizer, session, reference, alone = pair(PLANS["plain"], weight=lambda: 1.0)
    ranks = range(dist.get_world_size())
    for step in range(STEPS):
        x, y = samples(dist.get_rank(), step)
        optimizer.zero_grad()
        if step % 2:
            session.weight(len(x))
        loss_of(model, x, y).backward()
        optimizer.step()
        alone.zero_grad()
        given = [samples(one, step) for one in ranks]
        if step % 2:
            loss_of(reference, *joined(given)).backward()
        else:
            torch.stack([loss_of(reference, *one) for one in given]).mean().backward()
        alone.step()
    return ended(session, model, reference)


def compiled() -> float:
    """A model that `attach` compiles."""
    return difference(trained(EQUAL["plain"], compile="aot_eager"), one_process())


def all_lives() -> dict[str, float]:
    """Largest differences, by script and plan."""
    torch.set_num_threads(1)
    lives: dict[str, Callable[[], float]] = {
        f"{life.__name__}, {name}": partial(life, plan)
        for life in (zero_in_a_micro_batch, scaled, checkpointed, buffers, unequal_later, left_out)
        for name, plan in PLANS.items()
    }
    lives |= {
        f"unequal later, {how}, {name}": partial(unequal_later, PLANS[name], how)
        for how in ("kept", "accumulated", "part")
        for name in ("plain", "sharded")
    }
    lives |= {
        f"after an exception, {where}": partial(after_an_exception, where) for where in ("layer", "input", "part")
    }
    alone = (kept, switched, by_lbfgs, residuals_keep_what_is_not_sent, batches_of_micro_batches, batches_begun_later)
    lives |= {life.__name__: life for life in (*alone, asked_and_given, begun_again, compiled)}
    return {name: life() for name, life in lives.items()}
