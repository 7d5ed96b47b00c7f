"""`planner.simulate`: predicted step times of strategies on a cluster, over numbers of ranks. Never imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from planner.decide import name_of
from planner.lower import predict
from planner.problem import make_problem
from planner.profile.document import Cluster, Profile, load_cluster, load_profile
from planner.strategies import make_schedule
from planner.verify import verify

DEFAULT_STRATEGIES = ("wfbp", "wfbp:layer", "single", "mg_wfbp", "ddp", "optimal")


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """One strategy on one number of ranks."""

    strategy: str
    ranks: int
    iteration_us: float
    exposed_us: float
    forward_us: float
    backward_us: float
    update_us: float
    buckets: int
    extrapolated: bool
    cost_source: str

    def to_document(self) -> dict[str, Any]:
        """The record as plain JSON types."""
        return asdict(self)


def simulate(
    profile: Profile | str | Path,
    cluster: Cluster | str | Path | None = None,
    *,
    strategies: Sequence[str] = DEFAULT_STRATEGIES,
    ranks: Sequence[int] | None = None,
) -> list[Simulation]:
    """Predicts the step of each strategy on each number of ranks.

    Args:
        profile: a profile, or the path of profile.json.
        cluster: a cluster, or the path of cluster.json; default: the one measured with the profile.
        strategies: names such as `wfbp`, `wfbp:layer`, `single`, `mg_wfbp`, `ddp`, `ddp:SIZE_MIB`, `optimal`.
        ranks: numbers of ranks; default: the cluster's.

    Returns:
        One record per (ranks, strategy), in the order given.

    Raises:
        InputError: a document is wrong, there is no cluster, a strategy is unknown, or ranks do not fill nodes.
    """
    loaded = profile if isinstance(profile, Profile) else load_profile(profile)
    machines = cluster if cluster is None or isinstance(cluster, Cluster) else load_cluster(cluster)
    results = []
    for count in ranks or (None,):
        problem = make_problem(loaded, machines, count, where=name_of(cluster or profile))
        for strategy in strategies:
            schedule = make_schedule(problem, strategy)
            verify(schedule, problem.dtype_ids.tolist())
            prediction = predict(problem, schedule)
            results.append(
                Simulation(
                    strategy=strategy,
                    ranks=problem.ranks,
                    iteration_us=prediction.iteration_us,
                    exposed_us=prediction.exposed_us or 0.0,
                    forward_us=problem.forward_us,
                    backward_us=problem.backward_us,
                    update_us=problem.update_us,
                    buckets=len(schedule.buckets),
                    extrapolated=problem.cost.extrapolated,
                    cost_source=problem.cost.source,
                )
            )
    return results
