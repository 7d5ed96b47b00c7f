"""What the commands print, and the check that they may write where they are told to."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from planner.testbed.emulation import describe
from runtime.errors import CheckFailed

if TYPE_CHECKING:
    from rich.table import Table

    from planner.documents.profile import ProfileWorld
    from planner.jobs.demo import DemoResult
    from planner.jobs.training import RankRun


def run_document(runs: Sequence[RankRun]) -> dict[str, Any]:
    """What `planner run --json` prints.

    Raises:
        CheckFailed: ranks ended with different weights.
    """
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
    """JSON has no NaN or infinity."""
    return loss if math.isfinite(loss) else None


def _loss(loss: float | None) -> str:
    return "not finite" if loss is None else f"{loss:.4f}"


def run_lines(document: dict[str, Any], runs: Sequence[RankRun]) -> list[str]:
    """A run in words."""
    lines = [
        f"{document['steps']} steps on {document['ranks']} ranks: median {document['median_us'] / 1e3:.2f} ms a step, "
        f"loss {_loss(document['loss_first'])} → {_loss(document['loss_last'])}",
        f"weights {document['weights_sha256']}",
    ]
    if runs[0].emulation is not None:
        lines.append(f"on the {runs[0].emulation}")
    return [*lines, runs[0].report] if runs[0].report else lines


def emulation_lines(world: ProfileWorld) -> list[str]:
    """That a profile was measured on an emulated cluster, where it was."""
    return [] if world.emulated is None else [f"measured on the {describe(world.emulation)}"]


def demo_table(result: DemoResult) -> Table:
    """DDP beside the plan."""
    from rich.table import Table

    title = f"one epoch of {result.steps} steps on {result.plan.world.ranks} ranks, from the same seed, interleaved"
    world = result.profile.world
    if world.emulated is not None:
        title += f"; {describe(world.emulation)}"
    error = f"prediction off by {result.error:+.1%}"
    same = "the same weights, bit for bit" if result.ddp.weights_sha256 == result.planned.weights_sha256 else ""
    table = Table(
        title=title, caption="; ".join(filter(None, (error, same))), title_justify="left", caption_justify="left"
    )
    table.add_column("")
    for column in ("epoch (s)", "step (ms)", "predicted (ms)", "last loss", "test accuracy"):
        table.add_column(column, justify="right")
    ddp_us = (result.plan.baselines or {})["ddp"].iteration_us
    for name, epoch, predicted_us in (("DDP", result.ddp, ddp_us), ("plan", result.planned, result.predicted_us)):
        table.add_row(
            name,
            f"{epoch.epoch_s:.2f}",
            f"{epoch.median_us / 1e3:.2f}",
            f"{predicted_us / 1e3:.2f}",
            f"{epoch.loss_last:.3f}",
            f"{epoch.test_accuracy:.1%}",
        )
    return table
