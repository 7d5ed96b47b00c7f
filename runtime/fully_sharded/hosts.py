"""FSDP2's collectives on hosts without accelerators, overlapped with computation: its own block until they are done.

A gather is begun where FSDP2 asks for it and waited for where FSDP2 needs it. FSDP2 does not wait for reduce-scatters:
one is left under way only where nothing reads its result before backward ends, and then waited for before `backward()`
returns, and before more of them take memory than the plan has buffers for, as on accelerators. Messages follow one
another, and each sends the bytes that NCCL's would. Sums of two ranks are the same bits as without; those of more are
added up in another order, as they are where groups of modules are others.
"""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from runtime.comm.waits import wait_watched
from runtime.comm.world import World, deadlines
from runtime.errors import InputError
from runtime.fully_sharded.messages import SerialMessages
from runtime.plan import FullyShardPlan
from runtime.plan.fully_sharded import ROOT
from runtime.torch_compat import (
    OUTSIDE,
    current_backward_id,
    has_all_reduce_hook,
    is_sharded,
    queue_backward_callback,
)

_numbers: weakref.WeakKeyDictionary[dist.ProcessGroup, Iterator[int]] = weakref.WeakKeyDictionary()
"""Numbers of models whose messages share a group: a message of one model must not be received for another."""


def overlap_on_hosts(model: nn.Module, plan: FullyShardPlan, timeout_s: float | None = None) -> HostCollectives:
    """Overlap the collectives of a model that `fully_shard` has wrapped with its computation, on CPUs.

    Every rank calls it, for several models in the same order. `timeout_s`: deadline of every wait; default: the process
    group's own.

    Raises InputError: the model is not wrapped, not on CPUs, or copies of it are all-reduced (HSDP), which would read
    what reduce-scatters have not brought yet.
    """
    first = next((parameter for parameter in model.parameters() if is_sharded(parameter)), None)
    mesh: Any = None if first is None else first.device_mesh  # type: ignore[attr-defined]
    if mesh is None:
        raise InputError("the model is not wrapped, expected one from planner.fully_shard; call that first")
    if mesh.device_type != "cpu":
        raise InputError(
            f"the model is on {mesh.device_type}, where FSDP2 overlaps by itself, expected cpu; leave this call out"
        )
    if mesh.ndim > 1:
        raise InputError(
            f"the model's mesh has the shape {tuple(mesh.shape)}, whose all-reduces block on hosts; expected one of "
            f"one dimension: plan without shard_ranks"
        )
    return HostCollectives(model, plan, mesh.get_group(), timeout_s)


class HostCollectives:
    """The messages of one model, in order."""

    def __init__(
        self, model: nn.Module, plan: FullyShardPlan, group: dist.ProcessGroup, timeout_s: float | None
    ) -> None:
        self.world = World.over(group, *deadlines(timeout_s, group)).meet()
        number = next(_numbers.setdefault(group, itertools.count()))
        self.messages = SerialMessages(self.world.timeout_s, number)
        self.arrived: Callable[[float], None] | None = None
        """Called whenever a message is complete, with the seconds for which this rank has waited for it."""
        self._buffers = plan.reduce_scatter_max_input_buffers or 1
        self._left: list[NamedWork] = []
        self._backward = OUTSIDE
        modules: dict[str, Any] = dict(model.named_modules(remove_duplicate=False))
        members = {ROOT: [ROOT], **{group[0]: list(group) for group in plan.groups}}
        grouped = {id(modules[name]) for names in plan.groups for name in names}
        for name, parts in members.items():
            parameters = [each for part in parts for each in _own(modules[part], grouped - {id(modules[part])})]
            if parameters:
                modules[name].set_custom_all_gather(HostGather(self, name))
                modules[name].set_custom_reduce_scatter(HostScatter(self, name, modules[name], parameters))

    def leave(self, work: NamedWork) -> None:
        """Leave a message under way until backward ends."""
        now = current_backward_id()
        if now == OUTSIDE or now != self._backward:
            self.wait()  # what a backward that failed has left
            self._backward = now
            queue_backward_callback(self.wait)
        self._left.append(work)

    def make_room(self) -> None:
        """Wait for the oldest messages until one more may be under way, and let go of what they were given."""
        while len(self._left) >= self._buffers:
            self._left.pop(0).wait()

    def wait(self) -> None:
        """Return when all that was left under way has come."""
        left, self._left, self._backward = self._left, [], OUTSIDE
        for work in left:
            work.wait()


def _own(module: nn.Module, others: set[int]) -> list[nn.Parameter]:
    """Return the parameters below a module, but not below modules of other groups."""
    own = list(module.parameters(recurse=False))
    for child in module.children():
        if id(child) not in others:
            own += _own(child, others)
    return own


class NamedWork(dist.Work):
    """A message that names itself where it fails."""

    def __init__(self, message: Future[None], collectives: HostCollectives, what: str) -> None:
        super().__init__()
        self._message, self._collectives, self._what = message, collectives, what

    def wait(self, timeout: timedelta | None = None) -> bool:
        started_s = time.perf_counter()
        with self._collectives.world.error_context(self._what):
            wait_watched(self._is_over, self._collectives.world, self._what)
        if self._collectives.arrived is not None:
            self._collectives.arrived(time.perf_counter() - started_s)
        return True

    def _is_over(self, seconds: float) -> bool:
        over = bool(wait([self._message], seconds).done)
        if over:
            self._message.result()  # raises what has failed
        return over


class _Allocating:
    """Allocates memory for messages."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class HostGather(_Allocating):
    """The all-gather of a group of modules, for `set_custom_all_gather`."""

    def __init__(self, collectives: HostCollectives, name: str) -> None:
        self._collectives, self._what = collectives, f"the all-gather of {name or 'the model itself'}"

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work:
        ours = self._collectives
        return NamedWork(ours.messages.gather(output_tensor, input_tensor, group), ours, self._what)


class HostScatter(_Allocating):
    """The reduce-scatter of a group of modules, for `set_custom_reduce_scatter`."""

    def __init__(
        self, collectives: HostCollectives, name: str, module: nn.Module, parameters: Sequence[nn.Parameter]
    ) -> None:
        self._collectives, self._what = collectives, f"the reduce-scatter of {name or 'the model itself'}"
        self._module, self._parameters = module, parameters

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        self._collectives.make_room()
        return super().allocate(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        ours = self._collectives
        average, scaled = op == dist.ReduceOp.AVG, op == dist.ReduceOp.PREMUL_SUM
        if not (average or scaled or op == dist.ReduceOp.SUM):
            raise InputError(
                f"{self._what}: found {getattr(op, 'op', op)}, expected a sum, an average or a sum of scaled gradients"
            )
        # As set_gradient_divide_factor asks for, of which gloo's own reduce-scatter knows nothing.
        factor = op.factor if scaled else None
        message = ours.messages.reduce_scatter(output_tensor, input_tensor, group, average=average, factor=factor)
        work = NamedWork(message, ours, self._what)
        if self._read_at_once(output_tensor, divided=average or scaled):
            work.wait()
        else:
            ours.leave(work)

    def _read_at_once(self, output: Tensor, *, divided: bool) -> bool:
        """Return whether FSDP2, or a hook, reads the result before backward ends: divides, casts or adds it."""
        if not divided or has_all_reduce_hook(self._module):
            return True
        return any(
            parameter.grad is not None
            or parameter.dtype != output.dtype
            or getattr(parameter, "_post_accumulate_grad_hooks", None)
            for parameter in self._parameters
        )
