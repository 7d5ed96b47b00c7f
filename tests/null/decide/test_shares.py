"""`planner optimize --global-batch`: shares in the plan, what they gain, and what is refused."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

import planner
from planner.comparison.variants import make_lineup
from planner.decide.batch_shares import choose_shares
from planner.documents.catalog import find_profile
from planner.documents.profile import Cluster, Layer, Link, OptimizerProfile, Profile, RankCompute
from planner.model.modes.sharded import replicated_bytes
from planner.model.problem import make_problem
from runtime.errors import InputError
from runtime.plan import Plan, parse_plan


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
    with pytest.raises(InputError, match="--accuracy relaxed: found it with --global-batch"):
        planner.optimize(profile(), cluster(), global_batch=64, accuracy="relaxed")
    odd = planner.optimize(profile(), cluster(), global_batch=65)
    with pytest.raises(InputError, match="found shares of 65 samples, which 4 ranks of DDP cannot have equally"):
        make_lineup(odd, None, ())
    plan = planner.optimize(profile(), cluster(), global_batch=64).to_document()
    with pytest.raises(InputError, match=r"\.shares: found shares of 1 ranks, expected one for each of 0 to 3"):
        parse_plan({**plan, "shares": {"0": 64}})


def test_memory_limits_shares() -> None:
    with pytest.raises(InputError, match="--max-memory-mib: found a profile without the optimizer's state"):
        planner.optimize(profile(), cluster(), global_batch=64, max_memory_mib=10_000)
    known, mib = profile(), 2**20
    gradient_mib = known.compute.size_bytes / mib
    optimizer = OptimizerProfile(name="SGD", adaptive=False, state_bytes=0)
    layer = Layer(name="all", kind="conv", flops=1.0, activation_bytes=32.0 * mib)  # of 32 samples
    known = replace(known, compute=replace(known.compute, optimizer=optimizer), layers=(layer,))
    fast = cluster(4.0, 1.0, 1.0, 1.0)

    def planned(room_mib: float, global_batch: int = 64, profiled: bool = False) -> Plan:
        limit = 2.0 * gradient_mib + room_mib
        has = replace(known, world=replace(known.world, memory_bytes=int(limit * mib))) if profiled else known
        given = None if profiled else limit
        return planner.optimize(has, fast, global_batch=global_batch, max_memory_mib=given, passes="merge")

    def shares(*asked: Any) -> list[int]:
        return list((planned(*asked).shares or {}).values())

    assert shares(1000.0)[0] > 30
    assert shares(25.5) == shares(25.5, 64, True) == [25, 13, 13, 13]
    assert planned(25.5).largest_share == planned(25.5, 64, True).largest_share == 25
    assert not any("changes nothing" in note for note in planned(25.5).notes)
    choice = choose_shares(known, fast, 64)
    needed = replicated_bytes(make_problem(choice.profile, choice.cluster))
    assert needed == pytest.approx((2.0 * gradient_mib + choice.batch.shares[0]) * mib)
    with pytest.raises(InputError, match="found 64 samples, of which a rank has memory for 15, expected at most 60"):
        shares(15.5)
    with pytest.raises(InputError, match=r"--max-memory-mib: found .*, in which no sample fits next to"):
        shares(0.5)


def test_times_of_ranks_give_shares_and_what_does_not_grow_with_samples_counts() -> None:
    ranks = [
        RankCompute(fixed_us=fixed, sample_us=sample, update_us=0.0) for fixed, sample in ((10.0, 1.0), (0.0, 2.0))
    ]
    known = replace(profile(), compute=replace(profile().compute, by_rank=tuple(ranks)))
    plan = planner.optimize(known, cluster(ranks=2), global_batch=64)
    assert list((plan.shares or {}).values()) == [40, 24]  # 50 and 48: 39 and 25 take 49 and 50
    with pytest.raises(InputError, match=r"compute.by_rank: found the times of 2 ranks, expected those of the 1 in"):
        Profile.parse(known.to_document(), "here")


def test_shares_for_a_thousand_ranks_of_eight_speeds_are_chosen_at_once() -> None:
    speeds = tuple(1.0 + rank % 8 / 4.0 for rank in range(1024))
    many = cluster(*speeds, ranks=1024)
    choose_shares(profile(), cluster(), 64)  # imports
    began_s = time.process_time()
    found = choose_shares(profile(), many, 64 * 1024).batch
    assert time.process_time() - began_s <= 0.2
    assert sum(found.shares) == 64 * 1024
    assert found.bound_us <= found.slowest_us <= 1.02 * found.bound_us
