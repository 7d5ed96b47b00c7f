"""`planner run`: training on ranks."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import typer

from planner.cli.commands import Run
from planner.cli.options import Flags, printed_json
from planner.jobs.job import find_job
from planner.jobs.lr_schedule import Course, LrSchedule
from planner.jobs.on_rank import train_rank
from planner.jobs.rank_options import is_first_rank
from planner.jobs.training import RankRun
from planner.jobs.world import choose_device, on_ranks, planned_ranks
from runtime.errors import CheckFailed, PlanMismatch
from runtime.plan import load_plan


def run(asked: Run) -> None:
    """Train a job on ranks and print what came of it."""
    find_job(asked.job)
    plan, where = None if asked.plan is None else load_plan(asked.plan), asked.where
    if where.are_open and plan is not None:
        where = replace(where, ranks=planned_ranks(plan.world.ranks, str(asked.plan)))
    course = Course(asked.steps, LrSchedule.parse(asked.lr_schedule))
    device, shown = choose_device(where.device), not Flags.as_json
    try:
        runs = on_ranks(where, train_rank, asked.job, plan, course, device, shown, where.timeout_s)
    except PlanMismatch as error:
        raise PlanMismatch(f"{asked.plan}: {error}") from error
    # On every rank, before the others are silent: all end with the same exit code.
    document = run_document(runs)
    if is_first_rank() and not printed_json(lambda: document):
        typer.echo("\n".join(run_lines(document, runs)))


def run_document(runs: Sequence[RankRun]) -> dict[str, Any]:
    """Return what `planner run --json` prints. Raises CheckFailed: ranks ended with different weights."""
    weights = {run.weights_sha256 for run in runs}
    if len(weights) > 1:
        raise CheckFailed(
            "ranks ended with different weights, expected equal ones: the training step is not deterministic"
        )
    emulation = runs[0].emulation
    return {
        "steps": len(runs[0].step_us),
        "ranks": len(runs),
        "median_us": statistics.median(runs[0].step_us),
        "loss_first": _finite(statistics.fmean(run.losses[0] for run in runs)),
        "loss_last": _finite(statistics.fmean(run.losses[-1] for run in runs)),
        "weights_sha256": weights.pop(),
        **({} if emulation is None else {"emulated": emulation.kind, "emulation": emulation.spec}),
    }


def _finite(loss: float) -> float | None:
    """Return None for NaN and infinity, which JSON does not have."""
    return loss if math.isfinite(loss) else None


def _loss(loss: float | None) -> str:
    return "not finite" if loss is None else f"{loss:.4f}"


def run_lines(document: dict[str, Any], runs: Sequence[RankRun]) -> list[str]:
    """Describe a run in a few lines."""
    lines = [
        f"{document['steps']} steps on {document['ranks']} ranks: median {document['median_us'] / 1e3:.2f} ms a step, "
        f"loss {_loss(document['loss_first'])} → {_loss(document['loss_last'])}",
        f"weights {document['weights_sha256']}",
    ]
    if runs[0].emulation is not None:
        lines.append(f"on the {runs[0].emulation}")
    return [*lines, runs[0].report] if runs[0].report else lines
