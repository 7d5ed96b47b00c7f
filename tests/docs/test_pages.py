"""What the documents say is so: links, paths, names, commands and options exist; the tutorial and the README run.

A fenced block behind `<!-- file: NAME -->` is written to a file, one behind `<!-- run -->` is run, in the page's order.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import typer
from started import PATHS
from torch import nn, ones
from torch.optim import SGD

import planner
from planner.cli.app import app
from planner.documents.profile import parse_cluster

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results"
MAX_WORDS = 20_000
"""Of all documents but measured tables: more is read by nobody."""
PAGES = sorted(
    {ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md"), *ROOT.glob("[!.]*/README.md")}
)
BLOCK = re.compile(r"(?:^<!-- (?:file: (\S+)|(run)) -->\n)?^```(\w+)[^\n]*\n(.*?)^```$", re.M | re.S)
PLACE = re.compile(r"`((?:planner|runtime|tests|benchmarks|docs|examples|profiles)/[\w/.-]+)`")
CHEAPER = {"profile": "--budget-s 5", "compare": "--steps 2 --rounds 2", "run": "--steps 2"}
"""Options that come after those of the README's commands: the same commands, in seconds."""

SMALL_JOB = """
import torch
from planner import TrainingJob


def job():
    return TrainingJob(
        model=torch.nn.Linear(64, 8),
        loss=lambda model, batch: model(batch).square().mean(),
        batch=lambda step, rank: torch.full((4, 64), float(step + rank)),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    )
"""


def blocks(page: Path) -> Iterator[tuple[str | None, bool, str, str]]:
    """(name of a file, whether it is run, language, text) of each fenced block."""
    for name, run, language, text in BLOCK.findall(page.read_text(encoding="utf-8")):
        yield name or None, bool(run), language, text


def commands(page: Path) -> Iterator[list[str]]:
    """The words of each command in blocks of shell, without what is between pipes."""
    for _, _, language, text in blocks(page):
        if language == "bash":
            yield from filter(None, (shlex.split(line, comments=True) for line in text.splitlines()))


