"""Interfaces: what a plan may ask of the script, beyond what DDP does. Torch-free.

Beside its accuracy (what gradients are) a plan has an interface (which lines of a script go on working). Drop-in, the
default: every line that works with DDP works, on one rank alone too. Others have names, and are asked for by name:
`planner optimize --allow sharded-step`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

DROP_IN = "drop-in"
SHARDED_STEP = "sharded-step"
BFLOAT16_WEIGHTS = "bfloat16-weights"
LATE_GATHER = "late-gather"
OUTER = "outer"

INTERFACES: Mapping[str, str] = {
    SHARDED_STEP: "between backward and step gradients can be scaled, clamped, zeroed and clipped by norms (on every "
    "rank), and not read; checkpoints take session.optimizer_state_dict() on every rank",
    BFLOAT16_WEIGHTS: "weights are rounded to bfloat16 on all ranks while attached; checkpoints take "
    "session.state_dict() on every rank, or save the model inside session.global_weights(), where weights are float32",
    LATE_GATHER: "as sharded-step, and weights come beside the next forward: what looks at them where torch does not "
    "see it (CUDA graphs, C++ outside of modules, streams of its own) calls session.wait_for_weights() first",
    OUTER: "between outer steps each worker has weights of its own: evaluate and save inside session.global_weights(); "
    "checkpoints take session.state_dict() on every rank",
}
IMPLIES: Mapping[str, tuple[str, ...]] = {LATE_GATHER: (SHARDED_STEP,)}
"""Interface → others that it stands for, too."""


def granted(names: Iterable[str]) -> frozenset[str]:
    """Return all interfaces that these names stand for."""
    return frozenset(one for name in names for one in (name, *IMPLIES.get(name, ())))


def name_problem(name: str) -> str | None:
    """Return why this is no interface that can be asked for, as `found …, expected …`; None if it is one."""
    if name in INTERFACES:
        return None
    return f"found {name!r}, which is unknown; known: {', '.join(INTERFACES)}"
