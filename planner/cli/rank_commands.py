"""The commands that need ranks: profile, run, compare, demo."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from planner.cli.options import (
    MAX_STEPS,
    Allow,
    Backend,
    ClusterName,
    CompressBy,
    Device,
    Emulate,
    Flags,
    Job,
    MaxMemory,
    Parallel,
    ProfileName,
    Ranks,
    Timeout,
    for_fsdp2,
    print_json,
    strategies_beginning,
)
from planner.jobs.rank_options import RankOptions, under_torchrun
from planner.testbed.hosts import describe
from runtime.errors import CheckFailed, InputError, PlanMismatch

if TYPE_CHECKING:
    from rich.table import Table

    from planner.comparison.report import Comparison
    from planner.jobs.demo import DemoResult
    from planner.jobs.training import RankRun


STRATEGIES = "wfbp,single,mg_wfbp"
"""Of a rehearsal, where none are named."""
COMPARE_S = 300.0
"""Deadline of wrappings that are compared, before a step of theirs is known."""


def profile(
    job: Job,
    ranks: Ranks = None,
    output: Annotated[
        str | None,
        typer.Option("-o", "--output", help="Where to write the profile; default: profile.json, or that of --add-to."),
    ] = None,
    measure_for: Annotated[
        str | None, typer.Option("--for", help="exact, bounded or relaxed: the riskiest class of plan to measure for.")
    ] = None,
    add_to: Annotated[
        str | None, typer.Option(help="A profile of this job on these ranks: measure only what it lacks, and add it.")
    ] = None,
    budget_s: Annotated[
        float | None, typer.Option(help="Seconds that it may take beyond the first steps (default 60).")
    ] = None,
    device: Device = "auto",
    backend: Backend = None,
    timeout_s: Timeout = None,
    emulate: Emulate = None,
    updaters: Annotated[
        int | None,
        typer.Option(help="Also measure up to this number of local updaters for relaxed plans."),
    ] = None,
    parallel: Parallel = None,
) -> None:
    """Trace a job and measure its step and the links between ranks."""
    # What is wrong with options is said before torch is imported, which takes seconds.
    where = RankOptions(ranks, device, backend, timeout_s, emulate)
    wrapped = for_fsdp2(parallel, {"--updaters": updaters, "--add-to": add_to, "--for": measure_for})
    from planner.jobs.job import find_job
    from planner.jobs.on_rank import profile_rank
    from planner.jobs.world import choose_device, is_first_rank, on_ranks
    from planner.passes.local_async import check_updaters
    from planner.profile.request import make_request
    from planner.report.files import check_writable

    if updaters is not None:
        check_updaters(updaters, "--updaters")
    request = make_request(measure_for, add_to, budget_s, updaters, wrapped)
    if request.add_to is not None and ranks is None and emulate is None and not under_torchrun():
        world = request.add_to.world  # measured where that was
        where = replace(where, ranks=None if world.emulation else world.ranks, emulate=world.emulation)
    output = output or add_to or "profile.json"
    check_writable(output, find_job(job)[0])
    begun = (job, choose_device(device), not Flags.as_json, timeout_s, updaters or 0, request)
    result = on_ranks(where, profile_rank, *begun)[0]
    if not is_first_rank():
        return
    result.save(output)
    if Flags.as_json:
        print_json(result.to_document())
    else:
        from planner.report.tables import profile_lines

        emulated = [] if result.world.emulated is None else [f"measured on the {describe(result.world.emulation)}"]
        units = [] if result.units is None else [result.units.summary]
        typer.echo("\n".join([*profile_lines(result), *units, *emulated, f"wrote {output}"]))


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
    where = RankOptions(ranks, device, backend, timeout_s, emulate)
    from planner.jobs.job import find_job
    from planner.jobs.on_rank import train_rank
    from planner.jobs.world import choose_device, is_first_rank, on_ranks, planned_ranks
    from runtime.plan import load_plan

    find_job(job)
    loaded = None if plan is None else load_plan(plan)
    if ranks is None and emulate is None and loaded is not None:
        where = replace(where, ranks=planned_ranks(loaded.world.ranks, str(plan)))
    try:
        runs = on_ranks(where, train_rank, job, loaded, steps, choose_device(device), not Flags.as_json, timeout_s)
    except PlanMismatch as error:
        raise PlanMismatch(f"{plan}: {error}") from error
    # On every rank, before the others are silent: all end with the same exit code.
    document = run_document(runs)
    if not is_first_rank():
        return
    if Flags.as_json:
        print_json(document)
    else:
        typer.echo("\n".join(run_lines(document, runs)))


def compare(
    job: Annotated[
        str,
        typer.Argument(
            help="A job as for profile, or script.py: an existing script that calls planner.compare(session, step)."
        ),
    ],
    plan: Annotated[str, typer.Option(help="The plan to judge.")],
    profile: Annotated[str | None, typer.Option(help="profile.json, for predictions of what is not the plan.")] = None,
    strategy: Annotated[
        str, typer.Option(help="Further strategies, by name; needs --profile.", autocompletion=strategies_beginning)
    ] = "",
    ranks: Ranks = None,
    steps: Annotated[int, typer.Option(help="Measured steps of each variant.")] = 25,
    rounds: Annotated[
        int | None, typer.Option(help="Rounds that these steps are spread over; default: 5, or as many as steps.")
    ] = None,
    html: Annotated[str | None, typer.Option(help="Draw the comparison on one page.")] = None,
    device: Device = "auto",
    backend: Backend = None,
    timeout_s: Timeout = None,
    emulate: Emulate = None,
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[-- ARGUMENTS]", help="Of a script: its own arguments.")
    ] = None,
    parallel: Parallel = None,
) -> None:
    """Measure a plan and the best of DDP by turns in one run.

    Also what is not communicated at all, DDP's hooks, and further strategies.
    """
    where = RankOptions(ranks, device, backend, timeout_s, emulate)
    wrapped = for_fsdp2(parallel, {"--strategy": strategy, "--html": html, "ARGUMENTS": arguments})
    from planner.comparison.measure import compare_rank
    from planner.comparison.picture import picture_text
    from planner.comparison.report import comparison_table, failures, summarize
    from planner.comparison.script import Asked, check_rounds, find_trained, script_rank
    from planner.comparison.variants import make_lineup
    from planner.comparison.wrapped import compare_rank_wrapped
    from planner.comparison.wrappings import make_wrappings, summarize_wrappings
    from planner.documents.profile import load_profile
    from planner.jobs.job import find_job
    from planner.jobs.world import choose_device, is_first_rank, on_ranks, on_ranks_of_script, planned_ranks
    from planner.model.problem import make_problem
    from planner.report.files import check_writable
    from planner.report.tables import make_console, print_table
    from runtime.plan import check_has_buckets, load_plan
    from runtime.plan.files import write_text

    blocks, shown = check_rounds(steps, rounds), not Flags.as_json
    loaded = load_plan(plan)
    if ranks is None and emulate is None:
        where = replace(where, ranks=planned_ranks(loaded.world.ranks, plan))

    def measure_wrapped() -> Comparison:
        find_job(job)
        wrappings = make_wrappings(loaded, plan, profile)
        measured = (job, wrappings, blocks, choose_device(device), shown, timeout_s or COMPARE_S)
        return summarize_wrappings(on_ranks(where, compare_rank_wrapped, *measured))

    def measure() -> Comparison:
        check_has_buckets(loaded, plan, "compare it with --parallel fsdp2")
        file, script = find_trained(job, arguments or [])
        if html is not None:
            check_writable(html, file, plan, profile)
        measured_profile = None if profile is None else load_profile(profile)
        problem = None if measured_profile is None else make_problem(measured_profile, None, where=str(profile))
        names = _items(strategy)
        lineup = make_lineup(loaded, problem, names)
        if not script:
            measured = (job, lineup, blocks, choose_device(device), shown, timeout_s)
            return summarize(on_ranks(where, compare_rank, *measured))
        asked = Asked(
            plan=loaded, profile=measured_profile, strategies=names, rounds=blocks, timeout_s=timeout_s,
            show_progress=shown,
        )  # fmt: skip
        return on_ranks_of_script(where, script_rank, job, arguments or [], asked)[0]

    try:
        comparison = measure_wrapped() if wrapped else measure()
    except PlanMismatch as error:
        raise PlanMismatch(f"{plan}: {error}") from error
    if not is_first_rank():
        return
    if html is not None:
        title = f"{loaded.model.name}{f' on {emulate}' if emulate else ''}"
        write_text(html, picture_text(comparison, title, datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")))
    if Flags.as_json:
        print_json(comparison.to_document())
    else:
        if comparison.cause is not None:
            typer.echo(comparison.cause)
        print_table(make_console(), comparison_table(comparison))
        typer.echo("\n".join([*comparison.verdicts, *failures(comparison)]))
    if comparison.differences:
        raise CheckFailed("\n".join(comparison.differences))


def rehearse(
    profile: ProfileName,
    cluster: ClusterName = None,
    hosts: Annotated[
        str | None, typer.Option(help="HOSTSxRANKS to emulate, for example 8x1 or 4x2; default: the cluster's.")
    ] = None,
    strategy: Annotated[
        str,
        typer.Option(help="Strategies to compare as well, by name.", autocompletion=strategies_beginning),
    ] = STRATEGIES,
    accuracy: Annotated[str, typer.Option(help="exact, bounded or relaxed: the riskiest class of plan.")] = "exact",
    allow: Allow = None,
    compress: CompressBy = None,
    minutes: Annotated[float, typer.Option(help="What it may take in all.")] = 10.0,
    dilate: Annotated[float | None, typer.Option(help="Times are multiplied by this; default: chosen.")] = None,
    shrink: Annotated[float | None, typer.Option(help="Bytes are divided by this; default: chosen.")] = None,
    html: Annotated[str | None, typer.Option(help="Draw the comparison on one page.")] = None,
    max_memory_mib: MaxMemory = None,
    parallel: Parallel = None,
) -> None:
    """Run a plan for real on a scaled emulated cluster.

    Compute is waited for; all times are shown as on the cluster itself. Needs root.
    """
    import time

    started_s = time.time()
    others = {
        "--strategy": "" if strategy == STRATEGIES else strategy, "--accuracy": "" if accuracy == "exact" else accuracy,
        "--allow": allow, "--compress": compress, "--html": html,
    }  # fmt: skip
    wrapped = for_fsdp2(parallel, others)
    if max_memory_mib is not None and not wrapped:
        raise InputError(
            f"--max-memory-mib: found {max_memory_mib:g} without --parallel fsdp2, which it is for; add it"
        )
    from planner.decide.plan_request import check_allow
    from planner.rehearse.asked import Asked, ask_plan, ask_wrappings, find_target
    from planner.report.files import check_writable

    if html is not None:
        check_writable(html, profile, cluster)
    asked: Asked
    target = find_target(profile, cluster, hosts, minutes, dilate, shrink)
    if wrapped:
        asked = ask_wrappings(target, max_memory_mib)
    else:
        allowed = check_allow(_items(allow or ""))
        asked = ask_plan(target, strategies=_items(strategy), accuracy=accuracy, allow=allowed, compress=compress)
    # Wrong options are refused before torch is imported.
    from planner.rehearse.rehearsal import rehearsal_table
    from planner.rehearse.rehearsal import rehearse as rehearse_asked

    found = rehearse_asked(asked, started_s=started_s, show_progress=not Flags.as_json)
    if html is not None:
        from planner.comparison.picture import picture_text
        from runtime.plan.files import write_text

        write_text(html, picture_text(found.comparison, found.title, datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")))
    if Flags.as_json:
        print_json(found.to_document())
        return
    from planner.comparison.report import failures
    from planner.report.tables import make_console, print_table

    print_table(make_console(), rehearsal_table(found))
    typer.echo("\n".join([*found.comparison.verdicts, *failures(found.comparison), *found.notes]))


def _items(text: str) -> list[str]:
    return [item.strip() for item in text.split(",") if item.strip()]


def demo(
    ranks: Ranks = None,
    device: Device = "auto",
    backend: Backend = None,
    timeout_s: Timeout = None,
    emulate: Emulate = None,
) -> None:
    """Show the whole story here: profile, optimize, train, compare.

    On local ranks of this machine; a small model is trained with DDP and with the plan.
    """
    where = RankOptions(ranks, device, backend, timeout_s, emulate)
    from planner.jobs.demo import demo_rank
    from planner.jobs.world import choose_device, is_first_rank, on_ranks

    result = on_ranks(where, demo_rank, choose_device(device), not Flags.as_json, timeout_s)[0]
    if not is_first_rank():
        return
    if Flags.as_json:
        print_json(result.to_document())
        return
    from planner.report.tables import make_console, print_plan, print_table, profile_lines

    console = make_console()
    typer.echo("\n".join(profile_lines(result.profile)))
    print_plan(result.plan, console, buckets=True)
    print_table(console, demo_table(result))


def run_document(runs: Sequence[RankRun]) -> dict[str, Any]:
    """Return what `planner run --json` prints. Raises CheckFailed: ranks ended with different weights."""
    weights = {run.weights_sha256 for run in runs}
    if len(weights) > 1:
        raise CheckFailed(
            "ranks ended with different weights, expected equal ones: the training step is not deterministic"
        )
    emulation = runs[0].emulation
    return {
        "steps": len(runs[0].step_us),
        "ranks": len(runs),
        "median_us": statistics.median(runs[0].step_us),
        "loss_first": _finite(statistics.fmean(run.losses[0] for run in runs)),
        "loss_last": _finite(statistics.fmean(run.losses[-1] for run in runs)),
        "weights_sha256": weights.pop(),
        **({} if emulation is None else {"emulated": emulation.kind, "emulation": emulation.spec}),
    }


def _finite(loss: float) -> float | None:
    """JSON has no NaN or infinity."""
    return loss if math.isfinite(loss) else None


def _loss(loss: float | None) -> str:
    return "not finite" if loss is None else f"{loss:.4f}"


def run_lines(document: dict[str, Any], runs: Sequence[RankRun]) -> list[str]:
    """A run in words."""
    lines = [
        f"{document['steps']} steps on {document['ranks']} ranks: median {document['median_us'] / 1e3:.2f} ms a step, "
        f"loss {_loss(document['loss_first'])} → {_loss(document['loss_last'])}",
        f"weights {document['weights_sha256']}",
    ]
    if runs[0].emulation is not None:
        lines.append(f"on the {runs[0].emulation}")
    return [*lines, runs[0].report] if runs[0].report else lines


def demo_table(result: DemoResult) -> Table:
    """DDP beside the plan."""
    from rich.table import Table

    title = f"one epoch of {result.steps} steps on {result.plan.world.ranks} ranks, from the same seed, interleaved"
    world = result.profile.world
    if world.emulated is not None:
        title += f"; {describe(world.emulation)}"
    error = f"prediction off by {result.error:+.1%}"
    same = "the same weights, bit for bit" if result.ddp.weights_sha256 == result.planned.weights_sha256 else ""
    table = Table(
        title=title, caption="; ".join(filter(None, (error, same))), title_justify="left", caption_justify="left"
    )
    table.add_column("")
    for column in ("epoch (s)", "step (ms)", "predicted (ms)", "last loss", "test accuracy"):
        table.add_column(column, justify="right")
    ddp_us = (result.plan.baselines or {})["ddp"].iteration_us
    for name, epoch, predicted_us in (("DDP", result.ddp, ddp_us), ("plan", result.planned, result.predicted_us)):
        table.add_row(
            name,
            f"{epoch.epoch_s:.2f}",
            f"{epoch.median_us / 1e3:.2f}",
            f"{predicted_us / 1e3:.2f}",
            f"{epoch.loss_last:.3f}",
            f"{epoch.test_accuracy:.1%}",
        )
    return table
