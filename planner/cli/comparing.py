"""`planner compare`."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import typer

from planner.cli.commands import Compare
from planner.cli.options import Flags, printed_json, split_names
from planner.comparison.measure import compare_rank
from planner.comparison.picture import picture_text
from planner.comparison.report import Comparison, comparison_table, failures, summarize
from planner.comparison.script import Asked, check_rounds, find_trained, script_rank
from planner.comparison.variants import Rounds, make_lineup
from planner.comparison.wrapped import compare_rank_wrapped
from planner.comparison.wrappings import make_wrappings, summarize_wrappings
from planner.documents.profile import load_profile
from planner.jobs.job import find_job
from planner.jobs.rank_options import RankOptions
from planner.jobs.world import choose_device, is_first_rank, on_ranks, on_ranks_of_script, planned_ranks
from planner.model.problem import make_problem
from planner.report.files import check_writable
from planner.report.listing import print_tables
from runtime.errors import CheckFailed, PlanMismatch
from runtime.plan import Plan, check_has_buckets, load_plan
from runtime.plan.files import write_text

WRAPPED_TIMEOUT_S = 300.0
"""Deadline of wrappings that are compared, before a step of theirs is known."""


def compare(asked: Compare) -> None:
    """Measure a plan and what takes part in the comparison, and print and draw the result."""
    rounds = check_rounds(asked.steps, asked.rounds)
    plan, where = load_plan(asked.plan), asked.where
    if where.are_open:
        where = replace(where, ranks=planned_ranks(plan.world.ranks, asked.plan))
    measure = _measure_buckets if asked.parallel is None else _measure_wrappings
    try:
        comparison = measure(asked, plan, where, rounds)
    except PlanMismatch as error:
        raise PlanMismatch(f"{asked.plan}: {error}") from error
    if not is_first_rank():
        return
    draw(comparison, f"{plan.model.name}{f' on {where.emulate}' if where.emulate else ''}", asked.html)
    if not printed_json(comparison.to_document):
        if comparison.cause is not None:
            typer.echo(comparison.cause)
        print_tables(comparison_table(comparison))
        typer.echo("\n".join([*comparison.verdicts, *failures(comparison)]))
    if comparison.differences:
        raise CheckFailed("\n".join(comparison.differences))


def draw(comparison: Comparison, title: str, path: str | None) -> None:
    """Write the page of a comparison, if its path is given."""
    if path is not None:
        write_text(path, picture_text(comparison, title, datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")))


def _measure_wrappings(asked: Compare, plan: Plan, where: RankOptions, rounds: Rounds) -> Comparison:
    find_job(asked.job)
    wrappings = make_wrappings(plan, asked.plan, asked.profile)
    device, timeout_s = choose_device(where.device), where.timeout_s or WRAPPED_TIMEOUT_S
    measured = (asked.job, wrappings, rounds, device, not Flags.as_json, timeout_s)
    return summarize_wrappings(on_ranks(where, compare_rank_wrapped, *measured))


def _measure_buckets(asked: Compare, plan: Plan, where: RankOptions, rounds: Rounds) -> Comparison:
    check_has_buckets(plan, asked.plan, "compare it with --parallel fsdp2")
    arguments = asked.arguments or []
    file, is_script = find_trained(asked.job, arguments)
    if asked.html is not None:
        check_writable(asked.html, file, asked.plan, asked.profile)
    profile = None if asked.profile is None else load_profile(asked.profile)
    problem = None if profile is None else make_problem(profile, None, where=str(asked.profile))
    strategies = split_names(asked.strategy)
    lineup = make_lineup(plan, problem, strategies)
    shown = not Flags.as_json
    if is_script:
        request = Asked(
            plan=plan, profile=profile, strategies=strategies, rounds=rounds, timeout_s=where.timeout_s,
            show_progress=shown,
        )  # fmt: skip
        return on_ranks_of_script(where, script_rank, asked.job, arguments, request)[0]
    measured = (asked.job, lineup, rounds, choose_device(where.device), shown, where.timeout_s)
    return summarize(on_ranks(where, compare_rank, *measured))
