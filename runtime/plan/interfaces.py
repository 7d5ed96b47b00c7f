"""What a plan may ask of the script, beyond what DDP does. Torch-free.

Beside its accuracy (what gradients are) a plan has an interface (which lines of a script go on working). Drop-in, the
default: every line that works with DDP works, on one rank alone too. Others have names, and are asked for by name:
`planner optimize --allow sharded-step`.
"""

from __future__ import annotations

from collections.abc import Mapping

DROP_IN = "drop-in"
SHARDED_STEP = "sharded-step"
LATE_GATHER = "late-gather"
"""Implies a sharded step."""

INTERFACES: Mapping[str, str] = {
    SHARDED_STEP: "between backward and step gradients can be scaled, clamped, zeroed and clipped by norms (on every "
    "rank), and not read; checkpoints take session.optimizer_state_dict() on every rank",
    LATE_GATHER: "as sharded-step, and after optimizer.step() new weights arrive beside the next forward: what reads "
    "them outside of modules waits for them with session.wait_for_weights()",
}


def name_problem(name: str) -> str | None:
    """Why this is no interface that can be asked for, as `found …, expected …`; None where it is one."""
    if name in INTERFACES:
        return None
    return f"found {name!r}, which is unknown; known: {', '.join(INTERFACES)}"
