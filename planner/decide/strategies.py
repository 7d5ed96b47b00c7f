"""Named strategies: what users could have instead, as schedules. `STRATEGIES` is the only list of them.

`optimal` is the best exact schedule that this planner knows, what `planner optimize` decides without options: `merge`,
begun with the best of the baselines, then `topology`, which only two kinds of link give something to choose, and what
ranks share of the update (all of it with `optimal:sharded-step`; with `optimal:late-gather`, weights may also come
beside the next forward). Strategies are predicted in some hundredths of a
second: where gradients are many, all buckets go flat or all by a torus, and `planner optimize`, which mixes them, may
find better. `joint` begins with it.

`ssd:K` is SSD-SGD (arXiv 2012.05396), merged as suits the pushes. Local updaters (LAP-SGD, LPP-SGD) and local SGD
(arXiv 1805.09767, 1808.07217): of `lap:U` and `lpp:U` U updaters share a rank's model, and averagings go on beside
them; of `l_sgd:H` and `pl_sgd:H` one process waits for an averaging after every H steps, from the beginning or in the
second half of training.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from planner.ir import Schedule
from planner.model.compression import MAX_RATIO
from planner.model.modes.local_updaters import LocalUpdaters
from planner.model.problem import Problem
from planner.passes.delay import DEFAULT_MAX_DELAY, MAX_DELAY, candidates, delayed_schedule
from planner.passes.joint import Joint
from planner.passes.late_gather import LateGathers
from planner.passes.local_async import updater_schedule
from planner.passes.merge import Merge, best_of
from planner.passes.shard_updates import ShardUpdates
from planner.passes.topology import Topology
from planner.search.tables import has_two_links
from planner.strategies.arguments import positive_number, refuse_argument, whole_number
from planner.strategies.baselines import by_chance, ddp, mg_wfbp, single, wfbp
from planner.strategies.decoupled import dear, megatron
from planner.strategies.hitopk import hitopk
from planner.strategies.low_rank import low_rank
from planner.strategies.sparse import lags, naive_all_gather, slgs
from planner.strategies.topologies import torus_2d, tree
from planner.strategies.wire import wire
from runtime.errors import InputError
from runtime.plan import MAX_UPDATERS
from runtime.plan.interfaces import LATE_GATHER, SHARDED_STEP

MIXED = 200
"""Gradients up to which each bucket has a choice of its own on two kinds of link."""


def optimal(problem: Problem, argument: str | None = None) -> Schedule:
    """What `planner optimize` chooses among exact plans."""
    if argument not in (None, SHARDED_STEP, LATE_GATHER):
        raise InputError(
            f"found the strategy optimal:{argument}, expected optimal, optimal:{SHARDED_STEP} or optimal:{LATE_GATHER}"
        )
    merged = Merge().apply(best_baseline(problem), problem).schedule
    if problem.count <= MIXED or not has_two_links(problem):
        chosen = Topology().apply(merged, problem).schedule
    else:
        chosen = best_of(problem, [merged, torus_2d(problem)])
    step = "never" if argument is None else "auto"
    shared = ShardUpdates(method="lpt", step=step).apply(chosen, problem).schedule
    return LateGathers().apply(shared, problem).schedule if argument == LATE_GATHER else shared


def best_baseline(problem: Problem) -> Schedule:
    """The shortest of what users could have instead and a plan can hold: with several dtypes DDP's may interleave."""
    candidates = [wfbp(problem), wfbp(problem, "layer"), single(problem), mg_wfbp(problem)]
    return best_of(problem, candidates if problem.dtype_count > 1 else [*candidates, ddp(problem)])


def joint(problem: Problem, argument: str | None = None) -> Schedule:
    """Buckets and their forms together, as `--compress all` does; `joint:MAX_RATIO` looks at sparse buckets alone, with
    that as the largest ratio of all but biases and norms.
    """
    max_ratio = 0.0
    if argument is not None:
        max_ratio = positive_number("joint", argument, "times of compression", at_most=MAX_RATIO, at_least=1.0)
    compress = "all" if argument is None else "sparse"
    return Joint(max_ratio=max_ratio, compress=compress).apply(optimal(problem), problem).schedule


