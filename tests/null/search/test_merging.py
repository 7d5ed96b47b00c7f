"""Merging against brute force over every way to cut, and against a textbook dynamic program."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
import reference
from builders import line_problem, problems, random_problem
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.decide.strategies import BASELINES, best_baseline, make_schedule
from planner.ir import TIE, Schedule
from planner.model.modes import best_of, simulate_schedule
from planner.model.problem import Problem
from planner.model.step import Overlap, State
from planner.passes.merge import Merge, merge_problem, merge_without_contention
from planner.search.local_search import choice_of, neighbours, stops_of
from planner.search.merge import merge_by_count, merge_exact
from planner.search.merge_contended import MAX_GRID, end_us, improve, merge_contended, replay


def step_us(problem: Problem, stops: Sequence[int]) -> float:
    return simulate_schedule(problem, Schedule.from_boundaries(stops)).iteration_us


def check_against_brute_force(problem: Problem) -> None:
    """The same buckets, whose end is the reference's."""
    stops, end_us = reference.best_stops(problem)
    solution = merge_without_contention(problem)
    assert solution.end_us == pytest.approx(end_us, rel=1e-12)
    assert (solution.stops, solution.ties_exact) == (stops, True)


@settings(max_examples=150)
@given(problems(max_count=8))
def test_ties_on_a_grid(problem: Problem) -> None:
    """Equal sizes, equal ready times, free messages: the fewest buckets, then the earliest boundaries."""
    check_against_brute_force(problem)


@given(problems(max_count=7, mixed=True))
def test_ties_with_mixed_dtypes(problem: Problem) -> None:
    check_against_brute_force(problem)


@pytest.mark.parametrize("kind", ["line", "monotone", "jagged"])
def test_random_problems(kind: str) -> None:
    rng = np.random.default_rng(1)
    for count in [*range(1, 10), 9, 9, 10, 10]:
        check_against_brute_force(random_problem(rng, count, kind))


@pytest.mark.parametrize("kind", ["line", "jagged"])
def test_random_problems_with_mixed_dtypes(kind: str) -> None:
    rng = np.random.default_rng(2)
    for count in range(2, 9):
        dtypes = rng.choice(["float32", "bfloat16"], count).tolist()
        check_against_brute_force(random_problem(rng, count, kind, dtypes=dtypes))


@pytest.mark.parametrize("backward_us", [0.0, 1.0, 50.0])
@pytest.mark.parametrize("alpha_us", [0.0, 1.0, 49.0, 50.0, 51.0])
@pytest.mark.parametrize("beta_us_per_byte", [0.0, 0.25])
def test_equal_gradients(backward_us: float, alpha_us: float, beta_us_per_byte: float) -> None:
    """Nothing distinguishes the gradients: almost every choice is a tie."""
    check_against_brute_force(line_problem([(8, backward_us)] * 8, alpha_us, beta_us_per_byte))


def test_tie_rule_by_hand() -> None:
    """Four gradients at 100, 200, 300, 400; a message costs 10 whatever its size.

    The last bucket starts at 400 in every schedule that sends the others before, and so does one bucket: it wins.
    With a cost per byte of which only the last gradient has any, all but it may be cut anywhere: the first cut is
    forced, the earliest one that keeps two buckets is after gradient 2.
    """
    free = line_problem([(1, 0), (1, 100), (1, 100), (1, 100)], 10.0, 0.0)
    assert merge_without_contention(free).stops == (4,)
    rows = [(0, 0), (0, 100), (10, 100), (10, 100)]
    assert merge_without_contention(line_problem(rows, 10.0, 1.0)).stops == (3, 4)
    late = [(10, 0), (0, 100), (0, 100), (10, 100)]
    assert merge_without_contention(line_problem(late, 10.0, 1.0)).stops == (1, 4)


