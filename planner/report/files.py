"""`planner explain --trace FILE --html FILE`: what is read and what is written."""

from __future__ import annotations

import os
from collections.abc import Mapping
from os.path import realpath

from planner.report.accumulation import per_optimizer_step
from planner.report.page import page_text
from planner.report.trace import trace_text
from runtime.errors import InputError
from runtime.plan import Plan, check_has_buckets, load_plan
from runtime.plan.files import check_output, write_text
from runtime.plan.measured import load_measured

TRACE, HTML = "--trace", "--html"


def check_outputs(plan: str, measured: str | None, wanted: Mapping[str, str | None]) -> dict[str, str]:
    """Return the path of each file to write, by option.

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


def explain(plan: str, measured: str | None, outputs: Mapping[str, str]) -> Plan:
    """Read a plan, and a step measured with it where there is one; write each file atomically, once all are made.

    Raises:
        InputError: a document is wrong, they do not belong together, or a trace is wanted of a plan without times.
        EnvironmentFailure: plotly, which draws pages, is not installed.
    """
    loaded = load_plan(plan)
    asked = HTML if HTML in outputs else "--measured" if measured is not None else TRACE
    if asked != TRACE or (TRACE in outputs and loaded.phases is not None):
        check_has_buckets(loaded, f"{plan}: {asked}", f"{TRACE} draws its timeline")
    step = None if measured is None else load_measured(measured, loaded)
    if TRACE in outputs and step is None and not (loaded.predicted and loaded.predicted.timeline):
        raise InputError(
            f"{plan}: $.predicted.timeline: found none, expected tasks to draw; make the plan with `planner optimize`, "
            f"or give a measured step with --measured"
        )
    if step is not None:
        loaded = per_optimizer_step(loaded, step.micro_batches or 1, step.exchanged or 1)
    texts = {}
    if TRACE in outputs:
        texts[TRACE] = trace_text(loaded, step)
    if HTML in outputs:
        texts[HTML] = page_text(loaded, step, measured)
    for option, text in texts.items():
        write_text(outputs[option], text)
    return loaded


def check_writable(path: str, *inputs: str | None) -> None:
    """Raise InputError, before any work is done, for an output path that cannot be written or is an input file."""
    target = check_output(path)
    for given in inputs:
        try:
            same = given is not None and target.is_file() and os.path.samefile(given, target)
        except (OSError, ValueError):
            same = False  # the input cannot be read: its reader will say so
        if same:
            raise InputError(
                f"{path}: found the input file {given}, expected another one to write to; choose another output path"
            )
