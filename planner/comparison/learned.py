"""`planner compare --learn`: losses of DDP and contestants over the same batches, with verdicts. Torch-free.

Each seed trains all contestants from one start. What counts is the difference of a contestant's last loss from DDP's of
the same seed, relative to it; seeds are independent, so the interval is Student's t over seeds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from planner.comparison.contestants import Learn
from planner.comparison.report import STEP, Comparison, values_by_name
from planner.comparison.statistics import Interval, median_interval
from planner.comparison.variants import DDP, DDP_AGAIN
from planner.documents.text import milliseconds, pluralize
from runtime.monitor.verdict import half_interval, t_quantile
from runtime.plan import Plan
from runtime.plan.executed import executed_digest
from runtime.plan.measured_accuracy import AccuracyMeasured, JudgedBy, LearnedFigures, LearnedVerdict

if TYPE_CHECKING:
    from planner.comparison.learning import LearnedRank

LAST_SHARE = 0.1
"""Share of the steps, the last ones, whose mean is the last loss."""
WINDOWS = 20
"""Largest number of equal parts of the steps, whose means show when a loss is reached."""
REACHED = 0.9
"""Share of the steps at which DDP has the loss that others are timed to."""
CURVE_POINTS = 100
MOST_SEEDS, MOST_LONGER = 1000, 100.0
"""Number of seeds, and times as many steps, beyond which none are suggested."""


@dataclass(frozen=True, kw_only=True)
class LearnedRow(LearnedFigures):
    """The losses of one contestant, and the verdict. Differences are relative to DDP's last loss of the same seed."""

    COLUMNS: ClassVar[tuple[str, ...]] = (
        "", "last loss", "end loss", "against DDP", "95 % interval", "DDP's own spread", "steps to DDP's loss",
        "time to it", STEP, "metric", "metric against DDP", "verdict",
    )  # fmt: skip
    LEFT: ClassVar[tuple[str, ...]] = ("", "verdict")
    HEADING: ClassVar[str] = "{steps} steps on {ranks} ranks from {rounds}, over the same batches"
    failure: ClassVar[None] = None
    equal_to: ClassVar[None] = None
    place: ClassVar[float] = 0.0
    """Sort key in tables, which keep the order of the contestants."""
    name: str
    end_loss: float | None
    """Loss of the last step, mean over ranks and seeds."""
    step_us: float
    """Step as measured, the median or the mean over periods, or as predicted for another cluster."""
    telling_seeds: int | None = None
    """Estimated number of seeds that would tell; None: these do, or none are enough."""

    def cells(self) -> dict[str, str]:
        """Return texts by column; those of some columns may be absent."""
        interval = "" if self.ci95 is None else f"{self.ci95[0]:+.2%} to {self.ci95[1]:+.2%}"
        reached = "not reached" if self.steps_to_ddp_loss is None else f"{self.steps_to_ddp_loss:.0f}"
        spread = {"DDP's own spread": f"{self.ddp_spread:.2%}"} if self.name == DDP_AGAIN else {}
        compared = {} if self.name == DDP else {
            "against DDP": "" if self.against_ddp is None else f"{self.against_ddp:+.2%}", "95 % interval": interval,
            "metric against DDP": "" if self.metric_against_ddp is None else self.metric_text, "verdict": self.verdict,
        }  # fmt: skip
        return {
            "": self.name,
            "last loss": "not finite" if self.last_loss is None else f"{self.last_loss:.4f}",
            "end loss": "not finite" if self.end_loss is None else f"{self.end_loss:.4f}",
            "steps to DDP's loss": reached,
            "time to it": "" if self.time_to_ddp_loss is None else f"{self.time_to_ddp_loss:.2f}",
            STEP: milliseconds(self.step_us),
            "metric": "" if self.metric is None else f"{self.metric:.4f}",
            **spread, **compared,
        }  # fmt: skip

    @property
    def metric_text(self) -> str:
        """Return the difference of the metric from DDP's, with its interval."""
        around = "" if self.metric_ci95 is None else " ({:+.4g} to {:+.4g})".format(*self.metric_ci95)
        return f"{self.metric_against_ddp:+.4g}{around}"


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Losses of a contestant over the steps: means of windows, over ranks; over seeds the mean and both ends."""

    steps: tuple[float, ...]
    """Middle of each window, from 1."""
    mean: tuple[float | None, ...]
    low: tuple[float | None, ...]
    high: tuple[float | None, ...]


@dataclass(frozen=True, kw_only=True)
class Learned(Comparison):
    """The results of `--learn`; `print` it."""

    rows: tuple[LearnedRow, ...]  # type: ignore[assignment]  # printed and drawn as those of other comparisons are
    learn: Learn
    curves: Mapping[str, Curve]
    estimated_s: float
    """Seconds that it was said to take before it began."""
    took_s: float

    @property
    def heading(self) -> str:
        """Return the number of ranks, steps and seeds, in words."""
        said = pluralize(self.learn.seeds, "seed")
        return LearnedRow.HEADING.format(steps=self.learn.steps, ranks=self.ranks, rounds=said)

    @property
    def closing(self) -> tuple[str, ...]:
        """Return how long it took, and what was estimated before."""
        return (f"learning took {self.took_s:.0f} s, estimated {self.estimated_s:.0f} s",)

    def measured(self, plan: Plan, name: str, job: str) -> Plan:
        """Return a plan with what its file keeps of its row."""
        row = next(row for row in self.rows if row.name == name)
        kept = AccuracyMeasured(
            job=job, margin=self.learn.margin, steps=self.learn.steps, seeds=self.learn.seeds, ranks=self.ranks,
            executed=executed_digest(plan), **{each.name: getattr(row, each.name) for each in fields(LearnedFigures)},
        )  # fmt: skip
        return replace(plan, accuracy_measured=kept)


def summarize_learned(
    ranks: Sequence[LearnedRank], learn: Learn, predicted_us: Mapping[str, float] | None = None
) -> Learned:
    """Return the comparison of what each rank saw, in order of rank.

    Args:
        ranks: records of all contestants, DDP first.
        learn: steps, seeds and margin.
        predicted_us: step of each contestant on another cluster, in µs; None: as measured here.
    """
    losses = {record.variant.name: _losses(ranks, index, learn) for index, record in enumerate(ranks[0].records)}
    times = values_by_name(ranks)
    step_us = {name: median_interval(times[name]) for name in times}
    if predicted_us is not None:
        step_us = {name: Interval(us, us, us) for name, us in predicted_us.items()}
    spread = _spread(losses)
    metrics = _metrics(ranks)
    first = ranks[0]
    plans = {record.variant.name: record.variant.plan for record in first.records}
    exact = {name: 0 if plan is None else plan.first_steps for name, plan in plans.items()}
    rows = [_row(name, losses, metrics, step_us, learn, exact[name]) for name in losses if name in step_us]
    lines = [sentence(row, learn) for row in rows if row.name not in (DDP, DDP_AGAIN)]
    if spread > learn.margin:
        by_metric = any(row.judged_by == "metric" for row in rows)
        instead = "verdicts are by the metric" if by_metric else "judge by a metric"
        lines.append(
            f"DDP itself, with sums in another order, ends up to {spread:.2%} apart, more than the margin of "
            f"{learn.margin_percent:g} %: train longer, or {instead}"
        )
    notes = [f"steps are predicted for {learn.on}"] if predicted_us is not None else []
    notes += [f"the first {count} of {learn.steps} steps of {name} are exact" for name, count in exact.items() if count]
    if odd := [name for name, values in metrics.items() if not all(map(math.isfinite, values))]:
        notes.append(f"the metric of {', '.join(odd)} is not finite, so that verdicts on it are by the loss alone")
    if first.one_by_one is not None:
        notes.append(f"contestants trained one after the other from the same start: {first.one_by_one}")
    return Learned(
        rows=tuple(rows), verdicts=(*lines, *notes), rounds=learn.seeds, steps=learn.steps, ranks=len(ranks),
        learn=learn, curves={name: _curve(values) for name, values in losses.items()},
        estimated_s=first.estimated_s, took_s=first.took_s,
    )  # fmt: skip


def sentence(row: LearnedRow, learn: Learn) -> str:
    """Return a verdict as text: the difference with its interval; if it is not known, what would tell."""
    within = f"the margin of {learn.margin_percent:g} %"
    if row.against_ddp is None:
        return f"{row.name} is worse than DDP: its loss is not finite"
    if row.ci95 is None:
        return (
            f"not known whether {row.name} learns as DDP does: its last loss is {row.against_ddp:+.2%} of one seed, "
            f"which has no interval; expected --seeds 2 or more"
        )
    what, around = "last loss", f"{row.against_ddp:+.2%} ({row.ci95[0]:+.2%} to {row.ci95[1]:+.2%})"
    if row.judged_by == "metric":
        what, around = "metric", row.metric_text
    if row.verdict == "as ddp":
        return f"{row.name} learns as DDP does: its {what} differs by {around}, within {within}"
    if row.verdict == "not known":
        unknown = f"not known whether {row.name} learns as DDP does: its {what} differs by {around}"
        need = f"about {row.telling_seeds} seeds" if row.telling_seeds else f"more than {MOST_SEEDS} seeds"
        if row.judged_by == "metric":
            return f"{unknown}; {need} would tell{'' if row.telling_seeds else ', or which way is better'}"
        steps = telling_steps(row.against_ddp, row.ci95, learn)
        return f"{unknown}; {need} would tell, " + (
            f"or about {steps} steps" if steps is not None else "or many more steps"
        )
    return f"{row.name} is {row.verdict} than DDP: its {what} differs by {around}, beyond {within}"


def judge(differences: Sequence[float], margin: float) -> tuple[tuple[float, float] | None, LearnedVerdict]:
    """Return the 95 % interval of the mean of relative differences, one of each seed, and the verdict by it."""
    if not all(map(math.isfinite, differences)):
        return None, "worse"
    mean, half = statistics.fmean(differences), half_interval(differences)
    if not math.isfinite(half):
        return None, "not known"
    low, high = mean - half, mean + half
    if -margin <= low and high <= margin:
        return (low, high), "as ddp"
    return (low, high), "worse" if low > margin else "better" if high < -margin else "not known"


def telling_seeds(differences: Sequence[float], margin: float) -> int | None:
    """Return the estimated number of seeds whose interval would tell; None if that is more than `MOST_SEEDS`."""
    if len(differences) < 2 or not all(map(math.isfinite, differences)):
        return None
    away = abs(abs(statistics.fmean(differences)) - margin)
    spread = statistics.stdev(differences)
    counts = range(len(differences) + 1, MOST_SEEDS + 1)
    return next((n for n in counts if t_quantile(n - 1) * spread / n**0.5 <= away), None)


def telling_steps(mean: float, ci95: tuple[float, float], learn: Learn) -> int | None:
    """Return the estimated number of steps that would tell with as many seeds; None if that is more than `MOST_LONGER`
    times as many.

    The last losses are means over a part of the steps, in which the noise of single batches falls as one over the root
    of their number.
    """
    half, away = (ci95[1] - ci95[0]) / 2.0, abs(abs(mean) - learn.margin)
    longer = (half / away) ** 2 if away > 0.0 else math.inf
    return math.ceil(learn.steps * longer) if 1.0 < longer <= MOST_LONGER else None


def steps_to(windows: Sequence[float], loss: float, steps: int) -> float | None:
    """Return the number of steps until a window's mean is as low as `loss`, between two by a line; None: never."""
    for index, here in enumerate(windows):
        if here <= loss:
            before = windows[index - 1] if index else here
            part = (before - loss) / (before - here) if before > here else 0.0
            return (index + (part if index else 1.0)) * steps / len(windows)
    return None


