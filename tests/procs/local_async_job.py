"""The tiny job of the tests of local updaters, as `planner run` finds it."""

from __future__ import annotations

import local_async_jobs as jobs
import torch

from planner import TrainingJob


def job() -> TrainingJob:
    """Few minibatches that come again and again."""
    return TrainingJob(
        model=jobs.Net(), loss=jobs.loss, batch=lambda number, rank: jobs.batch(number % 4, rank),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    )  # fmt: skip
