"""What the ranks of the tests of shares do: a job whose second rank computes half as fast, profiled and trained."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from session_checks import plan_of
from torch import Tensor, nn
from torch.utils.data import DataLoader

import planner
from planner import TrainingJob
from planner.comparison.contestants import Learn, make_contestants
from planner.comparison.learning import learn_rank
from planner.comparison.measure import Measured, compare_rank
from planner.comparison.variants import Rounds, make_lineup
from planner.documents.profile import Cluster, ComputeProfile, Gradient, Link, Profile, ProfileWorld
from planner.jobs.lr_schedule import Course
from planner.jobs.on_rank import profile_rank, train_rank, with_batches
from planner.jobs.training import Trainer, build
from planner.profile.bench import Progress
from planner.profile.request import Request
from runtime.errors import InputError
from runtime.plan import ModelReference, Plan
from runtime.plan.document import PhasePlan

FIXED_S, SAMPLE_S = 6e-3, (1e-3, 2e-3)
"""Seconds of a step, and by rank of a sample."""
GLOBAL_BATCH, STEPS = 24, 5
PASS_BATCH, PASSES, TIMES_US = 12, 3, (30.0, 60.0)
"""Batch and number of passes, and times of ranks that have been compared when the last one begins."""


class Slow(nn.Linear):
    """A layer whose forward takes the rank's time."""

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 4) → (batch, 2)."""
        time.sleep(FIXED_S + SAMPLE_S[dist.get_rank()] * len(x))
        return super().forward(x)


def model() -> nn.Module:
    """The same on every rank."""
    torch.manual_seed(0)
    return Slow(4, 2, dtype=torch.float64)


def dataset() -> list[tuple[Tensor, Tensor]]:
    """Inputs and targets."""
    drawn = torch.randn(48, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return [(row[:4], row[4:]) for row in drawn]


def loss(trained: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """A mean over samples."""
    return (trained(batch[0]) - batch[1]).square().mean()


def job() -> TrainingJob:
    """The job."""
    x, y = (torch.stack(part) for part in zip(*dataset(), strict=True))
    return TrainingJob(
        model=model(), loss=loss, batch=lambda step, rank: (x[:16], y[:16]),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    )  # fmt: skip


def drawn(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Eight samples of one step and rank."""
    rows = torch.randn(8, 6, generator=torch.Generator().manual_seed(100 * step + rank), dtype=torch.float64)
    return rows[:, :4], rows[:, 4:]


def drawing_job() -> TrainingJob:
    """A job whose batches differ by step and rank."""
    torch.manual_seed(0)
    return TrainingJob(
        model=nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double(), loss=loss, batch=drawn,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    )  # fmt: skip


def compared(spec: str, plan: Plan | None = None) -> Measured:
    """A short `planner compare` of a job with a plan, by default of one bucket."""
    lineup = make_lineup(plan or plan_of(build(spec, "cpu").model, 2), None, (), hooks=())
    return compare_rank(spec, replace(lineup, caps=()), Rounds(count=2, steps=1), "cpu", False)


def jobs_batches_follow(shares: tuple[int, int]) -> dict[str, Any]:
    """`planner run` and `planner compare` by a plan with shares; and one process that takes all samples in order."""
    spec = f"{__file__}:drawing_job"
    alone = build(spec, "cpu")
    samples = [torch.cat(part) for part in zip(*(drawn(*divmod(one, 2)) for one in range(40)), strict=True)]
    losses, total = [], sum(shares)
    for step in range(STEPS):
        losses.append(float(alone.train(tuple(part[step * total : (step + 1) * total] for part in samples))))
    planned = {str(rank): share for rank, share in enumerate(shares)}
    plan = plan_of(build(spec, "cpu").model, 2, shares=planned)
    run = train_rank(spec, plan, Course(STEPS), "cpu", False)
    turned = replace(plan, shares={str(rank): share for rank, share in enumerate(reversed(shares))})
    phased = replace(plan, buckets=(), shares=None, phases=(PhasePlan(plan=plan, until_step=2), PhasePlan(plan=turned)))
    seen = compared(spec, plan)
    learn = Learn(steps=10, seeds=1)
    learnt = learn_rank(spec, make_contestants({"plan": plan}, None, ()), learn, "cpu", False)
    return {
        "same weights": run.weights_sha256,
        "apart": max(
            float((a - b).abs().max()) for a, b in zip(_weights(spec, plan), alone.model.parameters(), strict=True)
        ),
        "losses": (run.losses, losses),
        "in phases": (train_rank(spec, phased, Course(STEPS), "cpu", False).losses, losses),
        "measured": seen,
        "learnt": learnt,
    }


