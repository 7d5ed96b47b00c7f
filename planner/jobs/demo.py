"""`planner demo`: profile, optimize, train an epoch with DDP and one with the plan, and compare."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist

from planner.decide.optimize import optimize
from planner.documents.profile import Profile
from planner.jobs.demo_job import steps_per_epoch, test_accuracy
from planner.jobs.on_rank import profile_rank
from planner.jobs.training import Trainer, build, this_rank
from planner.profile.bench import Progress
from runtime.plan import Plan

JOB = "planner.jobs.demo_job:job"
BLOCK_STEPS = 5
"""Steps of DDP and of the plan are interleaved in such blocks, so that a drift of the machine hits both alike."""


@dataclass(frozen=True)
class EpochResult:
    """One epoch of one way to train."""

    epoch_s: float
    median_us: float
    loss_last: float
    test_accuracy: float
    weights_sha256: str


@dataclass(frozen=True)
class DemoResult:
    """Everything that the demo shows."""

    profile: Profile
    plan: Plan
    steps: int
    ddp: EpochResult
    planned: EpochResult
    report: str

    @property
    def predicted_us(self) -> float:
        return self.plan.predicted.iteration_us if self.plan.predicted else 0.0

    @property
    def error(self) -> float:
        """Predicted / measured − 1."""
        return self.predicted_us / self.planned.median_us - 1.0

    def to_document(self) -> dict[str, Any]:
        """Return the figures as plain JSON types."""
        world = self.profile.world
        return {
            "ranks": self.plan.world.ranks,
            "steps": self.steps,
            "ddp": asdict(self.ddp),
            "plan": asdict(self.planned),
            "predicted_us": self.predicted_us,
            "error": self.error,
            "buckets": len(self.plan.buckets),
            **({} if world.emulated is None else {"emulated": world.emulated, "emulation": world.emulation}),
        }


def demo_rank(device: str, show_progress: bool, timeout_s: float | None = None) -> DemoResult:
    """Run the demo on one rank; every rank calls it, and all plans are equal because the profile is."""
    profile = profile_rank(JOB, device, show_progress, timeout_s)
    plan = optimize(profile)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    ddp, planned = (Trainer(build(JOB, device), chosen, timeout_s) for chosen in (None, plan))
    steps = steps_per_epoch(ranks)
    progress = Progress(show=show_progress and this_rank() == 0)
    blocks = [range(first, min(first + BLOCK_STEPS, steps)) for first in range(0, steps, BLOCK_STEPS)]
    turns = [(trainer, step) for block in blocks for trainer in (ddp, planned) for step in block]
    for trainer, step in progress.track(turns, "DDP and plan, interleaved"):
        trainer.step(trainer.built.batch(step))
    accuracies = [test_accuracy(trainer.built.model) for trainer in (ddp, planned)]
    runs = [trainer.close() for trainer in (ddp, planned)]
    results = [
        EpochResult(
            epoch_s=sum(run.step_us) / 1e6,
            median_us=statistics.median(run.step_us),
            loss_last=run.losses[-1],
            test_accuracy=accuracy,
            weights_sha256=run.weights_sha256,
        )
        for run, accuracy in zip(runs, accuracies, strict=True)
    ]
    return DemoResult(profile, plan, steps, results[0], results[1], runs[1].report)
