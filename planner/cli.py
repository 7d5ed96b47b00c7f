"""The command line: each command loads, makes one call, and saves or prints.

`--json` and `-v` are accepted before or after the command. Exit codes: 0 done; 1 a check did not hold; 2 the user's
input is wrong; 3 the environment failed.
"""

from __future__ import annotations

import io
import json
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Annotated, Any

import typer

from runtime.errors import InputError, PlanMismatch, PlannerError
from runtime.version import __version__

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False)

Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Backend = Annotated[str | None, typer.Option(help="Backend of torch.distributed; default: nccl on GPUs, else gloo.")]
Ranks = Annotated[
    int | None, typer.Option(help="Local ranks to start (default 2); under torchrun its world is joined.")
]
Timeout = Annotated[
    float | None,
    typer.Option(
        help="Deadline in seconds of every wait for other ranks; default: from the measured step, at least 30."
    ),
]
Emulate = Annotated[
    str | None,
    typer.Option(
        help="Run on an emulated cluster HOSTSxRANKS@RATE on this machine, for example 4x1@1gbit (needs root)."
    ),
]
Job = Annotated[
    str, typer.Argument(help="path/to/file.py:name or package.module:name of a function that returns a TrainingJob.")
]
MAX_STEPS = 10**9
"""More steps than anybody waits for."""

ProfileName = Annotated[str, typer.Argument(help="profile.json, or a name: MODEL or MODEL@CLUSTER (planner catalog).")]
ClusterName = Annotated[
    str | None,
    typer.Option(help="cluster.json, or a name (planner catalog); default: the cluster measured with the profile."),
]


class _Options:
    """Global flags of this call."""

    as_json = False
    verbose = False


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
    _Options.as_json, _Options.verbose = as_json, verbose


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=1, allow_nan=False))


def _console() -> Any:
    from rich.console import Console

    # Into a pipe or a file, tables are as wide as they need; nothing is cut off. Names are printed as they are.
    width = None if Console().is_terminal else 160
    return Console(width=width, markup=False, emoji=False)


@app.command()
def profile(
    job: Job,
    ranks: Ranks = None,
    output: Annotated[str, typer.Option("-o", "--output", help="Where to write the profile.")] = "profile.json",
    device: Device = "auto",
    backend: Backend = None,
    timeout_s: Timeout = None,
    emulate: Emulate = None,
) -> None:
    """Trace a job and measure its step and the links between ranks."""
    from planner.job import find_job
    from planner.outputs import check_writable
    from planner.training import profile_rank
    from planner.world import RankOptions, choose_device, is_first_rank, on_ranks

    where = RankOptions(ranks, device, backend, timeout_s, emulate)
    check_writable(output, find_job(job)[0])
    result = on_ranks(where, profile_rank, job, choose_device(device), not _Options.as_json, timeout_s)[0]
    if not is_first_rank():
        return
    result.save(output)
    if _Options.as_json:
        _print_json(result.to_document())
    else:
        from planner.explain import profile_lines
        from planner.outputs import emulation_lines

        typer.echo("\n".join([*profile_lines(result), *emulation_lines(result.world), f"wrote {output}"]))


