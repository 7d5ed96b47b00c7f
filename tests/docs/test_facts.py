"""What pages say about the sources is so, and whole: environment variables, columns of tables, what needs no Unix."""

from __future__ import annotations

import ast
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import contract_examples
import pytest
from pages import ROOT, blocks, commands, run
from started import PATHS

from benchmarks.source_metrics import PACKAGES
from planner.comparison.report import Row, WrappingRow
from planner.report.tables import SUMMARY, _delay_table, _frontier_table, _updaters_table, bucket_table
from runtime.plan import parse_plan

VARIABLE = re.compile(r"[A-Z][A-Z0-9]+(_[A-Z0-9]+)*")
ENVIRONMENT = {"environ", "environment", "getenv"}
"""Names by which sources reach the environment."""


def variables(tree: ast.Module) -> Iterator[str]:
    """Yield every name that looks like a variable in functions that reach the environment."""
    constants = {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        nodes = list(ast.walk(function))
        names = {getattr(node, field, None) for node in nodes for field in ("id", "attr", "arg")}
        if names & ENVIRONMENT:
            texts = [node.value for node in nodes if isinstance(node, ast.Constant)]
            texts += [constants[node.id] for node in nodes if isinstance(node, ast.Name) and node.id in constants]
            texts += [node.arg for node in nodes if isinstance(node, ast.keyword)]
            yield from (text for text in texts if isinstance(text, str) and VARIABLE.fullmatch(text))


def test_the_page_names_every_environment_variable_and_no_other_of_ours() -> None:
    texts = [path.read_text(encoding="utf-8") for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    reaching = [text for text in texts if any(name in text for name in ENVIRONMENT)]
    read = {name for text in reaching for name in variables(ast.parse(text))}
    assert {"PLANNER", "PLANNER_CACHE", "PLANNER_DEBUG", "CUDA_PATH", "LOCAL_RANK"} <= read
    named = set(re.findall(r"`([A-Z][A-Z0-9_]+)`", (ROOT / "docs/environment.md").read_text(encoding="utf-8")))
    assert read <= named
    assert {name for name in named if name.startswith("PLANNER")} <= read


def test_the_page_on_output_names_every_column() -> None:
    plan = parse_plan(json.loads(contract_examples.PLAN), "plan.json")
    tables = (_frontier_table(plan), _delay_table(plan), _updaters_table(plan), bucket_table(plan, str, 0, ""))
    columns = {*SUMMARY, *Row.COLUMNS, *WrappingRow.COLUMNS, *(name for table in tables for name in table.columns)}
    text = (ROOT / "docs/howto/read-output.md").read_text(encoding="utf-8")
    assert [column for column in columns if column and f"`{column}`" not in text] == []


def test_the_page_on_output_shows_what_is_printed(tmp_path: Path) -> None:
    page = ROOT / "docs/howto/read-output.md"
    printed = "".join(run(words, tmp_path) for words in commands(page))
    shown = [text for _, _, language, text in blocks(page) if language == "text"][:2]
    rows = [line for text in shown for line in text.splitlines() if line.startswith("│")]
    cells = {cell.strip(" …;") for row in rows for cell in row.split("│")[1:]}
    assert len(cells) > 20
    assert [cell for cell in cells if cell.partition("…")[0] not in printed] == []


def predicted_us(section: str, folder: Path) -> list[float]:
    """Run the commands of a section that predict; return the steps of its strategies."""
    steps: list[float] = []
    for line in re.findall(r"^planner (?:cluster|simulate) .*$", section, re.M):
        words = shlex.split(line)
        if words[1] == "cluster":
            run(words, folder)
        else:
            steps += [record["iteration_us"] for record in json.loads(run([*words, "--json"], folder))]
    return steps


@pytest.mark.long
def test_recipes_tell_what_is_predicted(tmp_path: Path) -> None:
    """Every time in a section is, to its last digit, the step of a strategy that its commands predict."""
    text = (ROOT / "docs/howto/which-plan.md").read_text(encoding="utf-8")
    asked, *sections = text.split("\n## ")
    known = {"10 Gbit/s Ethernet": predicted_us(asked, tmp_path)}
    for section in sections:
        name = section.partition("\n")[0]
        times_us = known.get(name) or predicted_us(section, tmp_path)
        for digits, unit in re.findall(r"\b([\d.]+) (ms|s)\b", section) if times_us else ():
            unit_us = {"ms": 1e3, "s": 1e6}[unit]
            half_us = 0.5 * unit_us * 10.0 ** -len(digits.partition(".")[2])
            assert any(abs(float(digits) * unit_us - time_us) <= 1.01 * half_us for time_us in times_us), (name, digits)


DECIDING = ("catalog k80", "simulate googlenet@k80-10gbe --strategy ddp", "optimize googlenet@k80-10gbe -o plan.json")
WITHOUT_UNIX = """
import os, signal, sys

for name in ("fcntl", "resource", "pwd", "grp", "termios"):
    sys.modules[name] = None
for name in ("fork", "geteuid", "killpg", "memfd_create", "sched_getaffinity", "setpriority"):
    if hasattr(os, name):
        delattr(os, name)
for name in ("SIGALRM", "SIGHUP", "SIGKILL", "alarm"):
    delattr(signal, name)
from planner.cli.app import main

main()
"""


@pytest.mark.parametrize("command", DECIDING)
def test_deciding_needs_no_module_of_unix(command: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_UNIX, *command.split()], cwd=tmp_path, capture_output=True, text=True,
        timeout=300, env={"PATH": "", "PYTHONPATH": PATHS},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
