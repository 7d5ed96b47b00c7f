"""Settings of the tests that need no process group."""

from hypothesis import settings

# The same examples in every run; no deadline per example, for machines are shared.
settings.register_profile("null", derandomize=True, deadline=None)
settings.load_profile("null")
