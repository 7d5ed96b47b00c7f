"""`optimize --accuracy relaxed`: which k, when delay is taken, what such plans carry, and what they say."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import delayed_reference
import numpy as np
import pytest
from builders import (
    cluster_document,
    make,
    printed,
    problems,
    profile_document,
    random_problem,
    usual_document,
    usual_profile,
)
from hypothesis import given, settings

from planner import optimize, simulate
from planner.decide.defaults import MORE
from planner.decide.strategies import make_schedule
from planner.documents.profile import Cluster, parse_cluster, parse_profile
from planner.emit.lower import lower
from planner.ir import GAIN, Bucket, Codec, Dense, Schedule, Synchronous
from planner.model.codecs import TopK
from planner.model.delay_load import StepWork
from planner.model.modes import step_us
from planner.model.modes.delayed import NEAR, Delayed
from planner.model.problem import Problem, make_problem
from planner.passes.base import Candidate
from planner.passes.delay import MAX_DELAY, Delay, best_choice, push_bucketings
from planner.passes.select import select
from planner.report.tables import accuracy_lines
from runtime.errors import InputError
from runtime.plan import DelaySpec, Plan, load_plan, parse_plan

FREE = {"alpha_us": 0.0, "beta_us_per_byte": 0.0}


def slow(**fields: Any) -> Cluster:
    """A network on which the usual profile is sent for long, and compression does not pay."""
    fields.setdefault("local_update", {"alpha_us": 15.0, "beta_us_per_byte": 0.0})
    fields.setdefault("sparsify", {"alpha_us": 1e5, "beta_us_per_byte": 0.0})
    return parse_cluster(cluster_document((200.0, 0.001), **fields))


def decided(**options: Any) -> Plan:
    return optimize(usual_profile(), slow(), accuracy="relaxed", **options)


def mean_us(plan: Plan) -> float:
    assert plan.predicted is not None
    return plan.predicted.iteration_us


def schedule_of(plan: Plan, problem: Problem) -> Schedule:
    """The schedule that a plan was made from."""
    places = {gradient.name: index for index, gradient in enumerate(problem.profile.compute.gradients)}
    buckets = tuple(
        Bucket(
            tuple(places[name] for name in bucket.gradients),
            bucket.transport,
            _codec(problem, [places[name] for name in bucket.gradients], bucket.compressor.density),
        )
        for bucket in plan.buckets
    )
    return Schedule(buckets=buckets, mode=Delayed(plan.delay.steps) if plan.delay else Synchronous())


def _codec(problem: Problem, gradients: list[int], density: float | None) -> Codec:
    return Dense() if density is None else TopK(int(density * int(problem.numel[gradients].sum())))


@pytest.mark.parametrize("seed", range(6))
def test_the_chosen_delay_against_every_other_one(seed: int) -> None:
    """The smallest k within 2 % of the best, each k with its best buckets, by many steps of the reference."""
    problem = random_problem(np.random.default_rng(seed), 6, "line", update_us=20.0)
    given = make_schedule(problem, "optimal")
    options = push_bucketings(problem, given)
    assert given in options
    assert Schedule.from_boundaries([problem.count]) in options
    best_us = {
        k: min(max(delayed_reference.mean_us(StepWork.of(problem, option), k, 30)) for option in options)
        for k in range(1, 6)
    }
    choices = Delay(max_delay=5).choices(given, problem)
    assert [choice.point.steps for choice in choices] == [1, 2, 3, 4, 5]
    for choice in choices:
        assert choice.point.iteration_us == pytest.approx(best_us[choice.point.steps], rel=5e-3)
        assert choice.point.iteration_us == step_us(problem, choice.schedule)
        assert choice.schedule.mode == Delayed(choice.point.steps)
        assert choice.point.closed_form_us <= choice.point.iteration_us * (1 + 1e-9)
    limit_us = min(best_us.values()) * (1.0 + NEAR)
    assert best_choice(choices).point.steps == next(k for k in best_us if best_us[k] <= limit_us)


def test_less_delay_where_more_hardly_helps() -> None:
    """One bucket: pushes of 200 hide behind 310, pulls are 92 late, once in k steps."""
    profile = profile_document([(1000, 200.0)], forward_us=100.0, update_us=8.0)
    problem = make(profile, cluster_document((400.0, 0.0), local_update={"alpha_us": 10.0, "beta_us_per_byte": 0.0}))
    exact = make_schedule(problem, "optimal")
    choices = Delay(max_delay=8).choices(exact, problem)
    assert [choice.point.iteration_us for choice in choices] == pytest.approx([310.0 + 92.0 / k for k in range(1, 9)])
    assert [choice.point.closed_form_us for choice in choices] == pytest.approx([310.0 + 92.0 / k for k in range(1, 9)])
    assert {choice.point.case for choice in choices} == {1}
    assert best_choice(choices).point.steps == 6  # 325.3 are within 2 % of 321.5, 328.4 are not
    assert best_choice(choices[:4]).point.steps == 4
    assert Delay().apply(exact, problem).schedule == replace(exact, mode=Delayed(4))


def test_pushes_are_merged_as_suits_the_delay() -> None:
    """Exactly, a bucket leaves early to hide behind backward; with delay it hides anyway, and start-ups count."""
    rows = [(1000, 400.0)] * 3
    problem = make(profile_document(rows, update_us=0.0), cluster_document((2000.0, 0.0), local_update=FREE))
    layers = make_schedule(problem, "wfbp")
    found = Delay().apply(layers, problem).schedule
    assert len(found.buckets) == 1
    assert isinstance(found.mode, Delayed)
    assert step_us(problem, found) < step_us(problem, replace(layers, mode=found.mode))


def test_on_one_rank_and_where_nothing_is_exposed_there_is_no_delay() -> None:
    alone = make(profile_document([(10, 1.0)] * 6), cluster_document(nodes=1))
    assert Delay().choices(Schedule.from_boundaries([6]), alone) == ()
    assert optimize(usual_profile(), slow(nodes=1), accuracy="relaxed").accuracy == "exact"
    plan = optimize(usual_profile(), parse_cluster(cluster_document((0.0, 0.0))), accuracy="relaxed")
    assert plan.accuracy == "exact"
    assert "relaxed was allowed, but no compression" in plan.notes[-1]
    assert "and no delay would make the step shorter: the plan is exact" in plan.notes[-1]


def test_where_ranks_share_a_node_it_is_the_worker() -> None:
    """If both kinds of link are known; what attach would refuse is not planned."""
    link = {"alpha_us": 50.0, "beta_us_per_byte": 0.0005}
    fast = {"alpha_us": 1.0, "beta_us_per_byte": 1e-5}
    grid = {"nodes": 2, "ranks_per_node": 2}
    plan = optimize(usual_profile(), slow(**grid, inter=link, intra=fast), accuracy="relaxed")
    assert (plan.accuracy, plan.world.nodes) == ("relaxed", 2)
    assert "the worker is the node: its 2 ranks average their gradients" in "\n".join(plan.notes)
    assert {bucket.algorithm for bucket in plan.buckets} == {"library"}
    assert plan.predicted is not None
    assert {task.resource for task in plan.predicted.timeline or ()} == {"compute", "intra", "inter"}
    unknown = optimize(usual_profile(), slow(**grid), accuracy="relaxed", compress="none")
    assert (unknown.accuracy, unknown.delay, unknown.delays) == ("exact", None, None)
    assert "the cluster does not say what both kinds of link cost" in unknown.notes[-1]
    alone = optimize(usual_profile(), slow(nodes=1, ranks_per_node=4, intra=link), accuracy="relaxed")
    assert alone.delay is None
    assert "delay is between nodes, and here all ranks share one" in alone.notes[-1]


def test_pushes_may_be_selected_from() -> None:
    """One gradient that is nearly all of the model: sent whole the network sets the pace, selected it does not."""
    rows = [(100, 50.0), (500_000, 100.0), (100, 50.0)]
    profile = profile_document(rows, forward_us=100.0, update_us=8.0)
    document = cluster_document((20.0, 0.01), local_update=FREE, sparsify={"alpha_us": 5.0, "beta_us_per_byte": 1e-6})
    problem = make(profile, document)
    exact = make_schedule(problem, "optimal")
    whole = min(step_us(problem, replace(option, mode=Delayed(4))) for option in push_bucketings(problem, exact))
    found = Delay(protect="g0|g2|none", compress="sparse").apply(exact, problem).schedule
    assert [bucket.codec.name for bucket in found.buckets] == ["none", "topk", "none"]
    assert step_us(problem, found) < whole / 4  # pulls are whole, once in four steps at the most
    load = StepWork.of(problem, found)
    codec = found.buckets[1].codec
    assert isinstance(codec, TopK)
    k = codec.k
    assert load.push_us[1] == pytest.approx(problem.push.curve.at(8.0 * k))
    assert load.pack_us == pytest.approx((0.0, 5.0 + 1e-6 * 2e6, 0.0))
    assert load.pull_us[1] == pytest.approx(problem.pull.curve.at(2e6))
    plan = lower(problem, found)
    assert plan.accuracy == "relaxed"
    assert plan.buckets[1].compressor.density == pytest.approx((k + 0.5) / 500_000)
    assert "elements: reduce_scatter" in (plan.buckets[1].reason or "")
    protected = Delay(protect="g1|none", compress="sparse").apply(exact, problem).schedule
    assert {bucket.codec.name for bucket in protected.buckets} == {"none"}
    free = make(profile, cluster_document((20.0, 0.01), local_update=FREE))
    assert {
        bucket.codec.name for bucket in Delay(protect="none", compress="sparse").apply(exact, free).schedule.buckets
    } == {"none"}


def test_a_local_update_that_nobody_measured_is_no_gain() -> None:
    """An update of 30 % of the step, and nothing to send: taken as free, delay would seem to save all of it."""
    profile = profile_document([(1000, 200.0)], forward_us=100.0, update_us=130.0)
    problem = make(profile, cluster_document((0.0, 0.0)))
    assert step_us(problem, make_schedule(problem, "ssd:2")) == 300.0
    assert Delay().apply(make_schedule(problem, "optimal"), problem).schedule.mode == Synchronous()
    known = make(profile, cluster_document((0.0, 0.0), local_update=FREE))
    assert Delay().apply(make_schedule(known, "optimal"), known).schedule.mode == Delayed(1)


# Which class


def candidates_of(*times: float | None) -> list[Candidate]:
    """An exact candidate with a step of 100, and lossy ones; None: nothing makes the step shorter."""
    exact = Candidate(schedule=Schedule.from_boundaries([1]), judged_us=100.0)
    lossy = {
        "compression": Schedule(buckets=(Bucket((0,), codec=TopK(1)),)),
        "delay": replace(exact.schedule, mode=Delayed(1)),
    }
    return [exact] + [
        replace(exact, what=what, schedule=exact.schedule if us is None else schedule, judged_us=us or 100.0)
        for (what, schedule), us in zip(lossy.items(), times, strict=False)
    ]


@pytest.mark.parametrize(
    ("times", "chosen", "refused"),
    [
        ((None, None), None, ["no compression would make", "no delay would make"]),
        ((None, 97.9), "relaxed", ["no compression would make"]),
        ((None, 98.1), None, ["no compression would", "delay would make the step 1.90% shorter, and has to win 2%"]),
        ((90.0, 88.1), "relaxed", []),
        ((90.0, 88.3), "bounded", ["delay would make the step 1.89% shorter than compression does, and has to win"]),
        ((90.0, 95.0), "bounded", ["delay would gain less than compression"]),
        ((99.0, 97.5), None, ["compression would make the step 1.00% shorter, and has", "delay would make the step"]),
        ((99.0, 97.0), "relaxed", ["compression would make the step 1.00% shorter"]),
    ],
)
def test_a_riskier_class_has_to_win_by_two_percent(
    times: tuple[float | None, ...], chosen: str | None, refused: list[str]
) -> None:
    found, why = select(make(profile_document([(1, 1.0)]), cluster_document()), candidates_of(*times))
    assert found.schedule.accuracy == (chosen or "exact")
    assert len(why) == len(refused)
    assert all(text.startswith(start) for text, start in zip(why.values(), refused, strict=True))


@settings(max_examples=20)
@given(problems(max_count=6, mixed=True, contention=True))
def test_any_plan_is_sound_and_wins_by_enough(problem: Problem) -> None:
    cluster = problem.cost.cluster
    exact = optimize(problem.profile, cluster)
    plan = optimize(problem.profile, cluster, accuracy="relaxed", protect="none")
    again = optimize(problem.profile, cluster, accuracy="relaxed", protect="none")
    assert json.dumps(again.to_document()) == json.dumps(plan.to_document())
    assert parse_plan(json.loads(json.dumps(plan.to_document()))) == plan
    assert exact.delays is None
    assert plan.gradients == exact.gradients
    assert plan.certificate is not None
    assert plan.certificate.lower_bound_us <= mean_us(plan)
    assert (plan.delay is not None) == (plan.accuracy == "relaxed")
    others = plan.alternatives or {}
    assert plan.accuracy not in others
    if plan.accuracy == "exact":
        assert (plan.buckets, plan.predicted, plan.fallback) == (exact.buckets, exact.predicted, None)
        return
    assert plan.fallback == others["exact"]
    assert plan.fallback.buckets == exact.buckets
    less_risky = [other for name, other in others.items() if name not in ("relaxed", MORE)]
    if plan.accuracy == "relaxed":
        assert all(mean_us(plan) <= mean_us(other) * (1 - GAIN) for other in less_risky)
        assert mean_us(plan) == step_us(problem, schedule_of(plan, problem))


def test_a_relaxed_plan() -> None:
    plan = decided()
    assert plan.accuracy == "relaxed"
    assert plan.delay is not None
    k = plan.delay.steps
    assert plan.delay == DelaySpec(steps=k, warmup_steps=500 + -500 % k, alpha=0.75, beta=2.0)
    assert plan.predicted is not None
    assert plan.fallback is not None
    assert (plan.fallback.accuracy, plan.fallback.delay, plan.fallback.baselines) == ("exact", None, None)
    assert mean_us(plan.fallback) == mean_us(optimize(usual_profile(), slow()))
    assert plan.baselines is not None
    assert plan.scaling is not None
    problem = problem_of_slow()
    assert mean_us(plan) == step_us(problem, schedule_of(plan, problem))
    assert plan.predicted.update_us == 15.0
    computed = sum(filter(None, (plan.predicted.forward_us, plan.predicted.backward_us, plan.predicted.update_us)))
    assert plan.predicted.exposed_us == pytest.approx(mean_us(plan) - computed)
    assert plan.delays is not None
    assert [point.steps for point in plan.delays] == [1, 2, 3, 4]
    assert plan.delays[k - 1].iteration_us == mean_us(plan)
    tasks = plan.predicted.timeline or ()
    assert {task.step for task in tasks} == set(range(k))
    first = [next(task for task in tasks if task.bucket == index) for index in range(len(plan.buckets))]
    assert all(task.task.endswith("reduce_scatter") for task in first)
    assert plan.predicted.bucket_times(len(first)) == [(task.start_us, task.end_us) for task in first]


def problem_of_slow() -> Problem:
    return make_problem(usual_profile(), slow())


@pytest.mark.parametrize(("k", "steps"), [(1, 500), (2, 500), (3, 501), (7, 504)])
def test_synchronous_steps_before_are_a_multiple_of_k(k: int, steps: int) -> None:
    problem = problem_of_slow()
    plan = lower(problem, make_schedule(problem, f"ssd:{k}"))
    assert plan.accuracy == "relaxed"
    assert plan.delay == DelaySpec(steps=k, warmup_steps=steps, alpha=0.75, beta=2.0)


def test_what_a_relaxed_plan_says() -> None:
    plan = decided()
    assert plan.delay is not None
    k = plan.delay.steps
    notes = "\n".join(plan.notes)
    assert "relaxed: predicted " in notes
    assert "shorter than the best exact plan, which is the fallback" in notes
    assert f"k = {k} is the smallest within 2% of the best" in notes
    assert "by Eq. 4, case " in notes
    assert "torch.optim.SGD" in notes
    assert "reduce-scatter: half of the all-reduce; all-gather: half of the all-reduce" in notes
    assert "taken as free" not in notes.partition("relaxed: ")[2]
    text = printed(plan)
    assert "speed over delay" in text
    assert f"accuracy relaxed; delay k = {k}: new weights after every" in text
    assert "the optimizer has to be torch.optim.SGD" in text
    assert "reduce_scatter " in text
    lines = accuracy_lines(plan)
    assert lines[0].startswith("exact    ")
    assert lines[0].endswith(" ms")
    assert f"no compression, delay k = {k}: " in lines[2]
    assert accuracy_lines(optimize(usual_profile()))[2] == "relaxed  not looked at: --accuracy relaxed does"
    free = optimize(usual_profile(), slow(local_update=None), accuracy="relaxed")
    assert "the local update is taken as free, for the cluster has no `local_update` cost" in "\n".join(free.notes)


def test_compression_may_gain_more_than_delay_and_then_delay_is_an_alternative() -> None:
    link = {"alpha_us": 20.0, "beta_us_per_byte": 0.01}
    cluster = parse_cluster(cluster_document((200.0, 0.05), inter=link, sparsify=FREE, local_update=FREE))
    plan = optimize(usual_profile(), cluster, accuracy="relaxed", compress="all")
    assert plan.accuracy == "bounded"
    assert plan.delay is None
    assert set(plan.alternatives or {}) == {"exact", "relaxed"}
    assert plan.notes[-1] == "relaxed was allowed, but delay would gain less than compression"
    relaxed = (plan.alternatives or {})["relaxed"]
    assert relaxed.delay is not None
    sparse = sum(bucket.collective == "sparse" for bucket in relaxed.buckets)
    how = f"{sparse} of them sparse, delay k = {relaxed.delay.steps}: "
    assert accuracy_lines(plan)[2].startswith(f"relaxed  {len(relaxed.buckets)} buckets, {how}")


# Options


def test_less_delay_may_be_asked_for() -> None:
    plans = [decided(max_delay=limit) for limit in (1, 2)]
    assert plans[0].delay is not None
    assert plans[0].delay.steps == 1
    assert [len(plan.delays or ()) for plan in plans] == [1, 2]
    own = decided(passes="merge,delay{max_delay=1}", max_delay=3)
    assert own.delay is not None
    assert own.delay.steps == 1
    seen: list[str] = []
    decided(after_pass=lambda name, schedule, seconds: seen.append(name))
    assert seen == ["merge", "topology", "shard_updates", "joint", "delay", "local_async"]


def test_delay_is_offered_for_sgd_only() -> None:
    for name, delayed in (("SGD", True), ("AdamW", False), ("LAMB", False)):
        document = usual_document()
        document["compute"]["optimizer"] = {"name": name, "adaptive": name != "SGD"}
        plan = optimize(parse_profile(document), slow(), accuracy="relaxed")
        assert (plan.delay is not None) == delayed
        assert delayed or f"this step's optimizer is {name}" in plan.notes[-1]


@pytest.mark.parametrize("value", [0, -1, MAX_DELAY + 1, 2.5, "2"])
def test_wrong_delays(value: Any) -> None:
    expected = f"--max-delay: found {value!r}, expected a whole number of steps from 1 to 32"
    with pytest.raises(InputError, match=expected):
        decided(max_delay=value)


@pytest.mark.parametrize(
    ("accuracy", "options", "message"),
    [
        ("exact", {"max_delay": 2}, "--accuracy exact: found --max-delay, expected none, .*add --accuracy relaxed"),
        ("bounded", {"max_delay": 2}, "--accuracy bounded: found --max-delay, .*add --accuracy relaxed"),
        ("bounded", {"passes": "merge,delay"}, "--accuracy bounded: found the pass delay, expected none, for bound"),
        ("exact", {"passes": "delay", "protect": "g1"}, "found --protect and the pass delay, .*add --accuracy relaxed"),
    ],
)
def test_delay_has_to_be_allowed(accuracy: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        optimize(usual_profile(), accuracy=accuracy, **options)


def test_the_strategy_gives_the_mean_step() -> None:
    for k in (1, 3):
        [record] = simulate(usual_profile(), slow(), strategies=[f"ssd:{k}"], critical_path=True)
        problem = problem_of_slow()
        assert record.iteration_us == step_us(problem, make_schedule(problem, f"ssd:{k}"))
        assert record.exposed_us == pytest.approx(record.iteration_us - 100.0 - 960.0 - 15.0, abs=1e-6)
        assert record.update_us == 15.0
        assert record.message_bytes["network"] == pytest.approx((1 + 1 / k) * float(problem.size_bytes.sum()))
        assert "push: half of the all-reduce, pull: half of the all-reduce" in record.cost_source
        assert "local update free" not in record.cost_source
        assert record.critical_path
    [usual] = simulate(usual_profile(), slow(local_update=None), strategies=["ssd"], ranks=[8])
    assert usual.extrapolated
    assert usual.cost_source.endswith("local update free (no `local_update` given)")


def test_equal_inputs_give_equal_files(tmp_path: Path) -> None:
    for name in ("a", "b"):
        optimize(usual_profile(), slow(contention=(1.1, 1.2)), accuracy="relaxed").save(tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert load_plan(tmp_path / "a").delay is not None
