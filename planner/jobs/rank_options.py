"""The options of commands that need ranks, checked before anything is started. Torch-free."""

from __future__ import annotations

import os
from dataclasses import dataclass

from planner.testbed.hosts import MAX_RANKS, Emulation, check_namespaces, parse_emulation
from runtime.errors import InputError


def under_torchrun() -> bool:
    """Return whether a launcher has made this process one rank of a world."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ and "MASTER_ADDR" in os.environ


@dataclass(frozen=True)
class RankOptions:
    """The options of every command that needs ranks."""

    ranks: int | None = None
    device: str = "auto"
    backend: str | None = None
    timeout_s: float | None = None
    emulate: str | None = None
    """An emulated cluster to run on, such as `4x1@1gbit`; None: this machine as it is."""

    def __post_init__(self) -> None:
        """Check what can be checked without torch.

        Raises:
            InputError: the ranks, the deadline or the emulated cluster are none, or do not fit each other.
            EnvironmentFailure: this machine cannot emulate a cluster; says what is missing.
        """
        emulation = self.emulation
        if emulation is not None:
            if under_torchrun():
                raise InputError(
                    "--emulate: torchrun has started the ranks already; start the command without torchrun"
                )
            if self.ranks not in (None, emulation.ranks):
                raise InputError(
                    f"--ranks: found {self.ranks}, expected {emulation.ranks} as in --emulate {emulation.spec}; leave "
                    f"--ranks out"
                )
            if self.backend not in (None, "gloo"):
                raise InputError(
                    f"--backend: found {self.backend!r}, expected gloo on an emulated cluster; leave it out"
                )
            check_namespaces()
        count = self.local_ranks
        if not under_torchrun() and not 1 <= count <= MAX_RANKS:
            raise InputError(
                f"--ranks: found {count}, expected at least 1 and at most {MAX_RANKS} on one machine; correct "
                f"it, or start more with torchrun"
            )
        if self.timeout_s is not None:
            from runtime.comm.world import check_timeout_s

            check_timeout_s(self.timeout_s, "--timeout-s")

    @property
    def emulation(self) -> Emulation | None:
        """Return the emulated cluster that `emulate` describes."""
        return None if self.emulate is None else parse_emulation(self.emulate)

    @property
    def local_ranks(self) -> int:
        """Return the number of ranks to start if no launcher has."""
        return self.emulation.ranks if self.emulation else 2 if self.ranks is None else self.ranks
