"""What deciding does where nothing else is asked for; the command line shows it, and has to import it in no time."""

from __future__ import annotations

ROOM = 0.92
"""Of an accelerator's memory: the rest is the library's buffers and fragments."""
DEFAULT_PASSES = "merge,topology,shard_updates,late_gather"