@app.command()
def optimize(
    profile: ProfileName,
    cluster: ClusterName = None,
    accuracy: Annotated[
        str, typer.Option(help="exact, bounded or relaxed: the riskiest class of plan allowed.")
    ] = "exact",
    output: Annotated[str, typer.Option("-o", "--output", help="Where to write the plan.")] = "plan.json",
    passes: Annotated[str, typer.Option(help="The pipeline, for example merge{labels=4}.")] = "merge",
    print_after: Annotated[str | None, typer.Option(help="Print the schedule after this pass, or after all.")] = None,
) -> None:
    """Decide how gradients travel; explain; prove how far from optimal."""
    from planner.decide import optimize as decide
    from planner.outputs import check_writable
    from planner.passes import PASSES

    check_writable(output, profile, cluster)
    if print_after is not None and print_after not in ("all", *PASSES):
        raise InputError(f"--print-after: found {print_after!r}, expected all or one of: {', '.join(sorted(PASSES))}")

    def after_pass(name: str, schedule: object, seconds: float) -> None:
        if print_after in ("all", name):
            typer.echo(f"after {name} ({seconds * 1e3:.1f} ms):\n{schedule}", err=True)

    plan = decide(profile, cluster, accuracy=accuracy, passes=passes, after_pass=after_pass)  # type: ignore[arg-type]
    plan.save(output)
    if _Options.as_json:
        _print_json(plan.to_document())
        return
    from planner.explain import accuracy_lines, print_plan

    console = _console()
    print_plan(plan, console, buckets=False)
    for line in accuracy_lines(plan):
        console.print(line, highlight=False)
    console.print(f"wrote {output}; see `planner explain {output}`", highlight=False)


@app.command()
def simulate(
    profile: ProfileName,
    cluster: ClusterName = None,
    strategy: Annotated[
        str | None,
        typer.Option(
            help="Strategies, comma-separated: wfbp, wfbp:layer, single, mg_wfbp, ddp, ddp:MIB, torus_2d, optimal; "
            "lossy ones, for comparison: slgs:DENSITY, lags:MAX_RATIO, hitopk:DENSITY."
        ),
    ] = None,
    ranks: Annotated[
        str | None, typer.Option(help="Numbers of ranks, comma-separated; default: the cluster's.")
    ] = None,
    compute_speed: Annotated[float, typer.Option(help="What if the accelerator were so many times as fast?")] = 1.0,
    batch: Annotated[float, typer.Option(help="What if each rank's batch were so many times as large?")] = 1.0,
    intra: Annotated[str | None, typer.Option(help="What if links inside nodes were like 3us,600gbit?")] = None,
    inter: Annotated[str | None, typer.Option(help="What if links between nodes were like 5us,100gbit?")] = None,
    straggler: Annotated[float, typer.Option(help="What if one rank computed so many times slower?")] = 1.0,
    jitter: Annotated[
        float, typer.Option(help="Standard deviation of ranks' compute times, as a share: gives quantiles.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the jitter.")] = 0,
    critical_path: Annotated[
        bool, typer.Option("--critical-path", help="Say what the step's length is made of.")
    ] = False,
) -> None:
    """Predict strategies on a cluster."""
    from planner.predict import DEFAULT_STRATEGIES
    from planner.predict import simulate as predict
    from planner.whatif import WhatIf, parse_link

    strategies = DEFAULT_STRATEGIES if strategy is None else tuple(_items("--strategy", strategy))
    change = WhatIf(
        compute_speed=compute_speed,
        batch=batch,
        straggler=straggler,
        jitter=jitter,
        seed=seed,
        intra=None if intra is None else parse_link("--intra", intra),
        inter=None if inter is None else parse_link("--inter", inter),
    )
    results = predict(
        profile, cluster, strategies=strategies, ranks=_counts(ranks), what_if=change, critical_path=critical_path
    )
    if _Options.as_json:
        _print_json([result.to_document() for result in results])
        return
    from planner.explain import simulation_table

    _console().print(simulation_table(results))


def _items(option: str, text: str) -> list[str]:
    items = [item.strip() for item in text.split(",")]
    if not all(items):
        raise InputError(f"{option}: found {text!r}, expected items separated by commas")
    return items


def _counts(text: str | None) -> list[int] | None:
    if text is None:
        return None
    items = _items("--ranks", text)
    if not all(item.isdecimal() and len(item) < 10 and int(item) >= 1 for item in items):
        raise InputError(f"--ranks: found {text!r}, expected positive integers such as 4,8,16")
    return [int(item) for item in items]


