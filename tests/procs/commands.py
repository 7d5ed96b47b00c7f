"""Commands of planner in this process, which has imported torch; ranks that they start are warm."""

from __future__ import annotations

import contextlib
import io
import json
from typing import Any

import pytest

from planner.cli.app import main


def ended(*arguments: str) -> tuple[object, str, str]:
    """Run `planner ARGUMENTS`; return its exit code, standard output and standard error."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as end:
        main(arguments)
    return end.value.code, out.getvalue(), err.getvalue()


def result(*arguments: str) -> Any:
    """Return what a command prints with `--json`; it has to succeed."""
    code, out, err = ended(*arguments, "--json")
    assert code in (0, None), err
    return json.loads(out)