def ssd(problem: Problem, argument: str | None = None) -> Schedule:
    """Delay of k steps: `ssd:K`, by default 4; its step is the mean of the steady state."""
    k = DEFAULT_MAX_DELAY if argument is None else whole_number("ssd", argument, "steps", at_most=MAX_DELAY)
    return delayed_schedule(problem, k, candidates(problem))


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
    return _waiting(problem, LocalUpdaters(count=1, average_every=steps, then_every=steps, waits=True))


def pl_sgd(problem: Problem, argument: str | None = None) -> Schedule:
    """Post-local SGD: `pl_sgd:H`, after every step in the first half of training, then after every H."""
    return _waiting(problem, LocalUpdaters(count=1, average_every=1, then_every=_steps("pl_sgd", argument), waits=True))


def mb_sgd(problem: Problem, argument: str | None = None) -> Schedule:
    """Minibatch SGD, as papers about local SGD call it: the best exact schedule."""
    refuse_argument("mb_sgd", argument)
    return optimal(problem)


def _waiting(problem: Problem, updaters: LocalUpdaters) -> Schedule:
    return Schedule(buckets=Schedule.from_boundaries([problem.count]).buckets, mode=updaters)


def _updaters(strategy: str, argument: str | None) -> int:
    return USUAL_UPDATERS if argument is None else whole_number(strategy, argument, "updaters", at_most=MAX_UPDATERS)


def _steps(strategy: str, argument: str | None) -> int:
    return USUAL_STEPS if argument is None else whole_number(strategy, argument, "steps", at_most=10**6)


Strategy = Callable[[Problem, str | None], Schedule]
"""(problem, what stands behind the colon in the name) → schedule."""


STRATEGIES: Mapping[str, Strategy] = {
    "ddp": ddp,
    "dear": dear,
    "hitopk": hitopk,
    "joint": joint,
    "l_sgd": l_sgd,
    "lags": lags,
    "lap": lap,
    "lowrank": low_rank,
    "lpp": lpp,
    "mb_sgd": mb_sgd,
    "megatron": megatron,
    "mg_wfbp": mg_wfbp,
    "naive_all_gather": naive_all_gather,
    "optimal": optimal,
    "pl_sgd": pl_sgd,
    "random": by_chance,
    "single": single,
    "slgs": slgs,
    "ssd": ssd,
    "torus_2d": torus_2d,
    "tree": tree,
    "wfbp": wfbp,
    "wire": wire,
}
"""Registry: name → strategy. Add one here and the contract test covers it."""


BOUNDED = frozenset({"hitopk", "joint", "lags", "lowrank", "naive_all_gather", "slgs", "wire"})
"""Strategies that leave out a part of the gradient, or round it, which error feedback sends later."""


RELAXED = frozenset({"l_sgd", "lap", "lpp", "pl_sgd", "ssd"})
"""Strategies that delay synchronization, or average models now and then; all that are in neither set are exact."""


BASELINES = ("wfbp", "single", "mg_wfbp", "ddp")
"""The strategies that every plan is compared with."""


def accuracy_of(strategy: str) -> str:
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
            "wfbp:layer", "optimal:sharded-step", "optimal:late-gather", "ddp:SIZE_MIB", "dear:MIB", "megatron:MIB",
            "wire:DTYPE", "lowrank:RANK", "slgs:DENSITY", "lags:MAX_RATIO", "joint:MAX_RATIO", "hitopk:DENSITY",
            "naive_all_gather:DENSITY", "ssd:STEPS", "lap:UPDATERS", "lpp:UPDATERS", "l_sgd:STEPS", "pl_sgd:STEPS",
        )  # fmt: skip
        known = ", ".join([*STRATEGIES, *arguments])
        raise InputError(f"found the strategy {strategy!r}, expected one of: {known}")
    return STRATEGIES[name](problem, argument if colon else None)
