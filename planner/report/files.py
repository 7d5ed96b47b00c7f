"""`planner explain --trace FILE --html FILE`: what is read and what is written."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from os.path import realpath
from pathlib import Path

from planner.report.page import page_text
from planner.report.trace import trace_text
from runtime.errors import InputError
from runtime.plan import Plan, load_plan
from runtime.plan.files import check_output, write_text
from runtime.plan.measured import MeasuredStep, load_measured

TRACE, HTML = "--trace", "--html"


@dataclass(frozen=True, kw_only=True)
class Explained:
    """A plan, and a step measured with it where there is one."""

    plan: Plan
    measured: MeasuredStep | None
    measured_from: str | None


def check_outputs(plan: str, measured: str | None, wanted: Mapping[str, str | None]) -> dict[str, str]:
    """Option → path of the files to write.

    Raises:
        InputError: a path cannot be written, is read or written as something else too; or nothing is to be drawn.
    """
    outputs = {option: path for option, path in wanted.items() if path is not None}
    if measured is not None and not outputs:
        raise InputError(f"--measured: found neither {TRACE} nor {HTML}; expected one of them, to draw the step in")
    # Not Path.resolve, which raises for a link to itself.
    taken = {realpath(path) for path in (plan, measured) if path is not None}
    for option, path in outputs.items():
        check_writable(path)
        if realpath(path) in taken:
            raise InputError(f"{option}: found {path}, which is another file of this command; expected a new one")
        taken.add(realpath(path))
    return outputs


def load(plan: str, measured: str | None, outputs: Mapping[str, str]) -> Explained:
    """Reads what is to be explained.

    Raises:
        InputError: a document is wrong, they do not belong together, or a trace is wanted of a plan without times.
    """
    loaded = load_plan(plan)
    step = None if measured is None else load_measured(measured, loaded)
    if TRACE in outputs and step is None and not (loaded.predicted and loaded.predicted.timeline):
        raise InputError(
            f"{plan}: $.predicted.timeline: found none, expected tasks to draw; make the plan with `planner optimize`, "
            f"or give a measured step with --measured"
        )
    return Explained(plan=loaded, measured=step, measured_from=measured)


def write(explained: Explained, outputs: Mapping[str, str]) -> None:
    """Writes each file atomically, once all of them are made. Raises as `page_text` and `write_text` do."""
    plan, measured = explained.plan, explained.measured
    texts = {}
    if TRACE in outputs:
        texts[TRACE] = trace_text(plan, measured)
    if HTML in outputs:
        texts[HTML] = page_text(plan, measured, explained.measured_from)
    for option, text in texts.items():
        write_text(outputs[option], text)


def check_writable(path: str, *inputs: str | None) -> None:
    """Refuses, before any work is done, an output path that cannot be written or is one of the input files."""
    target = check_output(path)
    for given in inputs:
        if given is not None and _same_file(given, target):
            raise InputError(
                f"{path}: found the input file {given}, expected another one to write to; choose another output path"
            )


def _same_file(given: str, target: Path) -> bool:
    """Whether both lead to one file, by whatever links."""
    try:
        return target.is_file() and os.path.samefile(given, target)
    except (OSError, ValueError):
        return False  # the input cannot be read: its reader will say so
