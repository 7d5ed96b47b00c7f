"""`planner compare`: every way that a user could train, measured in turn in one run, beside what was predicted."""
