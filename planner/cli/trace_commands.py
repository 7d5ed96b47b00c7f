"""The command `planner import`, without what it needs when it runs."""

from __future__ import annotations

from typing import Annotated

import typer

from planner.cli.options import Parallel, for_fsdp2


def import_traces(
    traces: Annotated[
        list[str], typer.Argument(help="Traces of torch.profiler, one a rank (.json, .json.gz, .zip), or a directory.")
    ],
    job: Annotated[
        str | None,
        typer.Option(help="The job that was traced, path/to/file.py:name, for the names of its parameters."),
    ] = None,
    step_ms: Annotated[float | None, typer.Option(help="Milliseconds of a step without the profiler.")] = None,
    parallel: Parallel = None,
    output: Annotated[str, typer.Option("-o", "--output", help="Where to write the profile.")] = "profile.json",
) -> None:
    """Make a profile with its cluster of what torch.profiler recorded of a real run."""
    from planner.cli.traced_runs import import_run

    import_run(traces, output, job, step_ms, fsdp2=for_fsdp2(parallel))
