"""What all comparisons share: the data folder, names of methods, predictions, and fits that say what they saw."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path

from benchmarks.traces import by_tensor, read_csv
from planner.decide.strategies import make_schedule
from planner.documents.catalog import find_profile
from planner.documents.profile import Cluster, Line, Profile
from planner.ir import Schedule
from planner.model.modes import simulate_schedule
from planner.model.problem import make_problem

DATA = Path(__file__).resolve().parents[2] / "tests" / "data"

STRATEGY = {
    "WFBP": "wfbp:layer",
    "WFBP-A2A": "wfbp",
    "SyncEASGD": "single",
    "BSP-A2A": "single",
    "MG-WFBP": "mg_wfbp",
}
"""What publications call a method → our strategy. WFBP is one message per layer in MG-WFBP's papers; the code of
ddl-benchmarks sends one per tensor."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One published figure beside ours."""

    what: str
    """The cell of the table: model, machines, quantity."""
    published: float
    ours: float
    unit: str = "s"
    method: str = ""
    """Which of the methods that share the cell."""
    by_construction: bool = False
    """Whether ours is computed from the published figure, or from what that was computed from: it predicts nothing."""

    @property
    def name(self) -> str:
        return f"{self.what}, {self.method}" if self.method else self.what

    @property
    def ratio(self) -> float:
        return self.ours / self.published

    @property
    def error(self) -> float:
        """|ours / published − 1|."""
        return abs(self.ratio - 1.0)


@cache
def table(name: str) -> tuple[dict[str, str], ...]:
    """The lines of a CSV file of `tests/data`."""
    return tuple(read_csv(DATA / name))


@cache
def model(name: str) -> Profile:
    """A model of the catalogue."""
    return find_profile(name)


def schedule_of(profile: Profile, method: str, believed: Cluster, ranks: int | None = None) -> Schedule:
    """The buckets of a published method.

    MG-WFBP merges as its released code does: tensors and not layers, by what that code believed the network to cost,
    which is not always what it did cost. The other methods do not depend on the network.
    """
    if method == "MG-WFBP":
        profile = by_tensor(profile)
    return make_schedule(make_problem(profile, believed, ranks), STRATEGY[method])


def simulate_s(profile: Profile, cluster: Cluster, schedule: Schedule, ranks: int | None = None) -> float:
    """Predicted seconds of one step of a schedule."""
    return simulate_schedule(make_problem(profile, cluster, ranks), schedule).iteration_us / 1e6


def predict_s(profile: Profile, cluster: Cluster, strategy: str, ranks: int | None = None) -> float:
    """Predicted seconds of one step of a strategy that knows the cluster as it is."""
    problem = make_problem(profile, cluster, ranks)
    return simulate_schedule(problem, make_schedule(problem, strategy)).iteration_us / 1e6


@cache
def authors_line(network: str, workers: int) -> Line:
    """The all-reduce line in the released code of MG-WFBP (and, for 32 workers, of its successor by one author)."""
    entries = json.loads((DATA / "mgwfbp_tpds/alpha_beta.json").read_text(encoding="utf-8"))
    [first, *_] = [
        entry
        for entry in entries
        if (entry["collective"], entry["network"], entry["workers"]) == ("all_reduce", network, workers)
    ]
    return Line(
        alpha_us=round(first["alpha_s"] * 1e6, 3), beta_us_per_byte=float(f"{first['beta_s_per_byte'] * 1e6:.4g}")
    )


def mean_log_error(comparisons: Iterable[Comparison]) -> float:
    """Mean of |log(ours / published)|: too slow and too fast by a factor count alike, and one bad row counts once."""
    logs = [abs(math.log(comparison.ratio)) for comparison in comparisons]
    return sum(logs) / len(logs)


def descend(loss: Callable[..., float], dimensions: int, stride: int = 16) -> tuple[int, ...]:
    """The integers where `loss` is least, by descent to the best neighbour with ever smaller strides.

    Integers and rounded losses, so that the answer is the same on every platform.
    """
    memory: dict[tuple[int, ...], float] = {}

    def known(point: tuple[int, ...]) -> float:
        if point not in memory:
            memory[point] = round(loss(*point), 7)
        return memory[point]

    best = (0,) * dimensions
    while stride:
        steps = sorted(product((0, -stride, stride), repeat=dimensions), key=lambda step: sum(map(abs, step)))
        nearest = min((tuple(map(sum, zip(best, step, strict=True))) for step in steps), key=known)
        best, stride = (best, stride // 2) if known(nearest) >= known(best) else (nearest, stride)
    return best


def geometric(start: float, step: int) -> float:
    """`start` times 1.02^step, to four digits."""
    return float(f"{start * 1.02**step:.4g}")


def factor(step: int) -> float:
    """A contention factor, in steps of 0.02 from 1."""
    return round(1.0 + 0.02 * max(0, step), 2)


def ordered(values: dict[str, float]) -> list[str]:
    """Names from the least to the greatest value."""
    return sorted(values, key=lambda name: values[name])
