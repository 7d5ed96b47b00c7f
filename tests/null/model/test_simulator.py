"""The simulator against the recurrence and against an event-by-event replay, both written independently."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
import reference
from builders import cluster_document, factors, line_problem, make, problems, profile_document, random_problem
from hypothesis import given
from hypothesis import strategies as st

from planner.decide.strategies import make_schedule
from planner.documents.profile import Contention, parse_cluster, parse_profile
from planner.ir import Bucket, Schedule
from planner.model.modes import simulate_schedule, step_us
from planner.model.problem import Problem, make_problem
from runtime.errors import InputError
from runtime.plan.timeline import Span, Timeline, busy_us


def members(schedule: Schedule) -> list[Sequence[int]]:
    return [bucket.gradients for bucket in schedule.buckets]


@st.composite
def cut(draw: st.DrawFn, problem: Problem) -> Schedule:
    """Any contiguous buckets."""
    inner = draw(st.sets(st.integers(1, problem.count)))
    return Schedule.from_boundaries(sorted(inner | {problem.count}))


def test_step_by_hand() -> None:
    """Three gradients, ready at 110, 130 and 200; a message takes 20 + 0.1 per byte.

    [0] 110 → 134 (40 B); [1, 2] waits for 200 → 200 + 20 + 0.1·120 = 232; the update takes 10.
    """
    problem = line_problem([(10, 10), (20, 20), (10, 70)], 20.0, 0.1)
    timeline = simulate_schedule(problem, Schedule.from_boundaries([1, 3]))
    assert [(s.task, s.ready_us, s.start_us, s.end_us) for s in timeline.on("network")] == [
        ("bucket 0 all_reduce", 110.0, 110.0, 134.0),
        ("bucket 1 all_reduce", 200.0, 200.0, 232.0),
    ]
    assert timeline.iteration_us == 242.0
    assert timeline.exposed_us == 32.0
    assert (timeline.forward_us, timeline.backward_us, timeline.update_us) == (100.0, 100.0, 10.0)
    busy = simulate_schedule(problem, Schedule.from_boundaries([1, 2, 3]))
    assert [s.start_us for s in busy.on("network")] == [110.0, 134.0, 200.0]


def test_contended_step_by_hand() -> None:
    """Compute twice, network four times as slow while both are busy.

    The bucket of gradient 0 is ready at 110 and costs 24: alone it would end at 134. Backward has 90 left, which take
    180 together with the network; the network needs 4·24 = 96 of those and ends at 206, compute has done 48 of 90.
    At 206 the network is idle, gradient 2 is ready 42 later at 248, and its 32 are sent on a quiet machine: 280.
    """
    document = profile_document([(10, 10), (20, 20), (10, 70)])
    problem = make(document, cluster_document((20.0, 0.1), contention=(2.0, 4.0)))
    timeline = simulate_schedule(problem, Schedule.from_boundaries([1, 3]))
    spans = timeline.on("network")
    assert [(s.start_us, s.end_us) for s in spans] == [(110.0, 206.0), (248.0, 280.0)]
    assert [s.ready_us for s in spans] == [110.0, 248.0]
    assert timeline.iteration_us == 290.0
    assert [s.end_us for s in timeline.on("compute") if s.task == "backward"] == [248.0]


@given(st.data())
def test_step_equals_the_recurrence(data: st.DataObject) -> None:
    problem = data.draw(problems(mixed=data.draw(st.booleans())))
    schedule = data.draw(cut(problem))
    timeline = simulate_schedule(problem, schedule)
    expected = reference.iteration_us(problem, members(schedule))
    assert timeline.iteration_us == pytest.approx(expected, rel=1e-12)
    compute = problem.profile.compute
    quiet = compute.forward_us + sum(g.backward_us for g in compute.gradients) + compute.update_us
    assert timeline.exposed_us == pytest.approx(expected - quiet, rel=1e-9, abs=1e-6)


@given(st.data())
def test_contended_step_equals_the_replay(data: st.DataObject) -> None:
    problem = data.draw(problems(mixed=data.draw(st.booleans()), contention=True))
    schedule = data.draw(cut(problem))
    timeline = simulate_schedule(problem, schedule)
    expected = reference.contended_iteration_us(problem, members(schedule))
    assert timeline.iteration_us == pytest.approx(expected, rel=1e-9, abs=1e-6)


def test_factors_by_size_are_those_of_the_message() -> None:
    """1/factor lies on a line over the logarithm of the size, and stays beyond the sizes that were measured."""
    document = profile_document([(256, 0.0), (8192, 100.0), (10**6, 100.0)], forward_us=0.0)
    cluster = cluster_document((10.0, 0.0), contention=(9.0, 9.0))
    cluster["contention"]["by_size"] = [[1024, 2.0, 5.0], [1048576, 1.0, 1.0]]
    problem = make(document, cluster)
    assert problem.bucket_factors([(0,), (1,), (2,)]) == [
        (2.0, 5.0),
        (pytest.approx(1 / 0.75), pytest.approx(1 / 0.6)),
        (1.0, 1.0),
    ]
    # Beside 200 us of backward: 50 us for the first; the second begins when 100 us are done.
    ends = [span.end_us for span in simulate_schedule(problem, Schedule.from_boundaries([1, 2, 3])).on("network")]
    assert ends == pytest.approx([50.0, 125.0 + 10 / 0.6, 125.0 + 10 / 0.6 + (100 - 12.5) + 10])


@pytest.mark.parametrize("kind", ["line", "monotone", "jagged"])
@pytest.mark.parametrize("contention", [None, (1.07, 1.12), (2.5, 1.0), (1.0, 2.5)])
def test_long_steps(kind: str, contention: tuple[float, float] | None) -> None:
    rng = np.random.default_rng(7)
    for _ in range(5):
        problem = random_problem(rng, 200, kind, contention=contention)
        stops = sorted({*rng.integers(1, 200, 30).tolist(), 200})
        schedule = Schedule.from_boundaries(stops)
        expected = reference.contended_iteration_us(problem, members(schedule))
        assert simulate_schedule(problem, schedule).iteration_us == pytest.approx(expected, rel=1e-9)


def with_contention(problem: Problem, compute: float, network: float) -> Problem:
    document = {"compute": compute, "network": network}
    cluster = problem.cost.cluster
    changed = type(cluster)(**{**vars(cluster), "contention": Contention(**document)})
    return make_problem(problem.profile, changed)


@given(st.data())
def test_contention_never_helps(data: st.DataObject) -> None:
    """Larger factors never give a shorter step; factors of 1 are no contention."""
    problem = data.draw(problems())
    schedule = data.draw(cut(problem))
    compute, network = data.draw(factors())
    free_us = simulate_schedule(problem, schedule).iteration_us
    assert simulate_schedule(with_contention(problem, 1.0, 1.0), schedule).iteration_us == free_us
    some_us = simulate_schedule(with_contention(problem, compute, network), schedule).iteration_us
    more_us = simulate_schedule(with_contention(problem, compute + 0.5, network + 0.5), schedule).iteration_us
    assert free_us <= some_us * (1 + 1e-12)
    assert some_us <= more_us * (1 + 1e-12)


@pytest.mark.parametrize("factor", [(1.0, 1.0), (1.0 + 1e-12, 1.0 + 1e-12)])
def test_contended_path_meets_the_free_one(factor: tuple[float, float]) -> None:
    """Factors just above 1 take the other path through the code to the same timeline."""
    rng = np.random.default_rng(3)
    problem = random_problem(rng, 40, "line")
    schedule = make_schedule(problem, "ddp:0.5")
    free = simulate_schedule(problem, schedule)
    contended = simulate_schedule(with_contention(problem, *factor), schedule)
    for one, other in zip(free.spans, contended.spans, strict=True):
        assert (one.task, one.resource, one.bucket) == (other.task, other.resource, other.bucket)
        assert (one.start_us, one.end_us) == pytest.approx((other.start_us, other.end_us), rel=1e-9)
        assert one.ready_us == (None if other.ready_us is None else pytest.approx(other.ready_us, rel=1e-9))


def test_one_message_per_dtype() -> None:
    """Two float32 gradients (40 + 80 B), one bfloat16 (20 B): 2·20 + 0.1·(120 + 20)."""
    document = profile_document([(10, 0), (10, 0), (20, 0)], dtypes=["float32", "bfloat16", "float32"])
    problem = make(document, cluster_document((20.0, 0.1)))
    (span,) = simulate_schedule(problem, Schedule.from_boundaries([3])).on("network")
    assert span.duration_us == pytest.approx(54.0)
    split = Schedule(buckets=(Bucket(gradients=(0, 2)), Bucket(gradients=(1,))))
    assert [s.duration_us for s in simulate_schedule(problem, split).on("network")] == pytest.approx([32.0, 22.0])


def test_empty_gradients_cost_a_message() -> None:
    problem = line_problem([(0, 5), (0, 5)], 20.0, 0.1)
    assert problem.range_cost_us(0, 2).item() == 20.0
    assert problem.bucket_cost_us([(0,), (0, 1)]) == [20.0, 20.0]


@given(problems(mixed=True))
def test_ranges_and_buckets_cost_the_same(problem: Problem) -> None:
    expected = reference.cost_table(problem)
    for start in range(problem.count):
        stops = range(start + 1, problem.count + 1)
        row = [expected[start][stop] for stop in stops]
        found = problem.range_cost_us(start, slice(start + 1, problem.count + 1)).tolist()
        assert found == pytest.approx(row, rel=1e-9, abs=1e-6)
        assert problem.bucket_cost_us([range(start, stop) for stop in stops]) == pytest.approx(found, rel=1e-9)
    column = problem.range_cost_us(slice(0, problem.count), problem.count).tolist()
    assert column == pytest.approx([expected[start][problem.count] for start in range(problem.count)], abs=1e-6)


@given(st.data())
def test_timeline_is_consistent(data: st.DataObject) -> None:
    """Nothing overlaps on a resource, nothing starts before it is ready, and the spans add up to the step."""
    problem = data.draw(problems(mixed=True, contention=data.draw(st.booleans())))
    schedule = data.draw(cut(problem))
    timeline = simulate_schedule(problem, schedule)
    network, compute = timeline.on("network"), timeline.on("compute")
    assert len(network) + len(compute) == len(timeline.spans)
    assert [span.bucket for span in network] == list(range(len(schedule.buckets)))
    slack = 1e-9 * (1.0 + timeline.iteration_us)
    for spans in (network, compute):
        assert all(span.start_us <= span.end_us + slack for span in spans)
        assert all(first.end_us <= second.start_us + slack for first, second in pairwise(spans))
    assert all(span.ready_us is not None and span.ready_us <= span.start_us + slack for span in network)
    forward, backward, update = compute
    assert (forward.start_us, forward.end_us, backward.start_us) == (0.0, problem.forward_us, problem.forward_us)
    assert update.start_us == max(backward.end_us, network[-1].end_us)
    assert update.duration_us == pytest.approx(problem.update_us, abs=slack)
    assert timeline.iteration_us == update.end_us
    idle_us = timeline.iteration_us - sum(span.duration_us for span in compute)
    slowed_us = backward.duration_us - problem.backward_us
    assert timeline.exposed_us == pytest.approx(idle_us + slowed_us, abs=slack)


def test_exposed_is_never_negative() -> None:
    timeline = Timeline(spans=(), iteration_us=0.3, forward_us=0.1, backward_us=0.2, update_us=0.0)
    assert timeline.exposed_us == 0.0


def test_busy_time_is_the_union_of_spans() -> None:
    def span(start_us: float, end_us: float) -> Span:
        return Span(task="", resource="network", start_us=start_us, end_us=end_us)

    assert busy_us([span(5, 6), span(0, 2), span(1, 3), span(1, 2)]) == 4.0
    assert busy_us([]) == 0.0


def test_problem_needs_a_cluster() -> None:
    profile = parse_profile(profile_document([(1, 1.0)]))
    with pytest.raises(InputError, match=r"\$\.cluster: found none and no other was given; expected `--cluster FILE`"):
        make_problem(profile)
    given_cluster = parse_cluster(cluster_document(nodes=3))
    assert make_problem(profile, given_cluster).ranks == 3
    own = parse_profile(profile_document([(1, 1.0)], cluster=cluster_document(nodes=5)))
    assert make_problem(own).ranks == 5
    assert make_problem(own, given_cluster).ranks == 3


@given(problems(max_count=9, mixed=True, contention=True), st.sampled_from(["wfbp", "single", "ddp:0.001", "optimal"]))
def test_the_step_without_a_timeline_is_as_long(problem: Problem, strategy: str) -> None:
    schedule = make_schedule(problem, strategy)
    assert step_us(problem, schedule) == pytest.approx(simulate_schedule(problem, schedule).iteration_us, rel=1e-12)
