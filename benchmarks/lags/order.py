"""Dense > SLGS > LAGS, as Table 2 of LAGS-SGD has it: steps of three models, simulated on the networks of its authors.

The paper compares one ratio in every layer, 1000; its seconds are not in any copy that we have, so that only the order
is compared. Eq. 19 may send more elements than that, and then takes longer where a message slows backward down.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.lags.bound import layer_wise
from planner.decide.strategies import make_schedule
from planner.documents.catalog import find_cluster, find_profile
from planner.ir import Schedule
from planner.model.modes import step_us
from planner.model.problem import Problem, make_problem
from planner.search.lags import DEFAULT_BUFFER, fill_buffers

MODELS = ("resnet50", "vgg16", "inception-v4")
CLUSTERS = ("v100-4x4-10gbe", "p102-1gbe")
RANKS = 16
DENSITY = 0.001


@dataclass(frozen=True)
class Setting:
    """Steps of one model on one network, in milliseconds."""

    model: str
    cluster: str
    dense: float
    slgs: float
    by_layer: float
    """The ratio in every layer, a message a layer."""
    buffered: float
    """The same elements, merged by the buffer."""
    eq19: float
    """Ratios by Eq. 19, merged by the buffer."""

    @property
    def as_published(self) -> bool:
        """Whether steps are in the order of the paper's Table 2."""
        return self.dense > self.slgs > self.buffered


def settings(clusters: Sequence[str] = CLUSTERS) -> Iterator[Setting]:
    """Simulate the settings of each cluster."""
    for cluster in clusters:
        for model in MODELS:
            problem = make_problem(find_profile(model), find_cluster(cluster), RANKS)
            alone = layer_wise(problem, DENSITY)
            yield Setting(
                model,
                cluster,
                _ms(problem, make_schedule(problem, "optimal")),
                _ms(problem, make_schedule(problem, f"slgs:{DENSITY}")),
                _ms(problem, alone),
                _ms(problem, fill_buffers(problem, alone, DEFAULT_BUFFER)),
                _ms(problem, make_schedule(problem, f"lags:{1 / DENSITY:g}")),
            )


def _ms(problem: Problem, schedule: Schedule) -> float:
    return step_us(problem, schedule) / 1e3


def lines(rows: Iterator[Setting]) -> Iterator[str]:
    """One row per setting."""
    yield (
        "| 16 ranks | best exact plan | SLGS | 1/1000 of each layer, no buffer | buffer of 2048 elements | buffer / "
        "SLGS | Eq. 19 with the buffer / SLGS |"
    )
    yield "| --- " + "| --: " * 6 + "|"
    for row in rows:
        times = " | ".join(f"{value:,.1f}" for value in (row.dense, row.slgs, row.by_layer, row.buffered))
        shares = f"{row.buffered / row.slgs:.2f} | {row.eq19 / row.slgs:.2f}"
        yield f"| {row.model}, {row.cluster} | {times} | {shares} |"
