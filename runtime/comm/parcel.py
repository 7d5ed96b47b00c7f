"""What a communicator takes, and what it tells of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor


@dataclass(eq=False)
class Parcel:
    """One bucket on its way."""

    index: int
    """The bucket's, by which its collective is found."""
    label: str
    """For messages to people."""
    payloads: Sequence[Any]
    """What its collective gets, one after the other; see `runtime.comm.collectives.Collective`."""


class Vector(Protocol):
    """What a dense collective gets."""

    flat: Tensor
    """1-D; becomes the sum over ranks."""
    scratch: Any
    """What the collective keeps from step to step."""


@dataclass(slots=True)
class Sent:
    """When one bucket was sent; marks of the session's clock, None where unknown."""

    launch: Any = None
    start: Any = None
    end: Any = None
    phases: list[tuple[str, str, Any, Any]] = field(default_factory=list)
    """(name, link, start, end) of each phase, of collectives that have several."""
