"""`planner compare --learn` on two ranks: equal starts and batches, verdicts, and what the plan keeps of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import compare_checks
import compare_jobs
import pytest
import torch
from commands import ended, result
from compare_script import plan_document

from planner.jobs.launch import LocalWorld, run_ranks
from runtime.plan import load_plan, parse_plan
from runtime.plan.executed import executed_digest

JOB = f"{compare_jobs.__file__}:"
SENT = {
    "exact": {"collective": "all_reduce", "algorithm": "library", "compressor": {"name": "none"}},
    "int8": {"collective": "all_reduce", "algorithm": "two_shot", "compressor": {"name": "wire", "dtype": "int8"}},
    "between": {
        "collective": "all_reduce", "algorithm": "torus_2d",
        "compressor": {"name": "wire", "dtype": "int8", "links": "inter"},
    },
    "topk": {"collective": "sparse", "algorithm": "flat", "compressor": {"name": "topk", "density": 0.02}},
}  # fmt: skip


def written(folder: Path, name: str, **changes: Any) -> str:
    """The path of a plan for `learner`, all in one bucket."""
    accuracy = "exact" if name == "exact" else "bounded"
    bucket = {"gradients": list(compare_jobs.LEARNED), **SENT[name]}
    path = folder / f"{name}.json"
    path.write_text(json.dumps(plan_document(accuracy=accuracy, buckets=[bucket], **changes)), encoding="utf-8")
    return str(path)


def test_exact_plans_learn_as_ddp_and_others_are_judged(tmp_path: Path) -> None:
    """On two ranks an exact plan's sums are DDP's, bit for bit, with dropout in interleaved blocks, too."""
    plans = [written(tmp_path, name) for name in ("exact", "topk")]
    page = tmp_path / "page.html"
    found = result(
        "compare", f"{JOB}learner", "--plan", plans[0], "--plan", plans[1], "--learn", "42", "--seeds", "2",
        "--html", str(page),
    )  # fmt: skip
    rows = {row["name"]: row for row in found}
    assert list(rows) == ["ddp", "ddp:order", *plans]
    exact, topk = rows[plans[0]], rows[plans[1]]
    assert (exact["against_ddp"], exact["verdict"]) == (0.0, "as ddp")
    assert exact["metric_against_ddp"] == 0.0
    assert topk["against_ddp"] > 0.01
    assert 0.0 < rows["ddp:order"]["ddp_spread"] < 1e-3
    assert "Loss over steps" in page.read_text(encoding="utf-8")
    kept = load_plan(plans[1]).accuracy_measured
    assert kept is not None
    assert (kept.job, kept.steps, kept.seeds, kept.against_ddp) == (f"{JOB}learner", 42, 2, topk["against_ddp"])
    code, text, _ = ended("explain", plans[1])
    assert code == 0
    assert " ".join(f"accuracy: measured, {kept}".split()) in " ".join(text.split())


def test_each_contestant_is_compiled_as_the_job_is(tmp_path: Path) -> None:
    """In each of more starts than torch compiles models of one class by default."""
    bucket = {"gradients": ["bias", "weight"], **SENT["exact"]}
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan_document(buckets=[bucket])), encoding="utf-8")
    rows = result("compare", f"{JOB}compiled", "--plan", str(path), "--learn", "10", "--seeds", "4")
    assert [row["metric"] for row in rows] == [10.0, 10.0, 10.0]


def test_training_begins_from_a_checkpoint(tmp_path: Path) -> None:
    """Of model, optimizer and step; one of another model is named."""
    model = compare_jobs.learner().model
    path, other = str(tmp_path / "run.pt"), str(tmp_path / "other.pt")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    torch.save({"model": model.state_dict(), "step": 100}, path)
    torch.save(torch.nn.Linear(3, 3).state_dict(), other)
    plan = written(tmp_path, "exact")
    short = ("--plan", plan, "--learn", "10", "--seeds", "1")
    fresh = result("compare", f"{JOB}learner", *short)[0]["last_loss"]
    loaded = result("compare", f"{JOB}learner", *short, "--from", path)[0]["last_loss"]
    assert loaded != fresh
    code, _, errors = ended("compare", f"{JOB}learner", *short, "--from", other)
    assert code == 2
    assert "other.pt" in errors
    assert "Missing key(s) in state_dict" in errors
    assert "expected a checkpoint of" in errors


@pytest.mark.parametrize(
    ("job", "sent", "message"),
    [
        ("learner_with_other_batches", "exact", "differs between ddp and ddp:order, expected equal batches"),
        ("learner_with_another_loss", "exact", "expected equal ones: batches or the loss depend on something that is"),
        ("exploding", "exact", "found a loss of"),
        ("constant", "exact", "found the same loss, 1, in all 10 steps with DDP"),
        ("learner", "between", "1 bucket would be sent uncompressed, for these ranks are on one node"),
    ],
)
def test_what_cannot_be_compared_is_named(job: str, sent: str, message: str, tmp_path: Path) -> None:
    """In the first of many starts."""
    plan = written(tmp_path, sent)
    code, _, errors = ended("compare", f"{JOB}{job}", "--plan", plan, "--learn", "10", "--seeds", "1000")
    assert code == 2
    assert message in errors
    assert load_plan(plan).accuracy_measured is None


def test_a_script_learns_from_where_it_is(tmp_path: Path) -> None:
    plan, script = tmp_path / "plan.json", tmp_path / "script.py"
    bucket = {"gradients": ["bias", "weight"], **SENT["int8"]}
    plan.write_text(json.dumps(plan_document(accuracy="bounded", buckets=[bucket])), encoding="utf-8")
    script.write_text(SCRIPT.replace("PLAN", str(plan)), encoding="utf-8")
    found = ended("compare", str(script), "--plan", str(plan), "--learn", "12", "--seeds", "2")
    assert found[0] == 0, found[2]
    assert "contestants trained one after the other from the same start: a script has one model" in found[1]
    assert "learning took" in found[1]
    assert load_plan(plan).accuracy_measured is not None
    script.write_text(script.read_text(encoding="utf-8").replace("number", "at"), encoding="utf-8")
    code, _, errors = ended("compare", str(script), "--plan", str(plan), "--learn", "12")
    assert code == 2
    assert "found no parameter called number, expected step(model, number)" in errors


SCRIPT = """
import torch
import planner

