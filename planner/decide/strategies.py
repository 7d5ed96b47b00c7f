"""Named strategies, as schedules that plans are compared with. `STRATEGIES` is the only list of them.

`optimal` is the best exact schedule that this planner knows, what `planner optimize` decides without options: `merge`,
begun with the best of the baselines, then `topology`, which has a choice on intra-node and inter-node links only, and
sharding of the update (all of it with `optimal:sharded-step`; with `optimal:late-gather`, weights may also be gathered
during the next forward). Strategies are predicted in some hundredths of a second: where gradients are many, all buckets
go flat or all by a torus, and `planner optimize`, which mixes them, may find better. `joint` begins with it.

`ssd:K` is SSD-SGD (arXiv 2012.05396), merged for its pushes. Local updaters (LAP-SGD, LPP-SGD) and local SGD (arXiv
1805.09767, 1808.07217): with `lap:U` and `lpp:U`, U updaters share a rank's model while models are averaged; with
`l_sgd:H` and `pl_sgd:H`, one process waits for an averaging after every H steps, from the beginning or in the second
half of training.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from planner.ir import Schedule
from planner.model.compression import MAX_RATIO
from planner.model.modes import best_of
from planner.model.modes.local_updaters import LocalUpdaters
from planner.model.operator_costs import operator_costs
from planner.model.problem import Problem
from planner.model.regions import cut_behind
from planner.passes.delay import DEFAULT_MAX_DELAY, MAX_DELAY, delayed_schedule, push_bucketings
from planner.passes.joint import Joint
from planner.passes.late_gather import LateGathers
from planner.passes.local_async import updater_schedule
from planner.passes.merge import Merge
from planner.passes.shard_updates import ShardUpdates
from planner.passes.topology import Topology
from planner.search.tables import has_two_links
from planner.strategies.baselines import by_chance, ddp, mg_wfbp, single, wfbp
from planner.strategies.decoupled import dear, megatron
from planner.strategies.diloco import diloco, outer_steps, streaming_diloco
from planner.strategies.hitopk import hitopk
from planner.strategies.low_rank import low_rank
from planner.strategies.owner_rules import OPERATOR_RULES
from planner.strategies.sparse import lags, naive_all_gather, slgs
from planner.strategies.strategy import Strategy, number, strategy, whole, whole_and_count, word
from planner.strategies.topologies import torus_2d, tree
from planner.strategies.wire import wire
from runtime.errors import InputError
from runtime.plan import MAX_UPDATERS, Accuracy
from runtime.plan.interfaces import LATE_GATHER, SHARDED_STEP

MIXED = 200
"""Number of gradients up to which each bucket has a choice of its own on intra-node and inter-node links."""


@strategy(word([SHARDED_STEP, LATE_GATHER], f"optimal, optimal:{SHARDED_STEP} or optimal:{LATE_GATHER}"))
def optimal(problem: Problem, interface: str = "") -> Schedule:
    """Return the schedule that `planner optimize` chooses among exact ones, of those that an interface allows."""
    merged = Merge().apply(best_baseline(problem), problem).schedule
    if problem.count <= MIXED or not has_two_links(problem):
        chosen = Topology().apply(merged, problem).schedule
    else:
        chosen = best_of(problem, [merged, torus_2d(problem)])
    shared = ShardUpdates(method="lpt", step="auto" if interface else "never").apply(chosen, problem).schedule
    return LateGathers().apply(shared, problem).schedule if interface == LATE_GATHER else shared


def best_baseline(problem: Problem) -> Schedule:
    """Return the shortest baseline that a plan can hold: with several dtypes DDP's buckets may interleave."""
    candidates = [wfbp(problem), wfbp(problem, "layer"), single(problem), mg_wfbp(problem)]
    return best_of(problem, candidates if problem.dtype_count > 1 else [*candidates, ddp(problem)])


@strategy(word([*OPERATOR_RULES], ", ".join(f"operators:{rule}" for rule in OPERATOR_RULES)))
def operators(problem: Problem, rule: str = "longest_first") -> Schedule:
    """Return the best buckets with operators of a matrix optimizer (Muon) by a rule: on every rank, or on owners, the
    longest first or round robin, whose results come in one message.
    """
    if problem.ranks > 1 and operator_costs(problem) is None:
        raise InputError(
            f"found the strategy operators:{rule} for a profile without operators; expected `operator` in $.compute: "
            f"`planner profile` of a job with torch.optim.Muon, say, writes it"
        )
    return replace(optimal(problem), operators=OPERATOR_RULES[rule](problem))


@strategy(number("MAX_RATIO", "times of compression", at_most=MAX_RATIO, at_least=1.0), accuracy="bounded")
def joint(problem: Problem, max_ratio: float = 0.0) -> Schedule:
    """Return buckets and their forms decided together, as `--compress all` does; with a ratio dense or sparse buckets,
    with that as the largest ratio of all but biases and norms.
    """
    compress = "sparse" if max_ratio else "all"
    return Joint(max_ratio=max_ratio, compress=compress).apply(optimal(problem), problem).schedule


