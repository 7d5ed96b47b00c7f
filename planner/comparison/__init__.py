"""`planner compare`: every way that a user could train, interleaved in one run, beside what was predicted."""
