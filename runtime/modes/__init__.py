"""The ways to train, and which of them a plan asks for. A new one is a module of this folder and a line here."""

from __future__ import annotations

from collections.abc import Callable

from runtime.modes.base import Host, Mode, Synchronous
from runtime.modes.delayed import Delayed
from runtime.modes.local_updaters import LocalUpdaters
from runtime.modes.sharded import Sharded
from runtime.plan import Plan

__all__ = ["MODES", "Delayed", "Host", "LocalUpdaters", "Mode", "Sharded", "Synchronous", "asked_modes", "make_mode"]

MODES: dict[type[Mode], Callable[[Plan], bool]] = {
    Sharded: lambda plan: plan.sharded,
    Delayed: lambda plan: plan.delay is not None,
    LocalUpdaters: lambda plan: plan.local_async is not None,
}
"""Mode → whether a plan asks for it; a plan that asks for none is synchronous, one that asks for two is refused."""


def asked_modes(plan: Plan) -> list[type[Mode]]:
    """Return the modes that a plan asks for: one, but in plans that are refused."""
    return [mode for mode, asked in MODES.items() if asked(plan)] or [Synchronous]


def make_mode(plan: Plan, host: Host) -> Mode:
    """Return the mode of a session by this plan; synchronous for a rank alone, and where nothing is exchanged."""
    alone = host.world.ranks == 1 or not host.communicates
    return Synchronous(plan, host) if alone else asked_modes(plan)[0](plan, host)