def _weights(spec: str, plan: Plan) -> list[Tensor]:
    built = build(spec, "cpu").sharing(plan.shares)
    trainer = Trainer(built, plan)
    for step in range(STEPS):
        trainer.step(built.batch(step))
    trainer.close()
    return [one.detach() for one in built.model.parameters()]


def profiled_and_trained(whole: bool) -> dict[str, Any]:
    """From a profile to a plan with shares, and one pass with it, against one process that has all samples; `whole`:
    of a profile in which everything is measured.
    """
    spec = f"{__file__}:job"
    profile = profile_rank(spec, "cpu", False, request=Request(budget_s=5.0)) if whole else _of_batches_alone(spec)
    plan = planner.optimize(profile, global_batch=GLOBAL_BATCH)
    return {"profile": profile, "plan": plan, "apart": _apart_from_one_process(plan)}


def _of_batches_alone(spec: str) -> Profile:
    built = build(spec, "cpu")
    gradients = tuple(
        Gradient(name=name, layer="", numel=one.numel(), dtype="float64", backward_us=9_000.0)
        for name, one in built.model.named_parameters()
    )
    bare = Profile(
        model=ModelReference(name="linear"), world=ProfileWorld(ranks=2),
        compute=ComputeProfile(forward_us=20_000.0, update_us=20.0, gradients=gradients),
        cluster=Cluster(nodes=2, inter=Link(alpha_us=50.0, beta_us_per_byte=1e-3)),
    )  # fmt: skip
    return with_batches(built, built.batch(0), bare, Progress())


def _apart_from_one_process(plan: Plan) -> float:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    weights = []
    for shares in (list((plan.shares or {}).values()), [GLOBAL_BATCH]):
        alone = len(shares) < ranks
        trained = model()
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.1, momentum=0.9)
        sampler = planner.ShareSampler(dataset(), shares, 0 if alone else rank)  # type: ignore[arg-type]
        session = None if alone else planner.attach(trained, optimizer, plan)
        batch_size = GLOBAL_BATCH if session is None else session.share
        for x, y in DataLoader(dataset(), batch_size, sampler=sampler):  # type: ignore[arg-type]
            optimizer.zero_grad()
            if session is not None:
                session.weight(len(x))
            loss(trained, (x, y)).backward()
            optimizer.step()
        weights.append(trained.weight.detach())
        if session is not None:
            session.detach()
    return float((weights[0] - weights[1]).abs().max())


def following() -> dict[str, Any]:
    """Trains some passes with equal shares at first, of which the second rank is slow, and continues the last one."""
    trained, found = nn.Linear(4, 2, dtype=torch.float64), dict[str, Any](shares=[], drawn=[])
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.01)
    session = planner.attach(trained, optimizer, plan_of(trained, 2))
    data = dataset()
    sampler = session.sampler(range(len(data)), PASS_BATCH)
    for epoch in range(PASSES):
        sampler.set_epoch(epoch)
        if epoch == PASSES - 1:
            session._monitor.arrivals.compute_us = TIMES_US
        drawn = []
        for number, indices in enumerate(sampler):
            x, y = (torch.stack(part) for part in zip(*(data[index] for index in indices), strict=True))
            session.weight(len(indices))
            optimizer.zero_grad()
            loss(trained, (x, y)).backward()
            optimizer.step()
            drawn += indices
            if (epoch, number) == (PASSES - 1, 1):
                state = sampler.state_dict(batches=2)
        found["shares"].append(sampler.shares)
        found["drawn"].append(drawn)
    found["share"] = session.share
    other = planner.attach(again := nn.Linear(4, 2), torch.optim.SGD(again.parameters(), lr=0.01), plan_of(again, 2))
    found["problems"] = [
        _refused(lambda: other.sampler(range(9))),
        _refused(lambda: other.sampler(range(9), 1)),
        _refused(lambda: session.sampler(range(9), PASS_BATCH + 1)),
        _refused(lambda: session.sampler(range(1))),
    ]
    continued = other.sampler(range(len(data)), PASS_BATCH)
    continued.load_state_dict(state)
    continued.set_epoch(PASSES - 1)
    found["continued"] = [index for indices in continued for index in indices]
    found["continued shares"] = continued.shares
    continued.load_state_dict({**state, "consumed": len(data) - 1})
    last = other.batches(DataLoader(range(len(data)), batch_sampler=continued))  # type: ignore[arg-type]
    found["last"] = [(len(batch), other.weight(len(batch))) for batch in last]
    other.detach()
    session.detach()
    return found


def _refused(attempt: Callable[[], object]) -> str:
    try:
        attempt()
    except InputError as error:
        return str(error)
    return "nothing"
