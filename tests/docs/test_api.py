"""The API reference lists what is public, and what it shows of each name is complete."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import pytest
from pages import ROOT

import planner
import runtime

API = ROOT / "docs" / "api"
WITHOUT_ENTRY = {"__version__"}
ENTRY = re.compile(r"^::: (\S+)\n(?:    options:\n      members:\s+\[([^\]]+)\]\n)?", re.M)


def entries(page: str) -> dict[str, list[str] | None]:
    """Return the names that a page shows, with the members that it shows of each; None: all that are public."""
    found = ENTRY.findall((API / page).read_text(encoding="utf-8"))
    return {name: re.split(r",\s*", members) if members else None for name, members in found}


def resolve(name: str) -> Any:
    """Return the object, or the module, of a dotted name."""
    module, _, attribute = name.rpartition(".")
    owner = import_module(module)
    return getattr(owner, attribute) if hasattr(owner, attribute) else import_module(name)


def test_every_public_name_has_an_entry() -> None:
    assert set(entries("planner.md")) == {f"planner.{name}" for name in {*planner.__all__} - WITHOUT_ENTRY}
    own = {name for name in runtime.__all__ if getattr(runtime, name) is not getattr(planner, name, None)}
    shown = {name for name in entries("runtime.md") if not name.startswith("runtime.errors.")}
    assert shown == {f"runtime.{name}" for name in own}


def test_every_error_has_an_entry() -> None:
    errors = {name for name, value in vars(runtime.errors).items() if inspect.isclass(value)} - {*planner.__all__}
    assert {name.removeprefix("runtime.errors.") for name in entries("runtime.md")} >= errors


def test_extension_points_are_those_of_the_howto() -> None:
    text = (ROOT / "docs" / "howto" / "extend.md").read_text(encoding="utf-8")
    for name in entries("extend.md"):
        assert resolve(name) is not None
        assert re.search(rf"`@?{name.rpartition('.')[2]}(\.py)?`", text), name


def documented() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield every function, method and property that the pages of public names show."""
    for name, members in {**entries("planner.md"), **entries("runtime.md")}.items():
        shown = resolve(name)
        if inspect.isfunction(shown):
            yield name, shown
        elif not issubclass(shown, Exception):
            for key, value in inspect.getmembers_static(shown) if members else vars(shown).items():
                member = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
                written = inspect.isfunction(member) and member.__code__.co_filename != "<string>"
                public = key in members if members else not key.startswith("_") or key == "__init__"
                if written and public and (key != "__init__" or member.__doc__):
                    yield f"{name}.{key}", member


def test_members_that_are_shown_exist() -> None:
    for name, members in entries("planner.md").items():
        source = inspect.getsource(resolve(name)) if members else ""
        assert [one for one in members or () if not re.search(rf"def {one}\(|self\.{one}\b.* = ", source)] == [], name


@pytest.mark.parametrize(("name", "function"), [pytest.param(*one, id=one[0]) for one in documented()])
def test_docstrings_are_complete(name: str, function: Callable[..., Any]) -> None:
    """Each parameter has an entry in Args, or is named in backticks; what is returned is described."""
    text = inspect.getdoc(function) or ""
    assert text
    signature = inspect.signature(function)
    parameters = [one for one in signature.parameters if one not in ("self", "cls")]
    assert [one for one in parameters if not re.search(rf"^    {one}: |`{one}`", text, re.M)] == []
    returned = str(signature.return_annotation)
    if parameters and returned != "None" and not returned.startswith(("Iterator", "AbstractContextManager")):
        assert re.search(r"^Returns:|\bReturns? \w", text, re.M)
