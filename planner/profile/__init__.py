"""Measuring a training step and the links; the documents that hold the figures."""
