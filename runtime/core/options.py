"""The options that `attach` takes, in one record."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

CompileArgument = str | Mapping[str, Any]
"""Backend of `torch.compile` by name, or some of its keyword arguments."""

ResidualUnit = Literal["gradient", "update"]


@dataclass(frozen=True, kw_only=True)
class AttachOptions:
    """The keyword arguments of `runtime.attach`, which describes them; `communicate` is for measuring."""

    process_group: dist.ProcessGroup | None = None
    sync: bool = True
    broadcast_buffers: bool = True
    timeout_s: float | None = None
    drift: bool = True
    loss_scale: Callable[[], float] | None = None
    guard: bool = True
    mesh: DeviceMesh | None = None
    weight: Callable[[], float] | None = None
    residual_unit: ResidualUnit = "gradient"
    learning_rate: Callable[[], float] | None = None
    """Learning rate of the next update, in any unit, if residuals are in units of updates."""
    compile: CompileArgument | None = None
    communicate: bool = True
    """Whether gradients are exchanged; with False everything else happens."""
