"""The command line: each command loads, makes one call, and saves or prints.

`--json` and `-v` are accepted before or after the command. Exit codes: 0 done; 1 a check did not hold; 2 the user's
input is wrong; 3 the environment failed.
"""

from __future__ import annotations

import io
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from planner.cli.cluster_commands import clusters
from planner.cli.model_commands import models
from planner.cli.options import (
    Allow,
    ClusterName,
    CompressBy,
    Flags,
    FromSchedule,
    MaxDelay,
    MaxMemory,
    MaxRank,
    MaxRatio,
    Parallel,
    ProfileName,
    Protect,
    Solver,
    SolverLimit,
    entries_beginning,
    for_fsdp2,
    print_json,
    rate_option,
    strategies_beginning,
)
from planner.cli.rank_commands import compare, demo, profile, rehearse, run
from planner.cli.trace_commands import import_traces
from planner.decide.defaults import DEFAULT_PASSES
from runtime.debug import asked_events
from runtime.errors import InputError, PlannerError
from runtime.version import __version__

if TYPE_CHECKING:
    from runtime.plan import Plan

# Commands import what they need when they run: deciding must start in a fraction of a second, and without torch.
app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False)


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


app.command()(profile)


@app.command()
def optimize(
    profile: ProfileName,
    cluster: ClusterName = None,
    accuracy: Annotated[
        str, typer.Option(help="exact, bounded or relaxed: the riskiest class of plan allowed.")
    ] = "exact",
    allow: Allow = None,
    output: Annotated[str, typer.Option("-o", "--output", help="Where to write the plan.")] = "plan.json",
    passes: Annotated[
        str,
        typer.Option(
            help="The pipeline, for example merge{labels=4}; lossy passes: joint, sparsify; delay, local_async."
        ),
    ] = DEFAULT_PASSES,
    print_after: Annotated[str | None, typer.Option(help="Print the schedule after this pass, or after all.")] = None,
    solver: Solver = "dp",
    solver_limit: SolverLimit = None,
    compress: CompressBy = None,
    max_ratio: MaxRatio = None,
    max_rank: MaxRank = None,
    protect: Protect = None,
    max_delay: MaxDelay = None,
    max_memory_mib: MaxMemory = None,
    from_schedule: FromSchedule = None,
    parallel: Parallel = None,
) -> None:
    """Decide how gradients are sent, and how far that is from optimal."""
    deciding = {
        "--print-after": print_after, "--passes": None if passes == DEFAULT_PASSES else passes,
        "--solver": None if solver == "dp" else solver, "--solver-limit": solver_limit, "--compress": compress,
        "--max-ratio": max_ratio, "--protect": protect, "--max-delay": max_delay,
    }  # fmt: skip
    from planner.report.files import check_writable

    if for_fsdp2(parallel, {"--allow": allow, **deciding, "--from-schedule": from_schedule}):
        from planner.fsdp2.decide import WrappingRequest, optimize_wrapping

        check_writable(output, profile, cluster)
        request = WrappingRequest(
            profile=profile,
            cluster=cluster,
            accuracy=accuracy,  # type: ignore[arg-type]
            max_memory_mib=max_memory_mib,
        )
        _write_plan(optimize_wrapping(request), output)
        return
    from planner.decide.optimize import optimize as optimize_profile
    from planner.decide.solvers import SOLVER_SKIPPED
    from planner.passes import PASSES

    check_writable(output, profile, cluster, from_schedule)
    if print_after is not None and print_after not in ("all", *PASSES):
        raise InputError(f"--print-after: found {print_after!r}, expected all or one of: {', '.join(sorted(PASSES))}")

    def after_pass(name: str, schedule: object, seconds: float) -> None:
        if print_after in ("all", name):
            typer.echo(f"after {name} ({seconds * 1e3:.1f} ms):\n{schedule}", err=True)

    if from_schedule is not None:
        from planner.decide.given import optimize_given

        for option, value in {**deciding, "--max-rank": max_rank}.items():
            if value is not None:
                raise InputError(
                    f"{option}: found {value}, which is about deciding, with --from-schedule; leave one of them out"
                )
        decide: Callable[..., Any] = partial(optimize_given, path=from_schedule)
    else:
        decide = partial(
            optimize_profile,
            passes=passes,
            after_pass=after_pass,
            solver=solver,
            solver_limit=solver_limit,
            compress=compress,
            max_ratio=max_ratio,
            max_rank=max_rank,
            protect=protect,
            max_delay=max_delay,
        )
    plan = decide(
        profile,
        cluster,
        accuracy=accuracy,
        allow=() if allow is None else _items("--allow", allow),
        max_memory_mib=max_memory_mib,
    )
    if solver == "cpsat" and plan.sharded:
        typer.echo(f"planner: --solver cpsat: {SOLVER_SKIPPED}", err=True)

    def lines() -> list[str]:
        from planner.documents.catalog import find_cluster, find_profile
        from planner.documents.profile import unmeasured
        from planner.report.tables import accuracy_lines

        machines = find_profile(profile).cluster if cluster is None else find_cluster(cluster)
        return accuracy_lines(plan, unmeasured(machines, cluster or profile) if machines else None)

    _write_plan(plan, output, lines)


