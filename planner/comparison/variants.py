"""The variants of a comparison: no communication, DDP as its users tune it, strategies and the plan. Torch-free.

Wrappings for FSDP2 are in `planner.comparison.wrappings`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self

from planner.decide.strategies import make_schedule, problem_of
from planner.emit.lower import lower
from planner.model.problem import Problem
from planner.model.regions import with_cuts
from planner.strategies.baselines import CAPS_MIB, ddp_buckets
from runtime.errors import InputError
from runtime.plan import Plan
from runtime.plan.predicted import Prediction

Hook = Literal["fp16", "powersgd", "rounding"]

HOOKS: tuple[Hook, ...] = ("fp16", "powersgd")
"""DDP's own communication hooks that are tried: gradients as float16, and PowerSGD of rank 1."""

NO_COMMUNICATION, DDP, BEST_DDP, PLAN = "none", "ddp", "ddp:best", "plan"
EQUAL_SHARES = "plan:equal"
"""The plan for equal shares of the batch, where the plan has others."""
DDP_AGAIN = "ddp:order"
"""DDP whose sums are rounded as in another order: each averaged element is one unit in the last place larger, smaller,
or the same, at random (hook `rounding`). On two ranks no order changes a sum, and over NCCL the library chooses it."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to train that is compared, whichever library executes it."""

    name: str
    predicted_us: float | None = None
    """Predicted time of a step, in microseconds."""

    def renamed(self, name: str) -> Self:
        """Return the variant under another name."""
        return replace(self, name=name)

    @property
    def parts(self) -> int | None:
        """Number of buckets or groups, if it is known."""
        return None

    @property
    def together(self) -> bool:
        """Return whether ranks wait for each other in each step."""
        return True