torch.distributed.init_process_group("gloo")
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
session = planner.attach(model, optimizer, "PLAN")


def step(model, number):
    generator = torch.Generator().manual_seed(2 * number + torch.distributed.get_rank())
    batch = torch.randn(4, 8, generator=generator)
    optimizer.zero_grad()
    loss = (model(batch) - batch).square().mean()
    loss.backward()
    optimizer.step()
    scheduler.step()
    return loss


planner.compare(session, step, also=[scheduler])
"""


def test_options_of_one_kind_are_refused_with_those_of_the_other(tmp_path: Path) -> None:
    """Before torch is imported and ranks are started."""
    plan = written(tmp_path, "exact")
    for options, message in (
        (("--seeds", "4"), "--seeds: found 4 without --learn STEPS"),
        (("--learn", "20", "--rounds", "2"), "--rounds: found 2 with --learn"),
        (("--learn", "20", "--seeds", "0"), "--seeds: found 0, expected at least 1"),
        (("--learn", "20", "--on", "k80-10gbe"), "--on: found no --profile"),
        (("--plan", plan), "expected one plan without --learn STEPS"),
    ):
        code, _, errors = ended("compare", f"{JOB}learner", "--plan", plan, *options)
        assert code == 2, options
        assert message in errors


def test_attach_and_report_name_the_cost_of_a_lossy_plan() -> None:
    """Of exact plans nothing, of narrow ones that were not measured only the report; what was measured to learn as DDP
    is not warned of.
    """
    measured = {
        "job": "job.py:job", "ddp_spread": 0.0, "margin": 0.005, "steps": 300, "seeds": 3, "ranks": 2,
        "against_ddp": 0.09, "ci95": [0.08, 0.1],
    }  # fmt: skip
    exact = plan_document()
    topk = exact | {"accuracy": "bounded", "buckets": [bucket | SENT["topk"] for bucket in exact["buckets"]]}
    int8 = topk | {"buckets": [bucket | SENT["int8"] for bucket in exact["buckets"]]}
    narrow = measured | {"verdict": "worse", "executed": executed_digest(parse_plan(int8))}
    measured["executed"] = executed_digest(parse_plan(topk))
    plans = {
        "exact": exact,
        "int8": int8,
        "worse int8": int8 | {"accuracy_measured": narrow},
        "topk": topk,
        "worse": topk | {"accuracy_measured": measured | {"verdict": "worse"}},
        "as ddp": topk | {"accuracy_measured": measured | {"verdict": "as ddp"}},
        "changed": topk | {"from_step": 9, "accuracy_measured": measured | {"verdict": "as ddp"}},
    }
    first, second = run_ranks(LocalWorld(ranks=2), compare_checks.attach_and_report, plans)
    assert {name for name, (texts, _) in first.items() if texts} == {"topk", "worse", "changed", "worse int8"}
    assert not any(texts for texts, _ in second.values())
    assert "accuracy: not measured on this job" in first["topk"][0][0]
    assert "accuracy: measured before the plan was changed, not since" in first["changed"][0][0]
    assert "worse than DDP: last loss +9.00% (+8.00% to +10.00%) after 300 steps" in first["worse"][0][0]
    assert first["exact"][1] == ""
    assert "not measured on this job" in first["int8"][1]
    assert "as DDP: last loss +9.00%" in second["as ddp"][1]


def test_a_script_goes_on_as_if_nothing_had_been_learnt() -> None:
    """Weights, scheduler, masks and residuals are as they would have been; sharded steps learn as DDP, too."""
    exact = plan_document()
    plans = {
        "sharded": exact | {"interface": ["sharded-step"], "updates": {"step": {"sharded": True}}},
        "lossy": exact | {"accuracy": "bounded", "buckets": [bucket | SENT["topk"] for bucket in exact["buckets"]]},
    }
    found = run_ranks(LocalWorld(ranks=2), compare_checks.learn_as_if_nothing_had_happened, plans)[0]
    assert list(found["sharded"]) == ["ddp", "ddp:order", "plan"]
    assert all(abs(away) < 1e-5 for away in found["sharded"].values())
    assert set(found["lossy"]) == {"ddp", "ddp:order", "plan"}


def test_a_script_that_cannot_learn_goes_on_from_where_it_was(tmp_path: Path) -> None:
    """Weights, optimizer and session are as before, and DDP's hooks are gone, wherever its step fails."""
    file = tmp_path / "plan.json"
    phases = [{"plan": plan_document(), "until_step": 5}, {"plan": plan_document()}]
    file.write_text(json.dumps(plan_document(buckets=[], phases=phases)), encoding="utf-8")
    one = tmp_path / "plan.json.one"
    one.write_text(json.dumps(plan_document()), encoding="utf-8")
    said = run_ranks(LocalWorld(ranks=2), compare_checks.refuse_to_learn, str(file))[0]
    assert all("ZeroDivisionError" in said[name] for name in ("DDP", "plan", "estimate"))
    assert "step(model): found no loss with ddp in step 1, expected a number" in said["silent"]
    assert "found the same loss, 0, in all 10 steps with DDP" in said["constant"]
    assert "plan.json@0, one phase of a plan, expected a plan with a file of its own" in said["phase"]
    assert "plan.json: found a plan in 2 phases" in said["phases"]
    assert "found seeds, margin, on or metric without learn" in said["seeds"]
    assert load_plan(one).accuracy_measured is not None
    assert {*tmp_path.iterdir()} == {file, one}
