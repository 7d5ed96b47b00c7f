"""Models that this project did not write: profiled, planned and trained through the command line, and as DDP does."""

from __future__ import annotations

import json
from pathlib import Path

import commands
import foreign_jobs
import pytest

from planner.jobs.launch import LocalWorld, run_ranks

JOBS = str(Path(__file__).with_name("foreign_jobs.py"))
STEPS = 3
GRADIENTS = {"bert": 42, "bert_with_idle_pooler": 42, "gpt2": 28, "lstm": 10, "vit": 40}
"""How many each job's backward produces; a weight shared by two layers counts once."""

FAST_NETWORK = {
    "schema": "planner.cluster/1",
    "nodes": 1,
    "ranks_per_node": 2,
    "collectives": {"all_reduce": {"alpha_us": 1.0, "beta_us_per_byte": 0.01}},
}
"""Calls for several buckets; on the network measured here one is best for models as small as these."""


@pytest.fixture(scope="module")
def ddp() -> dict[str, str]:
    """SHA-256 of the weights that each job ends with under DDP."""
    weights: dict[str, str] = run_ranks(LocalWorld(ranks=2), foreign_jobs.train_with_ddp, JOBS, GRADIENTS, STEPS)[0]
    return weights


SOME = ("bert_with_idle_pooler", "gpt2")
"""With gradients that never come, and with a weight that two layers share; the zoo has models like the others."""
NAMES = [pytest.param(name, marks=() if name in SOME else pytest.mark.long) for name in sorted(GRADIENTS)]


@pytest.mark.parametrize("name", NAMES)
def test_a_foreign_model_trains_with_a_plan_as_with_ddp(name: str, ddp: dict[str, str], tmp_path: Path) -> None:
    job, files = f"{JOBS}:{name}", [str(tmp_path / f"{what}.json") for what in ("profile", "plan", "cluster")]
    Path(files[2]).write_text(json.dumps(FAST_NETWORK))
    profile = commands.result("profile", job, "--device", "cpu", "--budget-s", "10", "-o", files[0])
    assert len(profile["compute"]["gradients"]) == GRADIENTS[name]
    plan = commands.result("optimize", files[0], "--cluster", files[2], "-o", files[1])
    assert len(plan["buckets"]) > 1
    run = commands.result("run", job, "--device", "cpu", "--plan", files[1], "--steps", str(STEPS))
    assert (run["steps"], run["ranks"]) == (STEPS, 2)
    assert run["weights_sha256"] == ddp[name]


def test_plain_ddp_bears_unused_parameters(ddp: dict[str, str]) -> None:
    run = commands.result("run", f"{JOBS}:bert_with_idle_pooler", "--device", "cpu", "--steps", str(STEPS))
    assert run["weights_sha256"] == ddp["bert_with_idle_pooler"]
