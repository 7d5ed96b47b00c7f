"""examples/cluster: what its scripts start, what its manifest says, and the example of Ray Train."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from started import PATHS, started

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "examples" / "cluster"
ENVIRONMENT = {**os.environ, "PYTHONPATH": PATHS, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}

RAY = {
    "ray/__init__.py": "def init(runtime_env): pass\n",
    "ray/train/__init__.py": """
from types import SimpleNamespace as RunConfig, SimpleNamespace as ScalingConfig
reported = []

class Checkpoint:
    from_directory = str

def report(metrics, checkpoint):
    reported.append(metrics)
""",
    "ray/train/torch.py": """
from types import SimpleNamespace
import torch
import torch.distributed as dist
import ray.train

def get_device():
    return torch.device("cpu")

def prepare_model(model, parallel_strategy="ddp"):
    return model if parallel_strategy is None else torch.nn.parallel.DistributedDataParallel(model)

class TorchTrainer:
    def __init__(self, loop, train_loop_config, scaling_config, run_config):
        self.call = lambda: loop(train_loop_config)

    def fit(self):
        dist.init_process_group("gloo")
        self.call()
        dist.destroy_process_group()
        return SimpleNamespace(metrics=ray.train.reported[-1])
""",
}
"""What stands for Ray where it is not installed: the names that the example uses, on the ranks of torchrun."""


def printed(command: list[str], folder: Path, **environment: str) -> str:
    """Return what a command prints on standard output."""
    given = {**ENVIRONMENT, "PLANNER_CACHE": str(folder / "cache"), **environment}
    with started(command, cwd=folder, env=given, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        out, err = process.communicate(timeout=200)
    assert process.returncode == 0, f"{out}\n{err}"
    return out


def stub(folder: Path, name: str, text: str) -> None:
    """A program on the PATH of a test."""
    path = folder / "bin" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def recorded(tmp_path: Path) -> dict[str, str]:
    """An environment in which torchrun writes its arguments and what it was given, one a line, and srun calls it."""
    told = '"$PLANNER_CACHE" "$TORCH_DISABLE_SHARE_RDZV_TCP_STORE" "$@"'
    stub(tmp_path, "torchrun", f'printf "%s\\n" {told} > {tmp_path}/said')
    stub(tmp_path, "srun", 'exec "$@"')
    stub(tmp_path, "scontrol", '[ "$*" = "show hostnames node[3-6]" ] && printf "node%s\\n" 3 4 5 6')
    return {"PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}", "HOME": "/home/somebody"}


def options(said: list[str]) -> dict[str, str]:
    return {said[at]: said[at + 1] for at in range(0, len(said), 2)}


@pytest.mark.parametrize("script", sorted(CLUSTER.glob("*.sh")), ids=lambda path: path.name)
def test_scripts_are_bash(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)


@pytest.mark.parametrize("cache", [None, "/shared/plans"])
def test_torchrun_is_given_the_rendezvous(tmp_path: Path, recorded: dict[str, str], cache: str | None) -> None:
    given = {**recorded, "PLANNER_CACHE": cache or ""}
    printed(["bash", str(CLUSTER / "torchrun.sh"), "--steps", "7"], tmp_path, HEAD="node1", JOB="first", **given)
    said = (tmp_path / "said").read_text().splitlines()
    assert said[:2] == [cache or "/home/somebody/.cache/planner", "1"]
    assert options(said[2:-3]) == {
        "--nnodes": "2:4", "--nproc-per-node": "8", "--max-restarts": "3",
        "--rdzv-backend": "c10d", "--rdzv-endpoint": "node1:29400", "--rdzv-id": "first",
    }  # fmt: skip
    assert said[-3:] == [str(CLUSTER / "train.py"), "--steps", "7"]


def test_slurm_starts_one_torchrun_a_node(tmp_path: Path, recorded: dict[str, str]) -> None:
    slurm = {"JOB_NODELIST": "node[3-6]", "JOB_NUM_NODES": "4", "GPUS_ON_NODE": "2", "JOB_ID": "9"}
    given = {**recorded, **{f"SLURM_{name}": value for name, value in slurm.items()}}
    printed(["bash", str(CLUSTER / "slurm.sh"), "--steps", "7"], tmp_path, **given)
    said = (tmp_path / "said").read_text().splitlines()
    assert options(said[2:-3]) == {
        "--nnodes": "4", "--nproc-per-node": "2", "--max-restarts": "3",
        "--rdzv-backend": "c10d", "--rdzv-endpoint": "node3:29400", "--rdzv-id": "9",
    }  # fmt: skip
    assert (ROOT / said[-3]).exists()
    directives = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", (CLUSTER / "slurm.sh").read_text(), re.M))
    assert (directives["nodes"], directives["ntasks-per-node"]) == ("4", "1")


def test_torchrun_really_trains_and_continues_on_another_number_of_ranks(tmp_path: Path) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = ["bash", str(CLUSTER / "torchrun.sh"), "--checkpoint", str(tmp_path / "run.pt"), "--steps"]
    for done, steps, ranks, port in (("0", "12", "2", "29417"), ("12", "20", "3", "29418")):
        given = {"PATH": path, "HEAD": "localhost", "NODES": "1", "JOB": ranks, "GPUS": ranks, "PORT": port}
        out = printed([*command, steps], tmp_path, **given)
        assert f"steps {done} to {steps} on {ranks} ranks: loss " in out


def test_the_manifest_has_what_the_operator_and_planner_need() -> None:
    yaml: Any = pytest.importorskip("yaml")
    job = yaml.safe_load((CLUSTER / "pytorchjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    policy, worker = job["spec"]["elasticPolicy"], job["spec"]["pytorchReplicaSpecs"]["Worker"]
    assert policy["minReplicas"] <= worker["replicas"] <= policy["maxReplicas"]
    [container] = worker["template"]["spec"]["containers"]
    assert container["name"] == "pytorch"
    program, *rest = container["command"]
    assert program == "torchrun"
    assert (ROOT / rest[1]).exists()
    assert rest[0] == f"--nproc-per-node={container['resources']['limits']['nvidia.com/gpu']}"
    environment = {one["name"]: one["value"] for one in container["env"]}
    assert all(isinstance(value, str) for value in environment.values())
    mounts = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
    assert mounts.keys() == {one["name"] for one in worker["template"]["spec"]["volumes"]}
    assert environment["PLANNER_CACHE"].startswith(mounts["shared"])


def lines(out: str) -> list[str]:
    """Return what ranks said; ranks share one pipe, so that one's text may come before another's end of line."""
    return sorted(set(re.findall(r"loss \d\.\d{9} weights -?\d+\.\d{12}|exchanges \d+", out)))


def test_ray_train_by_a_stand_in(tmp_path: Path) -> None:
    """Both ways on two ranks give the same loss and weights; ranks differ in their loss."""
    for name, text in RAY.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    paths = os.pathsep.join([str(tmp_path), PATHS])
    found, expected = (
        lines(printed([*command, str(CLUSTER / "ray_train.py"), str(tmp_path), *more], tmp_path, PYTHONPATH=paths))
        for more in ([], ["--ddp"])
    )
    assert found == ["exchanges 24", *expected]
    assert len(expected) == 2


@pytest.mark.long
def test_ray_train_itself(tmp_path: Path) -> None:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("ray is not installed")
    command = [sys.executable, "-W", "ignore", str(CLUSTER / "ray_train.py"), str(tmp_path)]
    paths = os.pathsep.join([PATHS, *filter(None, [os.environ.get("PYTHONPATH")])])
    found, expected = (
        lines(printed([*command, *more], tmp_path, PYTHONPATH=paths, RAY_AUTH_MODE="disabled"))
        for more in ([], ["--ddp"])
    )
    assert found == ["exchanges 24", *expected]
    assert len(expected) == 1
