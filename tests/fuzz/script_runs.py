"""What the actions of a random script do, with DDP and with a plan alike, and a log of all that must come out equal."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from model_trainers import follow_rank_0
from script_net import BATCH, OPTIMIZERS, WIDTH, Net, Together, batch, each_of, loss_of
from script_sides import DDPSide, PlanSide, Servers
from scripts import RULES, SHARED, Action, Script
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, update_bn

from runtime.delay.delayed import Delayed
from runtime.errors import CommunicationError


class Misfit(Exception):
    """Something is not what was to be expected, in words."""


class Wrapper:
    """An optimizer in another object, as libraries have it."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.param_groups, self.state = optimizer.param_groups, optimizer.state

    def step(self, *arguments: Any) -> Any:
        """The optimizer's."""
        return self.optimizer.step(*arguments)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """The optimizer's."""
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> Any:
        """The optimizer's."""
        return self.optimizer.state_dict()


def _delete(first: nn.Parameter, _: nn.Parameter) -> None:
    first.grad = None


def _halve(first: nn.Parameter, _: nn.Parameter) -> None:
    assert first.grad is not None
    first.grad = first.grad * 0.5


def _in_place(first: nn.Parameter, _: nn.Parameter) -> None:
    assert first.grad is not None
    first.grad.mul_(2.0).add_(0.01)


def _data(first: nn.Parameter, _: nn.Parameter) -> None:
    assert first.grad is not None
    first.grad.data = first.grad.data.clamp(-0.01, 0.01)


def _swap(first: nn.Parameter, middle: nn.Parameter) -> None:
    first.grad, middle.grad = middle.grad, first.grad


EDITS: dict[str, Callable[[nn.Parameter, nn.Parameter], None]] = {
    "half": _halve, "delete": _delete, "in_place": _in_place, "data": _data, "swap": _swap,
}  # fmt: skip
"""Of gradients of two parameters of one shape."""


def _in_thread(run: Run) -> list[Tensor]:
    found = list[Tensor]()
    thread = threading.Thread(target=lambda: found.extend(p.detach().clone() for p in run.model.parameters()))
    thread.start()
    thread.join()
    return found


def _average(run: Run) -> list[Tensor]:
    run.averaged = run.averaged or AveragedModel(run.model)
    run.averaged.update_parameters(run.model)
    return list(run.averaged.parameters())


def _other(run: Run) -> list[Tensor]:
    other = nn.Linear(WIDTH, WIDTH, bias=False).to(run.dtype)
    other.weight = run.model.middle.weight
    return [other(torch.ones(BATCH, WIDTH, dtype=run.dtype))]


def _functional(run: Run) -> list[Tensor]:
    given = {name: parameter * 0.5 for name, parameter in run.model.first.named_parameters()}
    return [torch.func.functional_call(run.model.first, given, (torch.ones(BATCH, WIDTH, dtype=run.dtype),))]


def _wait(run: Run) -> list[Tensor]:
    session = run.side.watched()
    if session is not None:
        session.wait_for_weights()
    return list(run.model.parameters())


GLANCES: dict[str, Callable[[Run], list[Tensor]]] = {
    "kept": lambda run: [parameter * 1.0 for parameter in run.parameters],
    "method": lambda run: [nn.functional.linear(torch.ones(1, WIDTH, dtype=run.dtype), run.model.last.weight)],
    "thread": _in_thread,
    "keep_vars": lambda run: [value * 1.0 for value in run.model.state_dict(keep_vars=True).values()],
    "vector": lambda run: [nn.utils.parameters_to_vector(run.model.parameters())],
    "pickle": lambda run: list(pickle.loads(pickle.dumps(run.model)).parameters()),
    "average": _average,
    "functional": _functional,
    "part": lambda run: [run.model.middle(torch.ones(BATCH, WIDTH, dtype=run.dtype))],
    "wait": _wait,
    "other": _other,
}
"""`scripts.GLANCES`."""


def _nested(run: Run) -> None:
    with run.side.no_sync():
        with run.side.no_sync():
            run.micro_batch(0, False)
        run.micro_batch(1, False)
    run.micro_batch(2, True)


