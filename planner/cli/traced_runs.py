"""What the commands that read traces of real runs do: `planner import`, and `planner explain` of a trace."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from planner.cli.options import Flags, print_json
from planner.report.files import check_writable
from planner.traces.explain import COLUMNS, Explanation, change_cells, document_of, explain_run, lines_of, message_cells
from planner.traces.of_ranks import read_run
from planner.traces.replayed import replay
from planner.traces.stream import Progress
from planner.traces.to_profile import Parameter, model_name, profile_of
from planner.traces.trace_page import trace_page
from runtime.plan.files import write_text

if TYPE_CHECKING:
    from planner.documents.profile import Profile
    from planner.traces.events import Run

SLOW_BYTES = 50_000_000
"""Files larger than this are read with a progress bar."""


def import_run(traces: list[str], output: str, job: str | None, step_ms: float | None, *, fsdp2: bool) -> None:
    """Read a run, write its profile, and print what was read."""
    check_writable(output, *(trace for trace in traces if not os.path.isdir(trace)))
    with _reading() as opened:
        run = read_run(traces, opened)
    profile = _profile(run, job, step_ms, fsdp2=fsdp2)
    profile.save(output)
    if Flags.as_json:
        print_json(document_of(run, profile, replay(run, profile)))
        return
    for line in lines_of(explain_run(run, profile)):
        typer.echo(line)
    option = " --parallel fsdp2" if fsdp2 else ""
    typer.echo(f"wrote {output}; continue with: planner optimize {output}{option} -o plan.json")


def _profile(run: Run, job: str | None, step_ms: float | None, *, fsdp2: bool = False) -> Profile:
    parameters = None if job is None else parameters_of(job)
    return profile_of(run, name=job or model_name(run.paths[0]), parameters=parameters, step_ms=step_ms, fsdp2=fsdp2)


def parameters_of(job: str) -> list[Parameter]:
    """Return the trainable parameters of a job, in the order in which its model has them."""
    from planner.jobs.job import load_job
    from planner.profile.compute import matrix_of
    from runtime.checks.plan import trainable_parameters

    found = trainable_parameters(load_job(job).model)
    return [Parameter(name, tensor.numel(), matrix_of(tensor)) for name, tensor in found.items()]


def explain_traces(path: str, html: str | None) -> None:
    """Print, as a table or JSON, where the steps of a traced run go; write a page where one is asked for."""
    if html is not None:
        check_writable(html, path)
    with _reading() as opened:
        run = read_run([path], opened)
    explanation = explain_run(run, _profile(run, None, None))
    if html is not None:
        write_text(html, trace_page(explanation))
    if Flags.as_json:
        print_json(explanation.to_document())
        return
    _print(explanation)
    if html is not None:
        typer.echo(f"wrote {html}")


def _print(explanation: Explanation) -> None:
    from planner.report.tables import make_console, make_table, print_table

    console = make_console()
    for line in lines_of(explanation):
        console.print(line, highlight=False)

    def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        table = make_table(title, columns, left=(columns[0],))
        for row in rows:
            table.add_row(*row)
        print_table(console, table)

    show("messages, medians over the steps", COLUMNS, message_cells(explanation.messages))
    if explanation.doubt is not None:
        console.print(explanation.doubt, highlight=False)
    if explanation.changes:
        columns = ("what would change the step", "step (ms)", "saved", "note")
        show("predicted", columns, change_cells(explanation.changes))


@contextmanager
def _reading() -> Iterator[Callable[[str], Progress | None]]:
    """Yield what shows a bar on a terminal for each large file that is read."""
    if not sys.stderr.isatty():
        yield lambda path: None
        return
    from rich.console import Console
    from rich.progress import Progress as Bars

    with Bars(console=Console(stderr=True), transient=True) as bars:

        def opened(path: str) -> Progress | None:
            size_bytes = os.path.getsize(path) if os.path.isfile(path) else 0
            if size_bytes < SLOW_BYTES:
                return None
            task = bars.add_task(os.path.basename(path), total=size_bytes)
            return lambda read: bars.update(task, completed=read)

        yield opened
