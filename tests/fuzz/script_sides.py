"""What a random script trains with: DDP, or a plan; and what DDP does in the place of lossy buckets and of delay."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.state import GradientState
from model_trainers import follow_rank_0
from script_net import DENSITY, Net, each_of, plan_of
from scripts import OWN_WEIGHTS, SHARED, Script
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import runtime
from planner.integrations.accelerate import PlannerAccelerator
from runtime.checks.plan import trainable_parameters
from runtime.optimizers.kinds import inner_optimizers
from runtime.session.session import Session

WAIT_S = 20.0
"""Deadline of every collective."""


class DDPSide:
    """The reference."""

    plans = False

    def __init__(self, script: Script, group: dist.ProcessGroup) -> None:
        self.script, self.group = script, group
        self.watched: Callable[[], Session | None] = lambda: None
        self._feedback = Feedback(script.buckets, group)

    def attach(self, target: nn.Module, model: nn.Module, _optimizer: Any, loss_scale: Any) -> nn.Module:
        """Wraps the model; returns what the loop calls."""
        self._model, self._feedback.loss_scale = model, loss_scale
        self._ddp = DistributedDataParallel(
            target, process_group=self.group,
            **told_of(self.script),
        )  # fmt: skip
        if self.script.kind == "sparse":
            self._feedback.names = {id(p): name for name, p in model.named_parameters()}
            self._ddp.register_comm_hook(None, lambda _, bucket: self._feedback(bucket))
        return self._ddp

    def no_sync(self) -> contextlib.AbstractContextManager[Any]:
        """DDP's."""
        return self._ddp.no_sync()

    def exchanged(self) -> None:
        """Gradients have been: what buffers come to in the next forward, a session brings them to at once."""
        if self._ddp.will_sync_module_buffers():
            self._ddp._sync_buffers()

    def reattach(self, _buckets: int) -> None:
        """Buffers follow rank 0, as after any attach."""
        if not self.script.broadcast:
            follow_rank_0(self._model.buffers(), self.group)

    def checkpoint(self, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
        """The optimizer's state, and no other."""
        return optimizer.state_dict(), None

    def restore(self, _state: Any) -> None:
        """Nothing is kept beside model and optimizer."""

    def move(self, group: dist.ProcessGroup) -> None:
        """Goes on with other ranks."""
        self.group = group
        self._feedback = Feedback(self.script.buckets, group)

    def switch(self, _buckets: int) -> None:
        """There is no plan."""

    def drop(self) -> None:
        """There is no session."""

    def report(self) -> None:
        """There is none."""

    def leave(self) -> None:
        """Ends with its last reference."""


class PlanSide:
    """What is tested."""

    plans = True

    def __init__(self, script: Script, group: dist.ProcessGroup, kind: str | None = None) -> None:
        """`kind`: another one than the script's."""
        self.script, self.group = script, group
        self.session: Session | None = None
        self._own = kind or script.kind
        self._kind, self._buckets = self._own, script.buckets
        self._names: tuple[str, ...] = ()
        self.watched: Callable[[], Session | None] = lambda: None
        """The session, also when the script has let go of it."""

    def attach(self, target: nn.Module, model: nn.Module, optimizer: Any, loss_scale: Any) -> nn.Module:
        """Makes a session; the loop calls what it called."""
        self._arguments, self._names = (target, model, optimizer, loss_scale), ()
        self.session = runtime.attach(
            target, each_of(optimizer), self._plan(), None if self.group is dist.group.WORLD else self.group,
            timeout_s=WAIT_S, guard=False, broadcast_buffers=not self.script.broadcast,
            weight=(lambda: 3.0) if self.script.weights else None,
            loss_scale=loss_scale if self._kind in ("sparse", *OWN_WEIGHTS) else None,
        )  # fmt: skip
        self._names, self.watched = tuple(self.session._parameters), weakref.ref(self.session)
        return target

    def _plan(self) -> runtime.Plan:
        _, model, optimizer, _ = self._arguments
        names = list(self._names or trainable_parameters(model))
        muons = [one for one in inner_optimizers(each_of(optimizer)) if isinstance(one, torch.optim.Muon)]
        owned = {id(p) for one in muons for group in one.param_groups for p in group["params"]}
        matrices = [name for name, p in model.named_parameters() if name in names and id(p) in owned]
        return plan_of(names, self._kind, self._buckets, dist.get_world_size(self.group), matrices)

    def no_sync(self) -> contextlib.AbstractContextManager[Any]:
        """The session's."""
        assert self.session is not None
        return self.session.no_sync()

    def exchanged(self) -> None:
        """The session has seen it."""

    def reattach(self, buckets: int) -> None:
        """Detaches, and attaches another plan."""
        if self.session is not None:
            self._buckets = buckets
            self.session.detach()
            self.attach(*self._arguments)

    def checkpoint(self, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
        """As the documents say: from the session where ranks share the step."""
        if self.session is None:
            return optimizer.state_dict(), None
        shared = self._kind in SHARED and optimizer is self._arguments[2]
        with self.session.whole_optimizer_state() if shared else contextlib.nullcontext():
            own = optimizer.state_dict()
        return own, self.session.state_dict()

    def restore(self, state: Any) -> None:
        """Goes on."""
        if self.session is not None and state is not None:
            self.session.load_state_dict(state)

    def move(self, group: dist.ProcessGroup) -> None:
        """Goes on with other ranks."""
        self.group = group

    def switch(self, buckets: int) -> None:
        """Switch to another plan; where ranks share the step or train alone, every second one is exact."""
        if self.session is None:
            return
        self._buckets = buckets
        if self._own in (*SHARED, *OWN_WEIGHTS):
            self._kind = "exact" if self._kind == self._own else self._own
        self.session.switch(self._plan())

    def drop(self) -> None:
        """Nobody holds the session but the model."""
        self.session = None

    def report(self) -> None:
        """In words."""
        if self.session is not None:
            str(self.session.report())

    def leave(self) -> None:
        """The model is plain again."""
        if self.session is not None:
            self.session.detach()
            self.session = None


class WithAccelerator:
    """What a side has in common whose loop is Accelerate's."""

    script: Script
    accelerator: Accelerator

    def prepare(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, make: Callable[..., Accelerator]
    ) -> nn.Module:
        """Makes the Accelerator; returns the prepared model."""
        GradientState._reset_state()
        told = DistributedDataParallelKwargs(**told_of(self.script))
        self.accelerator = make(cpu=True, gradient_accumulation_steps=2, kwargs_handlers=[told])
        self.prepared: nn.Module
        self.prepared, *_ = self.accelerator.prepare(model, *each_of(optimizer))
        return self.prepared

    def no_sync(self) -> contextlib.AbstractContextManager[Any]:
        """The Accelerator's."""
        return self.accelerator.no_sync(self.prepared)  # type: ignore[no-any-return]

    def trigger(self) -> contextlib.AbstractContextManager[Any]:
        """Inside, a backward exchanges though its forward was in `no_sync`."""
        return self.accelerator.trigger_sync_in_backward(self.prepared)  # type: ignore[no-any-return]

    def accumulate(self) -> contextlib.AbstractContextManager[Any]:
        """Every second one exchanges."""
        return self.accelerator.accumulate(self.prepared)  # type: ignore[no-any-return]


class AcceleratorSide(WithAccelerator, DDPSide):
    """The reference of scripts with Accelerate."""

    def attach(self, target: nn.Module, model: nn.Module, optimizer: Any, _loss_scale: Any) -> nn.Module:
        """Prepares model and optimizer; returns what the loop calls."""
        self._model = model
        self._ddp = self.prepare(target, optimizer, Accelerator)  # type: ignore[assignment]
        return self._ddp


class PlannerAcceleratorSide(WithAccelerator, PlanSide):
    """What is tested of it."""

    def attach(self, target: nn.Module, model: nn.Module, optimizer: Any, loss_scale: Any) -> nn.Module:
        """Prepares model and optimizer, which attaches."""
        self._arguments = (target, model, optimizer, loss_scale)
        make = partial(PlannerAccelerator, plan=self._plan(), timeout_s=WAIT_S)
        prepared = self.prepare(target, optimizer, make)
        self.session = self.accelerator.sessions[0]
        self.watched = weakref.ref(self.session)
        return prepared


def told_of(script: Script) -> dict[str, bool]:
    """What DDP is told beside the model."""
    return {
        "find_unused_parameters": script.habit == "find_unused",
        "static_graph": script.habit == "static",
        "broadcast_buffers": not script.broadcast,
    }


class Feedback:
    """DDP's hook in the place of sparse buckets: sends what is largest of residual + gradient/ranks, keeps the rest."""

    def __init__(self, buckets: int, group: dist.ProcessGroup) -> None:
        self._buckets, self._group = buckets, group
        self._residuals = dict[tuple[str, ...], Tensor]()
        self.names = dict[int, str]()
        """By parameter."""
        self.loss_scale: Callable[[], float] = lambda: 1.0
        self._scale = 1.0

    def __call__(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """All gradients are in one bucket of DDP's."""
        assert bucket.is_last()
        assert bucket.index() == 0
        found = {self.names[id(p)]: g for p, g in zip(bucket.parameters(), bucket.gradients(), strict=True)}
        order = [name for name in reversed(self.names.values()) if name in found]
        scale = self.loss_scale()
        self._residuals = {members: held * (scale / self._scale) for members, held in self._residuals.items()}
        self._scale = scale
        for start in range(0, len(order), self._buckets):
            members = tuple(order[start : start + self._buckets])
            self._select(members, [found[name] for name in members])
        total = bucket.buffer()
        dist.all_reduce(total, group=self._group)
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(total)
        return future

    def _select(self, members: tuple[str, ...], gradients: list[Tensor]) -> None:
        flat = torch.cat([gradient.flatten() for gradient in gradients]) * (1.0 / dist.get_world_size(self._group))
        total = self._residuals.get(members, torch.zeros_like(flat)) + flat
        sent = torch.zeros_like(total)
        kept = total.abs().sort(descending=True, stable=True).indices[: max(1, int(DENSITY * total.numel()))]
        sent[kept] = total[kept]
        self._residuals[members] = total - sent
        for gradient, part in zip(gradients, sent.split([one.numel() for one in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))


def pushed(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Parameters by name but those that DDP is told to ignore."""
    return [(name, p) for name, p in model.named_parameters() if not hasattr(p, "_ddp_ignored")]


class Servers:
    """What owners of the weights come to with a delay: momentum SGD on the mean of what each rank's backward left."""

    def __init__(self, model: nn.Module, momenta: dict[str, Tensor]) -> None:
        """Ranks are about to be delayed: their weights are equal, and so is momentum."""
        self._momenta = momenta
        self.weights = {name: p.detach().clone() for name, p in pushed(model)}

    def push(
        self, model: Net, lr: float, momentum: float, loss_scale: float, average: Callable[[Tensor], None]
    ) -> None:
        """A backward is over; `average` is over ranks, in place. Where any gradient is not finite, it is no step."""
        means: dict[str, Tensor] = {}
        for name, parameter in pushed(model):
            nothing = parameter.grad is None or not parameter.requires_grad
            mean = torch.zeros_like(parameter) if nothing else parameter.grad.detach() / loss_scale  # type: ignore[union-attr]
            used = torch.tensor(float(not nothing and (model.uses_branch or not name.startswith("branch."))))
            average(mean), average(used)
            if used:
                means[name] = mean.detach()
        if not all(bool(mean.isfinite().all()) for mean in means.values()):
            return
        for name, mean in means.items():
            if momentum:
                before = self._momenta.get(name)
                mean = self._momenta[name] = mean if before is None else before * momentum + mean
            self.weights[name] = self.weights[name] - lr * mean

    def misfit(self, model: nn.Module) -> str | None:
        """Which of the model's weights, global now, is not what was pushed."""
        for name, parameter in pushed(model):
            expected = self.weights[name]
            off = float((parameter.detach() - expected).abs().max())
            if not off <= 1e-9 * max(1.0, float(expected.abs().max())):
                return f"{name}: the global weights are {off:.3g} from what was pushed"
        return None
