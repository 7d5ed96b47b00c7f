"""A plan as a trace file and as a page."""
