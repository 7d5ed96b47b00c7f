"""Local updaters (LAP-SGD, LPP-SGD) and local SGD (arXiv 1805.09767, 1808.07217): ranks average models of their own.

`lap:U` and `lpp:U`: U updaters share a rank's model, and averagings go on beside them. `l_sgd:H` and `pl_sgd:H`: one
process, which waits for an averaging after every H steps, from the beginning or in the second half of training.
"""

from __future__ import annotations

from planner.ir import Schedule, Updaters
from planner.model.problem import Problem
from planner.passes.local_async import updater_schedule
from planner.strategies.arguments import refuse_argument, whole_number
from planner.strategies.optimal import optimal
from runtime.plan import MAX_UPDATERS

USUAL_UPDATERS, USUAL_STEPS = 4, 16


def lap(problem: Problem, argument: str | None = None) -> Schedule:
    """LAP-SGD: `lap:U`, by default with 4 updaters; its step is what a rank takes for a minibatch."""
    return updater_schedule(problem, _updaters("lap", argument), blocks=False)


def lpp(problem: Problem, argument: str | None = None) -> Schedule:
    """LPP-SGD: `lpp:U`, by default with 4 updaters; blocks as `planner optimize` cuts them."""
    return updater_schedule(problem, _updaters("lpp", argument), blocks=True)


def l_sgd(problem: Problem, argument: str | None = None) -> Schedule:
    """Local SGD: `l_sgd:H`, an averaging after every H steps, by default 16."""
    steps = _steps("l_sgd", argument)
    return _waiting(problem, Updaters(count=1, average_every=steps, then_every=steps, waits=True))


def pl_sgd(problem: Problem, argument: str | None = None) -> Schedule:
    """Post-local SGD: `pl_sgd:H`, after every step in the first half of training, then after every H."""
    return _waiting(problem, Updaters(count=1, average_every=1, then_every=_steps("pl_sgd", argument), waits=True))


def mb_sgd(problem: Problem, argument: str | None = None) -> Schedule:
    """Minibatch SGD, as papers about local SGD call it: the best exact schedule."""
    refuse_argument("mb_sgd", argument)
    return optimal(problem)


def _waiting(problem: Problem, updaters: Updaters) -> Schedule:
    return Schedule(buckets=Schedule.from_boundaries([problem.count]).buckets, updaters=updaters)


def _updaters(strategy: str, argument: str | None) -> int:
    return USUAL_UPDATERS if argument is None else whole_number(strategy, argument, "updaters", at_most=MAX_UPDATERS)


def _steps(strategy: str, argument: str | None) -> int:
    return USUAL_STEPS if argument is None else whole_number(strategy, argument, "steps", at_most=10**6)
