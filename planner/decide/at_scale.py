"""Predictions at scale: models on up to thousands of a cluster's machines, with jitter, stragglers and failures.

A synchronous step is as slow as its slowest rank. With F the distribution of one rank's compute time, F^N is that of
the slowest of N, so that quantiles need no drawing. Failures cost as Young and Daly have it: with a mean time M between
failures of the whole job and checkpoints that take δ, one each √(2δM) is best, and a failure loses half of that and the
restart. Never imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

from planner.decide.advise import ComputedWith, advice_on, with_accelerator
from planner.documents.catalog import find_cluster, find_profile
from planner.documents.profile import Cluster, Profile
from planner.model.problem import make_problem
from runtime.errors import InputError
from runtime.plan.strict_json import MAX_RANKS

DEFAULT_RANKS = (8, 64, 128, 512, 1024, 4096, 8192, 16384)
"""Numbers of ranks that are looked at besides the cluster's own."""
MTBF_HOURS = 50_676.0
"""Mean time between failures of one accelerator with its share of the machine: 419 unexpected interruptions of 16,384
H100 in 54 days (Llama 3, Grattafiori et al. 2024, Section 3.3.4)."""
_NORMAL = NormalDist()


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """Departures from the profile; the defaults change nothing but for failures."""

    jitter: float = 0.0
    """Standard deviation of the logarithm of a rank's compute time from step to step."""
    slow_share: float = 0.0
    """Share of ranks that are slow in a step."""
    slow_factor: float = 1.0
    """Slow-down factor of slow ranks."""
    mtbf_hours: float = MTBF_HOURS
    """Mean time between failures of one accelerator; infinite: nothing fails."""
    checkpoint_s: float = 60.0
    restart_s: float = 600.0

    def __post_init__(self) -> None:
        for name, low, high in (
            ("jitter", 0.0, 1.0), ("slow_share", 0.0, 1.0), ("slow_factor", 1.0, 1000.0), ("checkpoint_s", 0.0, 1e6),
            ("restart_s", 0.0, 1e6),
        ):  # fmt: skip
            value = getattr(self, name)
            if not low <= value <= high:
                raise InputError(f"{name}: found {value}, expected between {low:g} and {high:g}; correct it")
        if not self.mtbf_hours > 0.0:
            raise InputError(f"mtbf_hours: found {self.mtbf_hours}, expected more than 0; correct it")

    def slowest(self, ranks: int, quantile: float) -> float:
        """Return the slow-down of the slowest of some ranks against the profile, at a quantile of steps.

        >>> Scenario().slowest(1024, 0.5)
        1.0
        >>> Scenario(slow_share=0.001, slow_factor=1.2).slowest(16384, 0.5)
        1.2
        """
        if not self.jitter:
            # Some rank is slow in all but (1 − p)^N of the steps.
            some = 1.0 - (1.0 - self.slow_share) ** ranks
            return self.slow_factor if some > 1.0 - quantile else 1.0
        target = math.log(quantile) / ranks
        low, high = -20.0 * self.jitter, 20.0 * self.jitter + math.log(self.slow_factor)
        for _ in range(60):
            middle = (low + high) / 2.0
            usual = _NORMAL.cdf(middle / self.jitter)
            slow = _NORMAL.cdf((middle - math.log(self.slow_factor)) / self.jitter)
            both = (1.0 - self.slow_share) * usual + self.slow_share * slow
            low, high = (middle, high) if both <= 0.0 or math.log(both) < target else (low, middle)
        return math.exp(high)

    def goodput(self, ranks: int) -> float:
        """Return the share of time that is not lost to checkpoints and failures.

        >>> Scenario(mtbf_hours=float("inf")).goodput(16384)
        1.0
        """
        between_s = self.mtbf_hours * 3600.0 / ranks
        if math.isinf(between_s):
            return 1.0
        every_s = max(math.sqrt(2.0 * self.checkpoint_s * between_s), self.checkpoint_s)
        if not every_s:
            return 1.0 / (1.0 + self.restart_s / between_s)
        return 1.0 / (1.0 + self.checkpoint_s / every_s + (every_s / 2.0 + self.restart_s) / between_s)


