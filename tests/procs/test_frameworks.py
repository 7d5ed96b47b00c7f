"""Lightning, Accelerate and the HF Trainer: the examples give what the frameworks' own DDP gives, line for line."""

from __future__ import annotations

import importlib.util
import inspect
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from findings import hold, wrong
from started import PATHS, started

from planner.integrations.attaching import check_version
from planner.jobs.launch import LocalWorld, run_ranks
from runtime.errors import EnvironmentFailure, InputError

ROOT = Path(__file__).parents[2]
EXCHANGES = {
    "accelerate_loop": ["24"], "trainer_script": ["16", "8"], "lightning_module": ["24", "8"],
    "accelerate_loop --muon": ["24"], "trainer_script --muon": ["16", "8"], "lightning_module --muon": ["48", "16"],
}  # fmt: skip
"""By example, how often gradients are exchanged: once for each step of the optimizer, not for each micro-batch; in
Lightning's manual optimization for each batch."""
PACKAGES = {"accelerate_loop": ["accelerate"], "trainer_script": ["accelerate", "transformers"],
            "lightning_module": ["lightning"]}  # fmt: skip


def printed(example: str, folder: Path, *options: str) -> list[str]:
    """Return the lines of losses, weights and exchanges that an example prints on two ranks."""
    folder.mkdir()
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    environment = {**os.environ, "PYTHONPATH": PATHS, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment["PLANNER_CACHE"] = str(folder / "cache")
    whole = [*command, str(ROOT / "examples" / f"{example}.py"), str(folder), *options]
    with started(whole, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    return [line for line in out.splitlines() if line.startswith(("loss", "exchanges"))]


@pytest.mark.long
@pytest.mark.parametrize("example", EXCHANGES)
def test_an_example_trains_as_with_ddp(tmp_path: Path, example: str) -> None:
    name, *options = example.split()
    for package in PACKAGES[name]:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    expected = printed(name, tmp_path / "ddp", "--ddp", *options)
    found = printed(name, tmp_path / "planner", *options)
    assert [line for line in found if line.startswith("loss")] == expected
    assert [line.split()[1] for line in found if line.startswith("exchanges")] == EXCHANGES[example]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What both ranks of two found with Accelerate."""
    pytest.importorskip("accelerate")
    import accelerate_checks

    return run_ranks(LocalWorld(ranks=2), accelerate_checks.run, str(tmp_path_factory.mktemp("accelerate")))


@pytest.mark.parametrize("check", ["synchronized", "copies", "accelerate"])
def test_scripts_of_accelerate_come_out_as_with_ddp(pair: list[dict[str, Any]], check: str) -> None:
    """`synchronized` has its calls around steps, `accelerate` its checkpoints, also where the step is sharded."""
    hold(pair, check)


@pytest.mark.long
def test_runs_of_lightning_and_transformers_go_on_from_their_checkpoints_as_with_ddp(tmp_path: Path) -> None:
    """Also where the step is sharded; what their DDP is told counts, and Lightning's session is there after `fit`."""
    for package in ("accelerate", "lightning", "transformers"):
        pytest.importorskip(package)
    import framework_checks

    for rank, results in enumerate(run_ranks(LocalWorld(ranks=2), framework_checks.run, str(tmp_path))):
        for framework, found in results.items():
            assert found
            assert wrong(found) == {}, (rank, framework)


@pytest.mark.long
def test_callbacks_log_the_metrics_of_the_session(tmp_path: Path) -> None:
    for package in ("accelerate", "lightning", "transformers"):
        pytest.importorskip(package)
    import framework_checks

    for rank, results in enumerate(run_ranks(LocalWorld(ranks=2), framework_checks.metrics, str(tmp_path))):
        assert {name: wrong(found) for name, found in results.items()} == {"lightning": {}, "transformers": {}}, rank


def test_what_has_no_counterpart_is_refused_on_all_ranks_alike(pair: list[dict[str, Any]]) -> None:
    first, second = (rank["refusals"] for rank in pair)
    assert first == second
    assert "found even_batches=False and a model that planner trains, expected as many batches" in first["uneven"]
    assert "PlannerAccelerator: found comm_hook='fp16', expected none, for planner takes DDP's place" in first["hook"]


def test_ddp_s_arguments_come_to_attach_s_or_are_refused() -> None:
    from planner.integrations.attaching import attach_arguments

    told = {"broadcast_buffers": False, "init_sync": False, "find_unused_parameters": True, "static_graph": True,
            "forward_sync_buffers": True, "mixed_precision": None, "device_mesh": None}  # fmt: skip
    assert attach_arguments(told, "here") == {"broadcast_buffers": False, "sync": False}
    for name in ("forward_sync_buffers", "ddp_comm_hook", "model_averaging_period", "mixed_precision", "find_unused"):
        with pytest.raises(InputError, match=f"^here: found {name}=0, expected none.*; .*(leave it out|pass)"):
            attach_arguments({name: 0}, "here")


def test_every_argument_of_ddp_is_known() -> None:
    """A new version of torch may add some."""
    from torch.nn.parallel import DistributedDataParallel

    from planner.integrations.attaching import COUNTERPARTS, REFUSED, WITHOUT_EFFECT

    asked = inspect.signature(DistributedDataParallel).parameters.keys() - {"module"}
    assert not asked - COUNTERPARTS.keys() - REFUSED.keys() - WITHOUT_EFFECT


def test_what_lightning_s_strategy_is_told_counts_or_is_refused() -> None:
    pytest.importorskip("lightning")
    from planner.integrations.lightning import PlannerStrategy

    PlannerStrategy(start_method="fork", process_group_backend="gloo", find_unused_parameters=True)
    with pytest.raises(InputError, match=r"PlannerStrategy: found model_averaging_period=4, expected none"):
        PlannerStrategy(model_averaging_period=4)


def test_a_framework_that_is_too_old_is_named() -> None:
    check_version("lightning", "2.10.0.dev1", "2.6")
    with pytest.raises(EnvironmentFailure, match=r"found version 2\.5\.9, expected 2\.6 or newer: pip install"):
        check_version("lightning", "2.5.9", "2.6")
