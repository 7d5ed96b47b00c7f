"""`planner optimize --global-batch`: shares in the plan, what they gain, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import planner
from planner.documents.catalog import find_profile
from planner.documents.profile import Cluster, Link, Profile
from planner.model.problem import make_problem
from runtime.errors import InputError
from runtime.plan import parse_plan


def cluster(*speed: float, ranks: int = 4) -> Cluster:
    return Cluster(nodes=ranks, inter=Link(alpha_us=20.0, beta_us_per_byte=8e-4), speed=speed or None)


def profile() -> Profile:
    found = find_profile("vgg16")
    return replace(found, world=replace(found.world, batch_per_rank=32))


@pytest.mark.parametrize(("speed", "least"), [((1.0, 1.0, 0.5, 0.5), 0.6), ((1.0, 0.75, 0.5), 0.6)])
def test_fast_ranks_get_more(speed: tuple[float, ...], least: float) -> None:
    ranks = len(speed)
    plan = planner.optimize(profile(), cluster(*speed, ranks=ranks), global_batch=32 * ranks)
    assert plan.shares is not None
    shares = list(plan.shares.values())
    assert (sum(shares), list(plan.shares)) == (32 * ranks, [str(rank) for rank in range(ranks)])
    assert shares == sorted(shares, reverse=True)
    assert shares[0] == pytest.approx(2 * shares[-1], abs=2)
    assert plan == parse_plan(plan.to_document())
    assert plan == planner.optimize(profile(), cluster(*speed, ranks=ranks), global_batch=32 * ranks)
    equal = planner.optimize(profile(), cluster(*speed, ranks=ranks))
    assert plan.predicted is not None
    assert equal.predicted is not None
    assert plan.predicted.iteration_us < equal.predicted.iteration_us
    assert equal.shares is None
    assert "with equal shares" in plan.notes[-1]


def test_a_step_waits_for_the_slowest_rank() -> None:
    usual, slow = (make_problem(profile(), one) for one in (cluster(), cluster(1.0, 1.0, 1.0, 0.5)))
    assert slow.compute_end_us == pytest.approx(2 * usual.compute_end_us)
    (found,) = planner.simulate(profile(), cluster(1.0, 1.0, 1.0, 0.5), strategies="ddp")
    (other,) = planner.simulate(profile(), cluster(), strategies="ddp", what_if=planner_what_if(2.0))
    assert found.iteration_us == pytest.approx(other.iteration_us)


def planner_what_if(straggler: float) -> Any:
    from planner.model.what_if import WhatIf

    return WhatIf(straggler=straggler)


def test_speeds_are_of_ranks_or_of_nodes() -> None:
    given = {"schema": "planner.cluster/1", "nodes": 2, "ranks_per_node": 2}
    assert Cluster.parse({**given, "speed": [1, 0.5]}, "here").speeds == (1.0, 1.0, 0.5, 0.5)
    assert Cluster.parse({**given, "speed": [1, 2, 3, 4]}, "here").speeds == (1.0, 2.0, 3.0, 4.0)
    assert Cluster.parse(given, "here").speeds == (1.0,) * 4
    with pytest.raises(InputError, match=r"speed: found 3 numbers, expected one for each of 4 ranks, or for each of 2"):
        Cluster.parse({**given, "speed": [1, 2, 3]}, "here")


def test_what_ranks_cannot_share_is_refused() -> None:
    with pytest.raises(InputError, match="--global-batch: found 3, fewer samples than the 4 ranks"):
        planner.optimize(profile(), cluster(), global_batch=3)
    nameless = replace(profile(), world=replace(profile().world, batch_per_rank=None))
    with pytest.raises(InputError, match=r"--global-batch: found a profile without world.batch_per_rank"):
        planner.optimize(nameless, cluster(), global_batch=64)
    plan = planner.optimize(profile(), cluster(), global_batch=64).to_document()
    with pytest.raises(InputError, match=r"\.shares: found shares of 1 ranks, expected one for each of 0 to 3"):
        parse_plan({**plan, "shares": {"0": 64}})


def test_memory_limits_shares() -> None:
    known = find_profile("vgg16")
    compute = known.compute
    if compute.optimizer is None or compute.optimizer.state_bytes is None:
        with pytest.raises(InputError, match="--max-memory-mib: found a profile without the optimizer's state"):
            planner.optimize(profile(), cluster(), global_batch=64, max_memory_mib=10_000)
