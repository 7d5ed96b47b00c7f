"""The command line: the flags of all commands, and how errors become exit codes.

`--json` and `-v` are accepted before or after the command. Exit codes: 0 done; 1 a check did not hold; 2 the user's
input is wrong; 3 the environment failed.
"""

from __future__ import annotations

import io
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated

import typer

from planner.cli.commands import app
from planner.cli.options import Flags
from runtime.debug import asked_events
from runtime.errors import InputError, PlannerError
from runtime.version import __version__

_ANYWHERE = ("--json", "-v", "--verbose")


def _version(show: bool) -> None:
    if show:
        typer.echo(f"planner {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable result on standard output.")] = False,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Show tracebacks.")] = False,
) -> None:
    """A compiler for the communication of data-parallel PyTorch training.

    --json and -v may also stand after the command.
    """
    Flags.as_json, Flags.verbose = as_json, verbose


@contextmanager
def _standard_output_checked() -> Iterator[None]:
    """Turn a failed write to standard output into an InputError; errors of named files pass."""
    try:
        yield
    except OSError as error:
        if isinstance(error, PlannerError) or error.filename is not None:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or Python would try, and fail, once more as it ends
        raise InputError(f"standard output: cannot be written: {error.strerror}; send it somewhere else") from error


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command, as the console script `planner` does, and exit with its code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    end = given.index("--") if "--" in given else len(given)  # what follows is a script's own
    flags = [argument for argument in given[:end] if argument in _ANYWHERE]
    rest = [argument for argument in given[:end] if argument not in _ANYWHERE] + given[end:]
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names may hold what the terminal's encoding lacks
    try:
        with _standard_output_checked():
            asked_events()  # raises InputError at once where PLANNER_DEBUG is wrong
            app([*flags, *rest], prog_name="planner")
    except PlannerError as error:
        if Flags.verbose:
            traceback.print_exc()
        typer.echo(f"planner: {error}", err=True)
        sys.exit(error.exit_code)
