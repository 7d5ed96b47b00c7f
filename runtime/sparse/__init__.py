"""Compressed buckets: selection, residuals, error feedback."""