def _triggered(run: Run) -> None:
    with run.side.no_sync():
        losses = [run.loss(0), run.loss(1)]
    run.backward(losses[0], False)
    with run.side.trigger():
        run.backward(losses[1], False)
    run.after_exchange()  # outside: what the context says of buffers is no more


def _accumulated(run: Run) -> None:
    for turn in range(2):
        with run.side.accumulate():
            run.micro_batch(turn, bool(turn))


MICRO: dict[str, Callable[[Run], None]] = {"nested": _nested, "trigger": _triggered, "accumulate": _accumulated}
"""Ways to accumulate gradients that are more than `no_sync` around all but the last."""


class Run:
    """One script on one side."""

    def __init__(self, script: Script, side: DDPSide | PlanSide, members: dist.ProcessGroup) -> None:
        self.script, self.side, self.members = script, side, members
        self.rank, self.dtype = dist.get_rank(), getattr(torch, script.dtype)
        self.log = list[tuple[str, Tensor | None]]()
        self.habits = dict[str, str]()
        self.hooks = list[Any]()
        self.kept = list[tuple[str, Any]]()
        self.number = 0
        """Of the step."""
        self.retired = self.dropped = self.attached = False
        self.mode = "train"
        self.label = ""
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=10**6)
        self.second: tuple[nn.Module, torch.optim.Optimizer, DDPSide | PlanSide, nn.Module] | None = None
        self.servers: Servers | None = None
        self.delayed = False
        """Whether ranks have, or have had, weights of their own."""
        self.momenta = dict[str, Tensor]()
        self.ema = dict[str, Tensor]()
        self.averaged: AveragedModel | None = None
        self.waits = any(action.name == "attach" for action in script.actions)
        self.late = any(action.name == "add_group" for action in script.actions)
        self._build(script.optimizer)
        self.target: nn.Module = self.model
        """What is attached, or wrapped."""
        self.first_state = copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))
        names = {name for name, _ in self.model.named_buffers()}
        follow_rank_0([t for name, t in self.first_state[0].items() if name in names], members)  # as from one file

    def _build(self, optimizer: str) -> None:
        self.model = Net(self.script.model, self.dtype)
        self._set_mode()
        parameters = list(self.model.parameters())
        self.optimizer: Any = OPTIMIZERS[optimizer](parameters[:-1] if self.late else parameters)
        self._watch_momenta()
        self.parameters = parameters
        self.call: nn.Module = self.model
        self.schedulers = list[Any]()

    def _watch_momenta(self) -> None:
        if self.script.kind == "delayed":  # registered before the session's: there is momentum yet
            self.optimizer.register_step_post_hook(self._see_momenta)

    def _see_momenta(self, *_: Any) -> None:
        found = {name: self.optimizer.state.get(p, {}) for name, p in self.model.named_parameters()}
        buffers = {name: state.get("momentum_buffer") for name, state in found.items()}
        self.momenta = {name: buffer.clone() for name, buffer in buffers.items() if buffer is not None}

    def perform(self, index: int, action: Action) -> None:
        """One action, on the ranks that do it."""
        self.label = f"{index} {action}"
        session = self.side.watched()
        self.delayed |= session is not None and session._mode.own_weights  # a switch has let them
        if self.retired:
            return
        if not self.attached and (action.name == "attach" or not self.waits or not RULES[action.name].early):
            self.attach()
        if action.rank is None or action.rank == self.rank:
            getattr(self, f"do_{action.name}")(*action.arguments)

    def finish(self) -> None:
        """Everything that is left."""
        if self.retired:
            return
        self.label = "end"
        session = self.side.watched()
        self._check_servers()
        state: Any = None
        if session is not None and session.optimizer is self.optimizer and self.script.kind in SHARED:
            state = None if self.dropped else session.optimizer_state_dict()
        # A session knows the state of its optimizer alone, which it averages with the weights.
        averages = self.script.kind == "outer" and not {one.name for one in self.script.actions} & {"drop", "optimizer"}
        if averages and session is not None and session._mode.own_weights:
            self.side.switch(100)
        self.side.leave()
        if self.second is not None:
            self.second[2].leave()
            self._note_model(self.second[0])
        self._note_model(self.model)
        self._note_state((state or self.optimizer.state_dict())["state"])
        for name, parameter in self.model.named_parameters():
            self.note(f"gradient of {name}", parameter.grad)
        self.delayed &= not averages

    # What is compared.

    def note(self, what: str, value: Any) -> None:
        """Logs a value, unless ranks have weights of their own now."""
        if not self.delayed:
            tensor = value if value is None or isinstance(value, Tensor) else torch.as_tensor(value)
            self.log.append((f"{self.label}: {what}", None if tensor is None else tensor.detach().clone()))

    def _note_model(self, model: nn.Module) -> None:
        for name, tensor in model.state_dict().items():
            self.note(name, tensor)

    def _note_gradients(self) -> None:
        """Of a shared step they are in parts."""
        for name, parameter in self.model.named_parameters() if self.script.kind not in SHARED else ():
            self.note(f"gradient of {name}", parameter.grad)

    def _note_state(self, state: Any) -> None:
        for index in sorted(state, key=str):
            for key, value in sorted(state[index].items(), key=lambda item: str(item[0])):
                if isinstance(value, Tensor | float | int):
                    self.note(f"{key} of {index}", value)

    # Attaching.

    def attach(self) -> None:
        """Wraps the model, or makes a session."""
        self.attached = True
        self.call = self.side.attach(self.target, self.model, self.optimizer, self._loss_scale)

    def do_attach(self) -> None:
        """`perform` has done it."""

    def do_reattach(self, buckets: str) -> None:
        """Another plan, by way of none."""
        self._end_delay()
        self.side.reattach(int(buckets))

    def do_switch(self, buckets: str) -> None:
        """Another plan."""
        self._end_delay()
        self.side.switch(int(buckets))

    def _end_delay(self) -> None:
        """What owners go on with begins anew when there is a delay again."""
        self._check_servers()
        self.servers = None if not self.dropped else self.servers

    def do_switch_within(self, buckets: str) -> None:
        """Another plan between two backwards of a step."""
        if self.dropped:
            return self.do_train("1")
        self._zero()
        with self.side.no_sync():
            self.backward(self.loss(0), False)
        self.do_switch(buckets)
        self.backward(self.loss(1), True)
        self._note_gradients()
        self._update()
        self._after_update()
        self.number += 1

    def do_drop(self) -> None:
        """The script forgets its session."""
        self.dropped = True
        self._check_servers()
        self.side.drop()
        gc.collect()

    def do_report(self) -> None:
        """Looks at it."""
        self.side.report()

    def do_compile(self, how: str, backend: str) -> None:
        """In place, or around what is called."""
        if how == "in_place":
            self.model.compile(backend=backend)
        else:
            self.call = torch.compile(self.call, backend=backend)  # type: ignore[assignment]
            if not self.attached:
                self.target = self.call

    # Training.

    def do_loop(self, habit: str, value: str) -> None:
        """A habit of every step from now on."""
        self.habits[habit] = value
        if habit == "schedule":
            make = torch.optim.lr_scheduler.StepLR if value == "step" else torch.optim.lr_scheduler.CosineAnnealingLR
            for one in each_of(self.optimizer):
                self.schedulers.append(make(one.optimizer if isinstance(one, Wrapper) else one, 2))
        if habit == "second" and self.second is None:
            model = Net((), self.dtype)
            optimizer = OPTIMIZERS["sgd"](model.parameters())
            side = type(self.side)(self.script, self.side.group)
            self.second = model, optimizer, side, side.attach(model, model, optimizer, None)

    def do_train(self, count: str) -> None:
        """Steps."""
        for _ in range(int(count)):
            if self._habit("closure") or self.script.optimizer == "lbfgs":
                self.note("loss of the closure", self.optimizer.step(self._closure).detach())
            else:
                self._zero()
                self._gradients()
                self._edit()
                self._update()
            self._second()
            self._after_update()
            self.number += 1

    def _loss_scale(self) -> float:
        return self.scaler.get_scale() if self._habit("scaler") else 1.0

    def _habit(self, name: str) -> str:
        value = self.habits.get(name, "off")
        return "" if value == "off" else value

    def _zero(self) -> None:
        how = self._habit("zero") or "none"
        if how == "model":
            self.model.zero_grad()
        elif how != "skip":
            self.optimizer.zero_grad(set_to_none=how == "none")
        if self._habit("own"):
            for index, parameter in enumerate(self.model.parameters()):
                if parameter.requires_grad:
                    parameter.grad = torch.full_like(parameter, 0.01 * (index + self.rank))

    def _gradients(self) -> None:
        micro, every = "" if self.dropped else self._habit("micro"), int(self._habit("every") or 1)
        if micro in MICRO:
            MICRO[micro](self)
            self._note_gradients()
            return
        silent = 0 if not micro else 1 if micro == "no_sync" else 1 + self.rank % 2
        for turn, exchanged in enumerate([False] * silent + [True] * every):
            with contextlib.nullcontext() if exchanged else self.side.no_sync():
                self.micro_batch(turn, exchanged)
        self._note_gradients()

    def micro_batch(self, turn: int, exchanged: bool) -> None:
        """Forward and backward of one."""
        loss = self.loss(turn)
        self.note(f"loss {turn}", loss)
        self.backward(loss, exchanged)

    def loss(self, turn: int, *, probing: bool = True) -> Tensor:
        """What a forward of this step gives."""
        self.model.uses_branch = not (
            ("unused" in self.script.model and self.number % 2) or ("apart" in self.script.model and self.rank == 1)
        )
        losses = []
        for forward in range(2 if self._habit("forwards") else 1):
            x, y = batch(100 * self.number + 10 * turn + forward, self.rank, self.dtype)
            probe, penalty = (probing and bool(self._habit(one)) for one in ("probe", "penalty"))
            x.requires_grad_(probe or penalty)
            with torch.autocast("cpu", torch.bfloat16, enabled=bool(self._habit("autocast"))):
                call = self.call.forward if self._habit("call") == "forward" else self.call
                losses.append(loss_of(call(x), y))
        loss = torch.stack(losses).sum()
        if probe:
            self.note("gradient of the input", torch.autograd.grad(loss, x, retain_graph=True)[0])
        if penalty:
            loss = loss + torch.autograd.grad(loss, x, create_graph=True)[0].pow(2).sum()
        if self._habit("scaler") == "overflow" and self.number % 3 == 1 and self.rank == 1:
            loss = loss * float("inf")
        if self._habit("reduce") == "loss":
            mean = loss.detach().clone()
            dist.all_reduce(mean, group=self.members)
            self.note("mean loss", mean)
        return loss

    def backward(self, loss: Tensor, exchanged: bool) -> None:
        """Of a micro-batch; `exchanged`: whether gradients are averaged over ranks in it."""
        if self._habit("scaler") and not self._habit("closure"):
            loss = self.scaler.scale(loss)
        if self.script.weights == "unequal":
            loss = self._weighed(loss)
        loss.backward()
        if exchanged:
            self.after_exchange()

    def _weighed(self, loss: Tensor) -> Tensor:
        """Unequal weights of ranks, in some steps none of the last one's: the session's, or in the loss for DDP."""
        step, ranks = self.number, dist.get_world_size(self.members)
        weights = [1.0 + (rank + step) % ranks for rank in range(ranks - 1)]
        weights += [0.0 if step % 3 == 2 else 1.0 + (ranks - 1 + step) % ranks]
        mine, session = weights[dist.get_rank(self.members)], self.side.watched()
        if session is not None:
            session.weight(mine)
        return loss if self.side.plans else loss * (mine * ranks / sum(weights))

    def after_exchange(self) -> None:
        """Bring the reference to where a session is behind the exchange of gradients."""
        self._align(self.side)
        if self.servers is not None:
            group = self.optimizer.param_groups[0]
            self.servers.push(self.model, group["lr"], group.get("momentum", 0.0), self._loss_scale(), self._mean)

    def _mean(self, tensor: Tensor) -> None:
        dist.all_reduce(tensor, group=self.members)
        tensor /= dist.get_world_size(self.members)

    def _closure(self) -> Tensor:
        self._zero()
        loss = self.loss(0)
        loss.backward()
        self._align(self.side)
        if self.script.optimizer == "lbfgs" and not self.side.plans:
            loss = loss.detach() / dist.get_world_size(self.members)
            dist.all_reduce(loss, group=self.members)
        return loss

    def _edit(self) -> None:
        """What comes between backward and update."""
        if self._habit("reduce") == "gradients":
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad, group=self.members)
        if self._habit("scaler") == "unscale":
            for one in each_of(self.optimizer):
                self.scaler.unscale_(one)
        first, middle = self.model.first.weight, self.model.middle.weight
        if self._habit("edit") and first.grad is not None and middle.grad is not None:
            EDITS[self._habit("edit")](first, middle)
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        clip = self._habit("clip")
        if clip in ("norm", "norm_loop"):
            self.note("norm", nn.utils.clip_grad_norm_(parameters, 0.5, foreach=clip == "norm"))
        elif clip == "value":
            nn.utils.clip_grad_value_(parameters, 0.01)
        elif clip == "parameter":
            for parameter in parameters:
                nn.utils.clip_grad_norm_(parameter, 0.1)

    def _update(self) -> None:
        if self._habit("scaler"):
            for one in each_of(self.optimizer):
                self.scaler.step(one)
            self.scaler.update(64.0 if self.script.kind == "outer" else None)  # else ranks come to scales of their own
            self.note("scale", self.scaler.get_scale())
        else:
            self.optimizer.step()

    def _align(self, side: DDPSide | PlanSide) -> None:
        """Bring DDP's buffers to what its next forward begins with: a session does so behind the exchange."""
        if self.servers is None:
            side.exchanged()

    def _second(self) -> None:
        """Another model with a session of its own, in the same step."""
        if self.second is None:
            return
        model, optimizer, side, call = self.second
        optimizer.zero_grad()
        x, y = batch(100 * self.number + 50, self.rank, self.dtype)
        loss = loss_of(call(x), y)
        if self.number % 2:
            self._zero()
            loss = loss + loss_of(self.call(x), y)
        loss.backward()
        self._align(side)
        self._align(self.side)
        optimizer.step()
        self._note_model(model)

    def _after_update(self) -> None:
        session = self.side.watched()
        if self.servers is None and session is not None and session._mode.own_weights:
            self.delayed = True
            self.servers = Servers(self.model, self.momenta) if self.script.kind == "delayed" else None
        for scheduler in self.schedulers:
            scheduler.step()
        if self._habit("ema"):
            for name, parameter in self.model.named_parameters():
                value = parameter.data if self._habit("ema") == "data" else parameter.detach()
                self.ema.setdefault(name, value.clone()).lerp_(value, 0.5)
                self.note(f"average of {name}", self.ema[name])
        if self.script.kind != "late" or self._habit("watch"):  # else each forward is the first to look
            self._note_model(self.model)
        for what, value in self.kept:
            self.note(what, torch.from_numpy(value) if what.endswith("numpy") else value)

    def _check_servers(self) -> None:
        session = self.side.watched()
        if self.servers is None or session is None or not any(isinstance(one, Delayed) for one in session._modes):
            return
        with session.global_weights():
            misfit = self.servers.misfit(self.model)
        if misfit is not None:
            raise Misfit(misfit)

    # Hooks.

    def _parameter(self, index: str) -> nn.Parameter:
        parameters = list(self.model.parameters())
        return parameters[int(index) % len(parameters)]

    def do_hook(self, kind: str, how: str, index: str) -> None:
        """Registers a hook on a parameter, a module or the model."""
        label = f"seen by the {kind} hook"
        if kind not in ("tensor", "post"):
            self._hook_module(kind, lambda value: self._changed(value, how, label), int(index))
            return
        parameter = self._parameter(index)
        if not parameter.requires_grad:
            return
        if kind == "tensor":
            handle = parameter.register_hook(lambda gradient: self._changed(gradient, how, label))
        else:
            handle = parameter.register_post_accumulate_grad_hook(lambda one: self._change_gradient(one, how, label))
        self.hooks.append(handle)

    def _hook_module(self, kind: str, change: Callable[[Any], Any], index: int) -> None:
        on: nn.Module = (self.model.first, self.model.middle, self.model.last)[index % 3]
        if kind.startswith("model_"):
            on, kind = self.model, kind.removeprefix("model_")
        handle = {
            "forward": lambda: on.register_forward_hook(lambda _m, _a, output: change(output)),
            "forward_pre": lambda: on.register_forward_pre_hook(lambda _m, arguments: change(arguments)),
            "backward": lambda: on.register_full_backward_hook(lambda _m, given, _out: change(given)),
            "backward_pre": lambda: on.register_full_backward_pre_hook(lambda _m, out: change(out)),
        }[kind]()
        self.hooks.append(handle)

    def _changed(self, value: Any, how: str, label: str) -> Any:
        """What a hook gives back for what it was given."""
        if isinstance(value, tuple):
            return tuple(self._changed(one, how, label) for one in value)
        if not isinstance(value, Tensor):
            return value
        if how == "look":
            self.note(label, value)
            return value
        if how == "clamp":
            return value.clamp(-0.02, 0.02)
        return value + 0.001 * (self.rank + 1) if how == "add" else value * 0.5

    def _change_gradient(self, parameter: Tensor, how: str, label: str) -> None:
        if parameter.grad is None:
            return
        if how == "clamp":
            parameter.grad.clamp_(-0.02, 0.02)
        elif how == "add":
            parameter.grad.add_(0.001 * (self.rank + 1))
        elif how == "replace":
            parameter.grad = parameter.grad * 0.5
        else:
            self.note(label, parameter.grad)

    def do_unhook(self) -> None:
        """Removes the oldest."""
        if self.hooks:
            self.hooks.pop(0).remove()

    # Gradients outside of training.

    def do_look(self, how: str) -> None:
        """As a log does it."""
        for parameter in self.model.parameters():
            gradient = parameter.grad
            if gradient is None:
                continue
            if how == "print":
                str(gradient)
                continue
            looks: dict[str, Callable[[Tensor], Any]] = {
                "norm": lambda g: g.norm(),
                "abs": lambda g: g.abs().sum(),
                "max": lambda g: g.max(),
                "numpy": lambda g: float(g.numpy().max()),
                "sum_of_squares": lambda g: (g**2).sum().item(),
            }
            self.note(how, looks[how](gradient))

    def do_glance(self, how: str) -> None:
        """Looks at weights where gathers may be on their way."""
        found = GLANCES[how](self)
        for index, tensor in enumerate(found):
            self.note(f"{how} {index}", tensor)

    def do_keep(self, how: str) -> None:
        """Holds a gradient over the next steps."""
        views: dict[str, Callable[[Tensor], Any]] = {
            "itself": lambda g: g,
            "clone": Tensor.clone,
            "detach": Tensor.detach,
            "data": lambda g: g.data,
            "view": lambda g: g.view(-1),
            "numpy": lambda g: g.numpy(),
            "dlpack": torch.from_dlpack,
            "storage": lambda g: torch.tensor([], dtype=g.dtype).set_(
                g.untyped_storage(), g.storage_offset(), g.shape, g.stride()
            ),
        }
        for parameter in (self.model.first.weight, getattr(self.model, "large", self.model.last).weight):
            if parameter.grad is not None:
                self.kept.append((f"kept as {how}", views[how](parameter.grad)))

    def do_let_go(self) -> None:
        """Of all that is kept."""
        self.kept.clear()

    def do_create_graph(self, how: str) -> None:
        """A backward that can be differentiated."""
        self.optimizer.zero_grad()
        self.loss(5).backward(create_graph=True)
        if how == "second":
            torch.stack([p.grad.pow(2).sum() for p in self.model.parameters() if p.grad is not None]).sum().backward()
        self._note_gradients()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def do_fail(self, where: str) -> None:
        """A step that raises, caught: in forward, in backward, or there on one rank alone, of which the others are
        told. DDP, which could not go on, only does what comes before, without a graph.
        """
        self.optimizer.zero_grad()
        call = self.call
        if not self.side.plans:
            self.side.exchanged()
            self.call = self.model
        fails = where == "forward" or (self.side.plans and (where == "backward" or self.rank == 1))
        self.model.trap = ("forward" if where == "forward" else "backward") if fails else ""
        told = contextlib.nullcontext() if fails else self._told()
        with contextlib.suppress(ArithmeticError), told, torch.set_grad_enabled(self.side.plans):
            loss = self.loss(6, probing=False)
            seen = len(self.log)
            if self.side.plans:
                try:
                    loss.backward()
                finally:
                    del self.log[seen:]  # what hooks saw, for which DDP runs no backward
        self.model.trap, self.call = "", call
        self.model.zero_grad()  # the optimizer need not have all parameters

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """Inside, another rank's backward raises, and this one's says so; with a delay it is no step, unsaid."""
        session = self.side.watched()
        waits = self.side.plans and session is not None and not session._mode.own_weights
        try:
            yield
        except CommunicationError as error:
            if "an exception ended the backward of 1" not in str(error):
                raise
        else:
            if waits:
                raise Misfit("another rank's backward raised, and this one's did not")

    def do_interrupt(self) -> None:
        """An exception between backward and step."""
        with contextlib.suppress(ArithmeticError):
            self._zero()
            self._gradients()
            raise ArithmeticError

    # Parameters and optimizers.

    def do_freeze(self, index: str) -> None:
        """From now on."""
        self._parameter(index).requires_grad_(False)

    def do_thaw(self, index: str) -> None:
        """From now on."""
        self._parameter(index).requires_grad_(True)

    def do_add_group(self) -> None:
        """The last parameter joins, once."""
        last = list(self.model.parameters())[-1]
        if not any(one is last for group in self.optimizer.param_groups for one in group["params"]):
            self.optimizer.add_param_group({"params": [last]})

    def do_optimizer(self, name: str) -> None:
        """Another one from now on."""
        self.optimizer = OPTIMIZERS[name](self.model.parameters())
        self.schedulers.clear()

    def do_wrapper(self) -> None:
        """The optimizer in another object."""
        each = each_of(self.optimizer)
        if not isinstance(each[0], Wrapper):
            self.optimizer = Wrapper(each[0]) if len(each) == 1 else Together(*map(Wrapper, each))

    def do_exchange(self, how: str) -> None:
        """Weights by `.data`."""
        first, middle = self.model.first.weight, self.model.middle.weight
        if how == "parameters":
            first.data, middle.data = middle.data, first.data
        elif how == "scaled":
            middle.data = middle.data * 0.9
        else:
            average = {n: self.ema.get(n, p.detach()).clone() for n, p in self.model.named_parameters()}
            backup = {name: parameter.data for name, parameter in self.model.named_parameters()}
            for name, parameter in self.model.named_parameters():
                parameter.data = average[name]
            self.do_evaluate("eval")
            if how == "average_and_back":
                for name, parameter in self.model.named_parameters():
                    parameter.data = backup[name]
        self._note_model(self.model)

    # States and copies.

    def do_save(self, what: str) -> None:
        """Looks at a state."""
        if what == "model":
            self._note_model(self.model)
        elif what == "optimizer":
            self._note_state(self.optimizer.state_dict()["state"])
        elif what == "pickle":
            pickle.loads(pickle.dumps(self.model.state_dict()))
            self._note_state(pickle.loads(pickle.dumps(self.optimizer)).state_dict()["state"])
        elif self.side.plans and not self.dropped:
            pickle.dumps(self.side.session.state_dict())  # type: ignore[union-attr]

    def do_load(self, what: str) -> None:
        """Back to the first state."""
        model, optimizer = copy.deepcopy(self.first_state)
        if what in ("model", "both"):
            self.model.load_state_dict(model)
        if what in ("optimizer", "both") and self.script.optimizer != "lbfgs":
            inner = self.optimizer.optimizer if isinstance(self.optimizer, Wrapper) else self.optimizer
            inner.load_state_dict(optimizer)

    def do_checkpoint(self) -> None:
        """Everything is saved, thrown away, built anew and loaded."""
        self._check_servers()
        self._restart(copy.deepcopy((self.model.state_dict(), *self.side.checkpoint(self.optimizer))))

    def _restart(self, states: tuple[Any, Any, Any]) -> None:
        kind, frozen = type(self.optimizer), [n for n, p in self.model.named_parameters() if not p.requires_grad]
        groups = [len(group["params"]) for group in self.optimizer.param_groups]
        self.side.leave()
        for handle in self.hooks:
            handle.remove()
        self.hooks.clear()
        self.habits.pop("schedule", None)
        self._build(self.script.optimizer)
        self.target = self.model
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(name not in frozen)
        parameters = list(self.model.parameters())
        if kind is Together:
            for _ in groups[len(each_of(self.optimizer)) :]:
                self.do_add_group()
        elif kind is not Wrapper:
            self.optimizer = kind(parameters[: groups[0]], lr=0.01)
            self._watch_momenta()
            for _ in groups[1:]:
                self.do_add_group()
        self.model.load_state_dict(states[0])
        self.optimizer.load_state_dict(states[1]) if kind is not Wrapper else None
        self.call = self.side.attach(self.target, self.model, self.optimizer, self._loss_scale)
        self.side.restore(states[2])
        if states[2] is None:  # of a session that was dropped: a delay begins anew, from what rank 0's weights are
            self.servers = None
        self.dropped = False

    def do_resize(self) -> None:
        """The last rank leaves; the others go on from a checkpoint of all."""
        model, optimizer, own = copy.deepcopy((self.model.state_dict(), *self.side.checkpoint(self.optimizer)))
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, own)
        group = dist.new_group([0, 1])
        if self.rank > 1:
            self.side.leave()
            self.retired = True
            return
        self.side.leave()
        self.side.move(group)
        self.members = group
        self._restart((model, optimizer, None if own is None else everyone))

    def do_evaluate(self, how: str) -> None:
        """The bare model on this rank."""
        x, y = batch(7000 + self.number, self.rank, self.dtype)
        self.model.uses_branch = True
        if how == "copy":
            twin = copy.deepcopy(self.model)
            loss_of(twin(x), y).backward()
            self.note("gradient of a copy", twin.first.weight.grad)
            return
        with torch.inference_mode() if how == "inference" else torch.no_grad():
            self.model.train(how == "no_grad")
            self.note("evaluation", loss_of(self.model(x), y).clone())
            self._set_mode()

    def do_validate(self, how: str) -> None:
        """What is called, by every rank, on two batches of its own."""
        self.model.uses_branch = True
        with torch.inference_mode() if how == "inference" else torch.no_grad():
            self.model.train(how == "no_grad")
            for turn in range(2):
                x, y = batch(8000 + 10 * self.number + turn, self.rank, self.dtype)
                self.note(f"validation {turn}", loss_of(self.call(x), y).clone())
            self._set_mode()
        for name, buffer in self.model.named_buffers():
            self.note(name, buffer)

    def do_mode(self, mode: str) -> None:
        """From now on: all in training, none, or in evaluation but for what has buffers."""
        self.mode = mode
        self._set_mode()

    def _set_mode(self) -> None:
        self.model.train(self.mode == "train")
        for part in ("norm", "bank", "growing") if self.mode == "part" else ():
            if part in self.script.model:
                getattr(self.model, part).train()

    def do_buffers(self, how: str) -> None:
        """Changes buffers between two steps."""
        if how == "update_bn":
            x, _ = batch(9000 + self.number, self.rank, self.dtype)
            update_bn([x], self.model)
            self._set_mode()
        elif how == "load":
            first = {
                name: self.first_state[0][name] for name, _ in self.model.named_buffers() if name in self.first_state[0]
            }
            first = {n: t for n, t in first.items() if t.shape == self.model.get_buffer(n).shape}
            self.model.load_state_dict(first, strict=False)
        for part in self.model.modules() if how in ("reset", "replace") else ():
            for name, buffer in part.named_buffers(recurse=False):
                if how == "reset":
                    buffer.fill_(self.rank + 1)
                else:
                    setattr(part, name, buffer + 1)

    def do_copy(self, what: str) -> None:
        """Copies, and trains what was copied."""
        model, optimizer = self.model, self.optimizer
        if what == "model":
            model = copy.deepcopy(model)
            optimizer = OPTIMIZERS["sgd"](model.parameters())
        elif what == "optimizer":
            self._note_state(copy.deepcopy(optimizer).state_dict()["state"])
            return
        else:
            model, optimizer = copy.deepcopy((model, optimizer))
        x = torch.ones(BATCH, WIDTH, dtype=self.dtype)
        torch.manual_seed(3)
        optimizer.zero_grad()
        loss_of(model(x), torch.zeros(BATCH, dtype=torch.int64)).backward()
        if self.script.optimizer != "lbfgs":
            optimizer.step()
        self._note_model(model)
