"""The schedule: buckets of gradients, their order and how they are sent. `str` gives each record as text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from runtime.plan import Accuracy, combinations
from runtime.plan.transports import LIBRARY, Transport


class Codec:
    """The encoding of a bucket's elements, as a frozen value; `str` gives its part of a bucket's text.

    The codecs, and what the planner asks of each, are in `planner.model.codecs`.
    """

    name: ClassVar[str]
    """The compressor's name in plan.json."""
    exact: ClassVar[bool] = False
    """Whether all elements arrive as they are."""

    @classmethod
    def parse(cls, text: str) -> Codec | None:
        """Return the codec of this class whose `str` is the text; None for any other text."""
        return None

    @property
    def by_layer(self) -> bool:
        """Return whether it selects a number of elements from each layer."""
        return False


@dataclass(frozen=True, slots=True)
class Dense(Codec):
    """All elements as they are."""

    name: ClassVar[str] = "none"
    exact: ClassVar[bool] = True

    def __str__(self) -> str:
        return self.name

    @classmethod
    def parse(cls, text: str) -> Codec | None:
        return cls() if text == cls.name else None


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients that are sent as one message per dtype; indices in readiness order.

    >>> str(Bucket((0, 1, 2, 5)))
    '[0-2,5] all_reduce/library none'
    """

    gradients: tuple[int, ...]
    transport: Transport = LIBRARY
    codec: Codec = Dense()

    @property
    def whole(self) -> bool:
        """Return whether the plain average arrives: no element is left out or rounded."""
        return self.codec.exact

    @property
    def features(self) -> tuple[str, ...]:
        """Return the features that a mode may not go with (`runtime.plan.combinations`); none of a dense all-reduce."""
        features = combinations.features_of_bucket(self.transport, self.codec.name, by_layer=self.codec.by_layer)
        return tuple(features)

    def __str__(self) -> str:
        return f"[{format_indices(self.gradients)}] {self.transport} {self.codec}"


ACCURACIES: tuple[Accuracy, ...] = ("exact", "bounded", "relaxed")
"""The classes of plans, from the least risky to the riskiest."""


class Mode:
    """A way to synchronize ranks, as a frozen value; `str` gives its line in the text form of a schedule, if any.

    The modes, and what the planner asks of each, are in `planner.model.modes`.
    """

    name: ClassVar[str]
    """The name in `runtime.plan.combinations`."""
    accuracy: ClassVar[Accuracy] = "exact"
    """The class of its schedules, unless their buckets are of a riskier one."""
    shares_update: ClassVar[bool] = False
    """Whether it shards the update, on which passes about gradients do not decide."""

    @classmethod
    def parse(cls, line: str) -> Mode | None:
        """Return the mode of this class whose `str` is the line; None for any other line."""
        return None

    def fitted(self, buckets: int) -> Mode:
        """Return the mode for a schedule of another number of buckets, if it depends on that."""
        return self


@dataclass(frozen=True)
class Synchronous(Mode):
    """Every step ends with the average of all ranks' gradients on every rank."""

    name: ClassVar[str] = combinations.SYNCHRONOUS

    def __str__(self) -> str:
        return ""


@dataclass(frozen=True, slots=True)
class OperatorShares:
    """The ranks that compute a matrix optimizer's operators, and the messages of their results.

    >>> str(OperatorShares((0, -1, 1), ((2,), (0,)), inside=(1,)))
    'operators 0,-,1 in 2|0 inside 1'
    """

    owners: tuple[int, ...]
    """The rank that computes each matrix of `planner.model.operator_costs.OperatorCosts`; −1: every rank does."""
    messages: tuple[tuple[int, ...], ...]
    """Matrices of each message, in launch order."""
    inside: tuple[int, ...] = ()
    """Messages that every node gathers by itself, in order: ranks of their owners are those within each node."""

    def __str__(self) -> str:
        messages = "|".join(",".join(map(str, members)) for members in self.messages)
        inside = f" inside {','.join(map(str, self.inside))}" if self.inside else ""
        return f"operators {format_owners(self.owners)} in {messages}{inside}"

    @classmethod
    def parse(cls, line: str) -> OperatorShares | None:
        """Return the shares whose `str` is the line; None for any other line."""
        match = _OPERATORS.fullmatch(line)
        if match is None:
            return None
        messages = tuple(tuple(map(int, members.split(","))) for members in match[2].split("|"))
        return cls(parse_owners(match[1]), messages, tuple(map(int, match[3].split(","))) if match[3] else ())