def run(command: list[str], folder: Path) -> str:
    """What a command prints; with this repository's packages, and programs of this interpreter."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=400,
        env={**os.environ, "PATH": path, "PYTHONPATH": PATHS, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, f"{shlex.join(command)}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(params=PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def page(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


def test_there_are_not_too_many_words() -> None:
    ours = [page for page in PAGES if RESULTS not in page.parents]
    assert len(ours) > 20
    assert sum(len(page.read_text(encoding="utf-8").split()) for page in ours) <= MAX_WORDS


def test_links_lead_somewhere(page: Path) -> None:
    """`make docs` also looks at anchors; this also at pages outside of the site."""
    found = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    for link in (link for link in found if "://" not in link and not link.startswith("#")):
        assert (page.parent / link.partition("#")[0]).exists(), f"{page}: {link}"


def test_named_files_and_folders_exist(page: Path) -> None:
    for place in PLACE.findall(page.read_text(encoding="utf-8")):
        assert "NAME" in place or (ROOT / place).exists(), f"{page}: {place}"


def test_named_functions_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    names = set(re.findall(r"`planner\.(\w+)[(`]", text)) | set(re.findall(r"^\s*.*\bplanner\.(\w+)\(", text, re.M))
    assert names <= {*planner.__all__, "profile"}, page  # `planner.profile` is a logger, too


def test_the_folder_map_is_the_tree() -> None:
    """The second column of spaces begins the words; what is before it is a file or a folder."""
    _, _, _, text = next(block for block in blocks(ROOT / "docs" / "architecture.md") if block[2] == "text")
    above, found = "", set()
    for line in text.splitlines():
        indented, names = line.startswith("  "), re.split(r"\s{2,}", line.strip())[0].removesuffix(" †")
        if len(line) - len(line.lstrip()) > 4:  # words of the line before
            continue
        above = above if indented else names
        found |= {above + name if indented else name for name in names.split(", ")}
    assert all((ROOT / place).exists() for place in found), [place for place in found if not (ROOT / place).exists()]
    for package in ("planner", "runtime"):
        folders = {f"{package}/{path.parent.name}/" for path in (ROOT / package).glob("*/__init__.py")}
        assert folders == {place for place in found if place.startswith(f"{package}/") and place.count("/") == 2}


def test_blocks_can_be_read(page: Path) -> None:
    for _, _, language, text in blocks(page):
        if language == "python":
            compile(text, str(page), "exec")
        elif language == "json":
            json.loads(text)


def test_commands_and_their_options_exist(page: Path) -> None:
    for words in commands(page):
        words = words[1:] if words[0] == "sudo" else words
        if words[0] == "planner":
            check_planner(words[1:])
        elif words[:2] == ["python", "-m"]:
            assert importlib.util.find_spec(words[2])
        elif words[0] == "make":
            assert f"\n{words[1]}:" in (ROOT / "Makefile").read_text(encoding="utf-8")
        else:
            assert words[0] in ("torchrun", "all_reduce_perf"), words


def test_benchmarks_exist(page: Path) -> None:
    for module in re.findall(r"python -m (benchmarks[\w.]*)", page.read_text(encoding="utf-8")):
        assert importlib.util.find_spec(module), f"{page}: {module}"


def check_planner(words: list[str]) -> None:
    """Whether these are a command and options of it."""
    command: Any = typer.main.get_command(app)
    while hasattr(command, "commands"):
        command, words = command.commands[words[0]], words[1:]
    known = {name for parameter in command.params for name in parameter.opts}
    own = words[: words.index("--")] if "--" in words else words
    assert {word for word in own if word.startswith("-")} <= known, (command.name, words)


def test_clusters_by_hand_are_some() -> None:
    texts = [text for _, _, language, text in blocks(ROOT / "docs/howto/describe-cluster.md") if language == "json"]
    assert [parse_cluster(json.loads(text)).nodes for text in texts] == [8, 8]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_tutorial_runs(tmp_path: Path) -> None:
    """The plan ends with the loss of DDP, to the last digit."""
    said = []
    for name, to_run, _, text in blocks(ROOT / "docs" / "tutorial.md"):
        if name:
            (tmp_path / name).write_text(text, encoding="utf-8")
        elif to_run:
            said += [run(shlex.split(line), tmp_path) for line in text.splitlines()]
    losses = re.findall(r"^loss (\S+)$", "".join(said), re.M)
    assert len(losses) == 2
    assert losses[0] == losses[1]
    assert "measured" in said[-2]
    assert (tmp_path / "page.html").stat().st_size > 100_000


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_commands_of_the_readme_run(tmp_path: Path) -> None:
    """On a smaller job in the place of the example."""
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "digits.py").write_text(SMALL_JOB, encoding="utf-8")
    found = [words for words in commands(ROOT / "README.md") if words[0] == "planner"]
    assert [words[1] for words in found] == ["profile", "optimize", "compare", "run"]
    for words in found:
        run([*words, *CHEAPER.get(words[1], "").split()], tmp_path)


def test_the_loop_of_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    batch, optimizer = ones(2, 4), SGD(model.parameters(), lr=0.1)
    profile = planner.profile_step(model, lambda: model(batch).sum().backward(), optimizer, budget_s=5)
    planner.optimize(profile).save(tmp_path / "plan.json")
    monkeypatch.chdir(tmp_path)
    [loop] = [text for _, _, language, text in blocks(ROOT / "README.md") if language == "python"]
    names: dict[str, Any] = {
        "model": model,
        "optimizer": optimizer,
        "loader": [batch] * 3,
        "loss_of": lambda model, batch: model(batch).sum(),
    }
    before = [parameter.clone() for parameter in model.parameters()]
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    try:
        exec(compile(loop, "README.md", "exec"), names)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    assert any((old != new).any() for old, new in zip(before, model.parameters(), strict=True))
    names["session"].detach()
