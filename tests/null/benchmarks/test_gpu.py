"""The command for GPUs: its rehearsal runs here; a part that fails, dies or hangs does not end it; it resumes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import __main__ as command
from benchmarks.gpu.environment import WheelsMissing, make_environment, requirements
from benchmarks.gpu.page import NOT_RUN, page
from benchmarks.gpu.parts import PARTS
from benchmarks.gpu.state import ROOT, Result, State

HERE = {"device": None, "torch": "2.13.0", "python": "3.11.7", "planner": "0.1.0", "machine": "x86_64"}
GPU = {"name": "H200", "capability": "9.0", "memory_gib": 140, "count": 1, "driver": "580.1", "cuda": "13.0"}

WORKER = """
import json, os, sys, time
state, parts = sys.argv[sys.argv.index("--state") + 1], sys.argv[sys.argv.index("--parts") + 1 :]
def say(**record):
    with open(state, "a") as file:
        file.write(json.dumps(record) + "\\n")
for part in parts:
    say(begun=part, time=time.time(), seconds=0.1)
    if part == "dies":
        print("last words", flush=True)
        os._exit(9)
    if part == "hangs":
        time.sleep(600)
    failures = ["a sum differs"] if part == "fails" and not os.path.exists(state + ".mended") else []
    say(part=part, took_s=0.0, date="2026-11-24", source="here", text=part, failures=failures)
    if failures:
        break
"""


@pytest.fixture
def fake_worker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """Parts in each start of a worker that does as their names say."""
    script, started = tmp_path / "worker.py", list[list[str]]()
    script.write_text(WORKER)

    def call(python: Path, *arguments: str) -> list[str]:
        started.append(list(arguments[arguments.index("--parts") + 1 :]))
        return [sys.executable, str(script), *arguments]

    monkeypatch.setattr(command, "_call", call)
    monkeypatch.setattr(command, "LEAST_S", 1.0)
    return started


def run(state: State, names: list[str], seconds: float = 60.0) -> dict[str, Result]:
    command.Runner(state, Path(sys.executable), "cuda", time.time() + seconds).run(names)
    return state.results()


@pytest.mark.timeout(500)
def test_the_rehearsal_runs_every_part(tmp_path: Path) -> None:
    output = tmp_path / "gpu.md"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--minutes", "6", "--output", str(output),
         "--state", str(tmp_path / "state")],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    text = output.read_text(encoding="utf-8")
    for part in PARTS.values():
        assert f"- {part.title}: runs" in text
        assert f". On a device it would {part.does}." in text
        assert f"{part.name}: good" in done.stdout
    assert NOT_RUN in text


def test_parts_that_fail_die_or_hang_are_told_of_and_others_go_on(fake_worker: list[list[str]], tmp_path: Path) -> None:
    state, names = State(tmp_path / "cuda.jsonl", HERE), ["one", "fails", "dies", "hangs", "two"]
    found = run(state, names)
    assert fake_worker == [names, names[2:], names[3:], names[4:]]
    assert {name: result.failures for name, result in found.items()} == {
        "one": (), "fails": ("a sum differs",), "dies": ("its process ended with exit code 9",),
        "hangs": ("it did not end in time",), "two": (),
    }  # fmt: skip
    assert "last words" in found["dies"].text


def test_the_same_command_goes_on_where_it_stopped(
    fake_worker: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "cuda.jsonl"
    monkeypatch.setattr(command, "LEAST_S", 60.0)
    run(State(path, HERE), ["one", "fails"])
    assert run(State(path, HERE), ["one", "hangs"], seconds=2.0).keys() == {"one", "fails"}  # the time was up
    (tmp_path / "cuda.jsonl.mended").touch()
    found = run(State(path, HERE), ["one", "fails", "two"])
    assert fake_worker == [["one", "fails"], ["hangs"], ["fails", "two"]]
    assert [found[name].failures for name in ("one", "fails", "two")] == [(), (), ()]
    assert State(path, HERE | {"torch": "2.14.0"}).results() == {}, "of another environment"
    assert len(list(tmp_path.glob("cuda.*.jsonl"))) == 1, "which is kept"


def test_the_page_says_what_is_of_a_device_and_what_was_rehearsed() -> None:
    good, bad = (Result("| a |", failures, 1.0, "2026-11-24", "here") for failures in ((), ("a sum differs",)))
    first, second = list(PARTS)[:2]
    rehearsed = page(None, HERE, {first: good, second: bad}, "here")
    assert NOT_RUN in rehearsed
    assert f"{PARTS[first].title}: runs." in rehearsed
    assert f"{PARTS[second].title}: **fails**: a sum differs." in rehearsed
    measured = page(rehearsed, HERE | {"device": GPU}, {first: good, second: bad}, "there")
    assert NOT_RUN not in measured
    assert "2026-11-24: H200 (140 GiB, compute capability 9.0), driver 580.1, CUDA 13.0, torch 2.13.0" in measured
    assert measured.count("Run from an earlier source.") == 2
    assert "**Failed**: a sum differs" in measured
    assert "Not run: the time was up" in measured
    assert f"{PARTS[first].title}: runs." in measured, "the rehearsal stays"
    assert page(measured, HERE, {}, "here").count("H200 (140 GiB") == 1, "as measurements do"


def test_the_page_in_the_documents_is_one_of_this_command() -> None:
    text = (ROOT / "docs" / "results" / "gpu.md").read_text(encoding="utf-8")
    assert page(text, HERE, {}, "").startswith(page(None, HERE, {}, "").split("## Measured")[0])


def make_wheel(folder: Path, name: str, needs: str = "") -> None:
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", "VALUE = 7\n")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{needs}")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: a test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


def test_an_environment_is_made_of_wheels_alone(tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with pytest.raises(WheelsMissing, match="found no wheel there, expected those of probe"):
        make_environment(wheels, tmp_path / "venv", ["probe"])
    make_wheel(wheels, "probe", "Requires-Dist: absent\n")
    with pytest.raises(WheelsMissing, match="absent"):
        make_environment(wheels, tmp_path / "venv", ["probe"])
    make_wheel(wheels, "absent")
    python = make_environment(wheels, tmp_path / "venv", ["probe"])
    said = subprocess.run([python, "-c", "import probe, absent; print(probe.VALUE)"], capture_output=True, text=True)
    assert said.stdout == "7\n", said.stderr
    assert {name.split(">")[0] for name in requirements()} >= {"torch", "pydantic", "scikit-learn"}


def test_nothing_of_the_command_itself_imports_torch() -> None:
    """A context of the device's would be the command's, and a wheel's torch is not this interpreter's."""
    code = "import sys, benchmarks.gpu.__main__; print(json.dumps('torch' in sys.modules))"
    done = subprocess.run([sys.executable, "-c", f"import json; {code}"], cwd=ROOT, capture_output=True, text=True)
    assert json.loads(done.stdout) is False, done.stderr


@pytest.mark.parametrize("arguments", [["--minutes", "0"], ["--only", "nothing"]])
def test_options_that_are_none_are_refused(arguments: list[str], capsys: Any) -> None:
    with pytest.raises(SystemExit, match="2"):
        command.main(arguments)
    assert arguments[0] in capsys.readouterr().err
