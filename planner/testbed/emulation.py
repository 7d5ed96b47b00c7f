"""What is emulated: hosts, ranks per host and the rate of each host's link, from text such as `4x1@1gbit`. Torch-free.

The ranks of an emulated host find it in their environment, and with them everything that measures: what was measured on
an emulated cluster says so.
"""

from __future__ import annotations

import os
import re
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

    def __str__(self) -> str:
        """In words, for people who read results."""
        return describe(self.spec)


def describe(spec: str | None) -> str:
    """Return an emulation in words."""
    return f"emulated cluster {spec} (network namespaces with shaped links)"


def parse_emulation(text: str, option: str = "--emulate") -> Emulation:
    """Return, for `4x1@1gbit`, 4 hosts of one rank, each with 1 Gbit/s.

    Raises InputError: anything else, or more than one machine can stand; `option` names the place.
    """
    match = _SPEC.fullmatch(text.strip().lower())
    if match is None:
        raise InputError(
            f"{option}: found {text[:80]!r}, expected HOSTSxRANKS@RATE with the rate of each host's link in kbit, mbit "
            f"or gbit (per second), for example 4x1@1gbit or 2x2@200mbit"
        )
    hosts, ranks, number, unit = match.groups()
    spec = f"{int(hosts)}x{int(ranks)}@{number}{unit}"
    bits_per_s = float(number) * _UNITS[unit]
    found = Emulation(hosts=int(hosts), ranks_per_host=int(ranks), bits_per_s=bits_per_s, spec=spec)
    if not 1 <= found.ranks <= MAX_RANKS:
        raise InputError(
            f"{option}: found {found.hosts} hosts of {found.ranks_per_host} ranks, expected at least one of each and "
            f"at most {MAX_RANKS} ranks in all on one machine; correct {spec}"
        )
    if not SLOWEST_BITS_PER_S <= found.bits_per_s <= FASTEST_BITS_PER_S:
        raise InputError(f"{option}: found a rate of {number}{unit}, expected 100kbit to 100gbit; correct {spec}")
    return found


def emulation_here() -> Emulation | None:
    """Return the emulated cluster that this process runs on, if any."""
    text = os.environ.get(VARIABLE)
    return None if text is None else parse_emulation(text, VARIABLE)
