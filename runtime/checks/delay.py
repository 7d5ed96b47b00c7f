"""Whether a plan with delay can be executed at all, every misfit in words; and what is executed before it and after."""

from __future__ import annotations

from dataclasses import replace

from runtime.checks.local_async import find_local_updaters
from runtime.comm.collectives import form_of
from runtime.plan import CURE, NO_COMPRESSION, DelaySpec, Plan

PUSHED = (("all_reduce", "library"), ("sparse", "flat"))
"""What buckets of plans with delay say: all elements are pushed, or selected ones."""


def delay_misfit(plan: Plan, delay: DelaySpec) -> str | None:
    """Why a plan cannot be executed with its delay."""
    if plan.accuracy != "relaxed":
        return f'the plan has a delay and the accuracy {plan.accuracy}; expected "relaxed": set it if delay is meant'
    if delay.steps < 1 or delay.warmup_steps < 0:  # of a plan that a program made
        return (
            f"the delay has steps {delay.steps} and warmup_steps {delay.warmup_steps}; expected at least 1 and 0, such "
            f"as 4 and 500: correct it"
        )
    if delay.local_update != "glu":
        return (
            f"the delay's local_update is {delay.local_update!r}; expected 'glu': leave it out (what was 'sgd' is "
            f"alpha 1 with beta 0)"
        )
    if delay.warmup_steps % delay.steps:
        return (
            f"the delay has {delay.warmup_steps} warmup_steps, expected a multiple of its {delay.steps} steps, such as "
            f"{-(-delay.warmup_steps // delay.steps) * delay.steps}"
        )
    other = next((i for i, bucket in enumerate(plan.buckets) if form_of(bucket) not in PUSHED), None)
    if other is not None:
        found, known = "/".join(form_of(plan.buckets[other])), " or ".join("/".join(form) for form in PUSHED)
        return f"bucket {other} travels by {found}, but with a delay all are pushed alike; expected {known}"
    by_layer = (i for i, b in enumerate(plan.buckets) if b.compressor.k is not None or b.compressor.scope == "layer")
    if (index := next(by_layer, None)) is not None:
        return (
            f"bucket {index} selects by layer, but with a delay what is pushed is selected from each owner's part of a "
            f'bucket; expected one density, and no scope "layer": {CURE}'
        )
    if plan.world.nodes == 1 and plan.world.ranks > 1:
        return (
            f"the plan has a delay for {plan.world.ranks} ranks on one node, which is one worker, and nothing is "
            f"between nodes; expected at least two nodes, or as many as ranks, whose workers are the ranks: {CURE}"
        )
    return None


def synchronous(plan: Plan) -> Plan:
    """The plan's buckets without its delay, all of them dense."""
    if plan.delay is None:
        return plan
    buckets = (replace(bucket, collective="all_reduce", compressor=NO_COMPRESSION) for bucket in plan.buckets)
    library = tuple(replace(bucket, algorithm="library") for bucket in buckets)
    return replace(plan, delay=None, buckets=library)


def afterwards(plan: Plan) -> Plan | None:
    """What a run goes on with when its delay ends early: the exact plan beside it; None: its own buckets, synchronous.

    A step that ranks share would not take over what pushes have held back.
    """
    return None if plan.fallback is None or plan.fallback.sharded else plan.fallback


SHARED_STEP_TAKES_NOTHING_OVER = (
    "found a plan whose ranks share the optimizer's step, after one that holds gradients back, which it cannot send; "
    "expected an exact plan without `updates.step` for a step first: session.switch to it, train a step, then switch"
)


def find_late_plan(plan: Plan, *, carries: bool) -> str | None:
    """Why a run that has begun cannot change over to the plan, or None; `carries`: what it does so far holds back."""
    if plan.sharded and carries:
        return f"the plan's updates.step: {SHARED_STEP_TAKES_NOTHING_OVER}"
    if plan.delay is None:
        return find_local_updaters(plan)
    return "the plan has a delay, whose warm-up begins with a run; expected delay null: attach with that plan"
