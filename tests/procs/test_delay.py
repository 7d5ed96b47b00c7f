"""Plans with delay: against a reference that plays all workers and servers, resumed, guarded and left."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import delay_life_checks
import delay_workers_checks
import pytest
import torch
from asked import asked_for
from findings import hold

from planner.jobs.launch import LocalWorld, run_ranks

Results = list[dict[str, dict[str, bool]]]


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.long)])
def ranks(request: pytest.FixtureRequest) -> Results:
    """What every rank of two or three found."""
    return run_ranks(LocalWorld(ranks=request.param), delay_life_checks.run, asked_for(request, "check"))


@pytest.fixture(scope="module")
def four_ranks(request: pytest.FixtureRequest) -> Results:
    """What every rank of four found."""
    return run_ranks(LocalWorld(ranks=4), delay_life_checks.run, asked_for(request, "with_four"))


IN_NODES = delay_workers_checks.CHECKS.keys() - {"compressed_pushes"}
"""What only four ranks show: workers of two ranks each."""


@pytest.mark.parametrize("check", delay_life_checks.CHECKS)
def test_on_every_rank(ranks: Results, check: str) -> None:
    hold(ranks, check)


@pytest.mark.parametrize(
    "with_four",
    [pytest.param(check, marks=() if check in IN_NODES else pytest.mark.long) for check in delay_life_checks.CHECKS],
)
def test_on_four_ranks(four_ranks: Results, with_four: str) -> None:
    hold(four_ranks, with_four)


def _run(folder: Path, **environment: str) -> str:
    """The script's words, of a run that may restart; only its first life is disturbed."""
    script = Path(__file__).with_name("delayed_example.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "3"]
    command += ["--standalone", str(script), str(folder)]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        command,
        env=os.environ
        | environment
        | {
            "PYTHONPATH": os.pathsep.join((str(root), str(root / "tests" / "procs"))),
            "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
            "OMP_NUM_THREADS": "1",
        },
        text=True,
        capture_output=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_a_rank_that_dies_between_push_and_pull_is_told_and_costs_nothing(tmp_path: Path) -> None:
    """The other one ends with an error that says where, and both go on from the last checkpoint."""
    ends = {}
    for name, environment in {"undisturbed": {}, "disturbed": {"DIES_AT": "13"}}.items():
        folder = tmp_path / name
        folder.mkdir()
        said = _run(folder, **environment)
        assert ("rank 0 goes on after step 12" in said) is bool(environment)
        assert ("CommunicationError: rank 0: bucket" in said) is bool(environment)
        ends[name] = [torch.load(folder / f"end{rank}.pt") for rank in range(2)]
    for one, other in zip(*ends.values(), strict=True):
        for part in ("own", "global"):
            assert all(torch.equal(a, b) for a, b in zip(one[part], other[part], strict=True))
