"""`planner optimize`."""

from __future__ import annotations

from typing import Any

import typer

from planner.cli.commands import DECIDING, Optimize
from planner.cli.options import chosen, printed_json, split_items
from planner.decide.given import optimize_given
from planner.decide.optimize import optimize as optimize_profile
from planner.decide.solvers import SOLVER_SKIPPED
from planner.documents.catalog import find_cluster, find_profile
from planner.documents.profile import unmeasured
from planner.fsdp2.decide import WrappingRequest, optimize_wrapping
from planner.passes import PASSES
from planner.report.files import check_writable
from planner.report.listing import make_console
from planner.report.tables import accuracy_lines, print_plan
from runtime.errors import InputError
from runtime.plan import Plan


def optimize(asked: Optimize) -> None:
    """Make a plan, save it and print it."""
    check_writable(asked.output, asked.profile, asked.cluster, asked.from_schedule)
    plan = _wrapping(asked) if asked.parallel else _buckets(asked)
    plan.save(asked.output)
    if printed_json(plan.to_document):
        return
    console = make_console()
    print_plan(plan, console, buckets=False)
    for line in (*_accuracy_lines(asked, plan), f"wrote {asked.output}; see `planner explain {asked.output}`"):
        console.print(line, highlight=False)


def _wrapping(asked: Optimize) -> Plan:
    accuracy: Any = asked.accuracy
    return optimize_wrapping(
        WrappingRequest(
            profile=asked.profile, cluster=asked.cluster, accuracy=accuracy, max_memory_mib=asked.max_memory_mib
        )
    )


def _buckets(asked: Optimize) -> Plan:
    shown = asked.print_after
    if shown is not None and shown not in ("all", *PASSES):
        raise InputError(f"--print-after: found {shown!r}, expected all or one of: {', '.join(sorted(PASSES))}")

    def after_pass(name: str, schedule: object, seconds: float) -> None:
        if shown in ("all", name):
            typer.echo(f"after {name} ({seconds * 1e3:.1f} ms):\n{schedule}", err=True)

    accuracy: Any = asked.accuracy
    common: dict[str, Any] = {
        "accuracy": accuracy,
        "allow": () if asked.allow is None else split_items("--allow", asked.allow),
        "max_memory_mib": asked.max_memory_mib,
    }
    if asked.from_schedule is not None:
        given = chosen(asked)
        for option in (option for option in (*DECIDING, "--max-rank") if option in given):
            raise InputError(
                f"{option}: found {given[option]}, which is about deciding, with --from-schedule; leave one of them out"
            )
        return optimize_given(asked.profile, asked.cluster, asked.from_schedule, **common)
    plan = optimize_profile(
        asked.profile, asked.cluster, passes=asked.passes, after_pass=after_pass, **vars(asked.solving),
        **vars(asked.lossy), **common,
    )  # fmt: skip
    if asked.solving.solver == "cpsat" and plan.sharded:
        typer.echo(f"planner: --solver cpsat: {SOLVER_SKIPPED}", err=True)
    return plan


def _accuracy_lines(asked: Optimize, plan: Plan) -> list[str]:
    if asked.parallel:
        return []
    machines = find_profile(asked.profile).cluster if asked.cluster is None else find_cluster(asked.cluster)
    return accuracy_lines(plan, unmeasured(machines, asked.cluster or asked.profile) if machines else None)
