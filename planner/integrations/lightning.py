"""`Trainer(strategy="planner")` after `import planner.integrations.lightning`, or `PlannerStrategy(plan=...)`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn

from planner.integrations import check_version
from planner.online.attach import PlannedSession, attach
from runtime.plan import Accuracy, Plan

check_version("lightning", lightning.__version__, "2.6")


class PlannerStrategy(DDPStrategy):  # type: ignore[misc, unused-ignore]
    """DDPStrategy whose model is attached where it would be wrapped; takes its arguments, too, but for those of DDP."""

    strategy_name = "planner"

    def __init__(
        self, plan: Plan | str | Path | None = None, accuracy: Accuracy | None = None,
        allow: Sequence[str] | None = None, **keywords: Any,
    ) -> None:  # fmt: skip
        super().__init__(**keywords)
        self._planned = plan, accuracy, allow
        self.session: PlannedSession | None = None

    def configure_ddp(self) -> None:
        """Leave the model plain."""

    def setup(self, trainer: lightning.Trainer) -> None:
        """See `DDPStrategy.setup`; with several optimizers none of them is timed."""
        super().setup(trainer)
        if trainer.state.fn != TrainerFn.FITTING or self.model is None:
            return
        plan, accuracy, allow = self._planned
        optimizer = self.optimizers[0] if len(self.optimizers) == 1 else None
        self.session = attach(self.model, optimizer, plan, accuracy=accuracy, allow=allow)

    def training_step(self, *arguments: Any, **keywords: Any) -> Any:
        """See `Strategy.training_step`; goes through the module's own call, which says when a forward begins."""
        module = self.lightning_module
        assert module is not None
        if self.session is None:
            return super().training_step(*arguments, **keywords)
        with self.precision_plugin.train_step_context():
            return self._forward_redirection(module, module, "training_step", *arguments, **keywords)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """See `ParallelStrategy.block_backward_sync`: micro-batches before the last one exchange nothing."""
        if self.session is None:
            yield
            return
        with self.session.no_sync():
            yield

    def teardown(self) -> None:
        """See `DDPStrategy.teardown`; the model is plain again."""
        if self.session is not None:
            self.session.detach()
            self.session = None
        super().teardown()

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register under one name."""
        if cls.strategy_name not in strategy_registry:
            strategy_registry.register(cls.strategy_name, cls, description="planner.attach in place of DDP")


PlannerStrategy.register_strategies(StrategyRegistry)
