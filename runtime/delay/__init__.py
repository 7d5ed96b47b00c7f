"""Delayed updates (SSD-SGD)."""
