"""A script on two gloo ranks, traced by torch.profiler: its traces are imported and planned."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from planner import optimize
from planner.traces.explain import explain_run
from planner.traces.of_ranks import read_run
from planner.traces.to_profile import profile_of
from runtime.plan import ModelReference

SCRIPT = """
import sys, torch
from torch import nn
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
layers = [nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10)]
model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.randn(32, 64)
def step():
    optimizer.zero_grad()
    model(data).square().mean().backward()
    optimizer.step()
for _ in range(3):
    step()
with profile(activities=[ProfilerActivity.CPU], record_shapes=sys.argv[2] == "shapes") as prof:
    for _ in range(3):
        step()
        if sys.argv[2] == "shapes":
            prof.step()
prof.export_chrome_trace(f"{sys.argv[1]}/rank{rank}.json.gz")
dist.destroy_process_group()
"""
SHAPES = [(10,), (10, 512), (512,), (512, 256), (256,), (256, 64)]


@pytest.mark.parametrize("recorded", ["shapes", "nothing"])
def test_a_script_on_two_gloo_ranks(tmp_path: Path, recorded: str) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "traces").mkdir()
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launcher, "train.py", "traces", recorded], cwd=tmp_path, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    run = read_run([str(tmp_path / "traces")])
    assert (run.world, run.traced_ranks, run.device, run.backend) == (2, (0, 1), "cpu", "gloo")
    assert len(run.steps) == 3
    if recorded == "shapes":
        assert sorted(run.steps[0].shapes or ()) == sorted(SHAPES)
    profile = profile_of(run, ModelReference(name="m"))
    assert profile.cluster is not None
    assert profile.cluster.samples is not None
    assert len(profile.cluster.samples["all_reduce"]) >= 2
    found = explain_run(run, profile)
    assert found.replay is not None
    assert {row.last_rank for row in found.messages if row.gradients} <= {0, 1}
    plan = optimize(profile)
    assert sum(len(bucket.gradients) for bucket in plan.buckets) == len(SHAPES)
