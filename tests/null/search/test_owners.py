"""Owners of operators: brute force on small cases, bounds and speed on large ones, text form, and what a plan says."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from builders import cluster_document, make, profile_document

import planner
from planner.decide.strategies import make_schedule
from planner.documents.profile import parse_profile
from planner.ir import OperatorShares
from planner.model.modes import step_us
from planner.model.operator_costs import OperatorCosts, by_message, defect
from planner.model.schedule_text import parse_schedule
from planner.online.deciding import decide, names_of
from planner.search.owners import _search
from planner.verify import VerifyError, verify
from runtime.errors import InputError
from runtime.plan import parse_plan


def costs_of(
    times_us: Any, sizes: Any, ranks: int, alpha_us: float = 20.0, byte_us: float = 1e-3, rest_us: float = 10.0
) -> OperatorCosts:
    count = len(times_us)
    return OperatorCosts(
        names=tuple(map(str, range(count))), operator_us=tuple(map(float, times_us)),
        result_bytes=tuple(map(int, sizes)), apply_us=(rest_us / count,) * count, last_us=5.0, ranks=ranks,
        curve=lambda size: alpha_us + byte_us * size, slowed=1.0,
    )  # fmt: skip


def random_costs(seed: int, count: int, ranks: int) -> OperatorCosts:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 50, count) * 1000
    times = sizes * rng.uniform(0.002, 0.02, count)
    return costs_of(times, sizes, ranks, rng.uniform(1.0, 60.0), 10 ** rng.uniform(-4.5, -2.5))


def every_choice(costs: OperatorCosts) -> Iterator[OperatorShares]:
    """Yield all owners (but for names of ranks that are alike) with all sequences of messages; and those of messages
    inside of nodes, where they may be.
    """
    ranks = [(rank, bool(link)) for link, (count, _) in enumerate(costs.scopes) for rank in range(count)]
    for choice in itertools.product([(-1, False), *ranks], repeat=costs.count):
        owned = [one for one in choice if one[0] >= 0]
        if costs.inside is None and [rank for rank, _ in dict.fromkeys(owned)] != list(range(len(set(owned)))):
            continue
        for message in itertools.product(range(len(owned)), repeat=len(owned)):
            inside = {number for number, (_, near) in zip(message, owned, strict=True) if near}
            if set(message) != set(range(len(set(message)))) or any(
                near != (number in inside) for number, (_, near) in zip(message, owned, strict=True)
            ):
                continue
            places, owners = iter(message), [owner for owner, _ in choice]
            yield by_message(costs, owners, [next(places) if owner >= 0 else 0 for owner in owners], inside)


@pytest.mark.parametrize("seed", range(12))
def test_search_finds_what_trying_everything_finds(seed: int) -> None:
    check_against_every_choice(random_costs(seed, 4, 2 + seed % 2))


def check_against_every_choice(costs: OperatorCosts) -> OperatorShares | None:
    least_us = min(costs.unshared_us, *(costs.update(shares).update_us for shares in every_choice(costs)))
    found = _search(costs)
    assert costs.bound_us <= least_us * (1.0 + 1e-9)
    assert found.update_us <= least_us * 1.005
    assert found.update_us >= least_us * (1.0 - 1e-9)
    if found.shares is not None:
        assert found.update_us == costs.update(found.shares).update_us
        assert defect(found.shares, (costs.count, costs.scopes[-1][0]), costs.ranks) is None
    return found.shares


def test_search_on_intra_node_and_inter_node_links_finds_what_trying_everything_finds() -> None:
    found = set[tuple[bool, ...]]()
    for seed in (0, 1, 4, 5, 7, 8, 15, 21, 26):
        rng, costs = np.random.default_rng(seed), random_costs(seed, 3, 4)
        alpha_us, byte_us = rng.uniform(1.0, 60.0), 10 ** rng.uniform(-4.5, -2.5)
        slowed = 1.0 + 0.2 * (seed % 2)
        costs = replace(
            costs, inside=(2, lambda size, a=alpha_us, b=byte_us: a + b * size), slowed=slowed, compute_slowed=slowed
        )
        if (shares := check_against_every_choice(costs)) is not None:
            found.add((len(shares.inside) < len(shares.messages), bool(shares.inside)))
    assert found == {(True, False), (False, True), (True, True)}  # between nodes, inside, and both at once


def test_many_matrices_are_planned_in_a_second_and_near_the_bound() -> None:
    rng = np.random.default_rng(0)
    sizes = rng.choice([768 * 768, 768 * 3072, 768 * 64, 64 * 64], 400) * 2
    costs = costs_of(sizes / 1e3, sizes, 64, 50.0, 1e-5)
    begin = time.process_time()
    found = _search(costs)
    assert time.process_time() - begin < 4.0  # 1.0 on an idle machine
    assert found.shares is not None
    assert found.update_us <= found.bound_us * 1.1


def test_owners_begin_the_step_anew_for_each_matrix() -> None:
    costs = random_costs(0, 4, 2)
    slower = replace(costs, before_us=(7.0,) * 4)
    shares = by_message(costs, (0, 0, -1, -1), (0,) * 4)
    assert slower.update(shares).computed_us == pytest.approx(costs.update(shares).computed_us + 14.0)
    assert slower.unshared_us == costs.unshared_us


def problem_of(operator_us: float = 5000.0, **cluster: Any) -> Any:
    """Eight square matrices under Muon on four ranks."""
    machines = cluster_document(**({"line": (50.0, 0.01)} | cluster))
    line = machines["collectives"]["all_reduce"]
    machines["collectives"]["all_gather"] = line
    profile = profile_document([(100 * 100, 300.0)] * 8, update_us=8 * operator_us + 500.0, cluster=machines)
    names = [gradient["name"] for gradient in reversed(profile["compute"]["gradients"])]
    shape = {"shape": [100, 100], "operator_us": operator_us, "result_bytes": 20000, "parameters": names}
    profile["compute"]["operator"] = {"optimizer": "Muon", "shapes": [shape]}
    return make(profile, machines)


def test_plan_has_owners_and_says_how_near_the_bound_it_is() -> None:
    plan = planner.optimize(problem_of().profile)
    operator = plan.updates.operator if plan.updates else None
    assert operator is not None
    assert operator.owners is not None
    assert sorted(operator.owners.values()) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [name for message in operator.messages for name in message].count("g0") == 1
    assert plan.predicted is not None
    assert plan.predicted.update_us == pytest.approx(operator.shared_us)
    assert operator.bound_us <= operator.shared_us < 0.5 * operator.replicated_us
    assert any("owners compute 8, results come in" in note for note in plan.notes)
    assert planner.optimize(problem_of().profile).to_document() == plan.to_document()


@pytest.mark.parametrize("seed", range(6))
def test_search_is_as_near_to_what_trying_everything_finds_with_stacks_as_without(seed: int) -> None:
    rng = np.random.default_rng(seed)
    times_us = rng.uniform(20.0, 200.0, 2).tolist()
    plain = costs_of(times_us * 2, [20000] * 4, 2 + seed % 2, rng.uniform(1.0, 60.0))
    saved_us = tuple(float(rng.uniform()) * time_us for time_us in times_us)
    gaps = []
    for costs in (plain, replace(plain, kinds=(0, 1) * 2, saved_us=saved_us * 2)):
        least_us = min(costs.unshared_us, *(costs.update(shares).update_us for shares in every_choice(costs)))
        found = _search(costs)
        assert costs.bound_us <= least_us * (1.0 + 1e-9)
        gaps.append(found.update_us / least_us)
    assert 1.0 - 1e-9 <= gaps[1] <= gaps[0] + 0.005


def test_stacks_are_planned_where_bits_are_equal_and_they_are_faster() -> None:
    document, found = problem_of().profile.to_document(), dict[Any, Any]()
    (shape,) = document["compute"]["operator"]["shapes"]
    for stacked_us in (None, 1000.0, 7000.0):
        if stacked_us is not None:
            shape["stacked_us"] = stacked_us
        found[stacked_us] = planner.optimize(parse_profile(document)).to_document()
    plain, stacked = found[None], found[1000.0]
    assert "batched" not in plain["updates"]["operator"]
    assert found[7000.0] == plain
    operator = stacked["updates"]["operator"]
    assert sorted(operator["batched"]) == sorted(operator["owners"])
    assert operator["bound_us"] <= operator["shared_us"] < plain["updates"]["operator"]["shared_us"] - 2000.0
    assert any("8 of them in stacks of equal shapes, with equal bits" in note for note in stacked["notes"])
    assert parse_plan(stacked).to_document() == stacked
    shape["stacked_us"], names = 1000.0, shape["parameters"]
    by_group = [{**shape, "parameters": names[place::4]} for place in range(4)]  # four of two
    document["compute"]["operator"]["shapes"] = by_group
    group = {name: place for place, one in enumerate(by_group) for name in one["parameters"]}
    operator = planner.optimize(parse_profile(document)).to_document()["updates"]["operator"]
    stacks = {(operator["owners"][name], group[name]) for name in operator["batched"]}
    assert len(operator["batched"]) == 2 * len(stacks)
    assert stacked["updates"]["operator"]["shared_us"] <= operator["shared_us"] + 1e-6


def test_nothing_to_gain_is_said() -> None:
    plan = planner.optimize(problem_of(operator_us=1.0, line=(5000.0, 0.01)).profile)
    assert plan.updates is not None
    assert plan.updates.operator is not None
    assert plan.updates.operator.owners is None
    assert any("nothing to gain from owners" in note for note in plan.notes)


def test_a_run_compares_buckets_with_the_same_owners() -> None:
    plan = planner.optimize(problem_of().profile)
    operator = plan.updates.operator if plan.updates else None
    assert operator is not None
    asked = {
        "profile": problem_of().profile.to_document(), "options": {}, "others": [names_of(plan.buckets)],
        "owners": operator.owners, "gathers": operator.messages,
    }  # fmt: skip
    answer, unowned = decide(asked), decide(asked | {"owners": None})
    assert plan.predicted is not None
    assert answer["others_us"] == [pytest.approx(plan.predicted.iteration_us)]
    assert unowned["others_us"][0] > answer["others_us"][0]


def test_between_slow_links_owners_are_ranks_of_each_node() -> None:
    links = {"intra": {"alpha_us": 5.0, "beta_us_per_byte": 1e-4}, "inter": {"alpha_us": 50.0, "beta_us_per_byte": 1.0}}
    problem = problem_of(line=(50.0, 1.0), nodes=2, ranks_per_node=2, **links)
    plan = planner.optimize(problem.profile)
    operator = plan.updates.operator if plan.updates else None
    assert operator is not None
    assert operator.owners is not None
    assert operator.inside == tuple(range(len(operator.messages)))
    assert set(operator.owners.values()) == {0, 1}
    assert operator.bound_us <= operator.shared_us < 0.6 * operator.replicated_us
    assert any("of them inside nodes" in note for note in plan.notes)
    assert parse_plan(plan.to_document()).to_document() == plan.to_document()
    asked = {
        "profile": problem.profile.to_document(), "options": {}, "others": [names_of(plan.buckets)],
        "owners": operator.owners, "gathers": operator.messages, "inside": operator.inside,
    }  # fmt: skip
    assert plan.predicted is not None
    assert decide(asked)["others_us"] == [pytest.approx(plan.predicted.iteration_us)]
    best = make_schedule(problem, "optimal")
    assert parse_schedule(str(best)) == best
    odd = replace(best, operators=OperatorShares((2, *[-1] * 7), ((0,),), (0,)))
    with pytest.raises(VerifyError, match="by rank 2 of each node, but 2 ranks of a node can share them"):
        verify(odd, [0] * 8, norms=(0, 4), matrices=(8, 2))


def test_strategies_and_text() -> None:
    problem = problem_of()
    made = {
        rule: make_schedule(problem, f"operators:{rule}") for rule in ("every_rank", "longest_first", "round_robin")
    }
    times_us = {rule: step_us(problem, schedule) for rule, schedule in made.items()}
    best = make_schedule(problem, "optimal")
    assert step_us(problem, best) <= min(times_us.values())
    assert times_us["longest_first"] < times_us["every_rank"]
    for schedule in (*made.values(), best):
        assert parse_schedule(str(schedule)) == schedule
    odd = replace(best, operators=OperatorShares((9, *[-1] * 7), ((0,),)))
    with pytest.raises(VerifyError, match="operators are computed by rank 9, but there are 4 ranks"):
        verify(odd, [0] * 8, norms=(0, 4), matrices=(8, 0))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"shape": [10, 10]}, r"found \[10, 10\] for 'g7', expected one of its 10000 elements"),
        ({"parameters": ["none"]}, "found 'none', which is none of the gradients"),
        ({"parameters": ["g0", "g0"]}, "found 'g0' once more; expected each parameter once"),
    ],
)
def test_wrong_operators_in_a_profile_are_refused(change: dict[str, Any], words: str) -> None:
    document = problem_of().profile.to_document()
    document["compute"]["operator"]["shapes"][0] |= change
    with pytest.raises(InputError, match=words):
        parse_profile(document)
