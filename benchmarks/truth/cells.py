"""One cell: a model on a link, profiled and trained with every plan in one start of the ranks."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np

from benchmarks.steps import measure_rank
from planner.comparison.measure import Measured
from planner.comparison.report import values_by_name
from planner.comparison.statistics import median_interval, ratio_interval
from planner.comparison.variants import NO_COMMUNICATION
from planner.decide.strategies import make_schedule
from planner.documents.profile import Profile
from planner.emit.lower import predict
from planner.ir import Schedule
from planner.jobs.on_rank import profile_rank
from planner.model.problem import Problem, make_problem
from planner.profile.request import Request
from runtime.plan import Accuracy

NAMED = ("wfbp", "single", "ddp", "mg_wfbp", "optimal")
LOSSY = ("single", "ddp", "optimal", "slgs:0.001", "lags:250", "joint")
"""Plans of a cell with lossy ones, which are held against the best of the exact ones."""
DELAYED = ("single", "ddp", "optimal", "ssd:1", "ssd:2", "ssd:3", "ssd:4")
"""Plans of a cell with delay, which are held against DDP."""
CAPS = ("ddp:1", "ddp:5", "ddp:100")
"""Bucket sizes beside DDP's default, of which the best counts as tuned DDP."""
RANDOM_SEEDS = (1, 2)
USER = "user"
"""The chosen strategy's plan by the profile of a user."""


@dataclass(frozen=True)
class Cell:
    """What is trained where."""

    model: str
    hosts: int
    rate: str
    """`100mbit`, `1gbit` or `unshaped`."""
    lossy: bool = False
    """Whether lossy plans take part."""
    delayed: bool = False
    """Whether plans with delay do."""

    @property
    def foreign(self) -> bool:
        """Whether this project did not write the model."""
        return ":" in self.model

    @property
    def key(self) -> str:
        """What is measured once."""
        kind = " lossy" if self.lossy else " delayed" if self.delayed else ""
        return f"{self.model}@{self.hosts}x1@{self.rate}{kind}"

    @property
    def strategies(self) -> tuple[str, ...]:
        return LOSSY if self.lossy else DELAYED if self.delayed else (*NAMED, *CAPS)

    @property
    def accuracy(self) -> Accuracy:
        """The riskiest class of plan that takes part."""
        return "bounded" if self.lossy else "relaxed" if self.delayed else "exact"

    @property
    def chosen(self) -> str:
        """The strategy that is held against the others."""
        return "joint" if self.lossy else "ssd:4" if self.delayed else "optimal"


@dataclass(frozen=True)
class Seen:
    """One plan: predicted from the profile before and the one after, and measured between them."""

    name: str
    buckets: int
    predicted_us: float
    measured_us: float
    ci95_us: tuple[float, float]
    alone_us: float | None
    user_us: float | None = None
    """Predicted as users have it: from one profile, of a start of its own, minutes before."""

    @property
    def error(self) -> float:
        """predicted / measured − 1."""
        return self.predicted_us / self.measured_us - 1.0


@dataclass(frozen=True)
class Result:
    """A cell's figures."""

    cell: Cell
    seen: tuple[Seen, ...]
    repeat_error: float
    """How far even rounds without communication are from odd ones: no prediction can be expected to beat it."""
    profiles_apart: float
    """How far the predictions of the profile after are from those of the one before, mean over plans."""
    backward_us: float
    chosen_against_best_ddp: tuple[float, float, float]
    """Ratio of the step of `optimal` to the best DDP's, with its 95 % interval."""
    distinct_pairs: tuple[tuple[str, str], ...]
    """(faster, slower) of every two plans whose measured difference is beyond the noise."""
    user_against_best_ddp: tuple[float, float, float] | None = None
    """The same ratio of the plan that users get from their one profile."""

    def to_document(self) -> dict[str, Any]:
        """Plain JSON types."""
        return asdict(self)

    @classmethod
    def parse(cls, document: dict[str, Any]) -> Result:
        """The inverse of `to_document` after JSON."""
        user = document.get("user_against_best_ddp")
        seen = tuple(Seen(**(one | {"ci95_us": tuple(one["ci95_us"])})) for one in document["seen"])
        return cls(
            **(
                document
                | {
                    "cell": Cell(**document["cell"]),
                    "seen": seen,
                    "chosen_against_best_ddp": tuple(document["chosen_against_best_ddp"]),
                    "user_against_best_ddp": user and tuple(user),
                    "distinct_pairs": tuple(tuple(pair) for pair in document["distinct_pairs"]),
                }
            )
        )


