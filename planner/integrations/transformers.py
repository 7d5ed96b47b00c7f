"""`PlannerTrainer` in place of `transformers.Trainer`: it trains through a `PlannerAccelerator`; and
`callbacks=[PlannerMetrics()]`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import transformers
from torch import nn
from transformers import Trainer, TrainerCallback

from planner.integrations.accelerate import PlannerAccelerator
from planner.integrations.attaching import Options, check_version, named_metrics, session_of, whole_states
from runtime.errors import InputError

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
    """Takes the arguments of `Trainer`, and `plan`, `accuracy`, `compress`, `allow`, `timeout_s`, `compile` and
    `weight` as `planner.attach` does; `weight="tokens"` weighs ranks by `num_items_in_batch`, the tokens that a rank's
    loss is a mean over.

    With `average_tokens_across_devices`, Trainer's default, the loss is normalized over all ranks already, and a weight
    raises InputError.
    """

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        self._tokens: Any = None
        weight = keywords.pop("weight", None)
        ask = self._tokens_of_batch if weight == "tokens" else weight
        self._planned = replace(Options.taken_from(keywords), weight=ask)
        super().__init__(*arguments, **keywords)
        if weight is not None and self.args.average_tokens_across_devices:
            raise InputError(
                f"PlannerTrainer: found weight={weight!r} and average_tokens_across_devices=True, with which Trainer "
                f"normalizes losses over the tokens of all ranks already; expected one of both: leave weight out, or "
                f"pass average_tokens_across_devices=False"
            )
        # The writers of logs, which Trainer puts first, come after what extends the logs.
        self.callback_handler.callbacks.sort(key=lambda callback: not isinstance(callback, PlannerMetrics))

    def create_accelerator_and_postprocess(self) -> None:
        """See `Trainer`, which makes an Accelerator by its own name: it becomes one that attaches."""
        super().create_accelerator_and_postprocess()
        self.accelerator.__class__ = PlannerAccelerator
        self.accelerator.take(self._planned)

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Any:
        """See `Trainer.training_step`; keeps the number of tokens for `weight="tokens"`."""
        self._tokens = num_items_in_batch
        return super().training_step(model, inputs, num_items_in_batch)

    def _tokens_of_batch(self) -> float:
        if self._tokens is None:
            raise InputError(
                'PlannerTrainer: found weight="tokens" and a model whose loss takes no num_items_in_batch, so that '
                "Trainer counts no tokens; expected one that does, or compute_loss_func: pass a function as weight"
            )
        return float(self._tokens)

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