@app.command()
def catalog() -> None:
    """Models and clusters that others measured: names for optimize and simulate, with their sources."""
    from planner.catalog import entries

    listed = entries()
    if _Options.as_json:
        _print_json([entry.to_document() for entry in listed])
        return
    from planner.explain import catalog_table

    _console().print(catalog_table(listed))


@app.command()
def explain(
    plan: Annotated[str, typer.Argument(help="plan.json")],
    trace: Annotated[
        str | None, typer.Option(help="Write Chrome trace events here, for ui.perfetto.dev or chrome://tracing.")
    ] = None,
    html: Annotated[str | None, typer.Option(help="Write a page here that needs no network.")] = None,
    measured: Annotated[
        str | None, typer.Option(help="A step measured with this plan (`session.report().save(...)`), to lay beside.")
    ] = None,
) -> None:
    """Why each bucket of a plan is what it is: a table, a trace, a page."""
    from planner.pictures.files import check_outputs, load, write

    outputs = check_outputs(plan, measured, {"--trace": trace, "--html": html})
    loaded = load(plan, measured, outputs)
    write(loaded, outputs)
    if _Options.as_json:
        _print_json(loaded.plan.to_document())
        return
    from planner.explain import print_plan

    console = _console()
    print_plan(loaded.plan, console, buckets=True)
    for path in outputs.values():
        console.print(f"wrote {path}", highlight=False)


@app.command()
def run(
    job: Job,
    plan: Annotated[str | None, typer.Option(help="plan.json; without one the job trains with plain DDP.")] = None,
    ranks: Ranks = None,
    steps: Annotated[int, typer.Option(help="Steps to train.")] = 20,
    device: Device = "auto",
    backend: Backend = None,
    timeout_s: Timeout = None,
    emulate: Emulate = None,
) -> None:
    """Train a job with a plan, or with plain DDP."""
    if not 1 <= steps <= MAX_STEPS:
        raise InputError(f"--steps: found {steps}, expected at least 1 and at most {MAX_STEPS}; correct it")
    from planner.job import find_job
    from planner.outputs import run_document, run_lines
    from planner.training import train_rank
    from planner.world import RankOptions, choose_device, is_first_rank, on_ranks, planned_ranks
    from runtime.plan import load_plan

    where = RankOptions(ranks, device, backend, timeout_s, emulate)
    find_job(job)
    loaded = None if plan is None else load_plan(plan)
    if ranks is None and emulate is None and loaded is not None:
        where = replace(where, ranks=planned_ranks(loaded.world.ranks, str(plan)))
    try:
        runs = on_ranks(where, train_rank, job, loaded, steps, choose_device(device), not _Options.as_json, timeout_s)
    except PlanMismatch as error:
        raise PlanMismatch(f"{plan}: {error}") from error
    document = run_document(runs)
    if not is_first_rank():
        return
    if _Options.as_json:
        _print_json(document)
    else:
        typer.echo("\n".join(run_lines(document, runs)))