def _write_plan(plan: Plan, output: str, lines: Callable[[], list[str]] = list) -> None:
    """Save a plan and print it, with further lines."""
    plan.save(output)
    if Flags.as_json:
        print_json(plan.to_document())
        return
    from planner.report.tables import make_console, print_plan

    console = make_console()
    print_plan(plan, console, buckets=False)
    for line in (*lines(), f"wrote {output}; see `planner explain {output}`"):
        console.print(line, highlight=False)


@app.command()
def simulate(
    profile: ProfileName,
    cluster: ClusterName = None,
    strategy: Annotated[
        str | None,
        typer.Option(
            help="Strategies, comma-separated: wfbp, wfbp:layer, single, mg_wfbp, ddp, ddp:MIB, torus_2d, optimal, "
            "optimal:sharded-step, optimal:late-gather, dear, megatron; lossy ones: joint, joint:MAX_RATIO; "
            "ssd:STEPS; lap:UPDATERS, lpp:UPDATERS; for "
            "comparison: slgs:DENSITY, lags:MAX_RATIO, hitopk:DENSITY, mb_sgd, l_sgd:STEPS, pl_sgd:STEPS.",
            autocompletion=strategies_beginning,
        ),
    ] = None,
    ranks: Annotated[
        str | None, typer.Option(help="Numbers of ranks, comma-separated; default: the cluster's.")
    ] = None,
    compute_speed: Annotated[float, typer.Option(help="Accelerator speed, as a factor of the profiled.")] = 1.0,
    batch: Annotated[float, typer.Option(help="Batch of each rank, as a factor of the profiled.")] = 1.0,
    intra: Annotated[str | None, rate_option("Links inside nodes, other than the cluster's: 3us,600gbit.")] = None,
    inter: Annotated[str | None, rate_option("Links between nodes, other than the cluster's: 5us,100gbit.")] = None,
    straggler: Annotated[float, typer.Option(help="Slow-down factor of one rank's computation.")] = 1.0,
    jitter: Annotated[
        float, typer.Option(help="Standard deviation of ranks' compute times, as a share: gives quantiles.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of the jitter.")] = 0,
    critical_path: Annotated[
        bool, typer.Option("--critical-path", help="Say what the step's length is made of.")
    ] = False,
    solver: Solver = "dp",
    solver_limit: SolverLimit = None,
) -> None:
    """Predict strategies on a cluster."""
    from planner.decide.simulate import DEFAULT_STRATEGIES
    from planner.decide.simulate import simulate as predict
    from planner.model.what_if import WhatIf, parse_link

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
        profile,
        cluster,
        strategies=strategies,
        ranks=_counts(ranks),
        what_if=change,
        critical_path=critical_path,
        solver=solver,
        solver_limit=solver_limit,
    )
    if Flags.as_json:
        print_json([result.to_document() for result in results])
        return
    from planner.report.tables import make_console, print_table, simulation_table

    print_table(make_console(), simulation_table(results))


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


OfCluster = Annotated[
    str | None, typer.Option("--accelerator", help="The cluster's, where it does not name it: a100, h100, ...")
]


@app.command()
def advise(
    profile: ProfileName,
    cluster: ClusterName = None,
    ranks: Annotated[int | None, typer.Option(help="Number of ranks; default: the cluster's.")] = None,
    max_memory_mib: MaxMemory = None,
    accuracy: Annotated[str, typer.Option(help="exact, or bounded: may messages lose digits?")] = "exact",
    accelerator: OfCluster = None,
) -> None:
    """Say what to use for a model on a cluster, and why."""
    from planner.decide.advise import advise as decide

    advice = decide(
        profile, cluster, ranks=ranks, max_memory_mib=max_memory_mib, accuracy=accuracy, accelerator=accelerator
    )
    if Flags.as_json:
        print_json(advice.to_document())
        return
    from planner.report.tables import advice_lines, advice_table, computed_line, make_console, print_table

    typer.echo(computed_line(advice))
    print_table(make_console(), advice_table(advice))
    for line in advice_lines(advice):
        typer.echo(line)


