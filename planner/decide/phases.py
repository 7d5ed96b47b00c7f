"""One plan in phases, of plans that follow each other in a training: resolutions, sparse steps first.

CommLib's record (MLSys 2021, Table 4) is such a schedule: 13 epochs of images of 96 pixels, 11 of 128, 3 of 224.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from planner.documents.profile import Profile
from planner.documents.text import pluralize
from planner.ir import ACCURACIES
from runtime.errors import InputError
from runtime.plan import Plan
from runtime.plan.document import PhasePlan, phase_problem
from runtime.plan.predicted import Prediction


def join_phases(plans: Sequence[Plan], epochs: Sequence[int], steps_per_epoch: Sequence[int]) -> Plan:
    """Return the plan whose phases are these plans, with the mean step as its prediction.

    Args:
        plans: a plan for each phase, of one model on the same ranks.
        epochs: epochs of each phase.
        steps_per_epoch: steps of an epoch in each phase; one number: in all of them.

    Raises:
        InputError: the numbers do not fit each other; the plans are of different models or numbers of ranks.
    """
    for number, plan in enumerate(plans):
        if problem := phase_problem(plan, number, plans[0], plans[0].world.ranks):
            raise InputError(f"profile {number + 1}: {problem}")
    steps = phase_steps(len(plans), epochs, steps_per_epoch)
    ends = list(accumulate(steps))
    times = [_phase_time(plan, end - count, end) for plan, count, end in zip(plans, steps, ends, strict=True)]
    return Plan(
        model=plans[0].model,
        world=plans[0].world,
        accuracy=max((plan.accuracy for plan in plans), key=ACCURACIES.index),
        interface=tuple(sorted({name for plan in plans for name in plan.interfaces})) or None,
        buckets=(),
        phases=tuple(
            PhasePlan(plan=plan, until_step=until) for plan, until in zip(plans, [*ends[:-1], None], strict=True)
        ),
        predicted=Prediction(iteration_us=sum(time_us for time_us, _ in times) / ends[-1]),
        notes=tuple(phase_lines(plans, epochs, steps, times)),
    )


def phase_steps(phases: int, epochs: Sequence[int], steps_per_epoch: Sequence[int]) -> list[int]:
    """Return the steps of each phase. Raises InputError as `join_phases`."""
    each = list(steps_per_epoch) * phases if len(steps_per_epoch) == 1 else list(steps_per_epoch)
    for option, values in (("--epochs", epochs), ("--steps-per-epoch", each)):
        if len(values) != phases or min(values, default=0) < 1:
            raise InputError(
                f"{option}: found {','.join(map(str, values))} for {pluralize(phases, 'profile')}, expected a whole "
                f"number from 1 for each, such as {','.join(['10'] * phases)}"
            )
    return [count * per for count, per in zip(epochs, each, strict=True)]


def check_same_gradients(profiles: Sequence[Profile]) -> None:
    """Raise InputError where a profile has another gradient, by name, number of elements or dtype, than the first."""
    expected, *others = [{one.name: (one.numel, one.dtype) for one in each.compute.gradients} for each in profiles]
    for number, found in enumerate(others, 2):
        name = next((name for name in (*expected, *found) if found.get(name) != expected.get(name)), None)
        if name is not None:
            raise InputError(
                f"profile {number}: gradient {name!r}: found {found.get(name, 'none')} (elements, dtype), expected "
                f"{expected.get(name, 'none')} as in the first: one model with other inputs; profile it again"
            )


def _phase_time(plan: Plan, begin: int, end: int) -> tuple[float, str]:
    """Return the time of a plan's steps from one to another of a run in microseconds, and what its first steps take.

    First steps of another kind than the prediction is for (exact, or synchronous) take as long as those of `fallback`.
    """
    later_us = plan.predicted.iteration_us if plan.predicted else 0.0
    first_steps = plan.outer.local_after(begin) if plan.outer else plan.first_steps
    first = min(max(first_steps - begin, 0), end - begin)
    if not first:
        return (end - begin) * later_us, ""
    exact = plan.fallback and plan.fallback.predicted
    first_us = exact.iteration_us if exact else later_us
    text = f"of {first_us / 1e3:.4g} ms" if exact else "of unknown time, counted as later ones"
    return first * first_us + (end - begin - first) * later_us, f" (the first {first:,} {text})"


def phase_lines(
    plans: Sequence[Plan], epochs: Sequence[int], steps: Sequence[int], times: Sequence[tuple[float, str]]
) -> list[str]:
    """Return a line for each phase, and one for the whole: steps, a step in ms, and seconds."""
    lines = []
    for number, (plan, count, step_count, (time_us, first)) in enumerate(zip(plans, epochs, steps, times, strict=True)):
        step_us = plan.predicted.iteration_us if plan.predicted else 0.0
        lines.append(
            f"phase {number}: {pluralize(count, 'epoch')}, {step_count:,} steps of {step_us / 1e3:.4g} ms{first}, "
            f"{time_us / 1e6:.4g} s; {pluralize(len(plan.buckets), 'bucket')}, {plan.accuracy}"
        )
    total_s = sum(time_us for time_us, _ in times) / 1e6
    return [*lines, f"predicted total: {total_s:.4g} s for {sum(steps):,} steps"]
