"""Costs of communication: one pure function per published formula, and curves through measured samples."""
