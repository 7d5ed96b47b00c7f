"""Emulated clusters, from text such as `4x1@1gbit`, and the places of local ranks, here or on their hosts. Torch-free.

The ranks of an emulated host find it in their environment, so that measurements on an emulated cluster are marked.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial

from planner.documents.profile import Emulated
from planner.testbed.namespaces import Namespace, NoNamespaces
from planner.testbed.wiring import INTERFACE, check_tools, wire
from runtime.errors import InputError

MAX_RANKS = 256
"""More processes than any one machine trains with."""
SLOWEST_BITS_PER_S, FASTEST_BITS_PER_S = 100e3, 100e9
"""Bounds of a rate: at a lower one a message takes minutes; a higher one is no limit for one machine."""

VARIABLE = "PLANNER_EMULATED"
"""Environment variable with the `Emulation.spec` of the cluster of an emulated host."""

_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_SPEC = re.compile(
    r"(?:namespaces:)?(\d{1,9})x(\d{1,9})@(\d{1,9}(?:\.\d{1,9})?)([kmg])(?:bits?(?:/s|ps)?|(?-i:b)ps|be)",
    re.ASCII | re.IGNORECASE,
)


@dataclass(frozen=True, kw_only=True)
class Emulation:
    """An emulated cluster: hosts, ranks on each, and the rate at which each host can send."""

    hosts: int
    ranks_per_host: int
    bits_per_s: float
    spec: str
    """The text that describes it."""
    kind: Emulated = "namespaces"
    """Real traffic through shaped links between network namespaces."""

    @property
    def ranks(self) -> int:
        return self.hosts * self.ranks_per_host

    def __str__(self) -> str:
        """Describe it in results."""
        return describe(self.spec)


def describe(spec: str | None) -> str:
    """Return an emulation in words."""
    return f"emulated cluster {spec} (network namespaces with shaped links)"


def parse_emulation(text: str, option: str = "--emulate") -> Emulation:
    """Return, for `4x1@1gbit`, 4 hosts of one rank, each with 1 Gbit/s.

    Raises:
        InputError: the text is another one, or more than one machine can carry; `option` names the place.
    """
    match = _SPEC.fullmatch(text.strip())
    if match is None:
        raise InputError(
            f"{option}: found {text[:80]!r}, expected HOSTSxRANKS@RATE with the rate of each host's link in kbit, mbit "
            f"or gbit (per second), for example 4x1@1gbit or 2x2@200mbit"
        )
    hosts, ranks, number = match.groups()[:3]
    unit = f"{match[4].lower()}bit"
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


@dataclass(frozen=True, kw_only=True)
class Place:
    """The place of one rank; its process gets it, and enters it before it forms the process group."""

    host: int = 0
    local_rank: int
    local_ranks: int
    emulation: Emulation | None = None
    namespace: Namespace | None = None

    def enter(self) -> None:
        """Move this process to its host, and set the environment variables that programs there read."""
        names = {"LOCAL_RANK": self.local_rank, "GROUP_RANK": self.host, "LOCAL_WORLD_SIZE": self.local_ranks}
        os.environ.update({name: str(value) for name, value in names.items()})
        if self.emulation is not None:
            os.environ[VARIABLE] = self.emulation.spec
        if self.namespace is not None:
            self.namespace.enter()
            self.namespace.close()
            os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE


@contextmanager
def emulated_hosts(emulation: Emulation) -> Iterator[Callable[[int], Place]]:
    """Wire the hosts of an emulated cluster for as long as the block runs; they vanish with their last process.

    Yields:
        A function that returns the place of each rank; the ranks of a host follow one another.

    Raises:
        NoNamespaces: this machine cannot emulate a cluster.
        EnvironmentFailure: a host did not come up within the deadline.
    """
    with ExitStack() as stack:
        with _naming_option():
            # A switch in a namespace of its own, and the hosts.
            switch, *hosts = [stack.enter_context(closing(Namespace.make())) for _ in range(emulation.hosts + 1)]
            wire(switch, hosts, emulation.bits_per_s)
        yield partial(place_on, emulation, hosts)


def place_on(emulation: Emulation, hosts: Sequence[Namespace], rank: int) -> Place:
    """Return the place of a rank on emulated hosts."""
    ranks = emulation.ranks_per_host
    host, local_rank = divmod(rank, ranks)
    return Place(host=host, local_rank=local_rank, local_ranks=ranks, emulation=emulation, namespace=hosts[host])


@contextmanager
def _naming_option() -> Iterator[None]:
    try:
        yield
    except NoNamespaces as error:
        raise NoNamespaces(f"--emulate: {error}") from error


def check_namespaces() -> None:
    """Raise NoNamespaces, with a hint, if this machine cannot emulate a cluster by them; takes a moment."""
    with _naming_option():
        check_tools()
        Namespace.make().close()


@contextmanager
def places_for(ranks: int, emulation: Emulation | None) -> Iterator[Callable[[int], Place]]:
    """Yield a function that returns the place of each of `ranks` local ranks."""
    if emulation is None:
        yield lambda rank: Place(local_rank=rank, local_ranks=ranks)
        return
    with emulated_hosts(emulation) as place:
        yield place
