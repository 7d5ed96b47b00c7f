"""`planner rehearse`."""

from __future__ import annotations

from planner.cli.commands import Rehearse
from planner.cli.comparing import draw, echo_lines
from planner.cli.options import Flags, printed_json, split_names
from planner.comparison.report import arrival_listings, first_lines, last_lines
from planner.decide.plan_request import check_allow
from planner.rehearse.asked import Asked, ask_plan, ask_wrappings, find_target
from planner.rehearse.rehearsal import rehearsal_table
from planner.rehearse.rehearsal import rehearse as run_rehearsal
from planner.report.files import check_writable
from planner.report.listing import print_tables


def rehearse(asked: Rehearse) -> None:
    """Rehearse a plan, and print and draw the result."""
    if asked.html is not None:
        check_writable(asked.html, asked.profile, asked.cluster)
    found = run_rehearsal(_request(asked), started_s=asked.started_s, show_progress=not Flags.as_json)
    draw(found.comparison, found.title, asked.html)
    if printed_json(found.to_document):
        return
    echo_lines(first_lines(found.comparison))
    print_tables(rehearsal_table(found), *arrival_listings(found.comparison))
    echo_lines([*last_lines(found.comparison), *found.notes])


def _request(asked: Rehearse) -> Asked:
    target = find_target(asked.profile, asked.cluster, asked.hosts, asked.minutes, asked.dilate, asked.shrink)
    if asked.parallel is not None:
        return ask_wrappings(target, asked.max_memory_mib)
    strategies, allow = split_names(asked.strategy), check_allow(split_names(asked.allow or ""))
    return ask_plan(
        target, strategies=strategies, accuracy=asked.accuracy, allow=allow, compress=asked.compress,
        global_batch=asked.global_batch,
    )  # fmt: skip
