"""`planner explain`, `diff` and `export`: what is made of plans."""

from __future__ import annotations

import typer

from planner.cli.commands import Diff, Explain, Export
from planner.cli.options import Flags, printed_json
from planner.cli.traced_runs import explain_traces
from planner.export import export as express
from planner.report import files
from planner.report.difference import difference, print_difference
from planner.report.listing import make_console
from planner.report.tables import print_plan
from planner.traces.stream import is_trace
from runtime.errors import InputError
from runtime.plan import load_plan
from runtime.plan.document import split_phase
from runtime.plan.files import write_bytes


def explain(asked: Explain) -> None:
    """Print a plan or a traced run, and draw it."""
    if is_trace(asked.plan):
        explain_traces(asked)
        return
    outputs = files.check_outputs(
        str(split_phase(asked.plan)[0]), asked.measured, {files.TRACE: asked.trace, files.HTML: asked.html}
    )
    loaded = files.explain(asked.plan, asked.measured, outputs)
    if printed_json(loaded.to_document):
        return
    print_plan(loaded, make_console(), buckets=True, more=[f"wrote {path}" for path in outputs.values()])


def diff(asked: Diff) -> None:
    """Print what differs between two plans."""
    found = difference(load_plan(asked.first), load_plan(asked.second))
    if not printed_json(found.to_document):
        print_difference(found, (asked.first, asked.second))
    if not found.same:
        raise typer.Exit(1)


def export(asked: Export) -> None:
    """Print or write what a stock executor takes of a plan."""
    if asked.output is not None:
        files.check_writable(asked.output, str(split_phase(asked.plan)[0]), asked.profile, asked.cluster)
    found = express(asked.plan, asked.to, asked.profile, asked.cluster)
    if found.data is not None and asked.output is None and not Flags.as_json:
        raise InputError(f"--to {asked.to}: found no --output, expected a file for what is no text; add -o plan.et")
    if asked.output is not None:
        write_bytes(asked.output, found.text.encode() if found.data is None else found.data)
    if printed_json(lambda: found.document):
        return
    if asked.output is None:
        typer.echo(found.text, nl=False)
    for note in found.notes:
        typer.echo(f"planner: {note}", err=True)
    if asked.output is not None:
        typer.echo(f"wrote {asked.output}")