def schedules(problem: Problem, cell: Cell, user: Profile) -> dict[str, Schedule]:
    """The plans of a cell; plans with the same buckets are measured once, under the first name.

    `user`: the profile that users would have; what they get from it is one of the plans.
    """
    made = {name: make_schedule(problem, name) for name in cell.strategies}
    made[USER] = make_schedule(make_problem(user), cell.chosen)
    for seed in () if cell.lossy or cell.delayed else RANDOM_SEEDS:
        rng = random.Random(seed)
        stops = sorted(rng.sample(range(1, problem.count), min(problem.count - 1, rng.randint(2, 8))))
        made[f"random:{seed}"] = Schedule.from_boundaries([*stops, problem.count])
    distinct: dict[str, Schedule] = {}
    for name, schedule in made.items():
        if schedule not in distinct.values():
            distinct[name] = schedule
    return distinct


@dataclass(frozen=True)
class RankCell:
    """What one rank saw."""

    before: Profile
    after: Profile
    measured: Measured


def cell_rank(spec: str, rounds: int, steps: int, cell: Cell, user: Profile, device: str = "cpu") -> RankCell:
    """Every rank calls it: profile, rounds of all plans by turns, profile."""
    seen = measure_rank(spec, partial(schedules, cell=cell, user=user), rounds, steps, device, cell.accuracy)
    after = profile_rank(spec, device, show_progress=False, request=Request(accuracy=cell.accuracy))
    return RankCell(seen.profile, after, seen.measured)


def summarize(cell: Cell, user: Profile, ranks: Sequence[RankCell]) -> Result:
    """The figures of a cell from what its ranks saw."""
    first = ranks[0]
    values = values_by_name([rank.measured for rank in ranks])
    problems = [make_problem(profile) for profile in (first.before, first.after, user)]
    made = schedules(problems[0], cell, user)
    seen, apart = [], []
    for record in first.measured.records:
        name = record.variant.name
        interval = median_interval(values[name])
        if name == NO_COMMUNICATION:
            predicted = [problem.compute_end_us + problem.update_us for problem in problems]
        else:
            predicted = [predict(problem, made[name]).iteration_us for problem in problems]
        apart.append(abs(predicted[1] / predicted[0] - 1.0))
        seen.append(
            Seen(
                name=name,
                buckets=len(made[name].buckets) if name in made else 0,
                predicted_us=float(np.mean(predicted[:2])),
                measured_us=interval.value,
                ci95_us=(interval.low, interval.high),
                alone_us=record.alone_us,
                user_us=predicted[2],
            )
        )
    # DDP as it can be tuned; or, where lossy plans take part, every exact plan that there is.
    exact = ("single", "optimal") if cell.lossy else ()
    asked = [name for name in cell.strategies if name.startswith("ddp") or name in exact]
    rivals = dict.fromkeys(_name_of(name, made, problems[0]) for name in asked)
    tuned = min(rivals, key=lambda name: float(np.median(values[name])))

    def against_tuned(name: str) -> tuple[float, float, float]:
        ratio = ratio_interval(values[name], values[tuned])
        return ratio.value, ratio.low, ratio.high

    users = make_schedule(problems[2], cell.chosen)
    bare = values[NO_COMMUNICATION]
    return Result(
        cell=cell,
        seen=tuple(seen),
        repeat_error=abs(float(np.median(bare[::2]) / np.median(bare[1::2])) - 1.0),
        profiles_apart=float(np.mean(apart)),
        backward_us=first.measured.backward_us,
        chosen_against_best_ddp=against_tuned(_name_of(cell.chosen, made, problems[0])),
        user_against_best_ddp=against_tuned(next(name for name, schedule in made.items() if schedule == users)),
        distinct_pairs=tuple(_distinct(values)),
    )


def _name_of(strategy: str, made: dict[str, Schedule], problem: Problem) -> str:
    """Under which name the strategy's buckets were measured."""
    wanted = make_schedule(problem, strategy)
    return next(name for name, schedule in made.items() if schedule == wanted)


def _distinct(values: dict[str, Any]) -> list[tuple[str, str]]:
    names = [name for name in values if name != NO_COMMUNICATION]
    pairs = []
    for index, one in enumerate(names):
        for other in names[index + 1 :]:
            ratio = ratio_interval(values[one], values[other])
            if ratio.high < 1.0:
                pairs.append((one, other))
            elif ratio.low > 1.0:
                pairs.append((other, one))
    return pairs
