"""The session tests' checks, gathered so that each number of ranks is started once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from session_checks import (
    accumulation_like_ddp,
    different_starts,
    gradients_are_final,
    integers_like_ddp,
    largest_difference,
    weights_like_ddp,
)
from step_checks import (
    after_an_exception,
    checkpointed,
    detach_and_attach,
    measured_timeline,
    memory_of_attach,
    mismatches,
    mixed_dtypes,
    reported_steps,
    two_models,
    unused_like_ddp,
)


def pair_checks() -> dict[str, Any]:
    """Everything that two ranks can show, in one start of processes."""
    checks: list[Callable[[], Any]] = [
        *(weights_like_ddp, integers_like_ddp, different_starts, gradients_are_final, accumulation_like_ddp),
        *(unused_like_ddp, mixed_dtypes, after_an_exception, detach_and_attach, two_models, mismatches),
        *(measured_timeline, reported_steps, memory_of_attach),
    ]
    results: dict[str, Any] = {check.__name__: check() for check in checks}
    results["checkpointed"] = {reentrant: checkpointed(reentrant) for reentrant in (False, True)}
    return results


def many_checks() -> dict[str, Any]:
    """What three or four ranks can show."""
    return {
        "integers_like_ddp": integers_like_ddp(),
        "float32": largest_difference(torch.float32),
        "float64": largest_difference(torch.float64),
        "different_starts": different_starts(),
        "unused_like_ddp": unused_like_ddp(),
    }
