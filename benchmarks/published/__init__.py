"""Published measurements and simulations beside the planner's own predictions; one module per publication.

Everything they read is in `tests/data` and `profiles`. `python -m benchmarks.validate` writes what they return.
"""
