"""`planner compare` on two ranks: everyone is measured, the same training where it should be, the model left alone."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest

from planner.cli import main

JOB = f"{Path(__file__).with_name('compare_jobs.py')}:"


def printed(*arguments: str) -> str:
    """What the command line prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        main(list(arguments))
    return out.getvalue()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """(profile, plan) of the job."""
    folder = tmp_path_factory.mktemp("compare")
    profile, plan = str(folder / "profile.json"), str(folder / "plan.json")
    assert "wrote" in printed("profile", f"{JOB}job", "-o", profile)
    assert "wrote" in printed("optimize", profile, "-o", plan)
    return profile, plan


@pytest.fixture(scope="module")
def records(files: tuple[str, str]) -> dict[str, dict[str, Any]]:
    """By name."""
    profile, plan = files
    text = printed(
        *("compare", f"{JOB}job", "--plan", plan, "--profile", profile, "--strategy", "wfbp"),
        *("--steps", "4", "--rounds", "2", "--json"),
    )
    return {record["name"]: record for record in json.loads(text)}


def test_everyone_is_measured(records: dict[str, dict[str, Any]]) -> None:
    assert {"none", "ddp", "ddp:fp16", "ddp:powersgd", "wfbp", "plan"} <= set(records)
    assert any(name.startswith("ddp:best(") for name in records)
    for name, record in records.items():
        assert record["failure"] is None, record
        low, high = record["ci95_us"]
        assert 0.0 < low <= record["median_us"] <= high
        assert (record["predicted_us"] is None) == (name in ("ddp:fp16", "ddp:powersgd"))
    assert records["none"]["exposed_us"] == 0.0
    assert records["plan"]["alone_us"] > 0.0
    assert 0.0 <= records["plan"]["hidden_share"] <= 1.0
    assert records["wfbp"]["buckets"] == 6


def test_the_table_says_who_won(files: tuple[str, str], tmp_path: Path) -> None:
    """Also of a plan whose ranks share the optimizer's step."""
    plan = json.loads(Path(files[1]).read_text(encoding="utf-8"))
    shared = tmp_path / "shared.json"
    shared.write_text(
        json.dumps(plan | {"interface": ["sharded-step"], "updates": {"step": {"sharded": True}}}), encoding="utf-8"
    )
    text = printed("compare", f"{JOB}job", "--plan", str(shared), "--steps", "2")
    assert "the plan" in text
    assert "the best DDP" in text
    assert "NOT THE SAME TRAINING" not in text


def test_a_strategy_that_cannot_be_trained_is_named_at_once(
    files: tuple[str, str], capfd: pytest.CaptureFixture[str]
) -> None:
    """And not taken for the plan, which has no fault."""
    profile, plan = files
    arguments = ("compare", f"{JOB}job", "--plan", plan, "--profile", profile, "--strategy", "wfbp,ssd:2")
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--steps", str(10**8)])
    assert ended.value.code == 2
    message = capfd.readouterr().err
    assert "planner: --strategy ssd:2: the plan has a delay for 2 ranks on one node" in message
    assert plan not in message


def test_what_cannot_work_is_left_out_with_its_reason(tmp_path: Path) -> None:
    profile, plan = str(tmp_path / "profile.json"), str(tmp_path / "plan.json")
    assert "wrote" in printed("profile", f"{JOB}mixed", "-o", profile)
    assert "wrote" in printed("optimize", profile, "-o", plan)
    text = printed("compare", f"{JOB}mixed", "--plan", plan, "--steps", "2", "--rounds", "2")
    assert "ddp:powersgd does not work here: PowerSGD over gloo with gradients of several dtypes" in text
