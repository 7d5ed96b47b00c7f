"""Cuts of a compiled graph against all subsets of them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from builders import profile_document
from torch import nn

from planner.comparison.variants import cut_as, make_lineup
from planner.decide.advise import CUTS, advise
from planner.decide.cut_choice import cut_problem, possible_cuts
from planner.decide.optimize import optimize
from planner.decide.simulate import simulate
from planner.decide.strategies import make_schedule
from planner.documents.catalog import find_profile
from planner.documents.profile import parse_profile
from planner.emit.lower import predict
from planner.model.problem import Problem, make_problem
from planner.model.regions import cut_behind, is_whole, with_assumed_cuts, with_cuts
from planner.online.pilot import Pilot
from planner.passes.merge import merge_without_contention
from planner.strategies.baselines import ddp_buckets
from runtime.errors import InputError


def _problem(seed: int, blocks: int, cut_us: float, beta: float, contention: float = 1.0) -> Problem:
    """A chain of blocks of two to four gradients, with a cost of up to `cut_us` for the cut between two of them."""
    draw = random.Random(seed)
    sizes = [draw.randint(2, 4) for _ in range(blocks)]
    rows = [(draw.choice((10, 1000, 250_000, 1_000_000)), draw.uniform(0.0, 2000.0)) for _ in range(sum(sizes))]
    breaks = [sum(sizes) // 2] if seed == 2 else []
    return _cuttable(draw, profile_document(rows, forward_us=8000.0), sizes, cut_us, beta, contention, breaks)


def _chain(name: str, cut_us: float) -> Problem:
    """The regions of the last ten blocks of a model of the catalogue, a gradient for each, and what is before them."""
    profile = with_assumed_cuts(find_profile(name))
    assert profile is not None
    assert profile.compute.compiled is not None
    stops = (0, *(cut.after for cut in profile.compute.compiled.cuts[:10]), len(profile.compute.gradients))
    regions = [profile.compute.gradients[start:stop] for start, stop in itertools.pairwise(stops)]
    rows = [(sum(one.numel for one in region), sum(one.backward_us for one in region)) for region in regions]
    document = profile_document(rows, forward_us=profile.compute.forward_us)
    return _cuttable(random.Random(name), document, [1] * len(rows), cut_us, 1e-3)


def _cuttable(
    draw: random.Random, document: dict[str, Any], sizes: Sequence[int], cut_us: float, beta: float,
    contention: float = 1.0, breaks: Sequence[int] = (),
) -> Problem:  # fmt: skip
    stops = list(itertools.accumulate(sizes))[:-1]
    document["compute"]["compiled"] = {
        "backend": "inductor",
        "breaks": list(breaks),
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
    _compare_with_all(problem)
    assert (len(set(with_cuts(problem, ()).ready_list_us)) == 1) == (seed != 2)


@pytest.mark.parametrize("cut_us", [0.0, 2000.0])
@pytest.mark.parametrize("name", ["gpt2", "bert-base"])
def test_cuts_of_known_models_are_within_one_percent_of_the_best_of_all_subsets(name: str, cut_us: float) -> None:
    _compare_with_all(_chain(name, cut_us))


def _compare_with_all(problem: Problem) -> None:
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


def test_cuts_where_buckets_end_are_those_of_modules_where_both_end_alike() -> None:
    problem = _problem(4, 7, 0.0, 1e-3)
    compiled = problem.profile.compute.compiled
    assert compiled is not None
    cuts = tuple(replace(cut, forward_us=30.0, backward_us=50.0) for cut in compiled.cuts)
    compute = replace(problem.profile.compute, compiled=replace(compiled, cuts=cuts))
    problem = replace(problem, profile=replace(problem.profile, compute=compute))
    stops = [0, *(cut.after for cut in cuts), problem.count]
    behind = cut_behind(problem, [range(*both) for both in itertools.pairwise(stops)])
    modules = with_cuts(problem, [cut.module for cut in cuts])
    assert behind.ready_list_us == modules.ready_list_us
    assert with_cuts(behind, [cut.module for cut in cuts]).ready_list_us == modules.ready_list_us


def test_ddp_is_predicted_with_its_own_cuts() -> None:
    problem = _problem(5, 8, 400.0, 2e-3)
    plan = optimize(problem.profile)
    buckets = ddp_buckets(problem.size_bytes.tolist(), problem.dtype_ids.tolist())
    there = cut_behind(problem, buckets)
    (simulated,) = simulate(problem.profile, strategies=["ddp"])
    assert 1 < len(buckets) < problem.count
    expected_us = predict(there, make_schedule(there, "ddp")).iteration_us
    assert (plan.baselines or {})["ddp"].iteration_us == pytest.approx(expected_us)
    assert simulated.iteration_us == pytest.approx(expected_us)
    lineup = {one.name: one for one in make_lineup(plan, problem, [], ()).variants}
    assert lineup["ddp"].predicted_us == pytest.approx(expected_us)
    assert lineup["none"].predicted_us == pytest.approx(problem.forward_us + problem.backward_us + problem.update_us)
    assert cut_as(lineup["plan"], problem).cuts == plan.cuts
    assert cut_as(lineup["none"], problem).cuts == ()


@pytest.mark.parametrize(("turned", "block"), [(False, "net.h."), (True, "net.h."), (True, "net.encoder_layer_")])
def test_one_graph_has_cuts_at_blocks_at_an_assumed_cost(turned: bool, block: str) -> None:
    """Gradients of one graph come at once, in any order."""
    names = [f"{block}{at}.mlp.{part}.weight" for at in reversed(range(6)) for part in (3, 0)]
    names = ["head.weight", *names, "embed.weight"]
    document = profile_document([(250_000, 0.0)] * len(names), forward_us=8000.0)
    document["cluster"] = {"schema": "planner.cluster/1", "nodes": 4, "collectives": {"all_reduce": {
        "alpha_us": 50.0, "beta_us_per_byte": 1e-3}}}  # fmt: skip
    for row, name in zip(document["compute"]["gradients"], names[::-1] if turned else names, strict=True):
        row["name"] = name
    document["compute"]["gradients"][0]["backward_us"] = 20_000.0
    problem = make_problem(parse_profile(document))
    assert is_whole(problem.profile.compute)
    choice = possible_cuts(problem)
    assert choice is not None
    assert choice.problem.cuts
    assert set(choice.problem.cuts) <= {f"{block}{at}" for at in range(6)}
    assert "could be cut at" in choice.note
    assert "if a cut costs 0.2 ms, which was not measured" in choice.note
    assert choice.step_us < choice.whole_us
    compiled = nn.Linear(1, 1)
    compiled.compile(backend="eager")
    run = SimpleNamespace(profile=problem.profile, session=SimpleNamespace(model=compiled))
    for asked, said in ((None, [choice.note]), ("inductor", [])):
        run.opening = SimpleNamespace(key=SimpleNamespace(compile=asked))
        assert Pilot.possible_cuts(SimpleNamespace(_run=run)) == said  # type: ignore[arg-type]
    option = next(one for one in advise(problem.profile).options if one.name == CUTS)
    assert option.iteration_us == pytest.approx(choice.step_us)
    assert possible_cuts(choice.problem) is None
    document["compute"]["gradients"][5]["backward_us"] = 20_000.0
    assert possible_cuts(make_problem(parse_profile(document))) is None


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
