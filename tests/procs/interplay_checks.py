"""All checks of what a script does around an attached model, gathered so that each number of ranks is started once."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from interplay_buffers_checks import BUFFER_CHECKS
from interplay_changes_checks import CHANGE_CHECKS
from interplay_compile_checks import COMPILE_CHECKS
from interplay_copies_checks import COPY_CHECKS
from interplay_cut_checks import CUT_CHECKS
from interplay_gradients_checks import GRADIENT_CHECKS
from interplay_harness import guarded
from interplay_hooks_checks import HOOK_CHECKS
from interplay_ignored_checks import IGNORED_CHECKS
from interplay_interface_checks import INTERFACE_CHECKS
from interplay_models_checks import MODEL_CHECKS
from interplay_outputs_checks import OUTPUT_CHECKS
from interplay_refusal_checks import REFUSAL_CHECKS
from interplay_scripts_checks import SCRIPT_CHECKS
from interplay_steps_checks import STEP_CHECKS
from interplay_training_checks import TRAINING_CHECKS
from interplay_wrappers_checks import WRAPPER_CHECKS

CHECKS: dict[str, Callable[[], dict[str, Any]]] = {
    **STEP_CHECKS,
    **HOOK_CHECKS,
    **INTERFACE_CHECKS,
    **GRADIENT_CHECKS,
    **MODEL_CHECKS,
    **IGNORED_CHECKS,
    **SCRIPT_CHECKS,
    **OUTPUT_CHECKS,
    **COPY_CHECKS,
    **TRAINING_CHECKS,
    **WRAPPER_CHECKS,
    **{f"buffers-{name}": check for name, check in BUFFER_CHECKS.items()},
    **{f"changed-{name}": check for name, check in CHANGE_CHECKS.items()},
    **{f"refused-{name}": check for name, check in REFUSAL_CHECKS.items()},
}
COMPILED = {f"compile-{name}": check for name, check in COMPILE_CHECKS.items()} | {
    f"cut-{name}": check for name, check in CUT_CHECKS.items()
}
WITH_TWO = [*CHECKS, *COMPILED]
ONLY_TWO = (
    "own-",
    "script-",
    "outputs-",
    "ema-",
    "optimizer-",
    "wrapped-",
    "checkpointing-",
    "refused-attach-",
    "changed-converted",
    "refused-unplanned",
)
"""Where a third rank adds nothing: what they are about happens on each rank alone."""
WITH_THREE = [name for name in CHECKS if not name.startswith(ONLY_TWO)]
LONG = set(COMPILED) - {"compile-before", "compile-in place", "compile-whole step", "cut-regions"}
"""With two ranks: seconds of compiling each."""
LONG_WITH_THREE = set(WITH_THREE) - set(WITH_THREE[::8])
"""With two ranks they are there already."""


def run(names: list[str]) -> dict[str, dict[str, Any]]:
    """The results of these checks on this rank; in float64 with more than two ranks, whose sums have several orders."""
    if dist.get_world_size() > 2:
        torch.set_default_dtype(torch.float64)
    results = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DDP's, about strides and unused parameters that are on purpose
        for name in names:
            started = time.perf_counter()
            results[name] = guarded((CHECKS | COMPILED)[name])
            results[name]["seconds"] = time.perf_counter() - started
    return results
