"""Where local ranks run: on this machine as it is, or on emulated hosts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from planner.testbed.emulation import VARIABLE, Emulation
from planner.testbed.namespaces import Namespace, NoNamespaces
from planner.testbed.wiring import INTERFACE, check_tools, wire


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where one rank is; goes to the rank's process, which enters it before it forms the process group."""

    host: int = 0
    local_rank: int
    local_ranks: int
    emulation: Emulation | None = None
    namespace: Namespace | None = None

    def enter(self) -> None:
        """Move this process to its host, and write into its environment what programs there look for."""
        names = {"LOCAL_RANK": self.local_rank, "GROUP_RANK": self.host, "LOCAL_WORLD_SIZE": self.local_ranks}
        os.environ.update({name: str(value) for name, value in names.items()})
        if self.emulation is not None:
            os.environ[VARIABLE] = self.emulation.spec
        if self.namespace is not None:
            self.namespace.enter()
            self.namespace.close()
            os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE


@dataclass(frozen=True)
class EmulatedHosts:
    """Hosts of a few ranks each, in network namespaces behind a switch in one of its own."""

    emulation: Emulation
    switch: Namespace
    namespaces: tuple[Namespace, ...]

    @classmethod
    def make(cls, emulation: Emulation) -> EmulatedHosts:
        """Wire and shape new namespaces. Raises NoNamespaces or EnvironmentFailure, and leaves nothing then."""
        made: list[Namespace] = []
        try:
            for _ in range(emulation.hosts + 1):
                made.append(Namespace.make())
            wire(made[0], made[1:], emulation.bits_per_s)
        except BaseException:
            for namespace in made:
                namespace.close()
            raise
        return cls(emulation, made[0], tuple(made[1:]))

    def place(self, rank: int) -> Place:
        """Return where a rank runs; the ranks of a host follow one another."""
        ranks = self.emulation.ranks_per_host
        host, local_rank = divmod(rank, ranks)
        return Place(
            host=host,
            local_rank=local_rank,
            local_ranks=ranks,
            emulation=self.emulation,
            namespace=self.namespaces[host],
        )

    def close(self) -> None:
        """Let go of the namespaces, which vanish with their last process."""
        for namespace in (self.switch, *self.namespaces):
            namespace.close()


@contextmanager
def emulated_hosts(emulation: Emulation) -> Iterator[EmulatedHosts]:
    """Make the hosts of an emulated cluster for as long as the block runs. Raises as `EmulatedHosts.make` does."""
    try:
        hosts = EmulatedHosts.make(emulation)
    except NoNamespaces as error:
        raise NoNamespaces(f"--emulate: {error}") from error
    try:
        yield hosts
    finally:
        hosts.close()


def check_namespaces() -> None:
    """Raise NoNamespaces, with the cure, where this machine cannot emulate a cluster by them; takes a moment."""
    try:
        check_tools()
        Namespace.make().close()
    except NoNamespaces as error:
        raise NoNamespaces(f"--emulate: {error}") from error


@contextmanager
def places_for(ranks: int, emulation: Emulation | None) -> Iterator[Callable[[int], Place]]:
    """Yield what gives the place of each of so many local ranks."""
    if emulation is None:
        yield lambda rank: Place(local_rank=rank, local_ranks=ranks)
        return
    with emulated_hosts(emulation) as hosts:
        yield hosts.place
