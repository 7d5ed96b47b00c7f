"""Where local ranks run: on this machine as it is, or on emulated hosts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from planner.testbed.emulation import Emulation, mark
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
        """Moves this process to its host, and writes into its environment what programs there look for."""
        names = {"LOCAL_RANK": self.local_rank, "GROUP_RANK": self.host, "LOCAL_WORLD_SIZE": self.local_ranks}
        os.environ.update({name: str(value) for name, value in names.items()})
        if self.emulation is not None:
            os.environ.update(mark(self.emulation))
        if self.namespace is not None:
            self.namespace.enter()
            self.namespace.close()
            os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE


class Hosts:
    """This machine as one host of all local ranks; emulated clusters differ from it."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    def place(self, rank: int) -> Place:
        """Where a rank runs."""
        return Place(local_rank=rank, local_ranks=self.ranks)


class EmulatedHosts(Hosts):
    """Hosts of a few ranks each."""

    def __init__(self, emulation: Emulation, switch: Namespace, hosts: tuple[Namespace, ...]) -> None:
        super().__init__(emulation.ranks)
        self.emulation, self.switch, self.namespaces = emulation, switch, hosts

    @classmethod
    def make(cls, emulation: Emulation) -> EmulatedHosts:
        """Network namespaces, wired and shaped. Raises NoNamespaces or EnvironmentFailure, and leaves nothing then."""
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
        """See `Hosts.place`."""
        host = self.emulation.host_of(rank)
        return Place(
            host=host,
            local_rank=rank % self.emulation.ranks_per_host,
            local_ranks=self.emulation.ranks_per_host,
            emulation=self.emulation,
            namespace=self.namespaces[host],
        )

    def close(self) -> None:
        """Lets go of the namespaces; they vanish with their last process."""
        for namespace in (self.switch, *self.namespaces):
            namespace.close()


@contextmanager
def emulated_hosts(emulation: Emulation) -> Iterator[EmulatedHosts]:
    """The hosts of an emulated cluster, for as long as the block runs.

    Raises:
        NoNamespaces: they cannot be had.
        EnvironmentFailure: a host did not come up within its deadline.
    """
    try:
        hosts = EmulatedHosts.make(emulation)
    except NoNamespaces as error:
        raise NoNamespaces(f"--emulate: {error}") from error
    try:
        yield hosts
    finally:
        hosts.close()


def check_namespaces() -> None:
    """Raises NoNamespaces, with the cure, where this machine cannot emulate a cluster by them; takes a moment."""
    try:
        check_tools()
        Namespace.make().close()
    except NoNamespaces as error:
        raise NoNamespaces(f"--emulate: {error}") from error


@contextmanager
def hosts_for(ranks: int, emulation: Emulation | None) -> Iterator[Hosts]:
    """Where so many local ranks run."""
    if emulation is None:
        yield Hosts(ranks)
        return
    with emulated_hosts(emulation) as hosts:
        yield hosts
