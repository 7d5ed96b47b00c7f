"""Scripts that measure; each is run as `python -m benchmarks.NAME`."""
