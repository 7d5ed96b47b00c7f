"""Owners of whole parameters in a sharded step: brute force on small cases, speed on large ones, what a plan says."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import halves_cluster, make, profile_document

from planner import optimize
from planner.decide.given import given_request
from planner.decide.plan_request import Request
from planner.decide.strategies import make_schedule
from planner.documents.profile import parse_profile
from planner.documents.text import mib
from planner.ir import Schedule
from planner.model.modes import simulate_schedule, step_us
from planner.model.modes.sharded import Sharded, gathers_us, owners_of, sharded_bytes
from planner.model.owned import gathered_bytes, loads_us, scattered_bytes, whole_gradients, work_us
from planner.model.problem import Problem
from planner.model.schedule_text import parse_schedule
from planner.passes.late_gather import best_late
from planner.passes.shard_updates import ShardUpdates, sharded_bound
from runtime.errors import InputError

HALF = (30.0, 0.005)
"""Start-up in microseconds, and microseconds a byte, of both halves of an all-reduce."""


def document(count: int, matrices: int, seed: int = 0, update_us: float = 3000.0, **options: Any) -> dict[str, Any]:
    """profile.json of `count` gradients, of which the first are matrices of Muon."""
    rng = np.random.default_rng(seed)
    rows = [(int(rng.integers(1, 40)) * 1000, float(rng.integers(5, 60))) for _ in range(count)]
    made = profile_document(rows, update_us=update_us, **options)
    made["compute"]["optimizer"] = {
        "name": "Muon, AdamW", "adaptive": True, "elementwise": False, "unit": "matrix", "holds_all": True,
        "matrices": [f"g{index}" for index in range(matrices)], "state_bytes": 4 * sum(numel for numel, _ in rows),
    }  # fmt: skip
    return made


def problem(count: int, matrices: int, seed: int = 0, ranks: int = 2, inside: int = 1, **cluster: Any) -> Problem:
    machines = halves_cluster(HALF, nodes=ranks // inside, ranks_per_node=inside, **cluster)
    return make(document(count, matrices, seed), machines)


def test_the_largest_part_decides() -> None:
    """By hand: rank 0 has the matrices g0 and g1 (each message is twice as long), and half of g2."""
    step = problem(3, 2)
    schedule = replace(Schedule.from_boundaries([3]), mode=Sharded(owners=(0, 0, -1)))
    sizes = step.size_bytes.tolist()
    message_us = [HALF[0] + HALF[1] * size for size in (2 * (sizes[0] + sizes[1]), sizes[2])]
    assert gathers_us(step, schedule.buckets, owners_of(schedule)) == [pytest.approx(sum(message_us))]
    loads = loads_us(step, (0, 0, -1))
    assert sum(loads) == pytest.approx(3000.0)
    assert loads[0] - loads[1] == pytest.approx(3000.0 * (sizes[0] + sizes[1]) / sum(sizes))
    assert simulate_schedule(step, schedule).iteration_us == pytest.approx(step_us(step, schedule))


@pytest.mark.parametrize(
    ("nodes", "cards", "loads", "scattered", "gathered"),
    [
        (4, 1, (3.0, 1.0, 2.0, 0.0), 12.0, 12.0),
        (1, 1, (3.0, 1.0, 2.0, 0.0), 12.0, 12.0),
        (2, 1, (3.0, 1.0, 2.0, 0.0), 8.0, 8.0 * 4 / 3),  # 4 of one node, to the two ranks of the other
        (2, 1, (2.0, 2.0, 1.0, 0.0), 8.0, 8.0),  # padded
        (2, 1, (1.0, 1.0, 1.0, 1.0), 4.0, 4.0),
        (2, 2, (3.0, 1.0, 2.0, 0.0), 12.0, 12.0),  # one card for each rank
    ],
)
def test_what_cards_of_a_node_carry_decides(
    nodes: int, cards: int, loads: tuple[float, ...], scattered: float, gathered: float
) -> None:
    step = problem(3, 2, ranks=4, inside=4 // nodes, nics_per_node=cards)
    assert scattered_bytes(step, loads) == pytest.approx(scattered)
    assert gathered_bytes(step, loads) == pytest.approx(gathered)


def test_only_parameters_that_are_updated_whole_take_products_of_matrices() -> None:
    """Not an embedding, of which another optimizer treats every element by itself."""
    known = document(2, 1)
    numels = [gradient["numel"] for gradient in known["compute"]["gradients"]]
    for gradient in known["compute"]["gradients"]:
        gradient["matrix"] = [gradient["numel"] // 10, 10]
    matrix_us, embedding_us = work_us(make(known, halves_cluster(HALF, nodes=2)))
    assert matrix_us / embedding_us == pytest.approx(numels[0] * (numels[0] / 10 + 10) / numels[1])
    assert matrix_us + embedding_us == pytest.approx(3000.0)


def test_updates_that_every_rank_applies_are_half_the_bytes_and_no_owners_work_alone() -> None:
    """By hand: g0 is gathered in 2 bytes an element, and all but its operator is every rank's."""
    known = document(3, 1)
    name, numel = known["compute"]["gradients"][0]["name"], known["compute"]["gradients"][0]["numel"]
    shape = {"shape": [numel // 10, 10], "operator_us": 1000.0, "result_bytes": 2 * numel, "parameters": [name]}
    found = {}
    for applied in (False, True):
        known["compute"]["operator"] = {"optimizer": "Muon", "shapes": [shape], "applied": applied}
        step = make(known, halves_cluster(HALF, nodes=2))
        schedule = replace(Schedule.from_boundaries([1, 3]), mode=Sharded(owners=(0, -1, -1)))
        owners = owners_of(schedule)
        assert owners is not None
        found[applied] = gathers_us(step, schedule.buckets, owners), loads_us(step, owners)
    rest_us = 2000.0 / int(step.size_bytes.sum())
    assert found[True][0][0] == pytest.approx(HALF[0] + HALF[1] * 2 * 2 * numel)
    assert found[False][0][0] == pytest.approx(HALF[0] + HALF[1] * 2 * 4 * numel)
    assert found[True][0][1] == found[False][0][1]
    assert found[True][1][0] == pytest.approx(found[False][1][0])
    assert found[True][1][1] == pytest.approx(found[False][1][1] + rest_us * 4 * numel)


@pytest.mark.parametrize(
    ("seed", "ranks", "inside"), [*((seed, 2 + seed % 2, 1) for seed in range(8)), (0, 4, 2), (1, 4, 2)]
)
def test_search_is_near_what_trying_everything_finds(seed: int, ranks: int, inside: int) -> None:
    """Over all owners of six parameters, four of them matrices, and all buckets."""
    step = problem(6, 4, seed, ranks, inside)
    found = ShardUpdates(step="always").sharded(Schedule.from_boundaries([6]), step)
    assert found is not None
    assert set(whole_gradients(step)) == {
        one for one, owner in enumerate(owners_of(found.schedule) or ()) if owner >= 0
    }
    best_us = min(
        step_us(step, replace(Schedule.from_boundaries([*cut, 6]), mode=Sharded(owners=(*owners, -1, -1))))
        for owners in itertools.product(range(step.ranks), repeat=4)
        for length in range(3)
        for cut in itertools.combinations(range(1, 6), length)
    )
    assert sharded_bound(step).step_us - 1e-6 <= best_us
    assert step_us(step, found.schedule) <= best_us * 1.02


def test_many_matrices_are_planned_in_a_second() -> None:
    step = problem(400, 400, ranks=64)
    begin = time.process_time()
    found = ShardUpdates(step="always").sharded(make_schedule(step, "ddp"), step)
    assert time.process_time() - begin < 5.0  # 1 s where nothing else runs
    assert found is not None
    assert max(loads_us(step, owners_of(found.schedule) or ())) <= 3000.0 / 64 * 1.3


def test_a_plan_has_owners_where_that_is_allowed_and_says_what_they_take() -> None:
    profile = parse_profile(document(6, 4, cluster=halves_cluster(HALF, nodes=2)))
    plan = optimize(profile, allow=["sharded-step"])
    assert plan.updates is not None
    assert plan.updates.step is not None
    owners = plan.updates.step.owners
    assert owners is not None
    assert set(owners) == {"g0", "g1", "g2", "g3"}
    words = "each of 4 whole parameters is updated by its owner, which alone has its state (of each rank estimated by"
    assert any(words in note for note in plan.notes or ())
    assert plan == optimize(profile, allow=["sharded-step"])
    drop_in = optimize(profile)
    assert drop_in.owners == {}
    assert any("--allow sharded-step lets owners update them" in note for note in drop_in.notes or ())
    late = optimize(profile, allow=["late-gather"])
    assert late.owners
    assert plan.predicted is not None
    assert late.predicted is not None
    assert late.predicted.iteration_us <= plan.predicted.iteration_us


def test_a_matrix_that_no_rank_can_hold_is_named() -> None:
    profile = parse_profile(document(6, 4, cluster=halves_cluster(HALF, nodes=2)))
    largest = max(profile.compute.gradients[:4], key=lambda one: one.numel)
    plan = optimize(profile, allow=["sharded-step"], max_memory_mib=0.1)
    words = f"one rank has all of {largest.name} ({mib(largest.size_bytes)}), about"
    assert any(words in note and "more ranks do not help" in note for note in plan.notes or ())


def test_late_gathers_have_owners_too() -> None:
    profile = parse_profile(document(6, 4, cluster=halves_cluster(HALF, nodes=2)))
    plan = optimize(profile, allow=["late-gather"], passes="merge,shard_updates,late_gather{when=always}")
    assert plan.gathers
    assert set(plan.owners) == {"g0", "g1", "g2", "g3"}
    step = problem(6, 4)
    schedule = best_late(step, Schedule.from_boundaries([3, 6]))[0]
    assert parse_schedule(str(schedule)) == schedule
    assert simulate_schedule(step, schedule).iteration_us == pytest.approx(step_us(step, schedule))
    alone = replace(schedule, mode=Sharded(owners=owners_of(schedule)))
    assert step_us(step, schedule) <= step_us(step, alone)


def test_schedules_with_owners_have_a_text_form_that_is_checked(tmp_path: Path) -> None:
    step = problem(3, 2)
    schedule = replace(Schedule.from_boundaries([3]), mode=Sharded(owners=(1, 0, -1)))
    assert str(schedule).splitlines()[0] == "sharded by 1,0,-"
    assert parse_schedule(str(schedule)) == schedule
    whole = sharded_bytes(step, replace(schedule, mode=Sharded(owners=(0, 0, 0))))
    assert (sharded_bytes(step, schedule) or 0) < (whole or 0)
    profile = parse_profile(document(3, 2, cluster=halves_cluster(HALF, nodes=2)))
    for mode, words in (
        ("sharded by 2,0,-", "there is no rank 2, for there are 2 ranks"),
        ("sharded by -,0,-", "gradient 0 has no owner, whose parameter the optimizer updates whole"),
        ("sharded", "gradient 0 has no owner"),
        ("sharded by 0,1", "found owners of 2 gradients, expected 3"),
    ):
        (tmp_path / "schedule").write_text(f"{mode}\n[0-2] all_reduce/library none\n", encoding="utf-8")
        with pytest.raises(InputError, match=words):
            given_request(Request(profile=profile, allow="sharded-step"), str(tmp_path / "schedule"))
