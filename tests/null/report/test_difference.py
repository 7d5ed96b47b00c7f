"""`planner diff`: what executes the same is never said to differ, and what differs is named, with an exit code."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders import halves_cluster, run, usual_document, usual_profile, write

from planner.decide.optimize import optimize
from planner.ir import Schedule
from planner.model.problem import make_problem
from planner.report.difference import difference
from runtime.plan import CompressorSpec, NormPlan, Plan, PlanBucket, StepPlan, UpdatePlan
from runtime.plan.document import PhasePlan
from runtime.plan.executed import USUAL_OPTIONS, executed_part


def made() -> Plan:
    return optimize(usual_profile())


def with_compressor(plan: Plan, **options: Any) -> Plan:
    buckets = [replace(bucket, compressor=CompressorSpec(**options)) for bucket in plan.buckets]
    return replace(plan, accuracy="bounded", buckets=tuple(buckets))


def sharded(plan: Plan, **step: Any) -> Plan:
    step = UpdatePlan(step=StepPlan(sharded=True, **step))  # type: ignore[assignment]
    return replace(plan, interface=("sharded-step", "late-gather"), updates=step)


def backwards(plan: Plan) -> tuple[tuple[int, ...], ...]:
    return tuple((bucket,) for bucket in reversed(range(len(plan.buckets))))


@pytest.mark.parametrize(
    "other",
    [
        lambda plan: plan,
        lambda plan: replace(plan, notes=("another",), predicted=None, certificate=None, baselines=None, sources=None),
        lambda plan: replace(plan, interface="drop-in"),
        lambda plan: replace(plan, buckets=tuple(replace(b, reason="why", size_bytes=None) for b in plan.buckets)),
        lambda plan: replace(plan, updates=UpdatePlan(step=StepPlan(sharded=False, sharded_us=3.0))),
        lambda plan: replace(plan, updates=UpdatePlan(norms=NormPlan(replicated_us=3.0))),
        lambda plan: replace(plan, alternatives={"bounded": plan}),
        lambda plan: replace(plan, phase_order=tuple((bucket, 0) for bucket in range(len(plan.buckets)))),
        lambda plan: replace(plan, model=replace(plan.model, name="other")),
    ],
)
def test_what_executes_the_same_does_not_differ(other: Any) -> None:
    plan = made()
    found = difference(plan, other(plan))
    assert found.same, found.executed
    assert executed_part(executed_part(plan)) == executed_part(plan)


@pytest.mark.parametrize(
    ("name", "plain", "spelled"),
    [
        ("wire", {"dtype": "int8"}, {"block": 256, "rounding": "nearest", "error_feedback": True, "links": "all"}),
        ("topk", {"density": 0.1}, {"selector": "exact", "scope": "bucket"}),
        ("topk", {"k": {"fc": 3}}, {"selector": "exact", "scope": "layer"}),
    ],
)
def test_usual_options_may_be_spelled_out(name: str, plain: dict[str, Any], spelled: dict[str, Any]) -> None:
    plan = made()
    left, right = (with_compressor(plan, name=name, **plain, **more) for more in ({}, spelled))
    assert difference(left, right).same


def test_usual_options_are_those_of_the_runtime() -> None:
    from runtime.sparse.compressors import wire

    assert USUAL_OPTIONS["block"] == wire.BLOCK
    assert USUAL_OPTIONS["links"] == wire.ALL_LINKS
    assert USUAL_OPTIONS["rounding"] in wire.ROUNDINGS


def test_gathers_in_the_usual_order_may_be_spelled_out() -> None:
    plan = made()
    late = sharded(plan, gather="forward")
    assert difference(late, sharded(plan, gather="forward", gathers=backwards(plan))).same
    forwards = backwards(plan)[::-1]
    [row] = difference(late, sharded(plan, gather="forward", gathers=forwards)).executed
    assert row.what == "updates.step.gathers"


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda plan: replace(plan, buckets=one_bucket(plan)), "gradients g0 … g5 (6)"),
        (lambda plan: with_compressor(plan, name="wire", dtype="int8"), "accuracy"),
        (lambda plan: replace(plan, buckets=plan.buckets[::-1]), "launch order"),
        (lambda plan: replace(plan, world=replace(plan.world, ranks=8)), "ranks"),
        (lambda plan: replace(plan, fallback=plan), "fallback"),
        (lambda plan: replace(plan, updates=UpdatePlan(norms=NormPlan(shares=(("g0",), ())))), "updates.norms.shares"),
        (lambda plan: sharded(plan), "updates.step.sharded"),
        (lambda plan: sharded(plan, owners={"g0": 1}), "updates.step.owners"),
        (lambda plan: replace(plan, shares={"0": 3, "1": 5}), "shares"),
        (lambda plan: replace(plan, cuts=()), "cuts"),
        (lambda plan: replace(plan, model=replace(plan.model, fingerprint="sha256:1")), "model"),
    ],
)
def test_what_differs_is_named(change: Any, what: str) -> None:
    plan = three_buckets()
    found = difference(plan, change(plan))
    assert not found.same
    assert what in [row.what for row in found.executed]
    assert difference(change(plan), change(plan)).same


def test_phases_are_compared_one_by_one() -> None:
    plan = three_buckets()

    def phased(last: Plan, border: int) -> Plan:
        return replace(plan, buckets=(), phases=(PhasePlan(plan=plan, until_step=border), PhasePlan(plan=last)))

    rows = difference(phased(plan, 5), phased(replace(plan, buckets=one_bucket(plan)), 7)).executed
    assert [row.what for row in rows] == ["borders of phases", "phase 1: gradients g0 … g5 (6)"]


def three_buckets() -> Plan:
    from planner.emit.lower import lower

    return lower(make_problem(usual_profile(), None), Schedule.from_boundaries([1, 4, 6]))


def one_bucket(plan: Plan) -> tuple[PlanBucket, ...]:
    return (PlanBucket(gradients=plan.gradients),)


def test_only_buckets_that_differ_have_rows() -> None:
    left, right = three_buckets(), three_buckets()
    halved = [replace(right.buckets[2], gradients=(name,)) for name in right.buckets[2].gradients]
    right = replace(right, buckets=(*right.buckets[:2], *halved))
    [row] = difference(left, right).executed
    assert (row.what, row.first.split(":")[0], row.second.split(":")[0]) == (
        "gradients g4 … g5 (2)", "1 bucket of 2", "2 buckets of 1+1"
    )  # fmt: skip


def test_the_command_ends_as_diff_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = usual_document(cluster=halves_cluster((20.0, 0.003)))
    profile, a, b = write(tmp_path / "p.json", document), str(tmp_path / "a"), str(tmp_path / "b")
    run("optimize", profile, "-o", a)
    run("optimize", profile, "-o", b, "--accuracy", "bounded", "--compress", "all")
    capsys.readouterr()
    run("diff", a, a)
    assert "execute the same" in capsys.readouterr().out
    for options in ([], ["--json"]):
        run("diff", a, b, *options, code=1)
    text = capsys.readouterr().out
    document = json.loads(text[text.index("{") :])
    assert not document["same"]
    assert {"what": "accuracy", "first": "exact", "second": "bounded"} in document["executed"]
    assert any(row["what"] == "step (ms)" for row in document["predicted"])
    assert "what they do differently" in text
    run("diff", a, str(tmp_path / "missing"), code=2)


def test_buckets_print_their_options() -> None:
    plan = three_buckets()
    [row, *_] = [
        row for row in difference(plan, with_compressor(plan, name="topk", k={"fc": 3, "conv": 4})).executed
        if row.what.startswith("gradients")
    ]  # fmt: skip
    assert "topk k=fc:3,conv:4" in row.second
