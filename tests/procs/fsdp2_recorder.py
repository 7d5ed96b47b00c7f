"""Records the order in which FSDP2 sends its messages in a real run; nothing else about it changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from runtime.plan import FullyShardPlan
from runtime.plan.fully_sharded import ROOT
from runtime.torch_compat import all_gather_single, reduce_scatter_single

ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE = "all_gather", "reduce_scatter", "all_reduce"


class Collective(NamedTuple):
    """One message of a step."""

    kind: str
    """`all_gather`, `reduce_scatter` or `all_reduce`."""
    group: str
    """The group's name: its first module."""
    size_bytes: int
    """Of the whole parameters or gradients; of an all-reduce, of this rank's part."""


def record_collectives(model: nn.Module, plan: FullyShardPlan) -> list[Collective]:
    """Return a list to which each message of a model that `fully_shard` has wrapped is added when it is sent.

    Takes the place of other custom collectives of the model.
    """
    sent: list[Collective] = []
    modules: dict[str, Any] = dict(model.named_modules(remove_duplicate=False))
    for name in (ROOT, *(group[0] for group in plan.groups)):
        modules[name].set_custom_all_gather(_Gather(sent, name))
        modules[name].set_custom_reduce_scatter(_Scatter(sent, name))
        modules[name].set_all_reduce_hook(_reduced(sent, name) if plan.shard_ranks else None)
    return sent


def _reduced(sent: list[Collective], name: str) -> Any:
    def hook(output: Tensor) -> None:
        sent.append(Collective(ALL_REDUCE, name, output.nbytes))

    return hook


class _Recording:
    def __init__(self, sent: list[Collective], name: str) -> None:
        self._sent, self._name = sent, name

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _Gather(_Recording):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        self._sent.append(Collective(ALL_GATHER, self._name, output_tensor.nbytes))
        return all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)


class _Scatter(_Recording):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> Any:
        self._sent.append(Collective(REDUCE_SCATTER, self._name, input_tensor.nbytes))
        return reduce_scatter_single(output_tensor, input_tensor, group=group, op=op, async_op=async_op)
