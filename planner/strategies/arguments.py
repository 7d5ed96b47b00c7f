"""Checks of what stands behind the colon in a strategy's name."""

from __future__ import annotations

import math

from runtime.errors import InputError


def refuse_argument(strategy: str, argument: str | None) -> None:
    """Raises InputError for `strategy:argument` where the strategy takes none."""
    if argument is not None:
        raise InputError(f"found the strategy {strategy}:{argument}, expected {strategy} without an argument")


def density(strategy: str, argument: str) -> float:
    """The argument as a share of elements; raises InputError otherwise."""
    value = _number(argument)
    if not 0.0 < value <= 1.0:
        raise InputError(
            f"found the strategy {strategy}:{argument}, expected a share of elements above 0 and up to 1, such as "
            f"{strategy}:0.01"
        )
    return value


def _number(argument: str) -> float:
    try:
        return float(argument)
    except ValueError:
        return math.nan


def positive_number(strategy: str, argument: str, unit: str, at_most: float, at_least: float = 0.0) -> float:
    """The argument as a positive number from `at_least` to `at_most`; raises InputError otherwise."""
    value = _number(argument)
    if not (0.0 < value <= at_most and value >= at_least):
        least = f" from {at_least:g}" if at_least > 0.0 else ""
        raise InputError(
            f"found the strategy {strategy}:{argument}, expected a positive number of {unit}{least} up to "
            f"{at_most:g}, such as {strategy}:25"
        )
    return value


def whole_number(strategy: str, argument: str, unit: str, at_most: int) -> int:
    """The argument as a whole number from 1 to `at_most`; raises InputError otherwise."""
    if not (argument.isascii() and argument.isdecimal() and len(argument) < 10 and 1 <= int(argument) <= at_most):
        raise InputError(
            f"found the strategy {strategy}:{argument}, expected a whole number of {unit} from 1 to {at_most}, such as "
            f"{strategy}:4"
        )
    return int(argument)