@pytest.mark.parametrize("kind", ["line", "monotone", "jagged"])
@pytest.mark.parametrize("count", [20, 100, 300])
def test_time_equals_the_textbook_program(kind: str, count: int) -> None:
    problem = random_problem(np.random.default_rng(count), count, kind)
    solution = merge_without_contention(problem)
    expected_us = reference.earliest_end_us(problem)
    assert solution.end_us == pytest.approx(expected_us, rel=1e-12)
    buckets = reference.buckets_of(solution.stops)
    assert reference.network_end_us(problem, buckets) == pytest.approx(expected_us, rel=1e-12)


@settings(max_examples=150)
@given(problems(max_count=40))
def test_time_equals_the_textbook_program_on_a_grid(problem: Problem) -> None:
    assert merge_without_contention(problem).end_us == pytest.approx(reference.earliest_end_us(problem), rel=1e-12)


@given(problems(max_count=7))
def test_each_number_of_buckets(problem: Problem) -> None:
    arrays = merge_problem(problem)
    for number, found in enumerate(merge_by_count(arrays, 5), start=1):
        cuts = itertools.combinations(range(1, arrays.count), number - 1)
        assert len(found.stops) == number
        assert found.end_us == pytest.approx(min(arrays.end_us((*cut, arrays.count)) for cut in cuts), rel=1e-12)
        assert arrays.end_us(found.stops) == pytest.approx(found.end_us, rel=1e-12)


@pytest.mark.parametrize("work", [0, 50])
def test_without_work_for_ties_the_time_is_still_optimal(work: int) -> None:
    rng = np.random.default_rng(5)
    for kind in ("line", "monotone", "jagged") * 5:
        problem = random_problem(rng, 60, kind)
        exact, quick = merge_without_contention(problem), merge_exact(merge_problem(problem), tie_work=work)
        assert exact.ties_exact
        assert not quick.ties_exact
        assert quick.end_us == pytest.approx(exact.end_us, rel=2 * TIE)
        assert quick.stops[-1] == 60
        assert list(quick.stops) == sorted(set(quick.stops))
        assert len(quick.stops) >= len(exact.stops)


@given(problems(max_count=8))
def test_without_work_for_ties_on_a_grid(problem: Problem) -> None:
    _, end_us = reference.best_stops(problem)
    solution = merge_exact(merge_problem(problem), tie_work=0)
    assert solution.end_us == pytest.approx(end_us, rel=1e-11)
    assert reference.network_end_us(problem, reference.buckets_of(solution.stops)) == pytest.approx(end_us, rel=1e-11)


def test_without_work_for_ties_neighbours_still_merge() -> None:
    """The first two hide either way; apart each of them ends sooner, together there are fewer buckets."""
    problem = line_problem([(8, 1000.0)] * 3, 0.0, 0.25)
    assert merge_exact(merge_problem(problem), tie_work=0).stops == (2, 3)


def test_without_work_for_ties_neighbours_merge_as_long_as_the_rest_can_wait() -> None:
    """Apart the first two end at 900, together at 1000, when the last one is ready."""
    problem = line_problem([(25, 0.0), (100, 300.0), (25, 600.0)], 100.0, 1.0)
    assert merge_exact(merge_problem(problem), tie_work=0).stops == (2, 3)


def test_a_boundary_moves_by_powers_of_two_up_to_the_reach() -> None:
    moves = [trial for trial in neighbours(choice_of((50, 100)), 0, reach=16) if len(trial) == 2]
    assert sorted(stops_of(trial)[0] - 50 for trial in moves) == [-16, -8, -4, -2, -1, 1, 2, 4, 8, 16]


RIVALS = (*BASELINES, "wfbp:layer", "ddp:0.01", "ddp:1")


@pytest.mark.parametrize("contention", [None, (1.07, 1.12), (1.3, 1.0), (1.0, 1.5), (2.0, 3.0)])
@pytest.mark.parametrize("kind", ["line", "monotone", "jagged"])
def test_never_worse_than_any_strategy(kind: str, contention: tuple[float, float] | None) -> None:
    """Under contention, where nothing is proved, that is promised of the baselines."""
    rng = np.random.default_rng(11)
    for count in (2, 5, 17, 60, 120):
        problem = random_problem(rng, count, kind, contention=contention)
        best_us = simulate_schedule(problem, make_schedule(problem, "optimal")).iteration_us
        rivals = RIVALS if contention is None else BASELINES
        rivals_us = [simulate_schedule(problem, make_schedule(problem, name)).iteration_us for name in rivals]
        assert best_us <= min(rivals_us) * (1 + 1e-12)


