"""Algorithms that find schedules: dynamic programs, Pareto labels, local search, CP-SAT."""
