"""The measured cost of a plan in accuracy, on a job. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from runtime.plan.strict_json import Name, PositiveCount, Ranks, Record

LearnedVerdict = Literal["as ddp", "worse", "better", "not known"]
"""Comparison of the last loss with DDP's, by the interval of the paired difference over seeds against ± a margin."""
JudgedBy = Literal["loss", "metric"]


@dataclass(frozen=True, kw_only=True)
class LearnedFigures(Record):
    """Last loss against DDP's over the same batches. Differences are relative: 0.01 is a loss that is 1 % larger."""

    verdict: LearnedVerdict
    last_loss: float | None = None
    """Mean over the last tenth of the steps, all ranks and seeds; None: it was not finite."""
    against_ddp: float | None = None
    """Mean over seeds of the difference from DDP's last loss."""
    ci95: tuple[float, float] | None = None
    """95 % interval of `against_ddp` over seeds; None: there was one seed, or the loss was not finite."""
    ddp_spread: Annotated[float, Field(ge=0.0)]
    """Largest difference of DDP from itself with sums in another order."""
    steps_to_ddp_loss: float | None = None
    """Steps until the loss that DDP has at 90 % of its steps, mean over seeds; None: some seed does not reach it."""
    time_to_ddp_loss: float | None = None
    """Time until that loss, as a share of DDP's."""
    metric: float | None = None
    """The job's evaluation metric after the last step, mean over ranks and seeds."""
    metric_against_ddp: float | None = None
    """Mean over seeds of the difference from DDP's metric, in its own unit."""
    metric_ci95: tuple[float, float] | None = None
    judged_by: JudgedBy = "loss"
    """The figure whose interval gave the verdict: the metric where DDP's own spread of the loss is above the margin and
    the job has one.
    """


@dataclass(frozen=True, kw_only=True)
class AccuracyMeasured(LearnedFigures):
    """The figures of a plan, as `planner compare --learn` measured them."""

    job: Name
    """The job or script that was trained."""
    margin: Annotated[float, Field(gt=0.0)]
    steps: PositiveCount
    seeds: PositiveCount
    ranks: Ranks
    executed: Annotated[str, Field(pattern=r"^sha256:")] | None = None
    """Digest of what the measured plan executes: see `runtime.plan.executed.executed_digest`."""

    def __str__(self) -> str:
        told = {"as ddp": "as DDP", "worse": "worse than DDP", "better": "better than DDP", "not known": "not known"}
        trained = f"after {self.steps} steps, {self.seeds} seed{'s'[: self.seeds > 1]}, on {self.ranks} ranks"
        loss = "loss not finite" if self.against_ddp is None else f"last loss {self.against_ddp:+.2%}"
        around = "" if self.ci95 is None else f" ({self.ci95[0]:+.2%} to {self.ci95[1]:+.2%})"
        metric = "" if self.metric_against_ddp is None else f", metric {self.metric_against_ddp:+.4g}"
        by = f"{self.judged_by} by a margin of {100.0 * self.margin:g} %"
        return f"{told[self.verdict]}: {loss}{around}{metric} {trained} of {self.job}, judged by the {by}"
