"""Files and names of the sources exist that pages for developers mention, names in the files named with them."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path

import pytest
from pages import ROOT

FOR_DEVELOPERS = tuple(ROOT / name for name in ("docs/architecture.md", "docs/howto/extend.md", "CONTRIBUTING.md"))
SOURCES = ("planner", "runtime", "benchmarks", "tests")
FILE = re.compile(r"`([\w/]+\.(?:py|cu))`")
NAME = re.compile(r"`@?([A-Za-z_][\w.]*)`")
NAME_IN_FILE = re.compile(r"`@?([A-Za-z_]\w*)`(?: in| of)? \(?`([\w/]+/\w+\.py)`")


@lru_cache(maxsize=1)
def texts() -> dict[str, str]:
    """Return the sources by path."""
    found = [path for folder in SOURCES for kind in ("py", "cu") for path in (ROOT / folder).rglob(f"*.{kind}")]
    return {
        path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
        for path in [*found, ROOT / "pyproject.toml"]
    }


@pytest.fixture(params=FOR_DEVELOPERS, ids=lambda page: page.name)
def page(request: pytest.FixtureRequest) -> str:
    path: Path = request.param
    return re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)


def test_files_without_a_folder_exist(page: str) -> None:
    named = {name for name in FILE.findall(page) if "NAME" not in name}
    assert [name for name in sorted(named) if not any(f"/{path}".endswith(f"/{name}") for path in texts())] == []


def test_names_exist(page: str) -> None:
    words = set(re.findall(r"\w+", "\n".join(text for path, text in texts().items() if not path.startswith("tests/"))))
    named = {part for name in NAME.findall(page) if not name.endswith(".py") for part in name.split(".")}
    assert sorted(named - words - {"NAME", "md", "json"}) == []


def test_names_are_in_the_files_that_are_named_for_them(page: str) -> None:
    for name, path in NAME_IN_FILE.findall(page):
        if "NAME" in path or name in SOURCES:
            continue
        assert re.search(rf"^\s*(?:class |def )?{name}\b", texts()[path], re.M), f"{name} is not in {path}"
