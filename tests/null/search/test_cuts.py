"""Cuts of a compiled graph against all subsets of them."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from builders import profile_document

from planner.decide.cut_choice import cut_problem
from planner.decide.optimize import optimize
from planner.documents.profile import parse_profile
from planner.model.problem import Problem, make_problem
from planner.model.regions import with_cuts
from planner.passes.merge import merge_without_contention
from runtime.errors import InputError


def _problem(seed: int, blocks: int, cut_us: float, beta: float, contention: float = 1.0) -> Problem:
    """A chain of blocks of two to four gradients, with a cost of up to `cut_us` for the cut between two of them."""
    draw = random.Random(seed)
    sizes = [draw.randint(2, 4) for _ in range(blocks)]
    rows = [(draw.choice((10, 1000, 250_000, 1_000_000)), draw.uniform(0.0, 2000.0)) for _ in range(sum(sizes))]
    document = profile_document(rows, forward_us=8000.0)
    stops = list(itertools.accumulate(sizes))[:-1]
    document["compute"]["compiled"] = {
        "backend": "inductor",
        "cuts": [
            {"module": f"b{index}", "after": stop, "forward_us": draw.uniform(0.0, cut_us / 2),
             "backward_us": draw.uniform(0.0, cut_us / 2)}
            for index, stop in enumerate(stops)
        ],
    }  # fmt: skip
    document["cluster"] = {
        "schema": "planner.cluster/1", "nodes": 4,
        "collectives": {"all_reduce": {"alpha_us": draw.uniform(50.0, 1000.0), "beta_us_per_byte": beta}},
        "contention": {"compute": contention, "network": contention},
    }  # fmt: skip
    return make_problem(parse_profile(document))


def _step_us(problem: Problem) -> float:
    return max(merge_without_contention(problem).end_us, problem.compute_end_us) + problem.update_us


@pytest.mark.parametrize("cut_us", [0.0, 500.0, 2000.0])
@pytest.mark.parametrize("beta", [1e-4, 1e-3, 4e-3])
@pytest.mark.parametrize(("seed", "blocks"), [(0, 3), (1, 6), (2, 8), (3, 9)])
def test_chosen_cuts_are_within_one_percent_of_the_best_of_all_subsets(
    seed: int, blocks: int, cut_us: float, beta: float
) -> None:
    problem = _problem(seed, blocks, cut_us, beta)
    compiled = problem.profile.compute.compiled
    assert compiled is not None
    modules = [cut.module for cut in compiled.cuts]
    subsets = (chosen for count in range(len(modules) + 1) for chosen in itertools.combinations(modules, count))
    best_us, fewest = min((_step_us(with_cuts(problem, chosen)), len(chosen)) for chosen in subsets)
    found = cut_problem(problem)
    assert _step_us(found) <= best_us * 1.01
    assert len(found.cuts or ()) <= fewest


def test_one_graph_stays_where_nothing_is_won() -> None:
    assert cut_problem(_problem(0, 6, 2000.0, 1e-9)).cuts == ()
    assert cut_problem(_problem(0, 1, 2000.0, 1e-3)).cuts == ()


def test_cuts_with_contention_are_no_slower_than_one_graph_or_all_cuts() -> None:
    problem = _problem(1, 7, 300.0, 2e-3, contention=1.2)
    plan = optimize(problem.profile)
    assert plan.predicted is not None
    for modules in ((), [f"b{index}" for index in range(6)]):
        other = optimize(with_cuts(problem, modules).profile)
        assert other.predicted is not None
        assert plan.predicted.iteration_us <= other.predicted.iteration_us * 1.005


def test_a_plan_has_the_cuts_in_the_order_of_forward_and_says_what_they_win() -> None:
    problem = _problem(2, 8, 100.0, 1e-3)
    plan = optimize(problem.profile)
    assert plan.cuts
    assert list(plan.cuts) == sorted(plan.cuts, reverse=True)
    assert any("in place of" in note and "with one graph" in note for note in plan.notes)
    assert optimize(problem.profile).digest() == plan.digest()
    assert optimize(replace(problem.profile, compute=replace(problem.profile.compute, compiled=None))).cuts is None


@pytest.mark.parametrize(
    ("change", "words"),
    [({"after": 3}, r"cuts\[0\]\.after: found 3, expected more than 0 and fewer than all 3"),
     ({"module": "b1"}, r"cuts\[1\]\.module: found 'b1' again")],
)  # fmt: skip
def test_wrong_cuts_of_a_profile_are_refused(change: dict[str, object], words: str) -> None:
    document = profile_document([(10, 1.0)] * 3)
    cuts: list[dict[str, object]] = [{"module": "b0", "after": 1}, {"module": "b1", "after": 2}]
    document["compute"]["compiled"] = {"backend": "inductor", "cuts": [cuts[0] | change, cuts[1]]}
    with pytest.raises(InputError, match=words):
        parse_profile(document)
