"""Compressors that this runtime can apply to a bucket. `COMPRESSORS` is the only list of them."""

from __future__ import annotations

COMPRESSORS: tuple[str, ...] = ("none",)
"""Names; `none` sends every element as it is."""
