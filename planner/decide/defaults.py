"""What deciding does where nothing else is asked for; the command line shows it, and has to import it in no time."""

from __future__ import annotations

DEFAULT_PASSES = "merge,topology,shard_updates,late_gather"
