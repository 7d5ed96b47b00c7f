"""`planner compare`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime

import typer

from planner.cli.commands import Compare
from planner.cli.options import Flags, printed_json
from planner.comparison.contestants import Learn, check_keeps, make_contestants, named_plans, predicted_on
from planner.comparison.learned import Learned, summarize_learned
from planner.comparison.learning import learn_rank
from planner.comparison.measure import compare_rank
from planner.comparison.picture import curves_text, picture_text
from planner.comparison.report import (
    Comparison,
    arrival_listings,
    comparison_table,
    first_lines,
    last_lines,
    summarize,
)
from planner.comparison.script import Asked, check_rounds, find_trained, script_rank
from planner.comparison.variants import Rounds, make_lineup
from planner.comparison.wrapped import compare_rank_wrapped
from planner.comparison.wrappings import make_wrappings, summarize_wrappings
from planner.documents.profile import Profile, load_profile
from planner.jobs.job import find_job
from planner.jobs.rank_options import RankOptions, is_first_rank
from planner.jobs.world import choose_device, on_ranks, on_ranks_of_script, planned_ranks
from planner.model.problem import Problem, make_problem
from planner.report.files import check_writable
from planner.report.frame import plotly_library
from planner.report.listing import print_tables
from runtime.errors import CheckFailed, InputError, PlanMismatch
from runtime.plan import Plan, check_has_buckets, load_plan
from runtime.plan.files import write_text

WRAPPED_TIMEOUT_S = 300.0
"""Deadline of wrappings that are compared, before a step of theirs is known."""


def compare(asked: Compare) -> None:
    """Measure a plan and what takes part in the comparison, and print and draw the result."""
    rounds, learn = check_rounds(asked.steps, asked.rounds), _learn(asked)
    plans = named_plans(asked.plan, [load_plan(path) for path in asked.plan])
    plan, path, where = next(iter(plans.values())), asked.plan[0], asked.where
    if where.are_open:
        where = replace(where, ranks=planned_ranks(plan.world.ranks, path))
    try:
        if learn is not None:
            comparison: Comparison = _measure_learning(asked, plans, where, learn)
        elif asked.parallel is None:
            comparison = _measure_buckets(asked, plan, where, rounds)
        else:
            comparison = _measure_wrappings(asked, plan, where, rounds)
    except PlanMismatch as error:
        raise PlanMismatch(f"{path}: {error}") from error
    if not is_first_rank():
        return
    if isinstance(comparison, Learned):
        for each, (name, kept) in zip(asked.plan, plans.items(), strict=True):
            comparison.measured(kept, name, asked.job).save(each)
    draw(comparison, f"{plan.model.name}{f' on {where.emulate}' if where.emulate else ''}", asked.html)
    if not printed_json(comparison.to_document):
        echo_lines(first_lines(comparison))
        print_tables(comparison_table(comparison), *arrival_listings(comparison))
        echo_lines(last_lines(comparison))
    if comparison.differences:
        raise CheckFailed("\n".join(comparison.differences))


def echo_lines(lines: Sequence[str]) -> None:
    """Print lines; nothing if there are none."""
    if lines:
        typer.echo("\n".join(lines))


def draw(comparison: Comparison, title: str, path: str | None) -> None:
    """Write the page of a comparison, if its path is given."""
    if path is not None:
        measured = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
        if isinstance(comparison, Learned):
            write_text(path, curves_text(comparison, title, measured))
        else:
            write_text(path, picture_text(comparison, title, measured))


def _learn(asked: Compare) -> Learn | None:
    """Return what is to be learnt, None without --learn. Raises InputError for numbers that are out of range."""
    options = asked.learning
    if options.learn is None:
        return None
    return Learn(
        steps=options.learn, seeds=options.seeds, margin_percent=options.margin, on=options.on, start=options.start
    )


def _read(asked: Compare) -> tuple[bool, list[str], Profile | None, Problem | None]:
    """Return whether a script is compared, its arguments, and the profile if there is one, as it is and as arrays."""
    arguments = asked.arguments or []
    file, is_script = find_trained(asked.job, arguments)
    if asked.html is not None:
        check_writable(asked.html, file, *asked.plan, asked.profile)
        plotly_library()  # where it is missing nothing is measured in vain
    profile = None if asked.profile is None else load_profile(asked.profile)
    problem = None if profile is None else make_problem(profile, None, where=str(asked.profile))
    return is_script, arguments, profile, problem


def _measure_learning(asked: Compare, plans: Mapping[str, Plan], where: RankOptions, learn: Learn) -> Learned:
    for path, plan in zip(asked.plan, plans.values(), strict=True):
        check_keeps(path, plan)
    is_script, arguments, profile, problem = _read(asked)
    if is_script:
        if learn.start is not None:
            raise InputError("--from: found it with a script, which loads its checkpoint by itself; leave it out")
        request = Asked(
            plan=next(iter(plans.values())), profile=profile, strategies=asked.strategies,
            rounds=Rounds(count=2, steps=1), timeout_s=where.timeout_s, show_progress=not Flags.as_json, learn=learn,
            plans=plans,
        )  # fmt: skip
        found = on_ranks_of_script(where, script_rank, asked.job, arguments, request)[0]
        assert isinstance(found, Learned)
        return found
    contestants = make_contestants(plans, problem, asked.strategies, learn.steps, begun=learn.start is not None)
    predicted = predicted_on(learn.on, profile, contestants)
    measured = (asked.job, contestants, learn, choose_device(where.device), not Flags.as_json, where.timeout_s)
    return summarize_learned(on_ranks(where, learn_rank, *measured), learn, predicted)


def _measure_wrappings(asked: Compare, plan: Plan, where: RankOptions, rounds: Rounds) -> Comparison:
    find_job(asked.job)
    wrappings = make_wrappings(plan, asked.plan[0], asked.profile)
    device, timeout_s = choose_device(where.device), where.timeout_s or WRAPPED_TIMEOUT_S
    measured = (asked.job, wrappings, rounds, device, not Flags.as_json, timeout_s)
    return summarize_wrappings(on_ranks(where, compare_rank_wrapped, *measured))


def _measure_buckets(asked: Compare, plan: Plan, where: RankOptions, rounds: Rounds) -> Comparison:
    check_has_buckets(plan, asked.plan[0], "compare it with --parallel fsdp2")
    is_script, arguments, profile, problem = _read(asked)
    strategies = asked.strategies
    lineup = make_lineup(replace(plan, shares=None) if is_script else plan, problem, strategies)
    shown = not Flags.as_json
    if is_script:
        request = Asked(
            plan=plan, profile=profile, strategies=strategies, rounds=rounds, timeout_s=where.timeout_s,
            show_progress=shown,
        )  # fmt: skip
        return on_ranks_of_script(where, script_rank, asked.job, arguments, request)[0]
    measured = (asked.job, lineup, rounds, choose_device(where.device), shown, where.timeout_s)
    return summarize(on_ranks(where, compare_rank, *measured))
