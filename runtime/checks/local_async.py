"""What speaks against a plan with local updaters. Torch-free."""

from __future__ import annotations

from collections.abc import Container

from runtime.errors import InputError
from runtime.plan import CURE, LocalAsyncSpec, Plan, check_blocks


def find_updater_misfit(parameters: Container[str], plan: Plan, spec: LocalAsyncSpec) -> str | None:
    """Why a plan cannot be executed with its local updaters, on a model with trainable parameters of these names."""
    if plan.accuracy != "relaxed":
        return f'the plan has local updaters and the accuracy {plan.accuracy}; expected "relaxed": set it if meant'
    if plan.delay is not None:
        return f"the plan has local updaters and a delay, which are not done together; expected one of them: {CURE}"
    if spec.updaters < 1 or spec.average_every < 1 or spec.then_every < 1:  # of a plan that a program made
        return (
            f"the plan's local_async has updaters {spec.updaters}, average_every {spec.average_every} and then_every "
            f"{spec.then_every}; expected at least 1 each: correct it"
        )
    if spec.synchronous and (spec.updaters != 1 or spec.blocks is not None):
        found = f"{spec.updaters} updaters" if spec.updaters != 1 else "blocks"
        return f"the plan's local_async is synchronous with {found}; expected one updater without blocks: {CURE}"
    lossy = next((index for index, bucket in enumerate(plan.buckets) if bucket.compressor.name != "none"), None)
    if lossy is not None:
        return f"bucket {lossy} is compressed, but updaters average whole models; expected the compressor none: {CURE}"
    unknown = next((name for block in spec.blocks or () for name in block if name not in parameters), None)
    if unknown is not None:
        return f"a block of the plan holds {unknown!r}, which is no trainable parameter of the model; {CURE}"
    try:
        check_blocks(spec, plan.gradients, "the plan's blocks")
    except InputError as error:
        return str(error)
    return None


def find_local_updaters(plan: Plan) -> str | None:
    """Why a plan cannot be attached to a model, or None: updaters are processes of their own."""
    if plan.local_async is None:
        return None
    return (
        "the plan asks for local updaters, which are processes of their own, and no session can start them; expected "
        "local_async null: train with runtime.local_async.run_local_async(job, plan, steps), or with `planner run`"
    )