@settings(max_examples=150)
@given(problems(max_count=9, contention=True))
def test_contended_never_worse_than_a_baseline_on_a_grid(problem: Problem) -> None:
    best_us = simulate_schedule(problem, make_schedule(problem, "optimal")).iteration_us
    free_us = step_us(problem, merge_without_contention(problem).stops)
    rivals_us = [simulate_schedule(problem, make_schedule(problem, name)).iteration_us for name in BASELINES]
    assert best_us <= min(free_us, *rivals_us) * (1 + 1e-12)


def test_few_labels_do_not_lose_to_a_baseline() -> None:
    """With one label the search itself loses to one of them now and then: `merge` begins with the best of them."""
    lost = 0
    for seed in range(200):
        rng = np.random.default_rng(seed)
        problem = random_problem(rng, int(rng.integers(2, 30)), "line", contention=(2.0, 1.5))
        starts = [make_schedule(problem, name) for name in BASELINES]
        starts.append(Schedule.from_boundaries(merge_without_contention(problem).stops))
        best_us = min(simulate_schedule(problem, start).iteration_us for start in starts)
        lost += step_us(problem, merge_contended(merge_problem(problem), Overlap.of(problem), 1)) > best_us * (1 + 1e-9)
        found = Merge(labels=1).apply(best_baseline(problem), problem).schedule
        assert simulate_schedule(problem, found).iteration_us <= best_us * (1 + 1e-12)
    assert lost > 0


def contended_losses(kinds: Sequence[str], cases: int, labels: int) -> list[float]:
    """How much longer than the best of all schedules the one found takes, relatively."""
    losses = []
    for seed, kind in zip(range(cases), itertools.cycle(kinds), strict=False):
        rng = np.random.default_rng(1000 + seed)
        contention = (float(rng.choice([1.0, 1.07, 1.3, 2.0])), float(rng.choice([1.12, 1.5, 3.0])))
        problem = random_problem(rng, int(rng.integers(2, 9)), kind, contention=contention)
        found = merge_contended(merge_problem(problem), Overlap.of(problem), labels)
        best_us = min(step_us(problem, stops) for stops in reference.all_stops(problem.count))
        losses.append(step_us(problem, found) / best_us - 1.0)
    return losses


def test_contended_against_brute_force() -> None:
    """Up to eight gradients the labels find the optimum almost always, and miss it by little."""
    losses = contended_losses(["line", "monotone", "jagged"], 150, labels=8)
    assert min(losses) >= -1e-12
    assert max(losses) <= 0.02
    assert sum(loss <= 1e-9 for loss in losses) > 0.97 * len(losses)


def test_one_label_is_worse_than_eight() -> None:
    """The reason to keep several: the earliest prefix need not be the one that compute has got furthest in."""
    one, eight = (sum(contended_losses(["line", "jagged"], 150, labels)) for labels in (1, 8))
    assert eight < one


def test_local_search_mends_bad_starts() -> None:
    """From one bucket per gradient, a search that only drops and moves boundaries comes near the best of all."""
    losses = []
    for seed in range(60):
        problem = random_problem(np.random.default_rng(seed), 8, "line", contention=(1.3, 1.5))
        arrays, overlap, start = merge_problem(problem), Overlap.of(problem), tuple(range(1, 9))
        found = improve(arrays, overlap, start)
        assert end_us(arrays, overlap, found) <= end_us(arrays, overlap, start)
        best_us = min(step_us(problem, stops) for stops in reference.all_stops(problem.count))
        losses.append(step_us(problem, found) / best_us - 1.0)
    assert sum(losses) / len(losses) <= 0.02
    assert sum(loss <= 1e-9 for loss in losses) > 0.7 * len(losses)


