"""The mode that a plan asks for. A new mode is a module of its own and a line here."""

from __future__ import annotations

from collections.abc import Callable

from runtime.delay.delayed import Delayed
from runtime.modes.base import Host, Mode, Synchronous
from runtime.modes.local_updaters import LocalUpdaters
from runtime.outer.local_steps import Outer
from runtime.plan import Plan
from runtime.sharded.sharded import LateGather, Sharded

MODES: dict[type[Mode], Callable[[Plan], bool]] = {
    Sharded: lambda plan: plan.sharded and plan.gathers is None,
    LateGather: lambda plan: plan.gathers is not None,
    Delayed: lambda plan: plan.delay is not None,
    Outer: lambda plan: plan.outer is not None,
    LocalUpdaters: lambda plan: plan.local_async is not None,
}
"""Mode → whether a plan asks for it; a plan that asks for none is synchronous, one that asks for two is refused."""


def asked_modes(plan: Plan) -> list[type[Mode]]:
    """Return the modes that a plan asks for: one, unless the plan has to be refused."""
    return [mode for mode, asked in MODES.items() if asked(plan)] or [Synchronous]


def make_mode(plan: Plan, host: Host) -> Mode:
    """Return the mode of a session by this plan; synchronous for a rank alone, and where nothing is exchanged."""
    alone = host.world.ranks == 1 or not host.options.communicate
    return Synchronous(plan, host) if alone else asked_modes(plan)[0](plan, host)
