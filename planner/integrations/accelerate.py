"""`PlannerAccelerator` in place of `accelerate.Accelerator`: prepared models are attached where it would wrap them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import accelerate
import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedType
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from torch.distributed.algorithms.join import Joinable, JoinHook
from torch.optim import Optimizer

from planner.integrations.attaching import (
    Options,
    attach_arguments,
    check_version,
    detach,
    model_state,
    session_of,
    together,
    whole_states,
)
from planner.online.attach import PlannedSession
from runtime.errors import InputError

check_version("accelerate", accelerate.__version__, "1.15")

WITH_DDP = (DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
"""Settings in which Accelerator wraps models in DistributedDataParallel."""


class PlannerAccelerator(Accelerator):  # type: ignore[misc]
    """Takes the arguments of `Accelerator`, and `plan`, `accuracy`, `compress`, `allow`, `timeout_s`, `weight` and
    `compile` as `planner.attach` does.

    A `DistributedDataParallelKwargs` among `kwargs_handlers` counts as far as `planner.attach` has the like; what else
    of it would change results raises InputError.
    """

    options: Options = Options()
    _waiting: list[nn.Module] | None = None
    """Models that `prepare` has met; None outside of it."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        planned = Options.taken_from(keywords)
        super().__init__(*arguments, **keywords)
        self.take(planned)

    def take(self, options: Options) -> None:
        """Attach with these options from now on. Raises InputError for what the accelerator was told and has no
        counterpart.
        """
        self.options = options
        self._arguments()

    def _arguments(self) -> dict[str, Any]:
        """Return the arguments of `planner.attach` that the accelerator's own come to."""
        handler, where = self.ddp_handler, type(self).__name__
        if self.parallelism_config is not None and self.parallelism_config.tp_enabled:
            raise InputError(
                f"{where}: found a parallelism_config with tp_size={self.parallelism_config.tp_size}, expected plain "
                f"data parallelism, of which planner takes the place: use accelerate.Accelerator"
            )
        if handler is None:
            return {}
        hook = None if str(handler.comm_hook) == "no" else str(handler.comm_hook)
        return attach_arguments({**handler.to_kwargs(), "comm_hook": hook}, where)

    @property
    def sessions(self) -> list[PlannedSession]:
        """Return the sessions of models in the order of `prepare` since `free_memory`; `end_training` detaches them."""
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
        optimizers = [_plain(one) for one in objects if isinstance(one, Optimizer)]
        for model in waiting:
            self._attach(model, optimizers)
        return prepared

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """See `Accelerator.prepare_model`; the model stays plain."""
        trains = not evaluation_mode and any(parameter.requires_grad for parameter in model.parameters())
        attaches = trains and self.use_distributed and not self._trains_already(model)
        if attaches:
            if self.distributed_type not in WITH_DDP:
                raise InputError(
                    f"PlannerAccelerator: found {self.distributed_type}, expected plain data parallelism "
                    f"({', '.join(map(str, WITH_DDP))}), of which planner takes the place: use accelerate.Accelerator"
                )
            self._arguments()
            before = session_of(model)
            if before is not None:  # of training before `free_memory`
                detach(before)
            with suppress(AttributeError):
                del model._is_accelerate_prepared
        prepared: nn.Module = super().prepare_model(model, device_placement, evaluation_mode=True)
        if attaches:
            if self._waiting is None:
                self._attach(prepared, [])
            else:
                self._waiting.append(prepared)
        return prepared

    def _trains_already(self, model: nn.Module) -> bool:
        session = session_of(model)
        attached = session is not None and session.is_attached and any(session is one for one in self.sessions)
        return attached or any(model is one for one in self._waiting or ())

    def _attach(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        mine = {id(parameter) for parameter in model.parameters()}
        of_model = [o for o in optimizers if any(id(p) in mine for g in o.param_groups for p in g["params"])]
        optimizer = together(of_model)
        scale = None if self.scaler is None else self.scaler.get_scale
        self.sessions.append(self.options.attach(model, optimizer, self._arguments(), scale))

    # Synchronization. `accumulate` and `no_sync` find what they look for on the model.

    @staticmethod
    def trigger_sync_in_backward(model: nn.Module) -> AbstractContextManager[None]:
        """Exchange gradients in the next backward; see `Accelerator.trigger_sync_in_backward`."""
        session = session_of(model)
        return nullcontext() if session is None else session.sync_in_backward()

    @contextmanager
    def join_uneven_inputs(self, joinables: list[Any], even_batches: bool | None = None) -> Iterator[None]:
        """See `Accelerator.join_uneven_inputs`. Raises InputError where ranks may have unlike numbers of batches."""
        planned = [one for one in joinables if isinstance(one, nn.Module) and session_of(one) is not None]
        even = self.even_batches if even_batches is None else even_batches
        if planned and self.multi_device and not even:
            raise InputError(
                f"{type(self).__name__}.join_uneven_inputs: found even_batches={even} and a model that planner trains, "
                f"expected as many batches on every rank: pass even_batches=True, or use accelerate.Accelerator"
            )
        others = [one for one in joinables if not any(one is model for model in planned)]
        with super().join_uneven_inputs([*others, *(_Even(self.device) for _ in planned)], even_batches):
            yield

    # Checkpoints.

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """See `Accelerator.get_state_dict`; with a plan that is not drop-in every rank calls this."""
        return model_state(session_of(model), lambda: super(PlannerAccelerator, self).get_state_dict(model, unwrap))

    def save_state(self, *arguments: Any, **keywords: Any) -> Any:
        """See `Accelerator.save_state`; with a plan that is not drop-in every rank calls this."""
        with whole_states(self.sessions):
            return super().save_state(*arguments, **keywords)

    # Ends.

    def free_memory(self, *objects: Any) -> Any:
        """See `Accelerator.free_memory`; models that the script keeps are synchronized still, as with DDP."""
        self.sessions.clear()
        return super().free_memory(*objects)

    def end_training(self) -> None:
        """See `Accelerator.end_training`; models are plain again."""
        for session in self.sessions:
            detach(session)
        super().end_training()


def _plain(optimizer: Optimizer) -> Optimizer:
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer


class _Even(Joinable):
    """Stands for an attached model in a `Join` that is switched off."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def join_hook(self, **_: Any) -> JoinHook:
        return JoinHook()

    @property
    def join_device(self) -> torch.device:
        return self._device

    @property
    def join_process_group(self) -> Any:
        return dist.group.WORLD