@settings(max_examples=150)
@given(problems(max_count=7, contention=True))
def test_contended_against_brute_force_on_a_grid(problem: Problem) -> None:
    found_us = simulate_schedule(problem, make_schedule(problem, "optimal")).iteration_us
    best_us = min(step_us(problem, stops) for stops in reference.all_stops(problem.count))
    assert best_us * (1 - 1e-12) <= found_us <= best_us * 1.02


@settings(max_examples=150)
@given(problems(max_count=8), st.integers(1, 8))
def test_labels_without_contention_are_exact(problem: Problem, labels: int) -> None:
    overlap = Overlap(1.0, 1.0, problem.compute_end_us)
    stops = merge_contended(merge_problem(problem), overlap, labels)
    assert step_us(problem, stops) == pytest.approx(step_us(problem, reference.best_stops(problem)[0]), rel=1e-11)


@pytest.mark.parametrize("kind", ["line", "jagged"])
def test_more_gradients_than_places(kind: str) -> None:
    """Labels look at some places only: what is found is near what is known, and the pass never worse than that."""
    problem = random_problem(np.random.default_rng(7), 3 * MAX_GRID + 1, kind, contention=(1.07, 1.12))
    arrays, overlap = merge_problem(problem), Overlap.of(problem)
    known = merge_without_contention(problem).stops
    found = merge_contended(arrays, overlap, 32, [known])
    assert list(found) == sorted(set(found))
    assert found[-1] == problem.count
    best_us = end_us(arrays, overlap, improve(arrays, overlap, found))
    assert best_us <= 1.02 * end_us(arrays, overlap, known)
    merged = Merge().apply(make_schedule(problem, "wfbp"), problem).schedule
    assert simulate_schedule(problem, merged).iteration_us <= step_us(problem, known) * (1 + 1e-12)


@given(problems(max_count=9, contention=True), st.data())
def test_replays_of_neighbours_equal_full_replays(problem: Problem, data: st.DataObject) -> None:
    """What the local search computes from the middle on, bit for bit."""
    arrays, overlap = merge_problem(problem), Overlap.of(problem)
    cuts = data.draw(st.sets(st.integers(1, problem.count)))
    stops = tuple(sorted(cuts | {problem.count}))
    judge, choice = replay(arrays, overlap), choice_of(stops)
    assert judge.begin(choice) == sent_end_us(problem, overlap, stops)
    for k in range(len(stops) - 1):
        trials = list(neighbours(choice, k, reach=problem.count))
        judge.look_up(trials, k, 2)
        expected = [sent_end_us(problem, overlap, stops_of(trial)) for trial in trials]
        assert [judge.end_us(trial, k) for trial in trials] == expected


def sent_end_us(problem: Problem, overlap: Overlap, stops: Sequence[int]) -> float:
    """When the last bucket ends, one after the other."""
    state, starts, ends = State(0.0, 0.0), np.array((0, *stops[:-1])), np.array(stops)
    factors = [np.broadcast_to(factor, ends.shape).tolist() for factor in overlap.factors(starts, ends)]
    costs_us, ready_us = problem.range_cost_us(starts, ends).tolist(), problem.ready_us[ends - 1].tolist()
    for ready, cost_us, *slowed in zip(ready_us, costs_us, *factors, strict=True):
        state = overlap.send(state, ready, cost_us, tuple(slowed))[2]
    return state.time_us


def test_any_number_of_labels() -> None:
    """A single gradient needs one label, however many are asked for."""
    problem = random_problem(np.random.default_rng(0), 1, "line", contention=(1.5, 1.5))
    found = Merge(labels=10**12).apply(make_schedule(problem, "wfbp"), problem)
    assert str(found.schedule) == "[0] all_reduce/library none"


def test_best_of_prefers_fewer_buckets_then_the_first() -> None:
    problem = line_problem([(0, 10.0)] * 3, 0.0, 0.0)
    cut = [Schedule.from_boundaries(stops) for stops in ([1, 2, 3], [2, 3], [1, 3])]
    assert best_of(problem, cut) is cut[1]
    costly = line_problem([(0, 10.0)] * 3, 30.0, 0.0)
    assert best_of(costly, [*cut, Schedule.from_boundaries([3])]) == Schedule.from_boundaries([3])
