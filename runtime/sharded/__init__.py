"""The sharded optimizer step (ZeRO-1)."""
