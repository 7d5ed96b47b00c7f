"""A strategy is a rule from a step to a schedule, by a name with an optional argument: `ddp`, `ddp:25`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from planner.ir import Schedule
from planner.model.problem import Problem
from runtime.errors import InputError
from runtime.plan import Accuracy

T = TypeVar("T", int, float)


@dataclass(frozen=True)
class Argument:
    """The argument behind the colon of a strategy's name."""

    label: str
    """Placeholder in lists of strategies: `MIB`."""
    expected: str
    """The argument in words, as in error messages; `{name}` is the strategy's."""
    read: Callable[[str], Any]
    """Function from the text to the value, which raises ValueError for a wrong one."""


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """A named rule; a call with a problem, and perhaps the argument's value, returns its schedule."""

    name: str
    make: Callable[..., Schedule]
    argument: Argument | None
    accuracy: Accuracy

    def __call__(self, problem: Problem, *value: Any) -> Schedule:
        return self.make(problem, *value)

    @property
    def usages(self) -> list[str]:
        """Return how it can be written: `ddp`, `ddp:SIZE_MIB`."""
        labels = self.argument.label.split("|") if self.argument else []
        return [self.name, *(f"{self.name}:{label}" for label in labels)]

    def schedule(self, problem: Problem, text: str | None) -> Schedule:
        """Return the schedule with an argument as text, or (None) without one.

        Raises:
            InputError: the argument is wrong, or one too many.
        """
        if text is None:
            return self.make(problem)
        expected = self.argument.expected if self.argument else "{name} without an argument"
        try:
            value = (self.argument.read if self.argument else _refuse)(text)
        except ValueError:
            expected = expected.format(name=self.name)
            raise InputError(f"found the strategy {self.name}:{text}, expected {expected}") from None
        return self.make(problem, value)


def strategy(
    argument: Argument | None = None, *, accuracy: Accuracy = "exact", name: str = ""
) -> Callable[[Callable[..., Schedule]], Strategy]:
    """Make a strategy of a function of a problem and of the argument's value, which has a default.

    Args:
        argument: what may stand behind the colon; None: nothing.
        accuracy: the class of its schedules.
        name: its name; empty: the function's.
    """

    def decorate(make: Callable[..., Schedule]) -> Strategy:
        return Strategy(name=name or make.__name__, make=make, argument=argument, accuracy=accuracy)

    return decorate


def check_dtypes(problem: Problem, strategy: str, dtypes: Collection[str]) -> None:
    """Raise InputError where a strategy cannot send a gradient, as its dtype is another one."""
    gradients = problem.profile.compute.gradients
    if (odd := next((one for one in gradients if one.dtype not in dtypes), None)) is not None:
        raise InputError(
            f"the strategy {strategy}: found the gradient {odd.name} in {odd.dtype}, expected "
            f"{', '.join(sorted(dtypes))}: choose another strategy"
        )


def share() -> Argument:
    """Return an argument that is a share of elements."""
    expected = "a share of elements above 0 and up to 1, such as {name}:0.01"
    return Argument("DENSITY", expected, lambda text: _within(float(text), 0.0, 1.0))


def number(label: str, unit: str, at_most: float, at_least: float = 0.0) -> Argument:
    """Return an argument that is a positive number, from `at_least` to `at_most`."""
    least = f" from {at_least:g}" if at_least > 0.0 else ""
    expected = f"a positive number of {unit}{least} up to {at_most:g}, such as {{name}}:25"
    return Argument(label, expected, lambda text: _within(float(text), at_least, at_most))


def whole(label: str, unit: str, at_most: int) -> Argument:
    """Return an argument that is a whole number, from 1 to `at_most`."""

    expected = f"a whole number of {unit} from 1 to {at_most}, such as {{name}}:4"
    return Argument(label, expected, lambda text: _within(_digits(text), 1, at_most))


def whole_and_count(label: str, unit: str, at_most: int, counted: str) -> Argument:
    """Return an argument of one or two whole numbers from 1 on with a colon between, as a tuple.

    Args:
        label: both placeholders: `STEPS:SERVERS`.
        unit: what the first counts.
        at_most: the largest first.
        counted: what the second counts.
    """
    first, second = whole("", unit, at_most), whole("", counted, 10**9)

    def read(text: str) -> tuple[int, ...]:
        one, colon, other = text.partition(":")
        return (first.read(one), second.read(other)) if colon else (first.read(one),)

    labels = f"{label.partition(':')[0]}|{label}"
    return Argument(labels, f"{first.expected}, perhaps with a number of {counted}: {{name}}:4:2", read)


def number_and_count(label: str, unit: str, at_most: float, counted: str, most: int) -> Argument:
    """Return an argument that is a number from 1 to `at_most`, perhaps with a colon and a whole number up to `most`.

    Args:
        label: both placeholders: `MAX_RATIO:BUFFER`.
        unit: what the first counts.
        at_most: the largest first.
        counted: what the second counts.
        most: the largest second; 0 is allowed.
    """

    def read(text: str) -> tuple[float, int] | tuple[float]:
        first, colon, second = text.partition(":")
        value = _within(float(first), 1.0, at_most)
        if not colon:
            return (value,)
        if (count := _digits(second)) > most:
            raise ValueError
        return value, count

    expected = (
        f"a number of {unit} from 1 up to {at_most:g}, such as {{name}}:25, and perhaps a whole number of {counted} "
        f"from 0 to {most}, such as {{name}}:25:4096"
    )
    return Argument(f"{label.partition(':')[0]}|{label}", expected, read)


def word(words: Sequence[str], expected: str) -> Argument:
    """Return an argument that is one of some words."""

    def read(text: str) -> str:
        if text not in words:
            raise ValueError
        return text

    return Argument("|".join(words), expected, read)


def _digits(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise ValueError
    return int(text)


def _within(value: T, at_least: float, at_most: float) -> T:
    if not (at_least <= value <= at_most and value > 0):
        raise ValueError
    return value


def _refuse(text: str) -> Any:
    raise ValueError
