"""Records that are commands: groups of parameters, what users chose, and the module that does the work."""

from __future__ import annotations

from typing import Any

import pytest
import typer

from planner.cli.options import argument, chosen, command, for_fsdp2, option, options
from runtime.errors import InputError

app = typer.Typer()
SEEN: list[Any] = []


@options
class Depth:
    """Options that several commands have."""

    depth: int = option("How deep.", 2)
    max_width: float | None = option("How wide.")


@command(app, __name__, "look")
class Look:
    """Look at something."""

    what: str = argument("A name.")
    how: Depth
    output: str | None = option("Where to write.", None, "-o", "--output")
    loud: bool = option("With noise.", False, "--loud")
    parallel: str | None = option("fsdp2, or nothing.")


def look(asked: Look) -> None:
    """Note what is asked for."""
    SEEN.append(asked)


def run(*arguments: str) -> Look:
    app(arguments, standalone_mode=False)
    found = SEEN.pop()
    assert isinstance(found, Look)
    return found


def test_the_function_gets_the_record_with_its_groups() -> None:
    assert run("x") == Look(what="x", how=Depth())
    given = run("x", "--max-width", "1.5", "-o", "y", "--loud")
    assert given == Look(what="x", how=Depth(max_width=1.5), output="y", loud=True)
    assert chosen(given) == {"WHAT": "x", "--max-width": 1.5, "--output": "y", "--loud": True}


def test_help_is_the_docstring_and_has_parameters_in_their_order(capsys: pytest.CaptureFixture[str]) -> None:
    app(["--help"], standalone_mode=False)
    text = capsys.readouterr().out
    assert "Look at something." in text
    places = [text.index(f"--{name}") for name in ("depth", "max-width", "output", "loud", "parallel")]
    assert places == sorted(places)


def test_what_does_not_go_with_fsdp2_is_named() -> None:
    assert not for_fsdp2(run("x", "--depth", "3"), ["--depth"])
    assert for_fsdp2(run("x", "--parallel", "fsdp2"), ["--depth", "--output"])
    with pytest.raises(InputError, match="--depth: found 3, which is not built for --parallel fsdp2 yet"):
        for_fsdp2(run("x", "--depth", "3", "--parallel", "fsdp2"), ["--output", "--depth"])
    with pytest.raises(InputError, match="--parallel: found 'tp', expected fsdp2"):
        for_fsdp2(run("x", "--parallel", "tp"))
