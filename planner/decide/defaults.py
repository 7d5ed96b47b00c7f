"""The default pipeline, and fixed parts of notes: for modules that show them and must not import the rest."""

from __future__ import annotations

DEFAULT_PASSES = "merge,topology,shard_updates,late_gather"

NOTHING_TO_GAIN = 0.01
"""Predicted gain over DDP, as a share of its step, below which a plan is said to gain nothing."""
NO_GAIN = "nothing to gain: "
"""Beginning of the note that the plan is hardly shorter than what users have without one."""

ALLOWED = " was allowed, but "
"""Part of the note that says why no plan of a class was taken."""

MORE = "bounded:all"
"""Name of the alternative that `--compress all` would give, where less is planned by default."""
