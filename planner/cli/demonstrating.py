"""`planner demo`."""

from __future__ import annotations

from importlib import import_module

import typer

from planner.cli.commands import Demo
from planner.cli.options import Flags, printed_json
from planner.jobs.rank_options import is_first_rank

INTRODUCTION = """\
GoogLeNet (51 MiB of gradients) on machines with 10 Gbit/s Ethernet: DDP as it comes, and a plan. About a minute.
The machines are emulated by processes here. Computation is timed waits: a K80's published layer times, five times as
fast. Connections are held to the link's rate. DDP, planner's runtime and all messages are real; times are ten times
as long, and are printed as on the machines."""


def demo(asked: Demo) -> None:
    """Rehearse DDP and a plan, and print the gain; exit status 1 if the plan does not train as DDP does."""
    show = not Flags.as_json
    if show and is_first_rank():
        typer.echo(INTRODUCTION)
    work = import_module("planner.rehearse.demo")  # torch is imported after the first lines are there to be read
    result = work.run_demo(asked.where, asked.minutes, show)
    if is_first_rank() and not printed_json(result.to_document):
        typer.echo("\n".join(work.demo_lines(result)))
    if result.rehearsal.comparison.differences:
        raise typer.Exit(1)