@strategy(whole_and_count("STEPS:SERVERS", "steps", MAX_DELAY, "servers"), accuracy="relaxed")
def ssd(problem: Problem, setting: tuple[int, ...] = (DEFAULT_MAX_DELAY,)) -> Schedule:
    """Return a delay of some steps (SSD-SGD), by default 4; its step is the mean of the steady state.

    A second number is that of the workers that are servers, which is predicted only. Raises InputError: there are fewer
    workers.
    """
    steps, servers = (*setting, 0)[:2]
    workers = problem.ranks // problem.ranks_per_worker
    if servers > workers:
        raise InputError(
            f"found the strategy ssd with {servers} servers, expected at most {workers}, one for each worker"
        )
    return delayed_schedule(problem, steps, push_bucketings(problem), servers % workers)


USUAL_UPDATERS, USUAL_STEPS = 4, 16


@strategy(whole("UPDATERS", "updaters", at_most=MAX_UPDATERS), accuracy="relaxed")
def lap(problem: Problem, updaters: int = USUAL_UPDATERS) -> Schedule:
    """Return LAP-SGD with some updaters, by default 4; its step is what a rank takes for a minibatch."""
    return updater_schedule(problem, updaters, blocks=False)


@strategy(whole("UPDATERS", "updaters", at_most=MAX_UPDATERS), accuracy="relaxed")
def lpp(problem: Problem, updaters: int = USUAL_UPDATERS) -> Schedule:
    """Return LPP-SGD with some updaters, by default 4; blocks as `planner optimize` cuts them."""
    return updater_schedule(problem, updaters, blocks=True)


@strategy(whole("STEPS", "steps", at_most=10**6), accuracy="relaxed")
def l_sgd(problem: Problem, steps: int = USUAL_STEPS) -> Schedule:
    """Return local SGD: an averaging after every H steps, by default 16."""
    return _waiting(problem, LocalUpdaters(count=1, average_every=steps, then_every=steps, waits=True))


@strategy(whole("STEPS", "steps", at_most=10**6), accuracy="relaxed")
def pl_sgd(problem: Problem, steps: int = USUAL_STEPS) -> Schedule:
    """Return post-local SGD: averagings after every step in the first half of training, then as of `l_sgd`."""
    return _waiting(problem, LocalUpdaters(count=1, average_every=1, then_every=steps, waits=True))


@strategy()
def mb_sgd(problem: Problem) -> Schedule:
    """Return minibatch SGD, as papers about local SGD call it: the best exact schedule."""
    return optimal(problem)


def _waiting(problem: Problem, updaters: LocalUpdaters) -> Schedule:
    return Schedule(buckets=Schedule.from_boundaries([problem.count]).buckets, mode=updaters)


STRATEGIES: Mapping[str, Strategy] = {
    made.name: made
    for made in (
        ddp, dear, diloco, hitopk, joint, l_sgd, lags, lap, low_rank, lpp, mb_sgd, megatron, mg_wfbp, naive_all_gather,
        operators, optimal, outer_steps, pl_sgd, by_chance, single, slgs, ssd, streaming_diloco, torus_2d, tree, wfbp,
        wire,
    )
}  # fmt: skip
"""Registry: name → strategy. Add one here and the contract test covers it, and lists of strategies show it."""


BASELINES = ("wfbp", "single", "mg_wfbp", "ddp")
"""The strategies that every plan is compared with."""


def accuracy_of(name: str) -> Accuracy:
    """Return the class of a strategy's schedules."""
    return STRATEGIES[name.partition(":")[0]].accuracy


def make_schedule(problem: Problem, strategy: str) -> Schedule:
    """Return the schedule of a strategy by name, such as `mg_wfbp`, `wfbp:layer` or `ddp:50`.

    Raises:
        InputError: unknown name (lists the known ones) or argument.
    """
    name, colon, argument = strategy.partition(":")
    if name not in STRATEGIES:
        arguments = [usage for one in STRATEGIES.values() for usage in one.usages[1:]]
        raise InputError(f"found the strategy {strategy!r}, expected one of: {', '.join([*STRATEGIES, *arguments])}")
    return STRATEGIES[name].schedule(problem, argument if colon else None)


def problem_of(problem: Problem, strategy: str) -> Problem:
    """Return the step that a strategy trains: DDP cuts a compiled graph where its own buckets end."""
    if problem.profile.compute.compiled is None and problem.uncut is None:
        return problem
    if strategy.partition(":")[0] != ddp.name:
        return problem
    return cut_behind(problem, (bucket.gradients for bucket in make_schedule(problem, strategy).buckets))
