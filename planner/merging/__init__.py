"""Optimal merging of gradients into buckets."""
