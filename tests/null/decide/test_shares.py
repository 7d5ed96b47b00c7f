"""`planner optimize --global-batch`: shares in the plan, what they gain, and what is refused."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

import pytest

import planner
from planner.comparison.variants import make_lineup
from planner.decide.batch_shares import choose_shares
from planner.documents.accelerators import ROOM
from planner.documents.catalog import find_profile
from planner.documents.profile import Cluster, Layer, Link, OptimizerProfile, Profile, RankCompute
from planner.model.modes.sharded import replicated_bytes
from planner.model.problem import make_problem
from runtime.errors import InputError
from runtime.plan import Plan, parse_plan

MIB = 2**20


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
    for field in ("speed", "memory_mib"):
        words = rf"{field}: found 3 numbers, expected one for each of 4 ranks, or for each of 2"
        with pytest.raises(InputError, match=words):
            Cluster.parse({**given, field: [1, 2, 3]}, "here")


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
    with pytest.raises(
        InputError, match=r"\.shares: found 16 for rank 0, expected at most 15, for which it has memory"
    ):
        parse_plan({**plan, "largest_shares": dict.fromkeys("0123", 15)})


def of_known_memory(samples: int = 32) -> Profile:
    """A sample keeps 1 MiB, next to weights and gradients."""
    found = profile()
    optimizer = OptimizerProfile(name="SGD", adaptive=False, state_bytes=0)
    layer = Layer(name="all", kind="conv", flops=1.0, activation_bytes=float(samples * MIB))
    world = replace(found.world, batch_per_rank=samples)
    return replace(found, compute=replace(found.compute, optimizer=optimizer), layers=(layer,), world=world)


def test_memory_limits_shares() -> None:
    with pytest.raises(InputError, match="--max-memory-mib: found a profile without the optimizer's state"):
        planner.optimize(profile(), cluster(), global_batch=64, max_memory_mib=10_000)
    known, gradient_mib = of_known_memory(), profile().compute.size_bytes / MIB
    fast = cluster(4.0, 1.0, 1.0, 1.0)

    def planned(room_mib: float, global_batch: int = 64, profiled: bool = False) -> Plan:
        limit = 2.0 * gradient_mib + room_mib
        memory_bytes = math.ceil(limit * MIB / ROOM) if profiled else None
        has = replace(known, world=replace(known.world, memory_bytes=memory_bytes))
        given = None if profiled else limit
        return planner.optimize(has, fast, global_batch=global_batch, max_memory_mib=given, passes="merge")

    def shares(*asked: Any) -> list[int]:
        return list((planned(*asked).shares or {}).values())

    assert shares(1000.0)[0] > 30
    assert shares(25.5) == shares(25.5, 64, True) == [25, 13, 13, 13]
    largest = dict.fromkeys("0123", 25)
    assert planned(25.5).largest_shares == planned(25.5, 64, True).largest_shares == largest
    assert not any("changes nothing" in note for note in planned(25.5).notes)
    choice = choose_shares(known, fast, 64)
    needed = replicated_bytes(make_problem(choice.profile, choice.cluster))
    assert needed == pytest.approx((2.0 * gradient_mib + choice.batch.shares[0]) * MIB)
    with pytest.raises(InputError, match="found 64 samples, of which a rank has memory for 15, expected at most 60"):
        shares(15.5)
    with pytest.raises(InputError, match=r"--max-memory-mib: found .*, in which no sample fits next to"):
        shares(0.5)


def test_each_rank_has_a_memory_of_its_own() -> None:
    """As the cluster states it, or as it was measured on each rank, with what a sample takes there."""
    needed_mib = 2.0 * profile().compute.size_bytes / MIB
    memory_mib = tuple((needed_mib + room) / ROOM for room in (25.5, 10.5, 20.5, 20.5))
    unlike = replace(cluster(4.0, 1.0, 1.0, 1.0), memory_mib=memory_mib)
    plan = planner.optimize(of_known_memory(), unlike, global_batch=64, passes="merge")
    assert list((plan.shares or {}).values()) == [25, 10, 15, 14]
    assert list((plan.largest_shares or {}).values()) == [25, 10, 20, 20]
    assert "too large for the memory of a rank" in plan.notes[-1]  # equal shares
    assert not any("that it has" in note for note in plan.notes)
    with pytest.raises(InputError, match=r"a rank has memory for 10, expected at most 55 on 4 ranks; rank 1 may fill"):
        planner.optimize(of_known_memory(), unlike, global_batch=64, max_memory_mib=needed_mib + 15.5)
    with pytest.raises(InputError, match=r"^memory_mib of the cluster: found too little.*: rank 2 may fill .* 1 MiB"):
        choose_shares(of_known_memory(), replace(unlike, memory_mib=(*memory_mib[:2], needed_mib, memory_mib[3])), 64)
    assert make_problem(of_known_memory(), unlike).profile.world.memory_bytes == int(min(memory_mib) * MIB)
    known, memory_bytes = of_known_memory(samples=4), [math.ceil(mib * MIB) for mib in memory_mib]
    ranks = tuple(
        RankCompute(fixed_us=0.0, sample_us=us, update_us=0.0, memory_bytes=has, sample_bytes=size * MIB)
        for us, has, size in zip((1.0, 4.0, 4.0, 4.0), memory_bytes, (1, 1, 2, 1), strict=True)
    )
    known = replace(known, compute=replace(known.compute, by_rank=ranks))
    choice = choose_shares(known, cluster(), 60)
    assert (choice.batch.shares, choice.largest) == ((25, 10, 10, 15), {"0": 25, "1": 10, "2": 10, "3": 20})
    problem = make_problem(choice.profile, choice.cluster)
    assert (replicated_bytes(problem) or 0) <= (problem.profile.world.memory_bytes or 0)


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
