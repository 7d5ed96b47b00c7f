"""Local updaters (LAP-SGD, LPP-SGD): processes of their own (`runtime.local_async`), which no session starts."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from runtime.modes.base import Mode
from runtime.plan import HINT, Plan, blocks_problem
from runtime.plan.combinations import LOCAL_UPDATERS


class LocalUpdaters(Mode):
    """Known to sessions by what is refused."""

    name = LOCAL_UPDATERS
    what = "local updaters"
    relaxed = True
    attach_reason = (
        "the plan asks for local updaters, which are processes of their own, and no session can start them; expected "
        "local_async null: train with runtime.local_async.run_local_async(job, plan, steps), or with `planner run`"
    )

    @classmethod
    def check_plan(cls, plan: Plan, parameters: Mapping[str, nn.Parameter]) -> str | None:
        spec = plan.local_async
        assert spec is not None
        if spec.updaters < 1 or spec.average_every < 1 or spec.then_every < 1:  # of a plan that a program made
            return (
                f"the plan's local_async has updaters {spec.updaters}, average_every {spec.average_every} and "
                f"then_every {spec.then_every}; expected at least 1 each: correct it"
            )
        if spec.synchronous and (spec.updaters != 1 or spec.blocks is not None):
            found = f"{spec.updaters} updaters" if spec.updaters != 1 else "blocks"
            return f"the plan's local_async is synchronous with {found}; expected one updater without blocks: {HINT}"
        unknown = next((name for block in spec.blocks or () for name in block if name not in parameters), None)
        if unknown is not None:
            return f"a block of the plan holds {unknown!r}, which is no trainable parameter of the model; {HINT}"
        return blocks_problem(spec, plan.gradients, "the plan's blocks")
