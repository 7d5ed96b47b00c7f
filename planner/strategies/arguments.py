"""Checks of what stands behind the colon in a strategy's name."""

from __future__ import annotations

import math

from runtime.errors import InputError


def refuse_argument(strategy: str, argument: str | None) -> None:
    """Raises InputError for `strategy:argument` where the strategy takes none."""
    if argument is not None:
        raise InputError(f"found the strategy {strategy}:{argument}, expected {strategy} without an argument")


def positive_number(strategy: str, argument: str, unit: str, at_most: float) -> float:
    """The argument as a positive number of `at_most`; raises InputError otherwise."""
    try:
        value = float(argument)
    except ValueError:
        value = math.nan
    if not 0.0 < value <= at_most:
        raise InputError(
            f"found the strategy {strategy}:{argument}, expected a positive number of {unit} up to {at_most:g}, such "
            f"as {strategy}:25"
        )
    return value