@dataclass(frozen=True, kw_only=True)
class ScalePoint:
    """One model on a number of ranks of one cluster's machines."""

    model: str
    cluster: str
    ranks: int
    strategy: str
    """The option that `advise` would use there."""
    computed_with: ComputedWith
    fits: bool | None
    step_us: float
    """Step as profiled, without stragglers."""
    median_us: float
    p99_us: float
    """Quantiles of the step with jitter and stragglers."""
    compute_us: float
    efficiency: float
    """Compute of a rank alone over the median step."""
    goodput: float
    """Share of time that is left after failures and checkpoints."""
    samples_per_s: float | None
    """Throughput of all ranks, with both; None where the batch is not known."""
    cost_source: str

    def to_document(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return asdict(self)


def sweep(
    models: Sequence[Profile | str | Path], clusters: Sequence[Cluster | str | Path],
    ranks: Sequence[int] | None = None, scenario: Scenario | None = None, accelerator: str | None = None,
) -> list[ScalePoint]:  # fmt: skip
    """Predict every model on every cluster's machines, each by the way that `advise` would use there.

    Args:
        models: profiles, paths or names.
        clusters: clusters, paths or names; each must say what messages cost on other numbers of ranks.
        ranks: how many; those that do not fill whole nodes are rounded up to ones that do. Default: `DEFAULT_RANKS` and
            the cluster's own.
        scenario: jitter, stragglers and failures.
        accelerator: the clusters', where they do not name it.

    Raises:
        InputError: a document is wrong, a number of ranks is none, costs are not known, or it cannot be known how long
            a model computes on a cluster's accelerators.
    """
    if not models or not clusters or (ranks is not None and not ranks):
        raise InputError("found no model, cluster or number of ranks; expected at least one of each")
    for count in ranks or ():
        if not 1 <= count <= MAX_RANKS:
            raise InputError(f"ranks: found {count}, expected between 1 and {MAX_RANKS}; correct it")
    change = scenario or Scenario()
    profiles = [find_profile(model) for model in models]
    points = []
    for given in clusters:
        cluster = with_accelerator(find_cluster(given), accelerator)
        counts = sorted({*DEFAULT_RANKS, cluster.ranks}) if ranks is None else ranks
        for count in dict.fromkeys(_filled(cluster, count) for count in counts):
            points += [_point(profile, cluster, count, change) for profile in profiles]
    return points


def _filled(cluster: Cluster, ranks: int) -> int:
    per_node = cluster.ranks_per_node
    return ranks if ranks <= per_node else -(-ranks // per_node) * per_node


def _point(profile: Profile, cluster: Cluster, ranks: int, change: Scenario) -> ScalePoint:
    problem = make_problem(profile, cluster, ranks, where=cluster.name or "cluster")
    advice = advice_on(profile, problem, brief=True)
    chosen = advice.chosen
    step_us, compute_us = chosen.iteration_us, chosen.iteration_us - chosen.exposed_us
    slow = [change.slowest(ranks, quantile) for quantile in (0.5, 0.99)]
    # What waits for the slowest rank is compute; messages take as long as they did.
    median_us, p99_us = (step_us + (factor - 1.0) * compute_us for factor in slow)
    goodput, batch = change.goodput(ranks), profile.world.batch_per_rank
    return ScalePoint(
        model=advice.model, cluster=advice.cluster, ranks=ranks, strategy=chosen.name,
        computed_with=advice.computed_with, fits=chosen.fits, step_us=step_us, median_us=median_us, p99_us=p99_us,
        compute_us=compute_us, efficiency=compute_us / median_us if median_us else 1.0, goodput=goodput,
        samples_per_s=None if batch is None or not median_us else batch * ranks / median_us * 1e6 * goodput,
        cost_source=advice.cost_source,
    )  # fmt: skip


def curves(points: Sequence[ScalePoint]) -> Iterator[tuple[str, str, list[ScalePoint]]]:
    """Yield model, cluster and the points of each model on each cluster, by ranks."""
    for model, cluster in dict.fromkeys((point.model, point.cluster) for point in points):
        these = [point for point in points if (point.model, point.cluster) == (model, cluster)]
        yield model, cluster, sorted(these, key=lambda point: point.ranks)
