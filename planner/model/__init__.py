"""Costs of schedules: the problem, simulators, modes and codecs; decides nothing."""
