"""`PlannerTrainer` in place of `transformers.Trainer`: it trains through a `PlannerAccelerator`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import transformers
from transformers import Trainer

from planner.integrations import check_version
from planner.integrations.accelerate import PlannerAccelerator
from runtime.plan import Accuracy, Plan

check_version("transformers", transformers.__version__, "5.0")


class PlannerTrainer(Trainer):
    """Takes the arguments of `Trainer`, and `plan`, `accuracy` and `allow` as `planner.attach` does."""

    def __init__(
        self, *arguments: Any, plan: Plan | str | Path | None = None, accuracy: Accuracy | None = None,
        allow: Sequence[str] | None = None, **keywords: Any,
    ) -> None:  # fmt: skip
        self._planned = plan, accuracy, allow
        super().__init__(*arguments, **keywords)

    def create_accelerator_and_postprocess(self) -> None:
        """See `Trainer`, which makes an Accelerator by its own name: it becomes one that attaches."""
        super().create_accelerator_and_postprocess()
        self.accelerator.__class__ = PlannerAccelerator
        self.accelerator.plan, self.accelerator.accuracy, self.accelerator.allow = self._planned