@app.command()
def compare(
    job: Job,
    plan: Annotated[str, typer.Option(help="The plan to judge.")],
    profile: Annotated[str | None, typer.Option(help="profile.json, for predictions of what is not the plan.")] = None,
    strategy: Annotated[str, typer.Option(help="Further strategies, by name; needs --profile.")] = "",
    ranks: Ranks = None,
    steps: Annotated[int, typer.Option(help="Measured steps of each contestant.")] = 25,
    rounds: Annotated[int, typer.Option(help="Rounds that these steps are spread over.")] = 5,
    device: Device = "auto",
    backend: Backend = None,
    timeout_s: Timeout = None,
) -> None:
    """Measure no communication, the best DDP, DDP's hooks, strategies and the plan by turns in one run."""
    from planner.compare.contestants import contestants, sweep
    from planner.compare.measure import compare_rank
    from planner.compare.report import comparison_table, failures, summarize
    from planner.job import find_job
    from planner.problem import make_problem
    from planner.profile.document import load_profile
    from planner.world import RankOptions, choose_device, is_first_rank, on_ranks, planned_ranks
    from runtime.plan import load_plan

    if not 2 <= rounds <= steps <= MAX_STEPS:
        raise InputError(
            f"--rounds {rounds} --steps {steps}: expected at least 2 rounds and a step for each, at most {MAX_STEPS}"
        )
    where = RankOptions(ranks, device, backend, timeout_s)
    find_job(job)
    loaded = load_plan(plan)
    problem = None if profile is None else make_problem(load_profile(profile), None, where=profile)
    names = [name.strip() for name in strategy.split(",") if name.strip()]
    them, caps = contestants(loaded, problem, names), sweep(loaded, problem)
    if ranks is None:
        where = replace(where, ranks=planned_ranks(loaded.world.ranks, plan))
    arguments = (job, them, caps, rounds, steps // rounds, choose_device(device), not _Options.as_json, timeout_s)
    try:
        comparison = summarize(on_ranks(where, compare_rank, *arguments))
    except PlanMismatch as error:
        raise PlanMismatch(f"{plan}: {error}") from error
    if not is_first_rank():
        return
    if _Options.as_json:
        _print_json(comparison.to_document())
        return
    _console().print(comparison_table(comparison))
    typer.echo("\n".join([*comparison.verdicts, *failures(comparison)]))


@app.command()
def demo(
    ranks: Ranks = None,
    device: Device = "auto",
    backend: Backend = None,
    timeout_s: Timeout = None,
    emulate: Emulate = None,
) -> None:
    """The whole story on this machine: profile, optimize, train with DDP and with the plan, compare."""
    from planner.demo import demo_rank
    from planner.outputs import demo_table
    from planner.world import RankOptions, choose_device, is_first_rank, on_ranks

    where = RankOptions(ranks, device, backend, timeout_s, emulate)
    result = on_ranks(where, demo_rank, choose_device(device), not _Options.as_json, timeout_s)[0]
    if not is_first_rank():
        return
    if _Options.as_json:
        _print_json(result.to_document())
        return
    from planner.explain import print_plan, profile_lines

    console = _console()
    typer.echo("\n".join(profile_lines(result.profile)))
    print_plan(result.plan, console, buckets=True)
    console.print(demo_table(result))


@app.command()
def doctor() -> None:
    """What is installed, which backends work here, and the cure for what does not."""
    from planner.doctor import examine

    findings = examine()
    if _Options.as_json:
        _print_json([finding.to_document() for finding in findings])
    else:
        for finding in findings:
            mark = "ok " if finding.ok else "NO " if finding.required else "-- "
            cure = f"  → {finding.cure}" if finding.cure and not finding.ok else ""
            typer.echo(f"{mark} {finding.what:<20} {finding.found}{cure}")
    if not all(finding.ok for finding in findings if finding.required):
        raise typer.Exit(3)


@contextmanager
def _full_output_told() -> Iterator[None]:
    """Turns a failed write to standard output into an error of ours; files that are named are dealt with elsewhere."""
    try:
        yield
    except OSError as error:
        if isinstance(error, PlannerError) or error.filename is not None:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or Python would try, and fail, once more as it ends
        raise InputError(f"standard output: cannot be written: {error.strerror}; send it somewhere else") from error


_ANYWHERE = ("--json", "-v", "--verbose")


def main(arguments: Sequence[str] | None = None) -> None:
    """The console script `planner`: runs a command and exits with its code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    flags = [argument for argument in given if argument in _ANYWHERE]
    rest = [argument for argument in given if argument not in _ANYWHERE]
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names may hold what the terminal's encoding lacks
    try:
        with _full_output_told():
            app([*flags, *rest], prog_name="planner")
    except PlannerError as error:
        if _Options.verbose:
            traceback.print_exc()
        typer.echo(f"planner: {error}", err=True)
        sys.exit(error.exit_code)
