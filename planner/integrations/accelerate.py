"""`PlannerAccelerator` in place of `accelerate.Accelerator`: prepared models are attached where it would wrap them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import accelerate
from accelerate import Accelerator, DistributedType
from torch import nn
from torch.optim import Optimizer

from planner.integrations import check_version
from planner.online.attach import PlannedSession, attach
from runtime.errors import InputError
from runtime.plan import Accuracy, Plan

check_version("accelerate", accelerate.__version__, "1.15")

WITH_DDP = (DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
"""What Accelerator wraps in DistributedDataParallel."""


class PlannerAccelerator(Accelerator):  # type: ignore[misc]
    """Takes the arguments of `Accelerator`, and `plan`, `accuracy` and `allow` as `planner.attach` does."""

    plan: Plan | str | Path | None = None
    accuracy: Accuracy | None = None
    allow: Sequence[str] | None = None
    _waiting: list[nn.Module] | None = None
    """Models that `prepare` has met; None outside of it."""

    def __init__(
        self, *arguments: Any, plan: Plan | str | Path | None = None, accuracy: Accuracy | None = None,
        allow: Sequence[str] | None = None, **keywords: Any,
    ) -> None:  # fmt: skip
        self.plan, self.accuracy, self.allow = plan, accuracy, allow
        super().__init__(*arguments, **keywords)

    @property
    def sessions(self) -> list[PlannedSession]:
        """The session of each attached model, in the order of `prepare`."""
        found: list[PlannedSession] = self.__dict__.setdefault("_sessions", [])
        return found

    def prepare(self, *objects: Any, device_placement: list[bool] | None = None) -> Any:
        """See `Accelerator.prepare`; a model is attached with the optimizer that is given beside it."""
        self._waiting = []
        try:
            prepared = super().prepare(*objects, device_placement=device_placement)
            waiting = self._waiting
        finally:
            self._waiting = None
        optimizers = [one for one in objects if isinstance(one, Optimizer)]
        for model in waiting:
            self._attach(model, optimizers)
        return prepared

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """See `Accelerator.prepare_model`; the model stays plain."""
        trains = not evaluation_mode and any(parameter.requires_grad for parameter in model.parameters())
        if trains and self.use_distributed and self.distributed_type not in WITH_DDP:
            raise InputError(
                f"PlannerAccelerator: found {self.distributed_type}, expected plain data parallelism "
                f"({', '.join(map(str, WITH_DDP))}), of which planner takes the place: use accelerate.Accelerator"
            )
        prepared: nn.Module = super().prepare_model(model, device_placement, evaluation_mode=True)
        if trains and self.use_distributed:
            if self._waiting is None:
                self._attach(prepared, [])
            else:
                self._waiting.append(prepared)
        return prepared

    def _attach(self, model: nn.Module, optimizers: Sequence[Any]) -> None:
        mine = {id(parameter) for parameter in model.parameters()}
        of_model = [o for o in optimizers if any(id(p) in mine for g in o.param_groups for p in g["params"])]
        optimizer = of_model[0] if len(of_model) == 1 else None
        session = attach(model, optimizer, self.plan, accuracy=self.accuracy, allow=self.allow)
        # `accumulate` and `no_sync` look for it on the model, as DistributedDataParallel has one.
        model.no_sync = session.no_sync  # type: ignore[assignment]
        self.sessions.append(session)

    def free_memory(self, *objects: Any) -> Any:
        """See `Accelerator.free_memory`; models are plain again."""
        for session in self.sessions:
            session.model.__dict__.pop("no_sync", None)
            session.detach()
        self.sessions.clear()
        return super().free_memory(*objects)
