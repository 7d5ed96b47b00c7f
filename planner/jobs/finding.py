"""What `planner doctor` finds. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One thing looked at."""

    what: str
    ok: bool
    found: str
    cure: str = ""
    required: bool = True
    """Whether planner is of no use without it."""
