"""Files for those who install, report and release: they agree with pyproject.toml, the Makefile and the commands."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from pages import ROOT, run
from test_pages import check_planner

from benchmarks.versions import CELLS, PYTHONS, TORCHES

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = ("demo", "pages")
CONDA_NAMES = {"torch": "pytorch", "ortools": "ortools-python"}
INSTALL = ROOT / "docs" / "install"
GITHUB = ROOT / ".github"
TEMPLATES = sorted((GITHUB / "ISSUE_TEMPLATE").glob("[!c]*.yml"))


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def test_conda_installs_what_pip_installs() -> None:
    *packages, pip = read(INSTALL / "environment.yml")["dependencies"]
    asked = dict(re.match(r"([\w-]+)(.*)", package).groups() for package in packages)  # type: ignore[union-attr]
    needed = PROJECT["dependencies"] + [one for extra in EXTRAS for one in PROJECT["optional-dependencies"][extra]]
    for name, bound in (re.match(r"([\w-]+)(.*)", one).groups() for one in needed):  # type: ignore[union-attr]
        assert asked[CONDA_NAMES.get(name, name)].partition(",")[0] == bound
    folder = shlex.split(pip["pip"][1])[-1]  # of conda's pip, which runs in the file's folder
    assert (INSTALL / folder).resolve() == ROOT


def test_docker_copies_what_a_wheel_is_built_from() -> None:
    text = (INSTALL / "Dockerfile").read_text(encoding="utf-8")
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#")]
    assert {word for word, _ in lines} <= {"FROM", "ARG", "WORKDIR", "COPY", "RUN", "USER", "ENTRYPOINT", "CMD"}
    copied = {name for word, rest in lines if word == "COPY" for name in rest.split()[:-1]}
    assert all((ROOT / name).exists() for name in copied)
    assert {"planner", "runtime", "profiles", "docs", "pyproject.toml", "setup.py", "MANIFEST.in"} <= copied
    assert f".[{','.join(EXTRAS)}]" in text
    assert re.search("^torch==", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.M)
    command = [json.loads(rest) for word, rest in lines if word in ("ENTRYPOINT", "CMD")]
    check_planner([*command[0], *command[1]][1:])


def test_public_ci_runs_targets_that_exist_on_the_versions_of_the_table() -> None:
    jobs = read(GITHUB / "workflows" / "ci.yml")["jobs"]
    matrix = jobs["versions"]["strategy"]["matrix"]
    assert (matrix["python"], matrix["torch"]) == (list(PYTHONS), list(TORCHES))
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    [versions] = [command for command in commands if command.startswith("make test-versions")]
    cell = versions.partition("CELL=")[2].replace("${{ matrix.python }}", "3.12").replace("${{ matrix.torch }}", "2.12")
    assert cell in map(str, CELLS)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = [command.split()[1] for command in commands if command.startswith("make ")]
    assert all(f"\n{target}:" in makefile for target in targets)
    assert all((ROOT / command.split()[1]).is_file() for command in commands if command.startswith("bash "))


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_forms_for_issues_ask_by_commands_that_exist(path: Path) -> None:
    form = read(path)
    assert {"name", "description", "body"} <= set(form)
    ids = [field["id"] for field in form["body"]]
    assert len(ids) == len(set(ids)) > 0
    labels = [field["attributes"]["label"] for field in form["body"]]
    for label in labels:
        if label.startswith("planner "):
            check_planner(["demo.py:job" if word == "JOB" else word for word in label.split()[1:]])
    assert "planner doctor --json" in labels or path.stem == "idea"


def test_what_a_report_of_a_bug_holds(tmp_path: Path) -> None:
    findings = json.loads(run(["planner", "doctor", "--json"], tmp_path))
    assert {"system", "python", "commplanner", "torch", "cuda", "two local ranks"} <= {one["what"] for one in findings}
    assert all({"ok", "found", "cure", "required"} <= set(one) for one in findings)


def test_versions_that_are_promised_are_those_of_the_table() -> None:
    supported = [one for one in PROJECT["classifiers"] if re.search(r"Python :: \d\.\d+$", one)]
    assert supported == [f"Programming Language :: Python :: {python}" for python in PYTHONS]
    assert PROJECT["requires-python"] == f">={PYTHONS[0]}"
    assert f"torch>={TORCHES[0]}" in PROJECT["dependencies"]
