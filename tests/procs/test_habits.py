"""What scripts do with an attached model besides training it, and what jobs do that the commands must bear."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import habit_checks
import pytest

from planner.cli.app import main
from planner.jobs.launch import LocalWorld, run_ranks


@pytest.fixture(scope="module")
def pair() -> list[dict[str, Any]]:
    """Results of both ranks of two."""
    return run_ranks(LocalWorld(ranks=2), habit_checks.habits)


@pytest.mark.parametrize("check", ["copies", "gradients_of_inputs"])
def test_models_stay_ordinary(pair: list[dict[str, Any]], check: str) -> None:
    for rank in pair:
        assert all(rank[check].values()), rank[check]


def test_reassigned_buffers_follow_rank_0_as_with_ddp(pair: list[dict[str, Any]]) -> None:
    assert [rank["reassigned_buffers"] for rank in pair] == [True, True]


def test_one_rank_s_trouble_is_told_to_all(pair: list[dict[str, Any]]) -> None:
    first, second = (rank["refusals"] for rank in pair)
    assert first == second
    assert first["lacking"] == "PlanMismatch: rank 1: /nowhere/plan.json: no such file; check the path"
    assert "'weight' and 'module.weight' are both called 'weight'" in first["twins"]


JOB = """
import os, sys
import torch
from planner import TrainingJob
print("printed while being imported")

class Odd(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.clone()
    @staticmethod
    def backward(context, gradient):
        raise ArithmeticError("odd")

def make(loss):
    def batch(step, rank):
        os.write(1, b"printed past Python\\n")
        return torch.ones(2, 3)
    sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.1)
    return TrainingJob(model=torch.nn.Linear(3, 1), loss=loss, batch=batch, optimizer=sgd)

def talking():
    return make(lambda model, batch: model(batch).sum())

def failing():
    return make(lambda model, batch: Odd.apply(model(batch)).sum())

def leaving():
    sys.exit(4)
"""


def test_what_a_job_prints_is_not_in_the_result(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "odd.py").write_text(JOB)
    with pytest.raises(SystemExit) as ended:
        main(["run", f"{tmp_path}/odd.py:talking", "--steps", "2", "--json"])
    out, err = capfd.readouterr()
    assert ended.value.code in (0, None), err
    assert json.loads(out)["steps"] == 2
    assert "printed while being imported" in err
    assert "printed past Python" in err


@pytest.mark.parametrize(
    ("job", "words"),
    [("failing", "loss.backward() raised ArithmeticError: odd"), ("leaving", "raised SystemExit: 4")],
)
def test_a_job_that_fails_is_named_without_a_traceback(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], job: str, words: str
) -> None:
    (tmp_path / "odd.py").write_text(JOB)
    with pytest.raises(SystemExit) as ended:
        main(["run", f"{tmp_path}/odd.py:{job}", "--steps", "2"])
    out, err = capfd.readouterr()
    assert ended.value.code == 2
    assert out == ""
    assert words in err
    assert "Traceback" not in err
