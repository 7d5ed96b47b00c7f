"""Contestants of `planner compare --learn`: its options, who learns, and their steps on another cluster. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from planner.comparison.variants import (
    DDP,
    DDP_AGAIN,
    EQUAL_SHARES,
    NO_COMMUNICATION,
    PLAN,
    BucketVariant,
    make_lineup,
)
from planner.decide.strategies import make_schedule
from planner.documents.catalog import find_cluster
from planner.documents.profile import Profile
from planner.emit.lower import predict
from planner.emit.read_back import schedule_of
from planner.model.problem import Problem, make_problem
from runtime.errors import InputError
from runtime.plan import Plan, check_has_buckets
from runtime.plan.document import split_phase
from runtime.plan.files import check_output

MARGIN_PERCENT, SEEDS = 0.5, 3
MAX_SEEDS, MAX_STEPS = 1000, 10**9
LEAST_STEPS = 10
"""Fewest steps, of which the last tenth counts."""
CYCLES = 3
"""Fewest periods of a delay or of outer steps that are trained."""


@dataclass(frozen=True, kw_only=True)
class Learn:
    """The options of `--learn`."""

    steps: int
    seeds: int = SEEDS
    margin_percent: float = MARGIN_PERCENT
    on: str | None = None
    """Cluster for whose predicted steps times are shown; None: steps as measured."""
    start: str | None = None
    """File of a checkpoint that training begins from; None: the job's own start."""

    def __post_init__(self) -> None:
        """Raise InputError for numbers that nothing can be learnt with."""
        if not (isinstance(self.steps, int) and LEAST_STEPS <= self.steps <= MAX_STEPS):
            raise InputError(
                f"--learn: found {self.steps!r} steps, expected at least {LEAST_STEPS} and at most {MAX_STEPS}: the "
                f"last tenth of them counts; correct it"
            )
        if not (isinstance(self.seeds, int) and 1 <= self.seeds <= MAX_SEEDS):
            raise InputError(
                f"--seeds: found {self.seeds!r}, expected at least 1 and at most {MAX_SEEDS}; an interval takes at "
                f"least 2: correct it"
            )
        if not (isinstance(self.margin_percent, int | float) and 0.0 < self.margin_percent < 100.0):
            raise InputError(
                f"--margin: found {self.margin_percent!r}, expected a percentage of DDP's last loss above 0 and below "
                f"100; correct it"
            )

    @property
    def margin(self) -> float:
        """Return the margin as a share."""
        return self.margin_percent / 100.0


def make_contestants(
    plans: Mapping[str, Plan], problem: Problem | None, strategies: Sequence[str], steps: int | None = None, *,
    begun: bool = False,
) -> list[BucketVariant]:  # fmt: skip
    """Return what learns: DDP, DDP with sums in another order, further strategies and the plans, by name; each for
    `steps` that begin with a run, or (`begun`) behind the exact first ones of plans.

    Raises:
        InputError: as `make_lineup`; plans are for different numbers of ranks, or few steps follow exact ones.
    """
    ranks = {name: plan.world.ranks for name, plan in plans.items()}
    if len({*ranks.values()}) > 1:
        raise InputError(
            f"--plan: found plans for {' and '.join(map(str, sorted({*ranks.values()})))} ranks, expected all for one "
            f"number of ranks; compare those of each number by themselves"
        )
    totals = {name: sum((plan.shares or {}).values()) for name, plan in plans.items()}
    if len({*totals.values()}) > 1:
        named = ", ".join(f"{total or 'none'} in {name}" for name, total in totals.items())
        raise InputError(
            f"--plan: found shares of unlike batches ({named}), expected as many samples in all, or none; compare them "
            f"by themselves"
        )
    found: dict[str, BucketVariant] = {}
    for name, plan in plans.items():
        for variant in make_lineup(plan, problem, strategies, hooks=()).variants:
            if variant.name not in (NO_COMMUNICATION, EQUAL_SHARES):
                named = name if variant.name == PLAN else variant.name
                found.setdefault(named, variant.renamed(named))
        again = BucketVariant(name=DDP_AGAIN, kind="ddp", hook="rounding", exact=False, shares=found[DDP].shares)
        found.setdefault(DDP_AGAIN, again)
    if begun:
        found = {name: one.steady for name, one in found.items()}
    for name, one in found.items():
        _check_steps(name, one, steps)
    first = (DDP, DDP_AGAIN)
    return [*(found[name] for name in first), *(one for name, one in found.items() if name not in first)]


def _check_steps(name: str, variant: BucketVariant, steps: int | None) -> None:
    """Raise InputError where too few of the steps are behind the exact ones that a plan begins with."""
    exact = 0 if variant.plan is None else variant.plan.first_steps
    least = max(-(-10 * exact // 9), exact + CYCLES * variant.cycle)
    if steps is None or steps >= least:
        return
    begins, repeats = f"begins with {exact} exact ones", f"repeats every {variant.cycle}"
    why = " and ".join([begins] * bool(exact) + [repeats] * bool(variant.cycle))
    raise InputError(
        f"--learn: found {steps} steps, expected at least {least} for {name}, which {why}: the last tenth and "
        f"{CYCLES} periods have to be behind those; train more, or begin there, by a checkpoint (--from) or in a "
        f"script that has made steps"
    )


def check_keeps(path: str, plan: Plan) -> None:
    """Raise InputError where a plan's file cannot keep what is measured of it: it has no buckets of its own, is one
    phase of a plan, or cannot be written.
    """
    check_has_buckets(plan, path, "compare it without --learn")
    if split_phase(path)[1] is not None:
        raise InputError(
            f"--learn: found {path}, one phase of a plan, expected a plan with a file of its own, which is to keep "
            f"what is measured; compare it without --learn"
        )
    check_output(path)


def named_plans(paths: Sequence[str], plans: Sequence[Plan]) -> dict[str, Plan]:
    """Return plans by name: `plan` where there is one, otherwise the paths of their files.

    Raises InputError where a file is named twice.
    """
    if twice := next((path for path in paths if paths.count(path) > 1), None):
        raise InputError(f"--plan: found {twice} twice, expected each plan once; leave one out")
    return {PLAN: plans[0]} if len(plans) == 1 else dict(zip(paths, plans, strict=True))


def predicted_on(
    cluster: str | None, profile: Profile | None, contestants: Sequence[BucketVariant]
) -> dict[str, float] | None:
    """Return the predicted step of each contestant on a named cluster, in µs; None without one.

    Raises:
        InputError: there is no such cluster, no profile, or a plan's step there cannot be predicted.
    """
    if cluster is None:
        return None
    if profile is None:
        raise InputError("--on: found no profile, expected that of the plan: add --profile profile.json")
    problem = make_problem(profile, find_cluster(cluster), where=cluster)
    found = {}
    for one in contestants:
        if one.plan is not None and one.given:
            schedule = schedule_of(problem, one.plan)
        else:
            schedule = make_schedule(problem, DDP if one.kind == "ddp" else one.name)
        found[one.name] = predict(problem, schedule).iteration_us
    return found
