"""Lightning, Accelerate and the HF Trainer: the examples give what the frameworks' own DDP gives, line for line."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from started import PATHS, started

from planner.integrations import check_version
from runtime.errors import EnvironmentFailure

ROOT = Path(__file__).parents[2]
EXCHANGES = {"accelerate_loop": ["24"], "trainer_script": ["16", "8"], "lightning_module": ["24", "8"]}
"""By example, how often gradients are exchanged: once for each step of the optimizer, not for each micro-batch."""
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
    for package in PACKAGES[example]:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    expected, found = printed(example, tmp_path / "ddp", "--ddp"), printed(example, tmp_path / "planner")
    assert [line for line in found if line.startswith("loss")] == expected
    assert [line.split()[1] for line in found if line.startswith("exchanges")] == EXCHANGES[example]


def test_a_framework_that_is_too_old_is_named() -> None:
    check_version("lightning", "2.10.0.dev1", "2.6")
    with pytest.raises(EnvironmentFailure, match=r"found version 2\.5\.9, expected 2\.6 or newer: pip install"):
        check_version("lightning", "2.5.9", "2.6")
