"""Gathers beside the next forward in theory: models of the catalogue on its clusters, and how long planning takes.

python -m benchmarks.two_windows                       # table by model; 1 where a target is missed
python -m benchmarks.two_windows --models resnet50 vit-l16 --clusters a100-1x8

In each cell both halves of the all-reduce are cut together (`planner.passes.late_gather`) whatever the optimizer is,
and held against their lower bound, the best exact plan without them (with a sharded step where the profile lets ranks
share it), the best threshold of DeAR and Megatron's bucket size. All of it is prediction.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from benchmarks.simulate_speed import large_profile, situations
from planner.decide.optimize import optimize
from planner.decide.strategies import make_schedule
from planner.documents.catalog import find_cluster, find_profile, names
from planner.documents.profile import OptimizerProfile, Profile, parse_cluster
from planner.model.modes import step_us
from planner.model.problem import make_problem
from planner.passes.late_gather import late_gathers
from runtime.errors import InputError

LEAST_SHARE = 0.97
"""Of the lower bound, on average."""
MOST_S = 1.5
"""Of processor time to plan 1,000 gradients, the search alone: with everything around it, baselines and a curve over
numbers of ranks included, a plan takes longer with and without."""
REPEATS = 3
ADAMW = OptimizerProfile(name="AdamW", adaptive=True, elementwise=True, holds_all=True)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One model on one cluster; steps in microseconds."""

    model: str
    cluster: str
    bound_us: float
    late_us: float
    exact_us: float
    """Of the best plan whose messages all end with the step."""
    dear_us: float
    megatron_us: float
    proven: bool

    @property
    def share(self) -> float:
        """Of the bound."""
        return self.bound_us / self.late_us if self.late_us > 0.0 else 1.0


def cells(models: Sequence[str], clusters: Sequence[str]) -> Iterator[Cell]:
    """Every model on every cluster that has several ranks and says what their messages cost."""
    for model in models:
        profile = find_profile(model)
        for cluster in clusters:
            try:
                problem = make_problem(profile, find_cluster(cluster))
                exact = make_schedule(problem, "optimal:sharded-step")
            except InputError:
                continue  # the cluster says nothing of messages, or of this model's accelerator
            if problem.ranks == 1:
                continue
            found = late_gathers(problem)
            yield Cell(
                model=model, cluster=cluster, bound_us=found.bound.step_us, late_us=step_us(problem, found.schedule),
                exact_us=step_us(problem, exact), dear_us=step_us(problem, make_schedule(problem, "dear")),
                megatron_us=step_us(problem, make_schedule(problem, "megatron")),
                proven=found.proven,
            )  # fmt: skip


def table(rows: Sequence[Cell]) -> list[str]:
    """By model: means, and the least share."""
    lines = [
        "| model | cells | share of the bound, mean | least | step over the best exact plan's | where chosen | over "
        "DeAR's | over Megatron's |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for model in [*dict.fromkeys(row.model for row in rows), "all"]:
        own = [row for row in rows if model in (row.model, "all")]
        shares = [row.share for row in own]
        gains = [row.late_us / row.exact_us for row in own]
        chosen = [gain for gain in gains if gain <= 0.98]
        over = [
            statistics.mean(row.late_us / us for row, us in zip(own, of, strict=True))
            for of in ([row.dear_us for row in own], [row.megatron_us for row in own])
        ]
        where_chosen = f"{statistics.mean(chosen):.3f} ({len(chosen)})" if chosen else "–"
        lines.append(
            f"| {model} | {len(own)} | {statistics.mean(shares):.4f} | {min(shares):.3f} "
            f"| {statistics.mean(gains):.3f} | {where_chosen} | {over[0]:.3f} | {over[1]:.3f} |"
        )
    return lines


def planning_s(profile: Profile, cluster: dict[str, object], *, search: bool) -> float:
    """Processor time of the search, or of `planner.optimize` with it; the least of some."""
    machines, times_s = parse_cluster(cluster), []
    for _ in range(REPEATS):
        problem = make_problem(profile, machines)  # a new one: what is kept of it is not there yet
        started_s = time.process_time()
        if search:
            late_gathers(problem)
        else:
            optimize(profile, machines, allow=["late-gather"])
        times_s.append(time.process_time() - started_s)
    return min(times_s)


def main() -> int:
    """Print the tables; 1 where a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=names("model"))
    parser.add_argument("--clusters", nargs="+", default=names("cluster"))
    parser.add_argument("--speed", action="store_true", help="how long planning takes, too")
    options = parser.parse_args()
    rows = []
    for row in cells(options.models, options.clusters):
        rows.append(row)
        print(f"{row.model} on {row.cluster}: {row.share:.3f} of the bound", file=sys.stderr)
    share = statistics.mean(row.share for row in rows)
    proven = sum(row.proven for row in rows)
    print("\n".join(table(rows)))
    print(f"\nOf {len(rows)} cells {proven} are proven optimal; the mean share is {share:.4f}, wanted {LEAST_SHARE:g}.")
    slowest_s = 0.0
    if options.speed:
        large = large_profile()
        large = replace(large, compute=replace(large.compute, optimizer=ADAMW))
        print(
            f"\n| {len(large.compute.gradients)} gradients | search (s) | planner.optimize (s) |\n| --- | ---: | ---: |"
        )
        for name, cluster in situations():
            search_s, all_s = (planning_s(large, cluster, search=search) for search in (True, False))
            slowest_s = max(slowest_s, search_s)
            print(f"| {name} | {search_s:.2f} | {all_s:.2f} |")
        print(f"\nThe search takes {slowest_s:.2f} s at most, wanted {MOST_S:g}.")
    return int(share < LEAST_SHARE or slowest_s > MOST_S)


if __name__ == "__main__":
    sys.exit(main())
