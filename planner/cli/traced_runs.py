"""`planner import`, and `planner explain` of traces: what is read from runs that a profiler recorded."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from os.path import basename, getsize, isdir, isfile

import typer
from rich.console import Console
from rich.progress import Progress as Bars

from planner.cli.commands import Explain, Import
from planner.cli.options import printed_json
from planner.decide.cut_choice import possible_cuts
from planner.documents.profile import Profile
from planner.documents.text import SENTENCE_CHARACTERS, sanitize
from planner.model.problem import make_problem
from planner.report.files import TRACE, check_writable
from planner.report.listing import print_tables
from planner.traces.events import Run
from planner.traces.explain import (
    Explanation,
    arrival_listings,
    change_listing,
    explain_run,
    lines_of,
    message_listing,
)
from planner.traces.of_ranks import read_run
from planner.traces.stream import Progress
from planner.traces.to_profile import model_name, profile_of
from planner.traces.trace_page import trace_page
from runtime.errors import InputError
from runtime.plan import ModelReference
from runtime.plan.files import write_text

SLOW_BYTES = 50_000_000
"""Files larger than this are read with a progress bar."""


def import_traces(asked: Import) -> None:
    """Read a run, write its profile, and print what was read."""
    check_writable(asked.output, *(trace for trace in asked.traces if not isdir(trace)))
    run = _read(asked.traces)
    profile = _profile(run, asked.job, asked.step_ms)
    if asked.parallel is not None and profile.units is None:
        raise InputError(
            f"--parallel: found fsdp2, and no annotation FSDP::pre_forward in {run.paths[0]}, expected a run of FSDP2; "
            f"leave the option out"
        )
    explained = explain_run(run, profile, changes=False)
    more = explained.doubt
    replace(profile, notes=(*(profile.notes or ()), *more) or None).save(asked.output)
    if printed_json(explained.to_document):
        return
    plans = asked.output if profile.units is None else f"{asked.output} --parallel fsdp2"
    wrote = f"wrote {asked.output}; continue with: planner optimize {plans} -o plan.json"
    _print_lines(explained, *more, wrote)


def explain_traces(asked: Explain) -> None:
    """Print where the steps of a traced run go, and draw them."""
    for option, value in ((TRACE, asked.trace), ("--measured", asked.measured)):
        if value is not None:
            raise InputError(f"{option}: found it with the trace {asked.plan}, expected it with a plan; leave it out")
    if asked.html is not None:
        check_writable(asked.html, asked.plan)
    run = _read([asked.plan])
    explained = explain_run(run, _profile(run))
    if asked.html is not None:
        write_text(asked.html, trace_page(explained))
    if printed_json(explained.to_document):
        return
    _print_lines(explained, *([] if asked.html is None else [f"wrote {asked.html}"]))
    print_tables(message_listing(explained), *arrival_listings(explained))
    for warning in explained.doubt:
        typer.echo(warning)
    if explained.changes:
        print_tables(change_listing(explained))


def _print_lines(explained: Explanation, *more: str) -> None:
    notes = [f"- {sanitize(note, SENTENCE_CHARACTERS)}" for note in explained.notes]
    typer.echo("\n".join([*lines_of(explained), *notes, *more]))


def _profile(run: Run, job: str | None = None, step_ms: float | None = None) -> Profile:
    """Return the run's profile, whose notes have what cuts would win of one compiled graph."""
    model, parameters = ModelReference(name=job or model_name(run.paths[0])), None
    if job is not None:
        parameters, fingerprint = import_module("planner.jobs.parameters").parameters_of(job)  # which loads torch
        model = replace(model, fingerprint=fingerprint)
    profile = profile_of(run, model, parameters, step_ms=step_ms)
    cuts = None if profile.cluster is None or profile.units else possible_cuts(make_problem(profile))
    return profile if cuts is None else replace(profile, notes=(*(profile.notes or ()), cuts.note))


def _read(paths: Sequence[str]) -> Run:
    """Read a run, with a bar on a terminal for each large file."""
    with Bars(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bars:

        def opened(path: str) -> Progress | None:
            size_bytes = getsize(path) if isfile(path) else 0
            if size_bytes < SLOW_BYTES:
                return None
            task = bars.add_task(basename(path), total=size_bytes)
            return lambda read: bars.update(task, completed=read)

        return read_run(paths, opened)
