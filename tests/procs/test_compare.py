"""`planner compare` on two ranks: everyone is measured, the same training where it should be, the model left alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import compare_checks
import compare_jobs
import compare_script
import foreign_jobs
import pytest
from commands import ended

from planner.cli.app import main
from planner.jobs.launch import LocalWorld, run_ranks

JOB = f"{Path(__file__).with_name('compare_jobs.py')}:"


def printed(*arguments: str) -> str:
    """What the command line prints."""
    return ended(*arguments)[1]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """(profile, plan) of the job."""
    folder = tmp_path_factory.mktemp("compare")
    profile, plan = str(folder / "profile.json"), str(folder / "plan.json")
    assert "wrote" in printed("profile", f"{JOB}job", "--budget-s", "5", "-o", profile)
    assert "wrote" in printed("optimize", profile, "-o", plan)
    return profile, plan


@pytest.fixture(scope="module")
def records(files: tuple[str, str]) -> dict[str, dict[str, Any]]:
    """By name."""
    profile, plan = files
    text = printed(
        *("compare", f"{JOB}job", "--plan", plan, "--profile", profile, "--strategy", "wfbp,wire:int8"),
        *("--steps", "4", "--rounds", "2", "--json"),
    )
    return {record["name"]: record for record in json.loads(text)}


def test_everyone_is_measured(records: dict[str, dict[str, Any]]) -> None:
    assert {"none", "ddp", "ddp:fp16", "ddp:powersgd", "wfbp", "wire:int8", "plan"} <= set(records)
    best = [record for name, record in records.items() if name.startswith("ddp:best")]
    assert len(best) == 1
    assert best[0]["name"] != "ddp:best" or best[0]["equal_to"] == "ddp"
    for name, record in records.items():
        assert record["failure"] is None, record
        low, high = record["ci95_us"]
        assert 0.0 < low <= record["median_us"] <= high
        assert (record["predicted_us"] is None) == (name in ("ddp:fp16", "ddp:powersgd"))
    assert records["none"]["exposed_us"] == 0.0
    assert records["plan"]["alone_us"] > 0.0
    assert 0.0 <= records["plan"]["hidden_share"] <= 1.0
    assert records["wfbp"]["buckets"] == 6
    for name, record in records.items():  # of DDP they are not known
        sent = record["buckets"] if name in ("wfbp", "wire:int8", "plan") else 0
        assert (len(record["arrivals"]), len(record["messages"])) == (2 * (sent > 0), sent), name
        assert sum(row["last"] for row in record["arrivals"]) == sent
    # With dropout: everyone draws the same masks.
    assert records["wfbp"]["same_training"]
    assert records["plan"]["same_training"]
    assert records["ddp:fp16"]["same_training"] is None
    assert records["wire:int8"]["same_training"] is None


def test_the_table_says_who_won(files: tuple[str, str], tmp_path: Path) -> None:
    """Also of a plan whose ranks share the optimizer's step."""
    plan = json.loads(Path(files[1]).read_text(encoding="utf-8"))
    shared = tmp_path / "shared.json"
    shared.write_text(
        json.dumps(plan | {"interface": ["sharded-step"], "updates": {"step": {"sharded": True}}}), encoding="utf-8"
    )
    code, text, _ = ended("compare", f"{JOB}job", "--plan", str(shared), "--steps", "2")
    assert code == 0
    assert "the plan" in text
    assert "the best DDP" in text
    assert "plan: arrival of each rank at each message behind the first one" in text


def written(path: Path, document: dict[str, Any]) -> str:
    """Its path."""
    path.write_text(json.dumps(document), encoding="utf-8")
    return str(path)


def bert_plan(folder: Path, ranks: int) -> str:
    """A plan written by hand: one gradient of BERT travels alone, all others before it."""
    names = [name for name, _ in reversed(list(foreign_jobs.bert().model.named_parameters()))]
    alone = compare_jobs.DROPPED
    plan = {
        "schema": "planner.plan/1",
        "model": {"name": "bert"},
        "world": {"ranks": ranks},
        "accuracy": "exact",
        "buckets": [{"gradients": [name for name in names if name != alone]}, {"gradients": [alone]}],
    }
    for bucket in plan["buckets"]:  # type: ignore[attr-defined]
        bucket |= {"collective": "all_reduce", "algorithm": "library", "compressor": {"name": "none"}}
    return written(folder / "plan.json", plan)


