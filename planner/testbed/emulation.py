"""What is emulated: hosts, ranks per host and the rate of each host's link, from text such as `4x1@1gbit`. Torch-free.

The ranks of an emulated host find it in their environment, and with them everything that measures: what was measured on
an emulated cluster says so.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from planner.documents.profile import Emulated
from runtime.errors import InputError

MAX_RANKS = 256
"""More processes than any one machine trains with."""
SLOWEST_BITS_PER_S, FASTEST_BITS_PER_S = 100e3, 100e9
"""Less takes minutes for a message; more is no limit to what one machine can move."""

VARIABLE = "PLANNER_EMULATED"
"""Tells a process on an emulated host which cluster that is of, by `Emulation.spec`."""

_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_SPEC = re.compile(r"(?:namespaces:)?(\d{1,9})x(\d{1,9})@(\d{1,9}(?:\.\d{1,9})?)(kbit|mbit|gbit)", re.ASCII)
_EXPECTED = (
    "HOSTSxRANKS@RATE with the rate of each host's link in kbit, mbit or gbit (per second), for example 4x1@1gbit or "
    "2x2@200mbit"
)


@dataclass(frozen=True, kw_only=True)
class Emulation:
    """Hosts, ranks on each, and what each host can send."""

    hosts: int
    ranks_per_host: int
    bits_per_s: float
    spec: str
    """As it was written."""
    kind: Emulated = "namespaces"
    """Real traffic through shaped links between network namespaces."""

    @property
    def ranks(self) -> int:
        return self.hosts * self.ranks_per_host

    @property
    def us_per_byte(self) -> float:
        """What a byte takes on a host's link."""
        return 8e6 / self.bits_per_s

    def __str__(self) -> str:
        """In words, for people who read results."""
        return describe(self.spec)

    def host_of(self, rank: int) -> int:
        """The ranks of a host follow one another."""
        return rank // self.ranks_per_host


def describe(spec: str | None) -> str:
    """Return an emulation in words."""
    return f"emulated cluster {spec} (network namespaces with shaped links)"


def parse_emulation(text: str, option: str = "--emulate") -> Emulation:
    """`4x1@1gbit` → 4 hosts of one rank, each with 1 Gbit/s.

    Raises:
        InputError: anything else, or more than one machine can stand; `option` names the place.
    """
    given = text.strip().lower()
    if given.startswith("sleep:"):
        raise InputError(
            f"{option}: found {text[:80]!r}, by which ranks would sleep and nothing real be measured; expected network "
            f"namespaces: leave `sleep:` out (`planner doctor` says what they need)"
        )
    match = _SPEC.fullmatch(given)
    if match is None:
        raise InputError(f"{option}: found {text[:80]!r}, expected {_EXPECTED}")
    hosts, ranks, number, unit = match.groups()
    spec = f"{int(hosts)}x{int(ranks)}@{number}{unit}"
    found = Emulation(
        hosts=int(hosts),
        ranks_per_host=int(ranks),
        bits_per_s=float(number) * _UNITS[unit],
        spec=spec,
    )
    if not 1 <= found.ranks <= MAX_RANKS:
        raise InputError(
            f"{option}: found {found.hosts} hosts of {found.ranks_per_host} ranks, expected at least one of each and "
            f"at most {MAX_RANKS} ranks in all on one machine; correct {spec}"
        )
    if not SLOWEST_BITS_PER_S <= found.bits_per_s <= FASTEST_BITS_PER_S:
        raise InputError(f"{option}: found a rate of {number}{unit}, expected 100kbit to 100gbit; correct {spec}")
    return found


def mark(emulation: Emulation) -> dict[str, str]:
    """What the environment of a process on an emulated host holds."""
    return {VARIABLE: emulation.spec}


def emulation_here(environment: Mapping[str, str] = os.environ) -> Emulation | None:
    """The emulated cluster that this process runs on, if any."""
    text = environment.get(VARIABLE)
    return None if text is None else parse_emulation(text, VARIABLE)
