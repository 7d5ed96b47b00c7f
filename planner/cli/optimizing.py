"""`planner optimize`."""

from __future__ import annotations

from typing import Any

import typer

from planner.cli.commands import DECIDING, Optimize
from planner.cli.options import chosen, printed_json, split_items
from planner.decide.cut_choice import possible_cuts
from planner.decide.given import given_request
from planner.decide.optimize import decide
from planner.decide.phases import check_same_gradients, join_phases, phase_steps
from planner.decide.plan_request import MAX_STEPS, Request
from planner.decide.solvers import SOLVER_SKIPPED
from planner.documents.catalog import find_cluster, find_profile
from planner.documents.profile import unmeasured
from planner.documents.text import pluralize
from planner.fsdp2.decide import WrappingRequest, optimize_wrapping
from planner.passes import PASSES
from planner.report.files import check_writable
from planner.report.listing import make_console
from planner.report.tables import accuracy_lines, print_plan
from runtime.errors import InputError
from runtime.plan import Plan


def optimize(asked: Optimize) -> None:
    """Make a plan, save it and print it."""
    check_writable(asked.output, asked.profile, asked.cluster, asked.from_schedule, *(asked.more or ()))
    if asked.more or asked.epochs is not None or asked.steps_per_epoch is not None:
        _phases(asked)
        return
    common: dict[str, Any] = {
        name: getattr(asked, name) for name in ("profile", "cluster", "accuracy", "max_memory_mib")
    }
    plan = optimize_wrapping(WrappingRequest(**common)) if asked.parallel else _buckets(asked, common)
    plan.save(asked.output)
    if not printed_json(plan.to_document):
        wrote = f"wrote {asked.output}; see `planner explain {asked.output}`"
        print_plan(plan, make_console(), buckets=False, more=(*_accuracy_lines(asked, plan), wrote))


def _phases(asked: Optimize) -> None:
    """Make one plan of several profiles, save it and print its phases."""
    if not asked.more or asked.epochs is None or asked.steps_per_epoch is None or asked.parallel or asked.from_schedule:
        options = ("epochs", "steps_per_epoch", "parallel", "from_schedule")
        given = ", ".join(f"--{name.replace('_', '-')}" for name in options if getattr(asked, name) is not None)
        raise InputError(
            f"phases: found {pluralize(1 + len(asked.more or ()), 'profile')} with {given or 'no option'}, expected "
            f"several with --epochs and --steps-per-epoch, without --parallel and --from-schedule: planner optimize "
            f"A.json B.json --epochs 13,11 --steps-per-epoch 40"
        )
    profiles = (asked.profile, *asked.more)
    epochs, per_epoch = _counts("--epochs", asked.epochs), _counts("--steps-per-epoch", asked.steps_per_epoch)
    steps = min(MAX_STEPS, sum(phase_steps(len(profiles), epochs, per_epoch)))
    check_same_gradients([find_profile(name) for name in profiles])
    common = {name: getattr(asked, name) for name in ("cluster", "accuracy", "max_memory_mib")}
    if asked.accuracy != "exact" and asked.lossy.steps is None:
        common["steps"] = steps
    plans = [_buckets(asked, {"profile": profile, **common}) for profile in profiles]
    plan = join_phases(plans, epochs, per_epoch)
    plan.save(asked.output)
    if not printed_json(plan.to_document):
        console = make_console()
        for line in (*plan.notes, f"wrote {asked.output}"):
            console.print(line, highlight=False)


def _counts(option: str, text: str) -> list[int]:
    parts = split_items(option, text)
    if not all(part.isascii() and part.isdecimal() and len(part) < 10 for part in parts):
        raise InputError(f"{option}: found {text!r}, expected whole numbers such as 13,11,3; correct it")
    return [int(part) for part in parts]


def _buckets(asked: Optimize, common: dict[str, Any]) -> Plan:
    shown = asked.print_after
    if shown is not None and shown not in ("all", *PASSES):
        raise InputError(f"--print-after: found {shown!r}, expected all or one of: {', '.join(sorted(PASSES))}")

    def after_pass(name: str, schedule: object, seconds: float) -> None:
        if shown in ("all", name):
            typer.echo(f"after {name} ({seconds * 1e3:.1f} ms):\n{schedule}", err=True)

    allow = () if asked.allow is None else split_items("--allow", asked.allow)
    if asked.from_schedule is not None:
        given = chosen(asked)
        for option in (option for option in DECIDING if option in given):
            raise InputError(
                f"{option}: found {given[option]}, which is about deciding, with --from-schedule; leave one of them out"
            )
    options = {**vars(asked.solving), **vars(asked.lossy), **common, "global_batch": asked.global_batch}
    request = Request(passes=asked.passes, after_pass=after_pass, allow=allow, **options)
    plan = decide(request if asked.from_schedule is None else given_request(request, asked.from_schedule))
    if asked.solving.solver == "cpsat" and plan.sharded:
        typer.echo(f"planner: --solver cpsat: {SOLVER_SKIPPED}", err=True)
    possible = possible_cuts(request.problem)
    if possible is not None and possible.problem.cuts:
        typer.echo(f"planner: {possible.note}", err=True)
    return plan


def _accuracy_lines(asked: Optimize, plan: Plan) -> list[str]:
    if asked.parallel:
        return []
    machines = find_profile(asked.profile).cluster if asked.cluster is None else find_cluster(asked.cluster)
    return accuracy_lines(plan, unmeasured(machines, asked.cluster or asked.profile) if machines else None)
