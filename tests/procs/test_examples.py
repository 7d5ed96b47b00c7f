"""The examples, as a user runs them: profile, optimize, train with the plan and with plain DDP."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
SCRIPT = str(EXAMPLES / "existing_script.py")
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


def python(folder: Path, *arguments: str) -> str:
    """What `python ARGUMENTS` prints when run in a folder; it ends within the time limit, with all that it started."""
    command = [sys.executable, *arguments]
    with subprocess.Popen(
        command,
        cwd=folder,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, errors = process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGTERM)
            raise
    assert process.returncode == 0, f"{' '.join(arguments)}\n{output}\n{errors}"
    return output


@pytest.mark.parametrize("name", ["charlm", "digits"])
def test_a_job_trains_with_its_plan_as_with_ddp(name: str, tmp_path: Path) -> None:
    job = f"{EXAMPLES / name}.py:job"
    python(tmp_path, *PLANNER, "profile", job)
    python(tmp_path, *PLANNER, "optimize", "profile.json")
    train = (*PLANNER, "run", job, "--steps", str(STEPS), "--json")
    planned, plain = (json.loads(python(tmp_path, *train, *plan)) for plan in (("--plan", "plan.json"), ()))
    same = ("steps", "ranks", "loss_first", "loss_last", "weights_sha256")
    assert {key: planned[key] for key in same} == {key: plain[key] for key in same}
    assert (planned["steps"], planned["ranks"]) == (STEPS, 2)
    assert planned["loss_last"] < planned["loss_first"]


def test_two_lines_make_an_existing_script_train_with_a_plan(tmp_path: Path) -> None:
    script = (*TORCHRUN, SCRIPT)
    assert python(tmp_path, *script, "--profile-to", "profile.json") == "wrote profile.json\n"
    python(tmp_path, *PLANNER, "optimize", "profile.json")
    train = (*script, "--steps", str(STEPS), "--checkpoint")
    planned = python(tmp_path, *train, "planned.pt", "--plan", "plan.json").splitlines()
    plain = python(tmp_path, *train, "plain.pt").splitlines()
    assert set(plain) <= set(planned)
    assert f"rank 0 of 2, {STEPS} steps: measured" in "".join(set(planned) - set(plain))
    assert planned[-1].startswith(f"after {STEPS} steps: test loss ")
    weights, expected = (torch.load(tmp_path / name)["model"] for name in ("planned.pt", "plain.pt"))
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_an_existing_script_runs_on_one_rank(tmp_path: Path) -> None:
    assert python(tmp_path, SCRIPT, "--profile-to", "profile.json") == "wrote profile.json\n"
    python(tmp_path, *PLANNER, "optimize", "profile.json")
    planned = python(tmp_path, SCRIPT, "--steps", str(STEPS), "--plan", "plan.json").splitlines()
    plain = python(tmp_path, SCRIPT, "--steps", str(STEPS)).splitlines()
    assert planned[-1] == plain[-1]
    assert any(line.startswith(f"rank 0 of 1, {STEPS} steps: measured") for line in planned)