@app.command()
def sweep(
    models: Annotated[str, typer.Argument(help="Profiles or names, comma-separated.")],
    clusters: Annotated[str, typer.Argument(help="Clusters or names, comma-separated.")],
    ranks: Annotated[
        str | None, typer.Option(help="Numbers of ranks, comma-separated; default: 8 to 16384, and the cluster's own.")
    ] = None,
    jitter: Annotated[float, typer.Option(help="Spread of a rank's compute from step to step, as a share.")] = 0.0,
    slow_share: Annotated[float, typer.Option(help="Share of ranks that are slow in a step.")] = 0.0,
    slow_factor: Annotated[float, typer.Option(help="Slow-down factor of slow ranks.")] = 1.0,
    mtbf_hours: Annotated[
        float | None, typer.Option(help="Hours between failures of one accelerator; default: as Llama 3 met them.")
    ] = None,
    checkpoint_s: Annotated[float, typer.Option(help="Seconds that a checkpoint takes.")] = 60.0,
    restart_s: Annotated[float, typer.Option(help="Seconds that a restart takes.")] = 600.0,
    html: Annotated[str | None, typer.Option(help="Write a page with curves here that needs no network.")] = None,
    accelerator: OfCluster = None,
) -> None:
    """Predict models on clusters of 8 to 16384 ranks, as `advise`."""
    from planner.decide.at_scale import MTBF_HOURS, Scenario
    from planner.decide.at_scale import sweep as predict
    from planner.report.files import check_writable

    if html is not None:
        check_writable(html)
    scenario = Scenario(
        jitter=jitter, slow_share=slow_share, slow_factor=slow_factor,
        mtbf_hours=MTBF_HOURS if mtbf_hours is None else mtbf_hours, checkpoint_s=checkpoint_s, restart_s=restart_s,
    )  # fmt: skip
    counts = _counts(ranks)
    points = predict(_items("MODELS", models), _items("CLUSTERS", clusters), counts, scenario, accelerator)
    if html is not None:
        from planner.report.scale_page import scale_page
        from runtime.plan.files import write_text

        write_text(html, scale_page(points, scenario))
    if Flags.as_json:
        print_json([point.to_document() for point in points])
        return
    from planner.report.tables import computed_line, make_console, print_table, sweep_table

    for line in dict.fromkeys(map(computed_line, points)):
        typer.echo(line)
    print_table(make_console(), sweep_table(points))
    if counts is not None and (rounded := sorted({point.ranks for point in points} - set(counts))):
        typer.echo(f"rounded up to whole nodes: {', '.join(map(str, rounded))} ranks")
    if html is not None:
        typer.echo(f"wrote {html}")


@app.command()
def catalog(
    name: Annotated[
        str,
        typer.Argument(
            help="A name, for all that is known of it; or a part of one, to filter.", autocompletion=entries_beginning
        ),
    ] = "",
) -> None:
    """List models and clusters that others measured, by name."""
    from planner.documents.catalog import search

    found = search(name)
    if Flags.as_json:
        print_json([entry.to_document() for entry in found])
        return
    for entry in found:
        typer.echo(entry.details() if name == entry.name else f"{entry.kind:<8} {entry.name:<28} {entry.summary}")


app.command("import")(import_traces)
app.add_typer(clusters, name="cluster")
app.add_typer(models, name="model")


