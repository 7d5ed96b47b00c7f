"""The examples: profile, optimize, train with the plan and with plain DDP."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import commands
import pytest
import torch
from started import started
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
SCRIPT = str(EXAMPLES / "existing_script.py")
DYING = str(Path(__file__).with_name("dying_example.py"))
STEPS = 20
TIMEOUT_S = 100.0
"""Of one command; each takes some seconds."""

PLANNER = ("-m", "planner")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
PATHS = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join(PATHS),
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",  # the host's name need not lead here
}


def python(folder: Path, *arguments: str, **environment: str) -> str:
    """What `python ARGUMENTS` prints when run in a folder; it ends within the time limit, with all that it started."""
    command = [sys.executable, *arguments]
    with started(
        command, cwd=folder, env={**ENVIRONMENT, **environment}, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        output, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, f"{' '.join(arguments)}\n{output}\n{errors}"
    return output


@pytest.mark.parametrize("name", ["charlm", "digits"])
def test_a_job_trains_with_its_plan_as_with_ddp(name: str, tmp_path: Path) -> None:
    job = f"{EXAMPLES / name}.py:job"
    profile, plan = str(tmp_path / "profile.json"), str(tmp_path / "plan.json")
    commands.result("profile", job, "--budget-s", "10", "-o", profile)
    commands.result("optimize", profile, "-o", plan)
    planned, plain = (commands.result("run", job, "--steps", str(STEPS), *more) for more in (("--plan", plan), ()))
    same = ("steps", "ranks", "loss_first", "loss_last", "weights_sha256")
    assert {key: planned[key] for key in same} == {key: plain[key] for key in same}
    assert (planned["steps"], planned["ranks"]) == (STEPS, 2)
    assert planned["loss_last"] < planned["loss_first"]


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A folder with plan.json and planned.pt, what training with the plan ends with; and the lines that it printed."""
    folder = tmp_path_factory.mktemp("planned")
    assert python(folder, *TORCHRUN, SCRIPT, "--profile-to", "profile.json") == "wrote profile.json\n"
    python(folder, *PLANNER, "optimize", "profile.json")
    arguments = ("--steps", str(STEPS), "--checkpoint", "planned.pt", "--plan", "plan.json")
    return folder, python(folder, *TORCHRUN, SCRIPT, *arguments).splitlines()


def differences(first: Any, second: Any, where: str = "") -> list[str]:
    """Where two checkpoints differ in a bit."""
    if isinstance(first, Tensor):
        return [] if torch.equal(first, second) else [where]
    if isinstance(first, dict) and isinstance(second, dict) and first.keys() == second.keys():
        return [found for key in first for found in differences(first[key], second[key], f"{where}.{key}")]
    if isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        pairs = enumerate(zip(first, second, strict=True))
        return [found for index, pair in pairs for found in differences(*pair, f"{where}[{index}]")]
    return [] if first == second else [where]


def test_two_lines_make_an_existing_script_train_with_a_plan(planned: tuple[Path, list[str]]) -> None:
    folder, lines = planned
    plain = python(folder, *TORCHRUN, SCRIPT, "--steps", str(STEPS), "--checkpoint", "plain.pt").splitlines()
    assert set(plain) <= set(lines)
    assert f"rank 0 of 2, {STEPS} steps: measured" in "".join(set(lines) - set(plain))
    assert lines[-1].startswith(f"after {STEPS} steps: test loss ")
    state, expected = (torch.load(folder / name) for name in ("planned.pt", "plain.pt"))
    assert state.keys() - expected.keys() == {"session"}
    assert differences({key: state[key] for key in expected}, expected) == []


@pytest.mark.long
def test_an_existing_script_compares_itself(planned: tuple[Path, list[str]]) -> None:
    printed = python(planned[0], *TORCHRUN, SCRIPT, "--compare", "plan.json")
    assert "25 steps each on 2 ranks, in 5 interleaved rounds" in printed
    assert "the best DDP" in printed
    assert "NOT THE SAME TRAINING" not in printed


def test_a_run_that_loses_a_rank_ends_with_the_weights_of_an_undisturbed_one(planned: tuple[Path, list[str]]) -> None:
    folder, lines = planned
    arguments = ("--steps", str(STEPS), "--plan", "plan.json", "--checkpoint", "lost.pt", "--save-every", "4")
    restarting = (*TORCHRUN, "--max-restarts", "1")
    output = python(folder, *restarting, DYING, *arguments, DIES_AFTER=str(STEPS // 2 + 1)).splitlines()
    assert "continuing after step 8" in output
    assert output[-1] == lines[-1]
    assert differences(torch.load(folder / "lost.pt"), torch.load(folder / "planned.pt")) == []
    assert not list(folder.glob("*.part"))


@pytest.mark.long
def test_an_existing_script_runs_on_one_rank(tmp_path: Path) -> None:
    assert python(tmp_path, SCRIPT, "--profile-to", "profile.json") == "wrote profile.json\n"
    python(tmp_path, *PLANNER, "optimize", "profile.json")
    planned = python(tmp_path, SCRIPT, "--steps", str(STEPS), "--plan", "plan.json").splitlines()
    plain = python(tmp_path, SCRIPT, "--steps", str(STEPS)).splitlines()
    assert planned[-1] == plain[-1]
    assert any(line.startswith(f"rank 0 of 1, {STEPS} steps: measured") for line in planned)
