"""Attaching for all frameworks: what scripts pass to DDP through them becomes arguments of `planner.attach`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from planner.online.attach import PlannedSession, attach
from runtime.core.options import CompileArgument
from runtime.errors import EnvironmentFailure, InputError
from runtime.optimizers.kinds import Optimizers
from runtime.plan import Accuracy, Plan


def check_version(package: str, found: str, needed: str) -> None:
    """Raise EnvironmentFailure where a framework is older than what this was made for."""

    def numbers(version: str) -> tuple[int, ...]:
        return tuple(int(digits) for digits in re.findall(r"\d+", version)[:2])

    if numbers(found) < numbers(needed):
        raise EnvironmentFailure(
            f"{package}: found version {found}, expected {needed} or newer: pip install '{package}>={needed}'"
        )


COUNTERPARTS: Mapping[str, str] = {
    "broadcast_buffers": "broadcast_buffers", "init_sync": "sync", "process_group": "process_group"
}  # fmt: skip
"""Argument of DDP → of `planner.attach`."""

WITHOUT_EFFECT = frozenset((
    "batched_grad_copy", "bucket_cap_mb", "bucket_cap_mb_list", "check_reduction", "device_ids", "dim",
    "find_unused_parameters", "gradient_as_bucket_view", "output_device", "skip_all_reduce_unused_params",
    "static_graph",
))  # fmt: skip
"""Arguments of DDP that say how it comes to its gradients, and not to which: buckets are the plan's, and unused
parameters are found."""

_HOOK = (
    "gradients are sent as the plan says: leave it out, and for compressed gradients attach a bounded plan "
    "(`planner optimize --accuracy bounded`)"
)
REFUSED: Mapping[str, str] = {
    **dict.fromkeys(("comm_hook", "ddp_comm_hook", "ddp_comm_state", "ddp_comm_wrapper"), _HOOK),
    "model_averaging_period": "models are averaged by local updaters (planner.run_local_async): leave it out",
    "mixed_precision": "leave it out, and take the framework's own mixed precision (autocast)",
    "device_mesh": "planner trains replicas: leave it out, or take the framework's own strategy for meshes",
    "forward_sync_buffers": "pass broadcast_buffers=False, with which buffers are each rank's own from the start on",
    "delay_all_reduce_named_params": "planner says when gradients are sent: leave it out",
    "param_to_hook_all_reduce": "planner says when gradients are sent: leave it out",
}  # fmt: skip
"""Arguments of DDP, and of what frameworks register with it, without a counterpart → what to do."""

_DEFAULTS = {name: one.default for name, one in inspect.signature(DistributedDataParallel).parameters.items()}


def attach_arguments(given: Mapping[str, object], where: str) -> dict[str, Any]:
    """Return the arguments of `planner.attach` that come to the same as these of DDP.

    Args:
        given: arguments of DistributedDataParallel, or what a framework registers with it, by name; None is a default.
        where: the framework's class that was given them, for messages.

    Raises:
        InputError: one that changes results has no counterpart, or is unknown.
    """
    asked: dict[str, Any] = {}
    for name, value in given.items():
        default = _DEFAULTS.get(name)
        if value is None or name in WITHOUT_EFFECT or (default is not None and value == default):
            continue
        if name in COUNTERPARTS:
            asked[COUNTERPARTS[name]] = value
        elif name != "forward_sync_buffers" or value is not True:
            advice = REFUSED.get(name, "it is unknown here: leave it out, or take the framework's own DDP")
            raise InputError(f"{where}: found {name}={value!r}, expected none, for planner takes DDP's place; {advice}")
    return asked


@dataclass(frozen=True)
class Options:
    """Arguments of `planner.attach` that a framework's class takes."""

    plan: Plan | str | Path | None = None
    accuracy: Accuracy | None = None
    allow: Sequence[str] | None = None
    timeout_s: float | None = None
    compress: str | None = None
    weight: Callable[[], float] | None = None
    compile: CompileArgument | None = None

    @classmethod
    def taken_from(cls, keywords: dict[str, Any]) -> Self:
        """Return the options among keyword arguments, which are taken out of them."""
        return cls(**{field.name: keywords.pop(field.name) for field in fields(cls) if field.name in keywords})

    def attach(
        self, model: nn.Module, optimizer: Optimizers | None, arguments: Mapping[str, Any],
        loss_scale: Callable[[], float] | None = None,
    ) -> PlannedSession:  # fmt: skip
        """Attach a model that the framework would wrap in DDP; `arguments` are of `attach_arguments`."""
        session = attach(
            model, optimizer, self.plan, accuracy=self.accuracy, compress=self.compress, allow=self.allow,
            timeout_s=self.timeout_s, loss_scale=loss_scale, weight=self.weight, compile=self.compile, **arguments,
        )  # fmt: skip
        model.no_sync = NoSync(session)  # type: ignore[assignment]
        return session


class NoSync:
    """`Session.no_sync` as `model.no_sync`, where DDP has it and frameworks look for it.

    Copies of the model and files of it, which are of no session, have one that does nothing.
    """

    def __init__(self, session: PlannedSession) -> None:
        self.session = session

    def __call__(self) -> Any:
        return self.session.no_sync()

    def __reduce__(self) -> tuple[Any, ...]:
        return partial, (nullcontext,)


def detach(session: PlannedSession) -> None:
    """Make the model plain again; all ranks call this."""
    with suppress(AttributeError):
        del session.model.no_sync
    session.detach()


def session_of(model: nn.Module) -> PlannedSession | None:
    """Return the session that a framework has attached a model to, if any."""
    found = getattr(model, "no_sync", None)
    return found.session if isinstance(found, NoSync) else None


def named_metrics(session: PlannedSession) -> dict[str, float]:
    """Return `session.metrics()` with names for a framework's loggers."""
    return {f"planner/{name}": value for name, value in session.metrics().items()}


def together(optimizers: Sequence[torch.optim.Optimizer]) -> tuple[torch.optim.Optimizer, ...] | None:
    """Return a model's optimizers as `planner.attach` takes them; None where there are none, or two share a parameter:
    then none of them is timed.
    """
    held = [id(p) for one in optimizers for group in one.param_groups for p in group["params"]]
    return tuple(optimizers) if optimizers and len(set(held)) == len(held) else None


@contextmanager
def whole_states(sessions: Iterable[PlannedSession]) -> Iterator[None]:
    """Make `state_dict()` of models and optimizers what a checkpoint needs; all ranks call this."""
    with ExitStack() as stack:
        for session in sessions:
            if session.is_attached:
                stack.enter_context(session.whole_optimizer_state())
                stack.enter_context(session.global_weights())
        yield


def model_state(session: PlannedSession | None, state_dict: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return a model's `state_dict()` for a checkpoint; copies where the plan is not exact, for there ranks may have
    weights of their own, or rounded ones. All ranks call this.
    """
    if session is None or not session.is_attached or session.plan.accuracy == "exact":
        return state_dict()
    with session.global_weights():
        state = state_dict()
        copies: dict[Any, torch.Tensor] = {}
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                key = value.data_ptr(), value.shape, value.dtype  # tied ones stay tied
                if key not in copies:
                    copies[key] = value.detach().clone()
                state[name] = copies[key]
        return state
