"""The wheel holds all that the commands need."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_wheel_holds_code_data_and_licence(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(tmp_path),
    ]
    source = tmp_path / "source"
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )
    for name in filter(None, tracked):
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / name).read_bytes())
    subprocess.run([*command, str(source)], check=True, timeout=240)
    [wheel] = tmp_path.glob("commplanner-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    code = {name for name in tracked if name.startswith(("planner/", "runtime/")) and name.endswith(".py")}
    assert code <= names
    assert {f"planner/{name}" for name in tracked if name.startswith("profiles/")} <= names
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name and ".data/" not in name} == {
        "planner", "runtime"
    }  # fmt: skip
    assert {f"planner/report/page.{kind}" for kind in ("css", "html", "js")} <= names
    assert {"planner/py.typed", "runtime/py.typed"} <= names
    assert any(name.endswith("LICENSE") for name in names)
    assert not any(name.startswith(("tests/", "examples/", "benchmarks/")) for name in names)
    entry_points = next(name for name in names if name.endswith("entry_points.txt"))
    assert "planner = planner.cli.app:main" in zipfile.ZipFile(wheel).read(entry_points).decode()
    installed = tmp_path / "installed"
    zipfile.ZipFile(wheel).extractall(installed)
    program = "from planner.cli.app import main; main(['simulate', 'resnet50@v100-16x8-25gbe', '--strategy', 'single'])"
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    found = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    assert found.returncode == 0, found.stderr
    assert "128" in found.stdout
    program = "from planner.cli.app import main; main(['docs', 'concepts/sharded-step'])"
    found = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    assert found.stdout.startswith("# "), found.stderr
