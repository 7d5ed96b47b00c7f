"""Ranks that a launcher started and that have no process group are refused: each would train alone, without a word."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import planner
import runtime
from runtime.errors import InputError
from runtime.plan import ModelReference, Plan, PlanBucket, PlanWorld

PLAN = Plan(
    model=ModelReference(name="linear"), world=PlanWorld(ranks=1), accuracy="exact",
    buckets=(PlanBucket(gradients=("weight", "bias")),),
)  # fmt: skip


def model() -> tuple[nn.Module, torch.optim.Optimizer]:
    net = nn.Linear(2, 2)
    return net, torch.optim.SGD(net.parameters(), lr=0.1)


def profile() -> Any:
    net, optimizer = model()
    return planner.profile_step(net, lambda: net(torch.ones(1, 2)).sum().backward(), optimizer)


def job() -> planner.LocalJob:
    def loss(net: nn.Module, batch: Tensor) -> Tensor:
        return net(batch).sum()

    return planner.LocalJob(nn.Linear(2, 2), loss, lambda p: torch.optim.SGD(p, 0.1), batch=lambda *_: torch.ones(1, 2))


ENTRIES: dict[str, Callable[[], Any]] = {
    "planner.attach": lambda: planner.attach(*model()),
    "planner.attach with a plan": lambda: planner.attach(*model(), PLAN),
    "runtime.attach": lambda: runtime.attach(*model(), PLAN),
    "profile_step": profile,
    "fully_shard": lambda: planner.fully_shard(model()[0], PLAN),
    "run_local_async": lambda: planner.run_local_async(job, PLAN, 1),
}


@pytest.mark.parametrize("way", ["auto", "off"])
@pytest.mark.parametrize("entry", ENTRIES)
def test_ranks_without_a_process_group_are_refused(monkeypatch: pytest.MonkeyPatch, entry: str, way: str) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("PLANNER", way)
    with pytest.raises(InputError, match=r"WORLD_SIZE is 2 .*torch\.distributed\.init_process_group\(\) first"):
        ENTRIES[entry]()


def test_one_process_needs_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    planner.attach(*model()).detach()


@pytest.fixture
def two_ranks() -> Iterator[Callable[[], None]]:
    """Give a function that makes a process group of two ranks, of which the other does not exist."""
    yield lambda: dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    dist.destroy_process_group()


def test_a_group_made_after_attach_is_refused_at_the_next_forward(two_ranks: Callable[[], None]) -> None:
    net, optimizer = model()
    session = runtime.attach(net, optimizer, PLAN)
    net(torch.ones(1, 2))
    two_ranks()
    with pytest.raises(InputError, match=r"attached before torch\.distributed\.init_process_group"):
        net(torch.ones(1, 2))
    session.detach()
    net(torch.ones(1, 2))


def test_a_group_of_fewer_ranks_is_taken(monkeypatch: pytest.MonkeyPatch, two_ranks: Callable[[], None]) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    two_ranks()
    net, optimizer = model()
    session = runtime.attach(net, optimizer, PLAN, dist.new_group([0]))
    net(torch.ones(1, 2)).sum().backward()
    session.detach()