@dataclass(frozen=True, kw_only=True)
class BucketVariant(Variant):
    """One way to train a job whose gradients are sent in buckets, or not at all."""

    kind: Literal["no_communication", "ddp", "plan"]
    cap_mib: float | None = None
    """DDP's `bucket_cap_mb`; None is its default."""
    hook: Hook | None = None
    plan: Plan | None = None
    """The attached plan; for plain DDP its buckets, if they are known, so that they can be sent alone."""
    exact: bool = True
    """Whether its gradients are DDP's, so that its losses have to be."""
    given: bool = False
    """Whether its plan is a file of the user's, in place of a strategy's."""
    shares: Mapping[str, int] | None = None
    """Samples of each rank in a step, by rank; None: batches are as the job has them."""

    @property
    def predicted(self) -> Prediction | None:
        """Return the prediction of its plan."""
        return None if self.plan is None else self.plan.predicted

    @property
    def parts(self) -> int | None:
        """Number of buckets, if it is known."""
        return None if self.plan is None else len(self.plan.buckets)

    @property
    def together(self) -> bool:
        """Return whether ranks wait for each other in each step."""
        return self.kind != "no_communication"

    @property
    def plain_ddp(self) -> bool:
        """Return whether it is DDP without a hook, with any buckets."""
        return self.kind == "ddp" and self.hook is None

    @property
    def cycle(self) -> int:
        """Return the number of steps after which its steps repeat: k of a delay, H of outer steps; else 0."""
        if self.plan is None:
            return 0
        delay, outer = self.plan.delay, self.plan.outer
        return outer.every if outer is not None else delay.steps if delay is not None else 0

    @property
    def least_warm_up(self) -> int:
        """Number of steps that cannot count.

        If steps wait for messages of earlier ones, the first one waits for nothing, and the second for less, because
        the first one's weights are compared with DDP's.
        """
        if self.plan is not None and self.plan.outer is not None:
            return max(2, 1 + self.plan.outer.delay_steps)  # from then on rounds of the period before arrive
        return 2 if self.cycle or (self.plan is not None and self.plan.gathers is not None) else 1

    @property
    def steady(self) -> BucketVariant:
        """Return the variant without the exact or synchronous first steps of its plan, which are not measured."""
        return self if self.plan is None else replace(self, plan=self.plan.without_first_steps())

    def whole_cycles(self, steps: int) -> int:
        """Return at least this number of steps, as whole cycles."""
        return -(-steps // self.cycle) * self.cycle if self.cycle else steps


@dataclass(frozen=True)
class Lineup:
    """The variants with buckets that are compared."""

    variants: Sequence[BucketVariant]
    """All but DDP's best bucket size, which is found by measuring; the first is the no-communication baseline."""
    caps: Sequence[tuple[float, BucketVariant]] = ()
    """DDP's bucket sizes to try, in MiB, each with the variant that takes part if it is the best."""


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """The interleaved rounds of a comparison, each with one block of steps of every variant."""

    count: int
    steps: int
    """Measured steps of a block."""
    end_s: float = math.inf
    """Wall-clock time (`time.time`) by which rounds end: none begins that would be late, but for `LEAST_ROUNDS`."""
    clear: tuple[str, str] | None = None
    """Names of two variants: no more rounds once their ratio is known well enough (`Interval.telling_rounds`)."""
    brief: Collection[str] = ()
    """Names of variants whose steps are so slow that they take part in the fewest rounds, with one measured step, or
    cycle, in each."""


def make_lineup(
    plan: Plan, problem: Problem | None, strategies: Sequence[str], hooks: Sequence[Hook] = HOOKS
) -> Lineup:
    """Return the variants that are compared with a plan.

    Args:
        plan: to judge.
        problem: the profile on its cluster, for predictions and strategies.
        strategies: further ones, by name.
        hooks: of DDP, that are tried.

    Raises:
        InputError: strategies without a profile, an unknown strategy, or a profile of another model or world; local
            updaters, which take no part.
    """
    _refuse_updaters("--plan", plan)
    if problem is None and strategies:
        raise InputError(
            f"--strategy {','.join(strategies)}: found no profile to make them from; expected --profile profile.json"
        )
    if problem is not None:
        problem = with_cuts(problem, plan.cuts or ())
        names = {gradient.name for gradient in problem.profile.compute.gradients}
        if odd := sorted(names ^ set(plan.gradients)):
            raise InputError(
                f"--profile: found gradients that are not the plan's, the first {odd[0]}; expected the profile that "
                f"the plan was made from"
            )
        if problem.ranks != plan.world.ranks:
            raise InputError(
                f"--profile: found a cluster of {problem.ranks} ranks, expected the plan's {plan.world.ranks}; give "
                f"the profile that the plan was made from"
            )
    baseline = BucketVariant(name=NO_COMMUNICATION, kind="no_communication", predicted_us=_compute_us(plan, problem))
    found = [baseline, of_ddp(DDP, None, plan, problem)]
    found += [BucketVariant(name=f"ddp:{hook}", kind="ddp", hook=hook, exact=False) for hook in hooks]
    for name in strategies:
        assert problem is not None
        made = lower(problem, make_schedule(problem, name))
        _refuse_updaters(f"--strategy {name}", made)
        found.append(_of_plan(name, made))
    caps = [(cap, of_ddp(f"{BEST_DDP}({cap:g} MiB)", cap, plan, problem)) for cap in CAPS_MIB]
    given = replace(_of_plan(PLAN, plan), given=True)
    if plan.shares is None:
        return Lineup([*found, given], caps)
    equal = _equal_shares(plan.shares)
    baseline, *others = [*found, _of_plan(EQUAL_SHARES, plan)]
    equals = [replace(one, shares=equal, predicted_us=None) for one in others]  # predictions are of the plan's shares
    # Each rank's masks and statistics are of other samples than DDP's: `EQUAL_SHARES` is held against it.
    shared = replace(given, shares=plan.shares, exact=False)
    lineup = [replace(baseline, shares=plan.shares), *equals, shared]
    return Lineup(lineup, [(cap, replace(one, shares=equal, predicted_us=None)) for cap, one in caps])


def _equal_shares(shares: Mapping[str, int]) -> dict[str, int]:
    """Return equal shares of as many samples. Raises InputError: there are none."""
    total, ranks = sum(shares.values()), len(shares)
    if total % ranks:
        raise InputError(
            f"--plan: found shares of {total} samples, which {ranks} ranks of DDP cannot have equally; expected a "
            f"multiple of {ranks}: plan with --global-batch {total - total % ranks or ranks}"
        )
    return dict.fromkeys(shares, total // ranks)


def _of_plan(name: str, plan: Plan) -> BucketVariant:
    predicted_us = plan.predicted.iteration_us if plan.predicted else None
    return BucketVariant(name=name, kind="plan", plan=plan, predicted_us=predicted_us, exact=plan.accuracy == "exact")


def _refuse_updaters(option: str, plan: Plan) -> None:
    """Raise InputError for local updaters: variants train in interleaved blocks in the ranks' own processes."""
    if plan.local_async is not None:
        raise InputError(
            f"{option}: found local updaters (local_async), whose steps cannot be interleaved with others; expected a "
            f"plan whose ranks train in their own processes: compare one made without --accuracy relaxed, and see with "
            f"`planner run` what local updaters get done"
        )


def of_ddp(name: str, cap_mib: float | None, plan: Plan, problem: Problem | None) -> BucketVariant:
    """Return plain DDP with a bucket size, with its prediction if there is one."""
    made = None
    if problem is not None:
        strategy = "ddp" if cap_mib is None else f"ddp:{cap_mib:g}"
        there = problem_of(problem, strategy)
        made = lower(there, make_schedule(there, strategy))
    predicted = made.predicted if made else (plan.baselines or {}).get("ddp") if cap_mib is None else None
    predicted_us = predicted.iteration_us if predicted else None
    return BucketVariant(name=name, kind="ddp", cap_mib=cap_mib, plan=made, predicted_us=predicted_us)


def cut_as(variant: BucketVariant, problem: Problem) -> Problem:
    """Return the step with a compiled graph cut as a variant has it; itself where the model is not compiled."""
    if variant.kind == "ddp":
        return problem_of(problem, DDP if variant.cap_mib is None else f"{DDP}:{variant.cap_mib:g}")
    return with_cuts(problem, () if variant.plan is None else variant.plan.cuts or ())


def distinct_caps(sizes_bytes: Sequence[int], dtypes: Sequence[int], caps_mib: Sequence[float]) -> list[float]:
    """Return those of DDP's bucket sizes whose buckets differ from its default's and from those of earlier sizes.

    Gradients are in the order in which DDP lays them out, equal dtypes equal numbers.
    """
    seen = [ddp_buckets(sizes_bytes, dtypes)]
    found = []
    for cap_mib in caps_mib:
        buckets = ddp_buckets(sizes_bytes, dtypes, cap_mib)
        if buckets not in seen:
            seen.append(buckets)
            found.append(cap_mib)
    return found


def _compute_us(plan: Plan, problem: Problem | None) -> float | None:
    predicted = plan.predicted
    if problem is not None and problem.uncut is not None and not plan.sharded:  # one graph
        whole = with_cuts(problem, ())
        return whole.compute_end_us + whole.update_us
    if predicted is None or predicted.exposed_us is None:
        return None
    norms = plan.updates.norms if plan.updates else None
    alone_us = 0.0  # ranks that exchange nothing share no norms
    if norms is not None and norms.shares is not None:
        alone_us = (norms.replicated_us or 0.0) - (norms.shared_us or 0.0)
    operator = plan.updates.operator if plan.updates else None
    if operator is not None and operator.owners:
        alone_us += (operator.replicated_us or 0.0) - (operator.shared_us or 0.0)
    if plan.sharded and plan.updates and plan.updates.step:  # nor the step: each updates all weights
        updating_us = predicted.update_us or 0.0
        gathered_us = 0.0 if plan.gathers else plan.updates.step.gather_us or 0.0
        alone_us = plan.world.ranks * (updating_us - gathered_us) - updating_us
    return predicted.iteration_us - predicted.exposed_us + alone_us
