"""Pipelines of passes: reading `merge{labels=4}`, and running with checks and times between passes."""

from __future__ import annotations

import dataclasses
import difflib
import logging
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from planner.ir import Schedule, Synchronous
from planner.model.problem import Problem
from planner.passes import PASSES
from planner.passes.base import Candidate, Frontier, Pass, Pipeline
from planner.verify import verify_on
from runtime.debug import asked_events
from runtime.errors import InputError

LOGGER = logging.getLogger("planner.decide")

_SPEC = re.compile(r"\s*([a-z_]+)\s*(?:\{([^{}]*)\})?\s*(?:,|$)")

AfterPass = Callable[[str, Schedule, float], None]
"""(name of the pass, its result, seconds it took)."""


def parse_passes(text: str) -> Pipeline:
    """Return the passes of a text such as `merge{labels=4}`.

    Raises:
        InputError: unknown pass or option (lists the known ones), or a value of another type than the option's.
    """
    passes: list[Pass] = []
    position = 0
    while position < len(text):
        match = _SPEC.match(text, position)
        if match is None:
            raise InputError(f"--passes: cannot read {text[position:]!r}, expected for example merge{{labels=8}}")
        passes.append(_make_pass(match[1], match[2] or ""))
        position = match.end()
    return Pipeline(passes)


def _make_pass(name: str, options: str) -> Pass:
    if name not in PASSES:
        raise InputError(f"--passes: found {name!r}, expected one of: {', '.join(sorted(PASSES))}")
    fields = {field.name: field for field in dataclasses.fields(PASSES[name])}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for option in filter(None, (part.strip() for part in options.split(","))):
        key, _, value = (part.strip() for part in option.partition("="))
        if key not in fields:
            near = difflib.get_close_matches(key, fields, n=1)
            hint = f"did you mean {near[0]}?" if near else f"it has: {', '.join(fields) or 'none'}"
            raise InputError(f"--passes: {name} has no option {key!r}; {hint}")
        kind: type[Any] = type(fields[key].default)
        try:
            values[key] = kind(value)
        except ValueError:
            values[key] = None
        if values[key] is None or (kind is not str and not values[key] >= 1):
            number = "an integer" if kind is int else "a number"
            raise InputError(f"--passes: {name}{{{key}={value}}}: expected {number} of at least 1")
    return PASSES[name](**values)


def run_passes(
    passes: Sequence[Pass],
    schedule: Schedule,
    problem: Problem,
    after_pass: AfterPass | None = None,
    *,
    accuracy: str = "exact",
) -> Candidate:
    """Apply the passes in order; the verifier runs before the first and after each.

    How the update is sharded does not depend on how gradients are sent, so passes that decide on that alone do not see
    it.

    Returns:
        The last candidate, with what those before it report of the plan.
    """
    verify_on(problem, schedule, accuracy)
    found = Candidate(schedule=schedule)
    for current in passes:
        started = time.perf_counter()
        found = _merged(found, current, problem)
        verify_on(problem, found.schedule, accuracy)
        seconds = time.perf_counter() - started
        if after_pass is not None:
            after_pass(current.name, found.schedule, seconds)
        if "schedule" in asked_events():
            LOGGER.debug("after %s (%.1f ms):\n%s", current, seconds * 1e3, found.schedule)
    return found


def _merged(before: Candidate, current: Pass, problem: Problem) -> Candidate:
    """Return what a pass makes of a candidate, with what that knew of the plan and of the update."""
    found = current.apply(before.schedule if current.decides_update else before.schedule.unshared, problem)
    schedule, bound, replicated = found.schedule, found.bound, found.replicated or before.replicated
    if current.decides_update and bound is None and schedule == before.schedule:
        bound = before.bound
    if not current.decides_update and schedule.mode == Synchronous():
        shared = before.schedule.mode.fitted(len(schedule.buckets))
        replicated = None if replicated is None else schedule.with_update_of(replicated)
        schedule = schedule.with_update_of(before.schedule)
        if shared.shares_update:
            schedule, bound = replace(schedule, mode=shared), before.bound
    return replace(
        found,
        schedule=schedule,
        plan_fields={**found.plan_fields, **before.plan_fields},
        bound=bound,
        replicated=replicated,
        frontier=_joined(before.frontier, found.frontier),
    )


def _joined(first: Frontier | None, second: Frontier | None) -> Frontier | None:
    """Return the better frontier of two bounded passes, with a bound for what either looked at."""
    if first is None or second is None:
        return first or second
    better = min(first, second, key=lambda frontier: frontier.best.iteration_us)
    return replace(better, bound_us=min(first.bound_us, second.bound_us), tables=None)


def with_options(passes: Sequence[Pass], **given: Any) -> tuple[Pass, ...]:
    """Return the passes with options of the command that they have by these names and set no values for."""
    made: list[Pass] = []
    for each in passes:
        missing = {name: value for name, value in given.items() if value is not None and not getattr(each, name, True)}
        made.append(replace(each, **missing) if missing else each)  # type: ignore[type-var]
    return tuple(made)
