"""Which interfaces a plan may have: drop-in, and what the user allows by name (`--allow sharded-step`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from planner.passes.base import Pass
from planner.passes.shard_updates import ShardUpdates
from runtime.errors import InputError
from runtime.plan.interfaces import SHARDED_STEP, name_problem


def check_allow(allow: Sequence[str]) -> tuple[str, ...]:
    """The names; raises InputError where one is unknown, or not built yet."""
    if isinstance(allow, str):
        raise InputError(f"allow: found {allow!r}, expected a list of names; pass [{allow!r}]")
    for name in allow:
        if (problem := name_problem(name)) is not None:
            raise InputError(f"--allow: {problem}; correct it, or leave it out: plans then are drop-in")
    return tuple(allow)


def find_sharing(passes: Sequence[Pass]) -> ShardUpdates | None:
    """The pass that decides whether ranks share the step; None where it is not among the passes."""
    return next((each for each in passes if isinstance(each, ShardUpdates)), None)


def allowed_passes(passes: Sequence[Pass], allow: Sequence[str]) -> tuple[Pass, ...]:
    """The passes, of which none shares the optimizer's step where that is not allowed.

    Raises:
        InputError: one of them was told to share it, and that is not allowed.
    """
    if SHARDED_STEP in allow:
        return tuple(passes)
    sharing = find_sharing(passes)
    if sharing is not None and sharing.step == "always":
        raise InputError(
            f"--passes: found shard_updates{{step=always}}, where ranks share the optimizer's step, so that some lines "
            f"which work with DDP do not (docs/concepts/sharded-step.md); expected --allow {SHARDED_STEP} beside it: "
            f"add that, or leave step=always out"
        )
    return tuple(replace(sharing, step="never") if sharing and each.decides_update else each for each in passes)
