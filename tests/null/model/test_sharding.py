"""Ranks that share the optimizer's step, in plans: when, what is predicted, what memory demands, and what is said."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from builders import halves_cluster, make, profile_document, write
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cli.app import main
from planner.comparison.variants import make_lineup
from planner.decide.optimize import optimize
from planner.decide.pipeline import parse_passes, run_passes
from planner.decide.solvers import SOLVER_SKIPPED
from planner.documents.profile import Profile, parse_profile
from planner.ir import Schedule
from planner.model.engine import run
from planner.model.modes import simulate_schedule, step_us
from planner.model.modes.local_updaters import LocalUpdaters
from planner.model.modes.sharded import Sharded, exchange, gathers_us, message_costs_us, replicated_bytes, sharded_bytes
from planner.model.problem import Problem
from planner.model.schedule_text import parse_schedule
from planner.model.step_ops import step_ops
from planner.passes.shard_updates import ShardUpdates
from planner.verify import VerifyError, verify
from runtime.errors import InputError
from runtime.plan.transports import TORUS_2D

ALLOW = ["sharded-step"]
allowed = partial(optimize, allow=ALLOW)

ROWS = [(1000, 100.0), (50, 10.0), (3000, 300.0), (2000, 200.0), (4, 1.0)]
MODEL_BYTES = 4 * sum(numel for numel, _ in ROWS)


def document(update_us: float = 400.0, state_bytes: int | None = 2 * MODEL_BYTES, **options: Any) -> dict[str, Any]:
    """profile.json of a step with AdamW."""
    made = profile_document(ROWS, update_us=update_us, **options)
    made["compute"]["optimizer"] = {"name": "AdamW", "adaptive": True, "elementwise": True}
    if state_bytes is not None:
        made["compute"]["optimizer"]["state_bytes"] = state_bytes
    return made


def profile(half: tuple[float, float] | None = (30.0, 0.005), **options: Any) -> Profile:
    return parse_profile(document(cluster=halves_cluster(half), **options))


def problem(half: tuple[float, float] | None = (30.0, 0.005), **options: Any) -> Problem:
    return make(document(**options), halves_cluster(half))


def test_what_a_shared_step_takes() -> None:
    """One bucket, by hand: pushed from 711 us on, told, a quarter of the update, gathered."""
    step, schedule = problem(), replace(Schedule.from_boundaries([5]), mode=Sharded())
    push_us = 30.0 + 0.005 * MODEL_BYTES
    told_us = 30.0 + 0.005 * 4 * 5
    assert message_costs_us(step, schedule.buckets) == [pytest.approx(push_us + told_us)]
    assert gathers_us(step, schedule.buckets) == [pytest.approx(push_us)]
    assert step_us(step, schedule) == pytest.approx(711.0 + push_us + told_us + 100.0 + push_us)
    timeline = simulate_schedule(step, schedule)
    assert timeline.iteration_us == pytest.approx(step_us(step, schedule))
    assert [(span.task, span.resource) for span in timeline.spans[2:]] == [
        ("bucket 0 reduce_scatter", "network"), ("update", "compute"), ("bucket 0 all_gather", "network"),
    ]  # fmt: skip
    assert timeline.spans[-1].end_us == pytest.approx(timeline.iteration_us)
    assert timeline.spans[3].end_us == pytest.approx(timeline.spans[4].start_us)


def test_messages_of_a_shared_step_pass_through_all_ranks_where_nodes_have_several() -> None:
    """Not between nodes alone, as pushes of nodes that are workers of a delay do."""
    link = {"alpha_us": 5.0, "beta_us_per_byte": 0.001}
    step = make(document(), halves_cluster(nodes=2, ranks_per_node=2, inter=link, intra=link))
    assert step.node_costs is not None
    schedule = replace(Schedule.from_boundaries([5]), mode=Sharded())
    whole_us = 30.0 + 0.005 * MODEL_BYTES
    assert gathers_us(step, schedule.buckets) == [pytest.approx(whole_us)]
    assert message_costs_us(step, schedule.buckets) == [pytest.approx(whole_us + 30.0 + 0.005 * 4 * 5)]
    assert step.push.curve.at(MODEL_BYTES) < whole_us / 2


@pytest.mark.parametrize("contention", [None, (1.2, 1.4)])
def test_every_way_of_simulating_agrees(contention: tuple[float, float] | None) -> None:
    step = make(document(), halves_cluster(contention=contention))
    for stops in ([5], [2, 5], [1, 2, 3, 4, 5]):
        schedule = replace(Schedule.from_boundaries(stops), mode=Sharded())
        expected_us = step_us(step, schedule)
        assert simulate_schedule(step, schedule).iteration_us == pytest.approx(expected_us)
        ops = step_ops(step, schedule, exchange(step, schedule))
        assert run(ops).total_us == pytest.approx(expected_us)


def test_messages_in_a_step_are_late_as_all_reduces_are() -> None:
    """By as much as those take longer in a queue than alone."""
    sizes = [[1000, 60.0], [100_000, 1050.0]]
    late = halves_cluster(back_to_back={"all_reduce": [[size, time_us + 7.0] for size, time_us in sizes]})
    late["samples"] = {"all_reduce": sizes}
    early = halves_cluster()
    early["samples"] = {"all_reduce": sizes}
    schedule = replace(Schedule.from_boundaries([2, 5]), mode=Sharded())
    one, other = (make(document(), machines) for machines in (early, late))
    assert sum(message_costs_us(other, schedule.buckets)) == pytest.approx(
        sum(message_costs_us(one, schedule.buckets)) + 14.0
    )
    assert sum(gathers_us(other, schedule.buckets)) == pytest.approx(sum(gathers_us(one, schedule.buckets)) + 14.0)


def test_halves_together_take_no_less_than_the_all_reduce() -> None:
    """Where each by itself seems to: the shared step then gains what it saves of the update, and no more."""
    schedule = replace(Schedule.from_boundaries([5]), mode=Sharded())
    whole_us = 50.0 + 0.01 * MODEL_BYTES
    for half in ((10.0, 0.001), (25.0, 0.005)):
        step = problem(half)
        told_us = half[0] + half[1] * 4 * 5
        assert message_costs_us(step, schedule.buckets) == [pytest.approx(whole_us / 2 + told_us)]
        assert gathers_us(step, schedule.buckets) == [pytest.approx(whole_us / 2)]


def test_the_step_is_shared_where_that_is_shorter_by_enough() -> None:
    """It saves three quarters of the update, and costs what the halves take more than the whole."""
    plan = allowed(profile())
    assert plan.sharded
    assert plan.updates is not None
    step = plan.updates.step
    assert step is not None
    assert plan.predicted is not None
    assert step.sharded_us == plan.predicted.iteration_us
    assert step.replicated_us == pytest.approx(optimize(profile()).predicted.iteration_us)  # type: ignore[union-attr]
    assert step.sharded_us <= 0.98 * step.replicated_us
    assert (step.replicated_bytes, step.sharded_bytes) == (
        4 * MODEL_BYTES, 2 * MODEL_BYTES + MODEL_BYTES // 2 + max(bucket.size_bytes or 0 for bucket in plan.buckets),
    )  # fmt: skip
    assert plan.notes[-1].startswith("ranks share the step of AdamW (as ZeRO-1): predicted")
    assert plan.interface == ("sharded-step",)
    assert "reduce_scatter" in str(plan.buckets[0].reason)
    assert plan.certificate is not None
    assert plan.certificate.note == "the bound is computation alone"
    assert plan.certificate.lower_bound_us <= plan.predicted.iteration_us


def test_a_solver_that_has_no_model_of_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = allowed(profile(), solver="cpsat")
    assert plan == replace(allowed(profile()), certificate=plan.certificate)
    assert plan.certificate is not None
    assert plan.certificate.solver is None
    assert plan.certificate.note == f"the bound is computation alone; {SOLVER_SKIPPED}"
    document_path = write(tmp_path / "profile.json", document(cluster=halves_cluster()))
    arguments = ["optimize", document_path, "-o", str(tmp_path / "plan.json"), "--solver", "cpsat"]
    with contextlib.suppress(SystemExit):
        main([*arguments, "--allow", "sharded-step"])
    assert f"planner: --solver cpsat: {SOLVER_SKIPPED}" in capsys.readouterr().err
    with contextlib.suppress(SystemExit):
        main(arguments)
    assert "cpsat" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("what", "given"),
    [
        ("the update is short", profile(update_us=10.0)),
        ("the halves are slow", profile((500.0, 0.01))),
        ("nobody measured the halves", profile(None)),
        ("one rank", parse_profile(document(cluster=halves_cluster(nodes=1)))),
    ],
)
def test_it_stays_off_otherwise(what: str, given: Profile) -> None:
    plan = allowed(given)
    assert not plan.sharded, what
    assert all(bucket.collective == "all_reduce" for bucket in plan.buckets)
    if what == "nobody measured the halves":
        assert "reduce-scatter and all-gather were not measured: profile again" in plan.notes[-1]
        assert allowed(given, passes="merge,shard_updates{step=always}").sharded
    elif what != "one rank":
        assert plan.updates is not None
        assert plan.updates.step is not None
        assert plan.updates.step.sharded_us is not None
        assert plan.notes[-1].startswith("ranks do not share the optimizer's step, as they may: that is predicted")


def test_old_profiles_and_other_optimizers_share_nothing() -> None:
    plain = profile_document(ROWS, update_us=400.0, cluster=halves_cluster())
    assert allowed(parse_profile(plain)).updates is None
    other = document(cluster=halves_cluster())
    other["compute"]["optimizer"]["elementwise"] = False
    for passes in ("merge,shard_updates", "merge,shard_updates{step=always}"):
        assert allowed(parse_profile(other), passes=passes).updates is None
    part = document(cluster=halves_cluster())
    for holds_all in (True, False):
        part["compute"]["optimizer"]["holds_all"] = holds_all
        plan = allowed(parse_profile(part), max_memory_mib=1e-3)
        assert plan.sharded == holds_all
        assert any("does not hold all parameters" in note for note in plan.notes) != holds_all
    assert not allowed(profile(), passes="merge,shard_updates{step=never}").sharded
    with pytest.raises(InputError, match="step=now}: expected one of: auto, always, never"):
        parse_passes("shard_updates{step=now}")


def test_memory_demands_it() -> None:
    """Shared although it is slower, where what every rank would hold does not fit; and no riskier plan instead."""
    slow = profile((500.0, 0.01))
    takes_mib = 4 * MODEL_BYTES / 2**20
    assert not allowed(slow, max_memory_mib=takes_mib * 1.01).sharded
    plan = allowed(slow, max_memory_mib=takes_mib * 0.99)
    assert plan.sharded
    assert plan.updates is not None
    step = plan.updates.step
    assert step is not None
    assert step.sharded_us is not None
    assert step.replicated_us is not None
    assert step.sharded_us > step.replicated_us
    assert "memory demands it, predicted" in plan.notes[-1]
    tiny = allowed(slow, max_memory_mib=takes_mib * 0.1)
    assert "even so a rank needs more than its" in tiny.notes[-1]
    lossy = allowed(slow, accuracy="bounded", max_memory_mib=takes_mib * 0.99)
    assert lossy.sharded
    assert "memory demands a shared step, which lossy plans do not have" in lossy.notes[-1]
    known = document(cluster=halves_cluster((500.0, 0.01)))
    known["world"]["memory_bytes"] = int(3.9 * MODEL_BYTES)
    assert allowed(parse_profile(known)).sharded
    unknown = profile((500.0, 0.01), state_bytes=None)
    assert not allowed(unknown, max_memory_mib=1e-6).sharded
    assert "does not say what the optimizer keeps: profile again" in allowed(unknown, max_memory_mib=1e-6).notes[-1]
    with pytest.raises(InputError, match="--max-memory-mib: found -1, expected MiB of memory"):
        allowed(slow, max_memory_mib=-1.0)


def test_a_limit_that_decides_nothing_is_told() -> None:
    plain = parse_profile(profile_document(ROWS, update_us=400.0, cluster=halves_cluster()))
    note = allowed(plain, max_memory_mib=0.5).notes[-1]
    assert note.startswith("--max-memory-mib 0.5 changes nothing: the profile does not say what the optimizer is")
    assert not any("--max-memory-mib" in each for each in allowed(plain).notes)
    assert not any("changes nothing" in each for each in allowed(profile(), max_memory_mib=1e-3).notes)
    assert "not among the passes" in allowed(profile(), passes="merge", max_memory_mib=0.5).notes[-1]
    other = document(cluster=halves_cluster())
    other["compute"]["optimizer"]["elementwise"] = False
    shared, limit = allowed(parse_profile(other), max_memory_mib=0.5).notes[-2:]
    assert all("is not known to treat every element by itself" in note for note in (shared, limit))
    assert shared.startswith("ranks do not share the optimizer's step, as they may: ")


def test_what_memory_takes() -> None:
    step = problem()
    assert replicated_bytes(step) == 4 * MODEL_BYTES
    whole, halves = (replace(Schedule.from_boundaries(stops), mode=Sharded()) for stops in ([5], [3, 5]))
    assert sharded_bytes(step, whole) == 3 * MODEL_BYTES + MODEL_BYTES // 2
    assert sharded_bytes(step, halves) == 2 * MODEL_BYTES + MODEL_BYTES // 2 + 4 * 4050
    assert replicated_bytes(problem(state_bytes=None)) is None


@settings(max_examples=60, deadline=None)
@given(
    st.tuples(st.floats(0.0, 200.0), st.floats(0.0, 0.02)),
    st.floats(0.0, 2000.0),
    st.sampled_from([None, (1.1, 1.3)]),
)
def test_never_slower_in_prediction(
    half: tuple[float, float], update_us: float, contention: tuple[float, float] | None
) -> None:
    step = make(document(update_us=update_us), halves_cluster(half, contention=contention))
    passes = parse_passes("merge,topology,shard_updates")
    start = Schedule.from_boundaries([1, 2, 3, 4, 5])
    found, without = run_passes(passes, start, step).schedule, run_passes(passes[:2], start, step).schedule
    assert step_us(step, found) <= step_us(step, without) * (1.0 + 1e-12)
    assert parse_schedule(str(found)) == found


def test_riskier_plans_have_to_beat_the_shared_step() -> None:
    plan = allowed(profile(), accuracy="relaxed")
    exact = allowed(profile())
    assert plan.predicted is not None
    assert exact.predicted is not None
    assert plan.predicted.iteration_us <= exact.predicted.iteration_us
    if plan.accuracy == "exact":
        assert plan.sharded
        assert any("over ranks that share the optimizer's step" in note for note in plan.notes)


def test_schedules_that_cannot_be_are_refused() -> None:
    ids = [0] * 5
    good = replace(Schedule.from_boundaries([5]), mode=Sharded())
    verify(good, ids)
    for odd in (replace(good, norms=(0,)), replace(Schedule.from_boundaries([5], TORUS_2D), mode=Sharded())):
        with pytest.raises(VerifyError, match="sharded step"):
            verify(odd, ids, norms=(1, 4))
    kept = run_passes(parse_passes("merge"), good, problem()).schedule
    assert kept.mode == Sharded()


def test_local_updaters_share_no_step() -> None:
    step, passes = problem(update_us=2000.0), parse_passes("shard_updates{step=always}")
    given = Schedule.from_boundaries([5])
    assert run_passes(passes, given, step, accuracy="relaxed").schedule.mode == Sharded()
    local = replace(given, mode=LocalUpdaters(count=2))
    assert run_passes(passes, local, step, accuracy="relaxed").schedule == local


def test_the_bare_loop_of_a_comparison_updates_all_weights() -> None:
    plan = allowed(profile())
    bare = next(one for one in make_lineup(plan, None, []).variants if one.name == "none")
    assert bare.predicted_us == pytest.approx(711.0 + 400.0)


def test_the_pass_leaves_phases_on_two_kinds_of_link_alone() -> None:
    step = problem()
    torus = Schedule.from_boundaries([5], TORUS_2D)
    assert ShardUpdates().sharded(torus, step) is None
    assert ShardUpdates(step="always").sharded(torus, step) is not None
