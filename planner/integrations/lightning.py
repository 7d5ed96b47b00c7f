"""`Trainer(strategy="planner")` after `import planner.integrations.lightning`, or `PlannerStrategy(plan=...)`; and
`callbacks=[PlannerMetrics()]`.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import lightning
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer

from planner.integrations.attaching import (
    REFUSED,
    Options,
    attach_arguments,
    check_version,
    detach,
    model_state,
    named_metrics,
    together,
)
from planner.online.attach import PlannedSession
from runtime.plan import Accuracy, Plan

check_version("lightning", lightning.__version__, "2.6")


class PlannerStrategy(DDPStrategy):  # type: ignore[misc, unused-ignore]
    """DDPStrategy whose model is attached where it would be wrapped.

    Takes `plan`, `accuracy`, `compress`, `allow`, `timeout_s`, `weight` and `compile` as `planner.attach` does, and the
    arguments of `DDPStrategy`. Of those for DistributedDataParallel they count as far as `planner.attach` has the like;
    what else of them would change results raises InputError.
    """

    strategy_name = "planner"

    def __init__(
        self, plan: Plan | str | Path | None = None, accuracy: Accuracy | None = None,
        allow: Sequence[str] | None = None, timeout_s: float | None = None, compress: str | None = None,
        **keywords: Any,
    ) -> None:  # fmt: skip
        given = {name: keywords.pop(name, None) for name in ("weight", "compile")}
        super().__init__(**keywords)
        self._planned = Options(plan, accuracy, allow, timeout_s, compress, **given)
        own = inspect.signature(DDPStrategy).parameters.keys() - REFUSED.keys()
        told = {name: value for name, value in keywords.items() if name not in own}
        self._arguments = attach_arguments(told, type(self).__name__)
        self.session: PlannedSession | None = None
        """Session of the last `fit`, which is detached at its end."""

    def configure_ddp(self) -> None:
        """Leave the model plain."""

    def setup(self, trainer: lightning.Trainer) -> None:
        """See `DDPStrategy.setup`; all optimizers are attached, unless they share parameters."""
        super().setup(trainer)
        if trainer.state.fn != TrainerFn.FITTING or self.model is None:
            return
        optimizer = together(self.optimizers)
        scaler = getattr(self.precision_plugin, "scaler", None)
        scale = None if scaler is None else scaler.get_scale
        self.session = self._planned.attach(self.model, optimizer, self._arguments, scale)

    def training_step(self, *arguments: Any, **keywords: Any) -> Any:
        """See `Strategy.training_step`; goes through the module's own call, which says when a forward begins."""
        module = self.lightning_module
        assert module is not None
        if self.session is None:
            return super().training_step(*arguments, **keywords)
        with self.precision_plugin.train_step_context():
            return self._forward_redirection(module, module, "training_step", *arguments, **keywords)

    def block_backward_sync(self) -> AbstractContextManager[None]:  # type: ignore[override, unused-ignore]
        """See `ParallelStrategy.block_backward_sync`: micro-batches before the last one exchange nothing."""
        return nullcontext() if self.session is None else self.session.no_sync()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the module's state; see `Strategy.lightning_module_state_dict`."""
        return model_state(self.session, super().lightning_module_state_dict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """See `Strategy.optimizer_state`; every rank calls this."""
        if self.session is None or not self.session.is_attached:
            return super().optimizer_state(optimizer)
        with self.session.whole_optimizer_state():
            return super().optimizer_state(optimizer)

    def teardown(self) -> None:
        """See `DDPStrategy.teardown`; the model is plain again."""
        if self.session is not None:
            detach(self.session)
        super().teardown()

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register under one name."""
        if cls.strategy_name not in strategy_registry:
            strategy_registry.register(cls.strategy_name, cls, description="planner.attach in place of DDP")


class PlannerMetrics(lightning.Callback):  # type: ignore[misc, unused-ignore]
    """Logs `session.metrics()` of a `PlannerStrategy` as planner/NAME to the trainer's loggers, on rank 0."""

    def __init__(self, every_steps: int | None = None) -> None:
        """`every_steps`: optimizer steps from one record to the next; None: the trainer's `log_every_n_steps`."""
        self.every_steps = every_steps
        self._last_step = 0

    def on_train_batch_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        """Log after each `every_steps`-th step of the optimizer."""
        session, step = getattr(trainer.strategy, "session", None), trainer.global_step
        every_steps = self.every_steps or getattr(trainer, "log_every_n_steps", 0) or 1
        if session is None or not trainer.is_global_zero or step == self._last_step or step % every_steps:
            return
        self._last_step = step
        for logger in trainer.loggers:
            logger.log_metrics(named_metrics(session), step)


PlannerStrategy.register_strategies(StrategyRegistry)