def _losses(ranks: Sequence[LearnedRank], index: int, learn: Learn) -> NDArray[np.float64]:
    """Return the losses of a contestant, mean over ranks. Shape (seeds, steps)."""
    of_ranks = [[loss for block in rank.records[index].losses for loss in block] for rank in ranks]
    values: NDArray[np.float64] = np.array(of_ranks, dtype=np.float64).mean(axis=0).reshape(learn.seeds, learn.steps)
    return values


def last_losses(losses: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the mean over the last tenth of the steps. Shape (seeds, steps) → (seeds,)."""
    count = max(1, round(LAST_SHARE * losses.shape[1]))
    found: NDArray[np.float64] = losses[:, -count:].mean(axis=1)
    return found


def _against(losses: NDArray[np.float64], ddp: NDArray[np.float64]) -> list[float]:
    """Return the relative difference of the last loss from DDP's, of each seed."""
    reference = last_losses(ddp)
    found: list[float] = ((last_losses(losses) - reference) / np.maximum(np.abs(reference), 1e-300)).tolist()
    return found


def _spread(losses: Mapping[str, NDArray[np.float64]]) -> float:
    """Return the largest difference of DDP from itself; not finite ones count as 1."""
    apart = [abs(one) for one in _against(losses[DDP_AGAIN], losses[DDP])]
    return max(one if math.isfinite(one) else 1.0 for one in apart)


def _windows(losses: NDArray[np.float64], most: int) -> list[float]:
    count = min(most, len(losses))
    edges = [round(part * len(losses) / count) for part in range(count + 1)]
    return [float(losses[start:stop].mean()) for start, stop in pairwise(edges)]


def _steps_to_ddp(losses: NDArray[np.float64], ddp: NDArray[np.float64]) -> float | None:
    found = []
    for mine, theirs in zip(losses, ddp, strict=True):
        reference = _windows(theirs, WINDOWS)
        found.append(steps_to(_windows(mine, WINDOWS), reference[round(REACHED * len(reference)) - 1], len(mine)))
    return None if None in found else statistics.fmean(one for one in found if one is not None)


def _metrics(ranks: Sequence[LearnedRank]) -> dict[str, list[float]]:
    """Return the metric of each seed, mean over ranks, by contestant; empty where the job has none."""
    found = {}
    for index, record in enumerate(ranks[0].records):
        of_ranks = [rank.records[index].metrics for rank in ranks]
        if all(of_ranks):
            found[record.variant.name] = [statistics.fmean(of_seed) for of_seed in zip(*of_ranks, strict=True)]
    return found


def _row(
    name: str, losses: Mapping[str, NDArray[np.float64]], metrics: Mapping[str, list[float]],
    step_us: Mapping[str, Interval], learn: Learn, exact_steps: int,
) -> LearnedRow:  # fmt: skip
    mine, ddp, spread = losses[name], losses[DDP], _spread(losses)
    differences = _against(mine, ddp)
    ci95, verdict = ((0.0, 0.0), "as ddp") if name == DDP else judge(differences, learn.margin)
    reached, of_ddp = _steps_to_ddp(mine, ddp), _steps_to_ddp(ddp, ddp)
    time = None
    if reached is not None and of_ddp and name != DDP_AGAIN:  # whose hook takes time
        exact = min(reached, float(exact_steps))  # as long as DDP's: those that count are behind them
        time = (exact + (reached - exact) * step_us[name].value / step_us[DDP].value) / of_ddp
    metric, telling = metrics.get(name), telling_seeds(differences, learn.margin)
    judged_by: JudgedBy = "loss"
    mean: float | None = None
    metric_ci95: tuple[float, float] | None = None
    if metric and all(map(math.isfinite, (*metric, *metrics.get(DDP, [math.nan])))):
        away = [a - b for a, b in zip(metric, metrics[DDP], strict=True)]
        bound = learn.margin * abs(statistics.fmean(metrics[DDP]))
        mean = statistics.fmean(away)
        metric_ci95, by_metric = judge(away, bound)
        if spread > learn.margin and name != DDP and all(map(math.isfinite, differences)):
            judged_by = "metric"
            # Which way is better only the loss tells.
            if by_metric in ("as ddp", "not known"):
                verdict, telling = by_metric, telling_seeds(away, bound)
            elif verdict not in ("worse", "better"):
                verdict, telling = "not known", None
    return LearnedRow(
        name=name, last_loss=_finite(float(last_losses(mine).mean())), against_ddp=_finite(float(np.mean(differences))),
        ci95=ci95, ddp_spread=spread, steps_to_ddp_loss=reached, time_to_ddp_loss=time, verdict=verdict,
        end_loss=_finite(float(mine[:, -1].mean())), step_us=step_us[name].value,
        metric=_finite(statistics.fmean(metric)) if metric else None, metric_against_ddp=mean,
        metric_ci95=metric_ci95, judged_by=judged_by, telling_seeds=telling if verdict == "not known" else None,
    )  # fmt: skip


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _curve(losses: NDArray[np.float64]) -> Curve:
    seeds = np.array([_windows(one, CURVE_POINTS) for one in losses])
    count = seeds.shape[1]
    middles = [(part + 0.5) * losses.shape[1] / count + 0.5 for part in range(count)]
    ends = (seeds.mean(axis=0), seeds.min(axis=0), seeds.max(axis=0))
    mean, low, high = (tuple(_finite(value) for value in one.tolist()) for one in ends)
    return Curve(steps=tuple(middles), mean=mean, low=low, high=high)