def test_bert_with_dropout_trains_as_with_ddp(tmp_path: Path) -> None:
    """Of three ranks sums are rounded in another order, which is not called a difference."""
    job, plan = f"{Path(foreign_jobs.__file__)}:bert", bert_plan(tmp_path, 3)
    code, text, errors = ended("compare", job, "--plan", plan, "--steps", "2", "--device", "cpu", "--json")
    assert (code, "NOT THE SAME" in errors) == (0, False)
    assert {row["name"]: row["same_training"] for row in json.loads(text)}["plan"]


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.long)])
def test_a_dropped_bucket_is_not_the_same_training(ranks: int, tmp_path: Path) -> None:
    plan = bert_plan(tmp_path, ranks)
    code, text, errors = ended(
        "compare", f"{JOB}bert_with_a_dropped_bucket", "--plan", plan, "--steps", "2", "--device", "cpu", "--json"
    )
    assert code == 1
    assert "NOT THE SAME TRAINING: plan: on rank " in errors
    assert f" the first update of {compare_jobs.DROPPED} is off by " in errors
    assert not {row["name"]: row["same_training"] for row in json.loads(text)}["plan"]


def test_a_job_that_draws_by_itself_is_not_judged(tmp_path: Path) -> None:
    plan = {
        "schema": "planner.plan/1", "model": {"name": "drawing"}, "world": {"ranks": 2}, "accuracy": "exact",
        "buckets": [{"gradients": ["bias", "weight"], "collective": "all_reduce", "algorithm": "library",
                     "compressor": {"name": "none"}}],
    }  # fmt: skip
    code, text, errors = ended(
        "compare", f"{JOB}drawing", "--plan", written(tmp_path / "plan.json", plan), "--steps", "2"
    )
    assert (code, errors) == (0, "")
    assert "cannot tell whether training is the same with plan as with DDP: two blocks of DDP itself" in text


def test_a_strategy_that_cannot_be_trained_is_named_at_once(
    files: tuple[str, str], capfd: pytest.CaptureFixture[str]
) -> None:
    """And not taken for the plan, which has no fault."""
    profile, plan = files
    arguments = ("compare", f"{JOB}job", "--plan", plan, "--profile", profile, "--strategy", "wfbp,ssd:2")
    with pytest.raises(SystemExit) as end:
        main([*arguments, "--steps", str(10**8)])
    assert end.value.code == 2
    message = capfd.readouterr().err
    assert "planner: --strategy ssd:2: the plan has a delay for 2 ranks on one node" in message
    assert plan not in message


def test_what_cannot_work_is_left_out_with_its_reason(tmp_path: Path) -> None:
    profile, plan = str(tmp_path / "profile.json"), str(tmp_path / "plan.json")
    assert "wrote" in printed("profile", f"{JOB}mixed", "--budget-s", "5", "-o", profile)
    assert "wrote" in printed("optimize", profile, "-o", plan)
    text = printed("compare", f"{JOB}mixed", "--plan", plan, "--steps", "2", "--rounds", "2")
    assert "ddp:powersgd does not work here: PowerSGD over gloo with gradients of several dtypes" in text


def test_a_script_measures_its_own_step_and_goes_on_as_if_nothing_had_happened() -> None:
    """Weights, optimizer, scheduler, masks and what lossy buckets hold back are as they would have been."""
    topk = {"collective": "sparse", "algorithm": "flat", "compressor": {"name": "topk", "density": 0.3}}
    exact = compare_script.plan_document()
    plans = {
        "exact": exact,
        "sharded": exact | {"interface": ["sharded-step"], "updates": {"step": {"sharded": True}}},
        "lossy": exact | {"accuracy": "bounded", "buckets": [bucket | topk for bucket in exact["buckets"]]},
    }
    said = run_ranks(LocalWorld(ranks=2), compare_checks.go_on_as_if_nothing_had_happened, plans)[0]
    assert (said["exact"]["plan"], said["sharded"]["plan"], said["lossy"]["plan"]) == (True, True, None)


def test_steps_that_cannot_be_measured_are_refused_and_training_goes_on() -> None:
    for said in run_ranks(LocalWorld(ranks=2), compare_checks.refuse):
        assert "found no call of the model that it is given, expected one: with DDP that is" in said["own"]
        assert "step(model) raised ZeroDivisionError: of the script (compare_checks.py" in said["broken"]
        assert "planner.compare: the session is detached" in said["detached"]


def test_a_command_measures_a_script(tmp_path: Path) -> None:
    """With its own arguments; one that never calls planner.compare is told which lines to put in."""
    plan, script = written(tmp_path / "plan.json", compare_script.plan_document()), str(compare_script.__file__)
    code, text, _ = ended("compare", script, "--plan", plan, "--steps", "2", "--json", "--", plan)
    assert code == 0
    assert {row["name"]: row["same_training"] for row in json.loads(text)}["plan"]
    code, _, errors = ended("compare", script, "--plan", plan, "--", plan, "--train-only")
    assert code == 2
    assert "compare_script.py: ended without a call of planner.compare, expected one: put these lines" in errors
    assert "print(planner.compare(session, step))" in errors
