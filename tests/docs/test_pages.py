"""What the documents say is so: links, paths, names, commands and options exist; the tutorial runs as it is written.

A fenced block behind `<!-- file: NAME -->` is written to a file, one behind `<!-- run -->` is run, in the page's order.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import typer
from pages import PAGES, ROOT, blocks, commands, run
from torch import nn, ones
from torch.optim import SGD

import planner
from planner.cli.app import app
from planner.documents.profile import parse_cluster
from runtime.pages import find_pages

RESULTS = ROOT / "docs" / "results"
API = ROOT / "docs" / "api"
COMPATIBILITY = {ROOT / "docs" / "compatibility.md", ROOT / "docs" / "refused.md"}
MAX_WORDS = 24_000
"""Of all pages that are read from start to end: not of results, nor of those where readers look up a row or a name."""
MAX_COMPATIBILITY_WORDS = 2_500
MAX_CHANGELOG_WORDS = 1300
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
MAX_CONTRIBUTING_WORDS = 550
PROGRAMS = ("torchrun", "all_reduce_perf", "sbatch", "pip", "rm")
"""Of others, in commands of pages."""
PLACE = re.compile(r"`((?:planner|runtime|tests|benchmarks|docs|examples|profiles)/[\w/.-]+)`")


@pytest.fixture(params=PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def page(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


def test_there_are_not_too_many_words() -> None:
    words = {
        page: len(page.read_text(encoding="utf-8").split()) for page in PAGES if not {RESULTS, API} & {*page.parents}
    }
    assert len(words) > 20
    assert sum(words.pop(page) for page in COMPATIBILITY) <= MAX_COMPATIBILITY_WORDS
    assert words.pop(CONTRIBUTING) <= MAX_CONTRIBUTING_WORDS
    assert words.pop(ROOT / "CHANGELOG.md") <= MAX_CHANGELOG_WORDS
    assert sum(words.values()) <= MAX_WORDS


def test_links_lead_somewhere(page: Path) -> None:
    """`make docs` also looks at anchors; this also at pages outside of the site."""
    found = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    for link in (link for link in found if "://" not in link and not link.startswith("#")):
        assert (page.parent / link.partition("#")[0]).exists(), f"{page}: {link}"


def test_named_files_and_folders_exist(page: Path) -> None:
    for place in PLACE.findall(page.read_text(encoding="utf-8")):
        assert "NAME" in place or (ROOT / place).exists(), f"{page}: {place}"


def test_contributing_names_tests_and_folders_that_exist() -> None:
    text = CONTRIBUTING.read_text(encoding="utf-8")
    for name in re.findall(r"`(test_\w+\.py)`", text):
        assert (ROOT / "tests/procs" / name).exists(), name
    table = text.partition("| folder |")[2].partition("\n\n")[0]
    for package in ("planner", "runtime"):
        folders = {f"{package}/{path.parent.name}" for path in (ROOT / package).glob("*/__init__.py")}
        missing = folders - set(re.findall(r"`((?:planner|runtime)/\w+)`", table))
        assert missing <= {"planner/cli"}, missing


def test_named_functions_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    names = set(re.findall(r"`planner\.(\w+)[(`]", text)) | set(re.findall(r"^\s*.*\bplanner\.(\w+)\(", text, re.M))
    assert names <= {*planner.__all__, "profile"}, page  # `planner.profile` is a logger, too


def test_messages_name_pages_that_every_installation_has() -> None:
    """A wheel has no folder `docs`; comments and docstrings are for readers of a checkout."""
    known, named = find_pages(), set()
    for path in (path for package in ("planner", "runtime") for path in (ROOT / package).rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in alone:
                assert not re.search(r"docs/\S+\.md", node.value), f"{path}:{node.lineno}: {node.value}"
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "page":
                named.add(ast.literal_eval(node.args[0]))
    for path in (ROOT / "profiles").rglob("*.json"):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"docs/\S+\.md", text), path
        named |= set(re.findall(r"`planner docs ([\w/-]+)`", text))
    assert named
    assert named <= set(known)


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
        words = [words[0].removeprefix(".venv/bin/"), *words[1:]]
        if words[0] == "planner":
            check_planner(words[1:])
        elif words[:2] == ["python", "-m"]:
            assert importlib.util.find_spec(words[2])
        elif words[0] == "make":
            assert f"\n{words[1]}:" in (ROOT / "Makefile").read_text(encoding="utf-8")
        elif words[0] == "pytest":
            assert (ROOT / words[1]).exists(), words
        else:
            assert words[0] in PROGRAMS, words


def test_benchmarks_exist(page: Path) -> None:
    for module in re.findall(r"python -m (benchmarks[\w.]*)", page.read_text(encoding="utf-8")):
        assert importlib.util.find_spec(module), f"{page}: {module}"


def check_planner(words: list[str]) -> None:
    """Parse them as the command line does, which raises where a command or an option is none, or lacks its value."""
    command: Any = typer.main.get_command(app)
    while hasattr(command, "commands") and words:
        assert words[0] in command.commands, words
        command, words = command.commands[words[0]], words[1:]
    own = [word for word in words if word not in ("--json", "-v", "--verbose")]  # these stand anywhere
    command.make_parser(command.context_class(command)).parse_args(own)


def test_commands_in_sentences_exist(page: Path) -> None:
    """Those of the present: a changelog also names what was."""
    if page.name == "CHANGELOG.md":
        return
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    for span in re.findall(r"`planner ([a-z][^`]*)`", text):
        check_planner([word for word in shlex.split(span) if word not in ("...", "…")])


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
