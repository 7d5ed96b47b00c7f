"""Quantities as documents hold them."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

MAX_RANKS = 10**7

TimeUs = Annotated[float, Field(ge=0.0, le=1e15)]
"""A measured time (1e15 µs are 31 years)."""
PredictedUs = Annotated[float, Field(ge=0.0)]
"""A computed time: the sum of any number of measured ones."""
Count = Annotated[int, Field(ge=0, le=2**53)]
PositiveCount = Annotated[int, Field(ge=1, le=2**53)]
Ranks = Annotated[int, Field(ge=1, le=MAX_RANKS)]
Name = Annotated[str, Field(min_length=1, max_length=4096)]
