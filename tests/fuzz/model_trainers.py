"""How a random model's gradients are exchanged: by DDP, by hand, or by a plan."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from model_nodes import RandomModel, planned_names
from models import Case, PlanShape, uses_everything
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import runtime
from runtime.plan import ModelReference, Plan, PlanBucket, PlanWorld

WAIT_S = 20
"""Deadline of every collective."""


class Trainer(Protocol):
    """How a model's gradients are exchanged."""

    forward: Callable[..., Any]
    no_sync: Callable[[], AbstractContextManager[Any]]

    def after_backward(self, synchronized: bool) -> None:
        """Called when a backward has returned."""
        ...

    def gave_up(self, synchronized: bool) -> None:
        """Called when a backward has raised."""
        ...

    def reattach(self) -> None:
        """Starts afresh, by another plan where there is one."""
        ...

    def close(self) -> None:
        """Leaves the model plain."""
        ...


@torch.no_grad()
def follow_rank_0(tensors: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    """Overwrites them with rank 0's, as no change that autograd counts."""
    for tensor in tensors:
        values = tensor.contiguous()
        dist.broadcast(values, group=group, group_src=0)
        tensor.data.copy_(values)


class WithDDP:
    """The reference wherever DDP supports the case."""

    def __init__(self, model: RandomModel, case: Case, group: dist.ProcessGroup) -> None:
        self._followers, self._group = model.buffers if case.broadcast_buffers else list[Tensor], group
        self.forward = DistributedDataParallel(
            model,
            process_group=group,
            broadcast_buffers=case.broadcast_buffers,
            find_unused_parameters=not uses_everything(case),
        )
        self.no_sync = self.forward.no_sync

    def after_backward(self, synchronized: bool) -> None:
        """DDP has done it, but for the buffers, which follow rank 0 in its next forward."""
        if synchronized:
            follow_rank_0(self._followers(), self._group)

    def gave_up(self, synchronized: bool) -> None:
        """Nothing was exchanged."""

    def reattach(self) -> None:
        """DDP goes on; buffers follow rank 0, as after any attach."""
        follow_rank_0(self._followers(), self._group)

    def close(self) -> None:
        """Ends with its last reference."""


class ByHand:
    """The reference elsewhere: the gradient of each rank, scaled as DDP does, then summed, after backward."""

    def __init__(self, model: RandomModel, case: Case, group: dist.ProcessGroup) -> None:
        self._model, self._group = model, group
        self._followers = model.buffers if case.broadcast_buffers else list[Tensor]
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._used: set[int] = set()
        self._synchronized = self._due = True
        for index, parameter in enumerate(self._parameters):
            parameter.register_post_accumulate_grad_hook(partial(self._note_used, index))
        follow_rank_0([*model.parameters(), *self._followers()], group)

    def _note_used(self, index: int, parameter: Tensor) -> None:
        if parameter.grad is not None:  # autograd calls hooks for undefined gradients, too
            self._used.add(index)

    def forward(self, *arguments: Any) -> Any:
        """The model's forward; buffers follow rank 0 where DDP's would."""
        if self._due:
            follow_rank_0(self._followers(), self._group)
        self._due = self._synchronized
        return self._model(*arguments)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Nothing is exchanged inside."""
        self._synchronized = False
        try:
            yield
        finally:
            self._synchronized = True

    def after_backward(self, synchronized: bool) -> None:
        """Averages what any rank has used since the last time; buffers follow rank 0."""
        if not synchronized:
            return
        follow_rank_0(self._followers(), self._group)
        counts = torch.zeros(len(self._parameters))
        counts[sorted(self._used)] = 1.0
        dist.all_reduce(counts, group=self._group)
        for parameter, count in zip(self._parameters, counts.tolist(), strict=True):
            if count:
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                values = gradient.contiguous() * (1.0 / dist.get_world_size())
                dist.all_reduce(values, group=self._group)
                parameter.grad = gradient.copy_(values)  # in the strides it had: norms depend on them
        self._used.clear()

    def gave_up(self, synchronized: bool) -> None:
        """A step that was to be exchanged leaves nothing behind."""
        if synchronized:
            self._used.clear()

    def reattach(self) -> None:
        """Buffers follow rank 0, as after any attach."""
        follow_rank_0(self._followers(), self._group)
        self._due = True

    def close(self) -> None:
        """Ends with its last reference."""


class WithPlan:
    """What is tested."""

    def __init__(self, model: RandomModel, case: Case, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._case, self._optimizer = model, case, optimizer
        self._attached = 0
        self._attach()

    def _attach(self) -> None:
        plan = plan_of(self._model, self._case.plans[self._attached % 2])
        broadcast = self._case.broadcast_buffers
        self._session = runtime.attach(
            self._model, self._optimizer, plan, broadcast_buffers=broadcast, timeout_s=WAIT_S
        )
        self._attached += 1
        self.forward, self.no_sync = self._model, self._session.no_sync

    def after_backward(self, synchronized: bool) -> None:
        """The session has done it."""

    def gave_up(self, synchronized: bool) -> None:
        """The session notices at the next forward."""

    def reattach(self) -> None:
        """The other plan."""
        self._session.detach()
        self._attach()

    def close(self) -> None:
        """Detaches."""
        self._session.detach()


def plan_of(model: RandomModel, shape: PlanShape) -> Plan:
    """The described plan, as it comes out of its document."""
    names = list(reversed(planned_names(model, shape.leave_out_unused)))
    if shape.order:
        random.Random(shape.order).shuffle(names)
    buckets, start = [], 0
    while start < len(names):
        size = shape.sizes[len(buckets) % len(shape.sizes)]
        buckets.append(PlanBucket(gradients=tuple(names[start : start + size])))
        start += size
    print_ = runtime.checks.plan.model_fingerprint(model)
    plan = Plan(
        model=ModelReference(name="random", fingerprint=print_),
        world=PlanWorld(ranks=dist.get_world_size()),
        accuracy="exact",
        buckets=tuple(buckets),
    )
    return runtime.parse_plan(json.loads(json.dumps(plan.to_document())))