OWNERS = r"(?:[0-9]{1,9}|-)(?:,(?:[0-9]{1,9}|-))*"
"""Pattern of owners in the text form."""
_OPERATORS = re.compile(
    rf"operators ({OWNERS}) in ([0-9]{{1,9}}(?:[,|][0-9]{{1,9}})*)(?: inside ([0-9]{{1,9}}(?:,[0-9]{{1,9}})*))?"
)


def format_owners(owners: Iterable[int]) -> str:
    """Return owners as text, − for those below 0: (0, −1) → '0,-'."""
    return ",".join("-" if owner < 0 else str(owner) for owner in owners)


def parse_owners(text: str) -> tuple[int, ...]:
    """Return the owners that `format_owners` wrote, as `OWNERS` has them."""
    return tuple(-1 if owner == "-" else int(owner) for owner in text.split(","))


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """Buckets in launch order, and the mode; `str` gives a line each, after those of mode, norms and operators if there
    are any.

    >>> str(Schedule(buckets=(Bucket((0,)),), norms=(0, 2)))
    'norms 0,2\\n[0] all_reduce/library none'
    """

    buckets: tuple[Bucket, ...]
    mode: Mode = Synchronous()
    norms: tuple[int, ...] | None = None
    """The rank that computes the norms of each layer of `Problem.norm_layers`; None: every rank computes all. Not a
    part of the mode, as norms depend on the optimizer, not on how gradients are exchanged.
    """
    operators: OperatorShares | None = None
    """Owners of operators; None: every rank computes all. As norms, no part of the mode."""

    @property
    def accuracy(self) -> Accuracy:
        """Return the class of its plans: the mode's, or bounded where a part of a gradient is kept."""
        if self.mode.accuracy == "exact" and not all(bucket.whole for bucket in self.buckets):
            return "bounded"
        return self.mode.accuracy

    @property
    def stops(self) -> tuple[int, ...]:
        """Return one past the last gradient of each bucket."""
        return tuple(bucket.gradients[-1] + 1 for bucket in self.buckets)

    @property
    def unshared(self) -> Schedule:
        """Return the schedule with nothing of the update sharded."""
        return replace(self.with_update_of(None), mode=Synchronous() if self.mode.shares_update else self.mode)

    def with_update_of(self, other: Schedule | None) -> Schedule:
        """Return the schedule with the norms and operators that another one shares; None: nothing shared."""
        if other is None:
            return replace(self, norms=None, operators=None)
        return replace(self, norms=other.norms, operators=other.operators)

    def __str__(self) -> str:
        head = [str(self.mode)] if str(self.mode) else []
        head += [] if self.norms is None else [f"norms {','.join(map(str, self.norms))}"]
        head += [] if self.operators is None else [str(self.operators)]
        return "\n".join([*head, *map(str, self.buckets)])

    @classmethod
    def from_boundaries(cls, stops: Iterable[int], transport: Transport = LIBRARY) -> Schedule:
        """Return dense buckets [0, stops[0]), [stops[0], stops[1]), …, all sent by one transport.

        >>> str(Schedule.from_boundaries([2, 3]))
        '[0-1] all_reduce/library none\\n[2] all_reduce/library none'
        """
        return cls.cut(stops, lambda members: Bucket(tuple(members), transport))

    @classmethod
    def cut(cls, stops: Iterable[int], make: Callable[[range], Bucket]) -> Schedule:
        """Return the buckets that `make` returns for the gradients between these boundaries."""
        return cls(buckets=tuple(make(range(*place)) for place in pairwise((0, *stops))))


def format_indices(indices: Sequence[int]) -> str:
    """Return runs of consecutive indices: (0, 1, 2, 5) → '0-2,5'."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][1] + 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


MAX_INDEX = 10**7
"""The largest index that is read: ranges of more gradients are a mistake in the text."""


def parse_indices(text: str) -> tuple[int, ...]:
    """Return the indices whose runs `format_indices` wrote: '0-2,5' → (0, 1, 2, 5).

    Raises:
        ValueError: the text has no such runs, or an index above `MAX_INDEX`.
    """
    indices: list[int] = []
    for run in text.split(","):
        first, dash, last = run.partition("-")
        start, stop = int(first), int(last if dash else first)
        if not 0 <= start <= stop <= MAX_INDEX:
            raise ValueError(f"found the run {run}, expected indices from 0 to {MAX_INDEX} that do not fall")
        indices.extend(range(start, stop + 1))
    return tuple(indices)


Places = slice | int | NDArray[np.int64]
"""Places between gradients: one, a slice or an array of them."""


TIE = 1e-12
"""Relative difference of finishing times below which two schedules count as equal."""

GAIN = 0.02
"""Share of the step that a riskier schedule has to save."""
