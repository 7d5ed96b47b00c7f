"""Local updaters: what is predicted of them, when they are taken, and what such plans say."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from builders import cluster_document, make, printed, profile_document

from planner import optimize, simulate
from planner.decide.strategies import make_schedule
from planner.documents.profile import parse_cluster, parse_profile
from planner.emit.lower import lower
from planner.ir import Bucket, Schedule
from planner.model.modes import simulate_schedule, step_us
from planner.model.modes.local_updaters import (
    LocalUpdaters,
    Work,
    closed_form_saved_backwards,
    phases,
    saved_backwards,
    speed_up,
    updaters_of,
)
from planner.model.problem import Problem
from planner.model.what_if import WhatIf
from planner.passes.local_async import LocalAsync, best_choice, updater_schedule
from planner.report.tables import accuracy_lines
from planner.verify import VerifyError, verify
from runtime.errors import InputError
from runtime.plan import LocalAsyncSpec, parse_plan
from runtime.plan.timeline import busy_us
from runtime.plan.transports import TORUS_2D


def section(curve: list[tuple[float, float | None]], layers: int = 4, **fields: Any) -> dict[str, Any]:
    """Layers of one gradient that take 10 for weights and 10 on the way to the next one; updates of 1 each.

    Args:
        curve: (minibatch_us, averaging_us) of 1, 2, 4, … updaters.
        layers: their number.
        fields: more of the section.
    """
    parts = [
        {"layer": f"layer{i}", "gradients": 1, "grad_weight_us": 10.0, "grad_input_us": 10.0 * (i + 1 < layers),
         "update_us": 1.0}
        for i in range(layers)
    ]  # fmt: skip
    points = [
        {"updaters": 2**i, "minibatch_us": quiet, "averaging_us": beside, "memory_bytes": 100 * 2**i}
        for i, (quiet, beside) in enumerate(curve)
    ]
    return {"batch_us": 5.0, "forward_us": 41.0, "loss_us": 0.0, "layers": parts, "curve": points} | fields


def document(curve: list[tuple[float, float | None]], **fields: Any) -> dict[str, Any]:
    """A step of 120: forward 41, backward of four layers 70, update 4."""
    rows = [(1000, 10.0), (1000, 20.0), (1000, 20.0), (1000, 20.0)]
    made = profile_document(rows, forward_us=41.0, update_us=4.0)
    return made | {"local_async": section(curve, **fields)}


def problem_of(curve: list[tuple[float, float | None]], averaging_us: float = 0.0, **fields: Any) -> Problem:
    """On a network whose all-reduce takes so long, whatever its size."""
    return make(document(curve, **fields), cluster_document((averaging_us, 0.0)))


def test_partial_backwards_by_hand() -> None:
    """Four layers: 10 of weights each, 10 on the way from each to the next."""
    work = Work.of(problem_of([(120.0, None)]))
    assert work.backward.full_us == 70.0
    assert work.alone_us == 120.0
    assert [work.partial_us(range(i, i + 1)) for i in range(4)] == [10.0, 20.0, 30.0, 40.0]
    assert work.partial_us(range(1, 3)) == 40.0
    assert work.partial_us(range(4)) == 70.0
    assert work.saved_us(range(1)) == 60.0 + 3.0  # of backward, and of the update
    assert work.saved_us(range(4)) == 0.0


def test_blocks_and_what_they_save() -> None:
    """Two blocks of at least a quarter of the weights: [0] for 10 and [1..3] for 60, 70 of 140 less."""
    problem = problem_of([(120.0, None), (60.0, None)])
    schedule = updater_schedule(problem, 2, blocks=True)
    assert schedule.mode == LocalUpdaters(count=2, stops=(1, 4))
    assert saved_backwards(problem, updaters_of(schedule)) == pytest.approx(70.0 / 70.0)
    assert closed_form_saved_backwards(2) == 0.5
    # In two minibatches the first saves 63 of 240, the second 11.
    assert speed_up(problem, updaters_of(schedule)) == pytest.approx((240 / 177 + 240 / 229) / 2)


def test_without_averagings_the_rate_alone_counts() -> None:
    problem = problem_of([(120.0, 130.0), (66.0, 72.0)])
    assert step_us(problem, make_schedule(problem, "lap:1")) == 120.0
    assert step_us(problem, make_schedule(problem, "lap:2")) == 66.0
    assert step_us(problem, make_schedule(problem, "lap:64")) == 66.0  # more than was measured: as the most that was
    faster = speed_up(problem, updaters_of(updater_schedule(problem, 2, blocks=True)))
    assert step_us(problem, make_schedule(problem, "lpp:2")) == pytest.approx(6.6 + 0.9 * 66.0 / faster)


def test_local_updaters_on_a_compiled_profile_have_a_plan_without_cuts() -> None:
    problem = replace(problem_of([(120.0, 130.0), (66.0, 72.0)]), cuts=("layer1",))
    assert lower(problem, make_schedule(problem, "wfbp")).cuts == ("layer1",)
    plan = lower(problem, make_schedule(problem, "lap:2"))
    assert parse_plan(plan.to_document()).cuts is None


def test_averagings_slow_the_minibatches_beside_them() -> None:
    """An averaging takes 288, which is four minibatches of 72 beside it: first it goes on without pause, then
    4 minibatches of 16 are beside one."""
    problem = problem_of([(120.0, 130.0), (66.0, 72.0)], averaging_us=288.0)
    late_us = (4 * 72.0 + 12 * 66.0) / 16
    assert step_us(problem, make_schedule(problem, "lap:2")) == pytest.approx((72.0 + late_us) / 2)
    one = make(document([(120.0, 130.0)]), cluster_document((288.0, 0.0), nodes=1))
    assert step_us(one, make_schedule(one, "lap:1")) == 120.0  # one rank averages with nobody


def test_local_sgd_waits_for_averagings() -> None:
    problem = problem_of([(120.0, None)], averaging_us=80.0)
    assert step_us(problem, make_schedule(problem, "l_sgd:16")) == 120.0 + 5.0
    assert step_us(problem, make_schedule(problem, "pl_sgd:16")) == 120.0 + (80.0 + 5.0) / 2
    assert step_us(problem, make_schedule(problem, "mb_sgd")) == step_us(problem, make_schedule(problem, "optimal"))


def test_training_goes_through_its_phases() -> None:
    shares = list(phases(LocalUpdaters(count=2, stops=(1, 4))))
    assert [(pytest.approx(share), *rest) for share, *rest in shares] == [
        (0.1, 1, False), (0.4, 1, True), (0.5, 16, True),
    ]  # fmt: skip
    assert list(phases(LocalUpdaters(count=2))) == [(0.5, 1, False), (0.5, 16, False)]


def test_updaters_are_added_while_they_bring_three_percent_and_fit() -> None:
    def chosen(*times_us: float, **fields: Any) -> int:
        return best_choice(LocalAsync().choices(problem_of([(us, us) for us in times_us], **fields))).point.updaters

    assert chosen(120.0, 66.0, 60.0) == 4
    assert chosen(120.0, 66.0, 65.0) == 2  # 1.5 % more
    assert chosen(120.0, 117.0, 50.0) == 1  # a step that does not pay is not leapt over
    assert chosen(120.0, 66.0, 60.0, memory_available_bytes=399) == 2
    assert chosen(120.0, 66.0, 60.0, memory_available_bytes=400) == 4


def test_the_pass_takes_them_only_where_more_gets_done() -> None:
    exact = Schedule.from_boundaries([4])
    assert isinstance(LocalAsync().apply(exact, problem_of([(120.0, None), (66.0, None)])).schedule.mode, LocalUpdaters)
    assert LocalAsync().apply(exact, problem_of([(130.0, None), (131.0, None)])).schedule == exact
    assert (
        LocalAsync(updaters=2).choices(problem_of([(120.0, None), (66.0, None), (60.0, None)]))[0].point.updaters == 2
    )
    unmeasured = make({**document([(1.0, None)]), "local_async": None}, cluster_document())
    assert LocalAsync().apply(exact, unmeasured).schedule == exact


def test_making_the_minibatch_counts_on_both_sides() -> None:
    """An updater takes 125 for a minibatch, with making it; other steps take 115, with a minibatch that is there."""
    exact = Schedule.from_boundaries([4])
    assert LocalAsync().apply(exact, problem_of([(125.0, None)], batch_us=9.0)).schedule == exact
    assert isinstance(
        LocalAsync().apply(exact, problem_of([(125.0, None)], batch_us=11.0)).schedule.mode, LocalUpdaters
    )


@pytest.mark.parametrize("step", ["never", "always"])
def test_classes_are_compared_with_the_minibatch_made(step: str) -> None:
    """125 is 2 % less than a step of 115 from a making of 13 on."""
    profile, cluster = document([(125.0, None)]), parse_cluster(cluster_document((0.0, 0.0)))
    profile["compute"]["optimizer"] = {"name": "SGD", "adaptive": False, "elementwise": True}

    def plan(batch_us: float) -> Any:
        profile["local_async"]["batch_us"] = batch_us
        passes = f"merge,shard_updates{{step={step}}},local_async"
        return optimize(parse_profile(profile), cluster, accuracy="relaxed", passes=passes, allow=["sharded-step"])

    assert plan(8.0).local_async is None
    taken = plan(18.0)
    assert taken.local_async == LocalAsyncSpec(updaters=1)
    assert taken.predicted.iteration_us == 125.0
    assert any("making a minibatch takes a rank 0.018 ms" in note for note in taken.notes)
    assert simulate(parse_profile(profile), cluster, strategies=["lap:1"])[0].cost_source.endswith(
        "with making the minibatch, which other steps leave out"
    )


def decided(curve: list[tuple[float, float | None]], **options: Any) -> Any:
    profile = parse_profile(document(curve))
    cluster = parse_cluster(cluster_document((50.0, 0.0), sparsify={"alpha_us": 1e5, "beta_us_per_byte": 0.0}))
    return optimize(profile, cluster, accuracy="relaxed", **options)


def test_a_plan_with_updaters() -> None:
    plan = decided([(120.0, 125.0), (66.0, 70.0), (65.0, 70.0)])
    assert plan.accuracy == "relaxed"
    assert plan.delay is None
    assert plan.local_async == LocalAsyncSpec(updaters=2, blocks=(("g0",), ("g1", "g2", "g3")))
    assert [bucket.gradients for bucket in plan.buckets] == [("g0", "g1", "g2", "g3")]
    assert plan.fallback is not None
    assert plan.fallback.accuracy == "exact"
    assert set(plan.alternatives) == {"exact"}
    assert [(point.updaters, point.blocks) for point in plan.updaters] == [(1, 1), (2, 2), (4, 4)]
    assert plan.updaters[1].saved_backwards == pytest.approx(1.0)
    assert plan.updaters[1].lpp_us == plan.predicted.iteration_us
    assert parse_plan(json.loads(json.dumps(plan.to_document()))) == plan
    assert plan == decided([(120.0, 125.0), (66.0, 70.0), (65.0, 70.0)])


def test_what_it_says() -> None:
    plan = decided([(120.0, 125.0), (66.0, 70.0)])
    text = printed(plan)
    assert "2 local updaters on the full model and 2 blocks, interleaved" in text
    assert "partial backwards take 14%, 86% of a full one; one of each updater saves 1.00 full backwards" in text
    assert "(c − 1)/2 = 0.50" in text
    assert "the best plan that synchronizes in every step: " in text
    assert "minibatches/s from all ranks" in text
    assert "the model, averaged beside updaters every 1 update, later every 16" in text
    assert "2 local updaters" in accuracy_lines(plan)[2]


def test_samples_are_counted_where_the_profile_knows_them() -> None:
    profile = parse_profile(document([(120.0, None), (60.0, None)]))
    profile = replace(profile, world=replace(profile.world, batch_per_rank=8))
    plan = optimize(
        profile, parse_cluster(cluster_document((50.0, 0.0))), accuracy="relaxed", passes="merge,local_async"
    )
    rate = 4 * 8 * 1e6 / plan.predicted.iteration_us
    assert any(f"predicted {rate:,.4g} samples/s from all ranks" in note for note in plan.notes)


def test_delay_may_gain_as_much() -> None:
    """Updaters have to win by 2 % over the best less risky plan, and say so where they do not."""
    plan = decided([(119.0, None), (119.0, None)])
    assert plan.local_async is None
    assert any("local updaters would" in note or "number of local updaters" in note for note in plan.notes)


def test_other_optimizers_get_none() -> None:
    changed = document([(120.0, None), (60.0, None)])
    changed["compute"]["optimizer"] = {"name": "AdamW", "adaptive": True}
    plan = optimize(parse_profile(changed), parse_cluster(cluster_document()), accuracy="relaxed")
    assert plan.local_async is None
    assert any("local updaters need torch.optim.SGD, and this step's optimizer is AdamW" in note for note in plan.notes)


def test_where_nothing_was_measured_that_is_said_if_asked_for() -> None:
    profile = parse_profile({**document([(1.0, None)]), "local_async": None})
    cluster = parse_cluster(cluster_document())
    asked = optimize(profile, cluster, accuracy="relaxed", passes="merge,local_async")
    assert any("`planner profile --updaters 4` does" in note for note in asked.notes)
    [line] = [one for one in accuracy_lines(asked) if one.startswith("relaxed")]
    assert line.endswith('none: see the note that begins with "relaxed was allowed"')
    assert not any("updaters" in note for note in optimize(profile, cluster, accuracy="relaxed").notes)


def test_exact_and_bounded_plans_have_none() -> None:
    profile, cluster = parse_profile(document([(120.0, None), (20.0, None)])), parse_cluster(cluster_document())
    for accuracy in ("exact", "bounded"):
        assert optimize(profile, cluster, accuracy=accuracy).local_async is None  # type: ignore[arg-type]
    with pytest.raises(InputError, match="--accuracy exact: found the pass local_async, expected none"):
        optimize(profile, cluster, passes="merge,local_async")


@pytest.mark.parametrize("updaters", ["0", "1025", "x"])
def test_wrong_numbers_of_updaters(updaters: str) -> None:
    with pytest.raises(InputError, match=r"--passes: "):
        decided([(120.0, None)], passes=f"merge,local_async{{updaters={updaters}}}")


def test_the_timeline_shows_every_updater() -> None:
    problem = problem_of([(120.0, None), (66.0, None)], averaging_us=30.0)
    timeline = simulate_schedule(problem, updater_schedule(problem, 2, blocks=True))
    for name in ("updater 0", "updater 1"):
        spans = timeline.on(name)
        assert busy_us(spans) == pytest.approx(spans[-1].end_us)  # never idle
        assert [span.task for span in spans[:6]] == [
            "forward", "backward", "update", "forward 1", "backward of a block 1", "update of a block 1",
        ]  # fmt: skip
    assert timeline.on("updater 0")[-1].end_us < timeline.on("updater 1")[-1].end_us  # its block is the cheaper one
    assert timeline.on("network")


def test_simulate_and_what_if() -> None:
    profile, cluster = parse_profile(document([(120.0, 120.0), (66.0, 66.0)])), parse_cluster(cluster_document())
    names = ["lap:2", "lpp:2", "l_sgd:16"]
    found = simulate(profile, cluster, strategies=names, critical_path=True)
    assert [one.strategy for one in found] == names
    assert found[0].iteration_us == 66.0
    assert sum(found[0].critical_path.values()) == pytest.approx(1.0)
    assert found[0].message_bytes["network"] < found[2].message_bytes["network"] * 16
    twice = simulate(profile, cluster, strategies=["lap:2"], what_if=WhatIf(compute_speed=2.0))
    assert twice[0].iteration_us == 33.0
    bare = parse_profile({**document([(1.0, None)]), "local_async": None})
    assert "throughput not measured" in simulate(bare, cluster, strategies=["lap:2"])[0].cost_source


WHOLE = Schedule.from_boundaries([4]).buckets


@pytest.mark.parametrize(
    ("schedule", "accuracy", "message"),
    [
        (Schedule(buckets=WHOLE, mode=LocalUpdaters(count=0)), "relaxed", "there has to be an updater"),
        (
            Schedule(buckets=WHOLE, mode=LocalUpdaters(count=1)),
            "bounded",
            "that is relaxed, but the plan has to be bounded",
        ),
        (Schedule(buckets=WHOLE, mode=LocalUpdaters(count=2, stops=(2, 3))), "relaxed", "hold each of 4 gradients"),
        (Schedule(buckets=WHOLE, mode=LocalUpdaters(count=2, stops=(0, 4))), "relaxed", "none may be empty"),
        (Schedule(buckets=WHOLE, mode=LocalUpdaters(count=1, stops=(2, 4))), "relaxed", "more blocks than updaters"),
        (
            Schedule(buckets=WHOLE, mode=LocalUpdaters(count=1), norms=(0,)),
            "relaxed",
            "each local updater computes all norms itself",
        ),
        (
            Schedule(buckets=(Bucket((0, 1, 2, 3), TORUS_2D),), mode=LocalUpdaters(count=1)),
            "relaxed",
            "averaged uncompressed",
        ),
    ],
)
def test_broken_schedules(schedule: Schedule, accuracy: str, message: str) -> None:
    with pytest.raises(VerifyError, match=message):
        verify(schedule, [0, 0, 0, 0], accuracy=accuracy, norms=(1, 2))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": []}, r"\$.local_async.layers: found \[\], expected at least 1 item"),
        ({"curve": []}, r"\$.local_async.curve: found \[\], expected at least 1 item"),
        ({"curve": [{"updaters": 2, "minibatch_us": 1.0}]}, r"found \[2\] updaters, expected growing numbers from 1"),
        ({"curve": [{"updaters": 1, "minibatch_us": 0.0}]}, r"minibatch_us: found 0.0, expected greater than 0"),
        ({"layers": section([(1.0, None)], layers=3)["layers"]}, r"found 3 gradients, expected all 4"),
        (
            {"layers": section([(1.0, None)], layers=5)["layers"]},
            r"layers\[4\]: found 1 gradients of the layer",
        ),
    ],
)
def test_wrong_sections_of_profiles(change: dict[str, Any], message: str) -> None:
    wrong = document([(120.0, None)])
    wrong["local_async"] |= change
    with pytest.raises(InputError, match=message):
        parse_profile(wrong)
