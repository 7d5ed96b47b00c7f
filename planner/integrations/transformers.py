"""`PlannerTrainer` in place of `transformers.Trainer`: it trains through a `PlannerAccelerator`; and
`callbacks=[PlannerMetrics()]`.
"""

from __future__ import annotations

from typing import Any

import transformers
from torch import nn
from transformers import Trainer, TrainerCallback

from planner.integrations.accelerate import PlannerAccelerator
from planner.integrations.attaching import Options, check_version, named_metrics, session_of, whole_states

check_version("transformers", transformers.__version__, "5.0")


class PlannerMetrics(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Adds `session.metrics()` as planner/NAME to what a `PlannerTrainer` logs."""

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None,
        model: nn.Module | None = None, **_: Any,
    ) -> None:  # fmt: skip
        """Extend `logs`, which the callbacks after this one write."""
        session = None if model is None else session_of(model)
        if session is not None and logs is not None:
            logs.update(named_metrics(session))


class PlannerTrainer(Trainer):
    """Takes the arguments of `Trainer`, and `plan`, `accuracy`, `compress`, `allow` and `timeout_s` as `planner.attach`
    does.
    """

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        self._planned = Options.taken_from(keywords)
        super().__init__(*arguments, **keywords)
        # The writers of logs, which Trainer puts first, come after what extends the logs.
        self.callback_handler.callbacks.sort(key=lambda callback: not isinstance(callback, PlannerMetrics))

    def create_accelerator_and_postprocess(self) -> None:
        """See `Trainer`, which makes an Accelerator by its own name: it becomes one that attaches."""
        super().create_accelerator_and_postprocess()
        self.accelerator.__class__ = PlannerAccelerator
        self.accelerator.take(self._planned)

    def _wrap_model(self, model: nn.Module, training: bool = True, *arguments: Any, **keywords: Any) -> nn.Module:
        # `Trainer` reuses what it wrapped and compiled before; here each training attaches the model itself.
        mine = self.model if training and self.model is not None else model
        return super()._wrap_model(mine, training, *arguments, **keywords)

    def save_model(self, *arguments: Any, **keywords: Any) -> None:
        """See `Trainer.save_model`; with a plan that is not drop-in every rank calls this."""
        with whole_states(self.accelerator.sessions):
            super().save_model(*arguments, **keywords)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        with whole_states(self.accelerator.sessions):
            super()._save_optimizer_and_scheduler(output_dir)
