"""Named strategies: what users could have instead, as schedules. `STRATEGIES` is the only list of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from planner.ir import Schedule
from planner.model.problem import Problem
from planner.strategies.ddp import ddp
from planner.strategies.hitopk import hitopk
from planner.strategies.joint import joint
from planner.strategies.lags import lags
from planner.strategies.local import l_sgd, lap, lpp, mb_sgd, pl_sgd
from planner.strategies.mg_wfbp import mg_wfbp
from planner.strategies.optimal import optimal
from planner.strategies.single import single
from planner.strategies.slgs import naive_all_gather, slgs
from planner.strategies.ssd import ssd
from planner.strategies.torus_2d import torus_2d
from planner.strategies.tree import tree
from planner.strategies.wfbp import wfbp
from runtime.errors import InputError

Strategy = Callable[[Problem, str | None], Schedule]
"""(problem, what stands behind the colon in the name) → schedule."""

STRATEGIES: Mapping[str, Strategy] = {
    "ddp": ddp,
    "hitopk": hitopk,
    "joint": joint,
    "l_sgd": l_sgd,
    "lags": lags,
    "lap": lap,
    "lpp": lpp,
    "mb_sgd": mb_sgd,
    "mg_wfbp": mg_wfbp,
    "naive_all_gather": naive_all_gather,
    "optimal": optimal,
    "pl_sgd": pl_sgd,
    "single": single,
    "slgs": slgs,
    "ssd": ssd,
    "torus_2d": torus_2d,
    "tree": tree,
    "wfbp": wfbp,
}
"""Registry: name → strategy. Add one here and the contract test covers it."""

BOUNDED = frozenset({"hitopk", "joint", "lags", "naive_all_gather", "slgs"})
"""Strategies that leave out a part of the gradient, which error feedback sends later."""

RELAXED = frozenset({"l_sgd", "lap", "lpp", "pl_sgd", "ssd"})
"""Strategies that delay synchronization, or average models now and then; all that are in neither set are exact."""

BASELINES = ("wfbp", "single", "mg_wfbp", "ddp")
"""The strategies that every plan is compared with."""


def accuracy_of(strategy: str) -> str:
    """The class of accuracy that a strategy's schedules have."""
    name = strategy.partition(":")[0]
    return "relaxed" if name in RELAXED else "bounded" if name in BOUNDED else "exact"


def make_schedule(problem: Problem, strategy: str) -> Schedule:
    """The schedule of a strategy by name, such as `mg_wfbp`, `wfbp:layer` or `ddp:50`.

    Raises:
        InputError: unknown name (lists the known ones) or argument.
    """
    name, colon, argument = strategy.partition(":")
    if name not in STRATEGIES:
        arguments = (
            "wfbp:layer", "optimal:sharded-step", "ddp:SIZE_MIB",
            "slgs:DENSITY", "lags:MAX_RATIO", "joint:MAX_RATIO", "hitopk:DENSITY",
            "naive_all_gather:DENSITY", "ssd:STEPS", "lap:UPDATERS", "lpp:UPDATERS", "l_sgd:STEPS", "pl_sgd:STEPS",
        )  # fmt: skip
        known = ", ".join([*STRATEGIES, *arguments])
        raise InputError(f"found the strategy {strategy!r}, expected one of: {known}")
    return STRATEGIES[name](problem, argument if colon else None)