@app.command()
def explain(
    plan: Annotated[
        str, typer.Argument(help="plan.json; or a trace of torch.profiler, or a directory of them, one a rank.")
    ],
    trace: Annotated[
        str | None, typer.Option(help="Write Chrome trace events here, for ui.perfetto.dev or chrome://tracing.")
    ] = None,
    html: Annotated[str | None, typer.Option(help="Write a page here that needs no network.")] = None,
    measured: Annotated[
        str | None,
        typer.Option(help="A step measured with this plan (`session.report().save(...)`), to draw, too."),
    ] = None,
) -> None:
    """Say why a plan is what it is, or where the steps of a traced run go: a table, a trace, a page."""
    from planner.report import files
    from planner.traces.stream import is_trace

    if is_trace(plan):
        from planner.cli.traced_runs import explain_traces

        for option, value in (("--trace", trace), ("--measured", measured)):
            if value is not None:
                raise InputError(f"{option}: found it with the trace {plan}, expected it with a plan; leave it out")
        explain_traces(plan, html)
        return
    outputs = files.check_outputs(plan, measured, {files.TRACE: trace, files.HTML: html})
    loaded = files.explain(plan, measured, outputs)
    if Flags.as_json:
        print_json(loaded.to_document())
        return
    from planner.report.tables import make_console, print_plan

    console = make_console()
    print_plan(loaded, console, buckets=True)
    for path in outputs.values():
        console.print(f"wrote {path}", highlight=False)


@app.command()
def diff(
    first: Annotated[str, typer.Argument(help="plan.json")],
    second: Annotated[str, typer.Argument(help="Another one.")],
) -> None:
    """Show what two plans do differently, and what each predicts.

    Exit status 0: they execute the same; 1: they do not.
    """
    from planner.report.difference import difference_of_files, print_difference

    found = difference_of_files(first, second)
    if Flags.as_json:
        print_json(found.to_document())
    else:
        print_difference(found, (first, second))
    if not found.same:
        raise typer.Exit(1)


@app.command()
def export(
    plan: Annotated[str, typer.Argument(help="plan.json")],
    to: Annotated[str, typer.Option(help="ddp, ddp-hook, inductor, nccl-tuner or chakra.")],
    profile: Annotated[
        str | None,
        typer.Option(help="The plan's profile: checks buckets, and reports what is lost, in ms."),
    ] = None,
    cluster: ClusterName = None,
    output: Annotated[str | None, typer.Option("-o", "--output", help="Where to write; default: print it.")] = None,
) -> None:
    """Give a plan to stock DDP, torch.compile or NCCL.

    As DDP's arguments, estimates for its scheduler, or rows for its tuner. What cannot be expressed is said, with what
    it costs.
    """
    from planner.export import export as express
    from planner.report.files import check_writable
    from runtime.plan.files import write_bytes

    if output is not None:
        check_writable(output, plan, profile, cluster)
    found = express(plan, to, profile, cluster)
    if found.data is not None and output is None and not Flags.as_json:
        raise InputError(f"--to {to}: found no --output, expected a file for what is no text; add -o plan.et")
    if output is not None:
        write_bytes(output, found.text.encode() if found.data is None else found.data)
    if Flags.as_json:
        print_json(found.document)
        return
    if output is None:
        typer.echo(found.text, nl=False)
    for note in found.notes:
        typer.echo(f"planner: {note}", err=True)
    if output is not None:
        typer.echo(f"wrote {output}")


for command in (run, compare, rehearse, demo):
    app.command()(command)


@app.command()
def docs(
    name: Annotated[str, typer.Argument(help="A page, such as concepts/merging; default: list all.")] = "",
) -> None:
    """Print a page of the documentation."""
    from runtime.pages import find_pages

    pages = find_pages()
    known = name.removeprefix("docs/").removesuffix(".md")
    if name and known not in pages:
        raise InputError(f"NAME: found {name!r}, expected one of: {', '.join(pages) or 'none, for none is installed'}")
    if Flags.as_json:
        print_json({known: pages[known].read_text(encoding="utf-8")} if name else list(pages))
    else:
        typer.echo(pages[known].read_text(encoding="utf-8") if name else "\n".join(pages))


@app.command()
def doctor() -> None:
    """Look at what is installed and works here, with cures."""
    from planner.cli.doctor import examine

    findings = examine()
    if Flags.as_json:
        print_json([vars(finding) for finding in findings])
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
    end = given.index("--") if "--" in given else len(given)  # what follows is a script's own
    flags = [argument for argument in given[:end] if argument in _ANYWHERE]
    rest = [argument for argument in given[:end] if argument not in _ANYWHERE] + given[end:]
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names may hold what the terminal's encoding lacks
    try:
        with _full_output_told():
            asked_events()  # says at once what is wrong with it
            app([*flags, *rest], prog_name="planner")
    except PlannerError as error:
        if Flags.verbose:
            traceback.print_exc()
        typer.echo(f"planner: {error}", err=True)
        sys.exit(error.exit_code)
