"""Data: clusters that others measured, with their sources."""
