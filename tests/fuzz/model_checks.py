"""What the ranks of the model fuzzer do: train each case by a plan and by a reference, and compare every bit."""

from __future__ import annotations

import contextlib
import copy
import faulthandler
import gc
import hashlib
import json
import traceback
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from model_nodes import BATCH, LARGE, WIDTH, RandomModel, losses_of
from model_trainers import WAIT_S, ByHand, Trainer, WithDDP, WithPlan
from models import Case, Step, ddp_can, from_line
from torch import Tensor, nn

import runtime.modes.base
from runtime.core.buckets import Message, Slot
from runtime.core.buffers import BufferSync
from runtime.core.usage import UsageFlags
from runtime.plan import ModelReference, Plan, PlanBucket, PlanWorld

CASE_S = 90
"""Wall clock that a case may take before its ranks are given up."""

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, weight_decay=0.01),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "nesterov": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True, foreach=False),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01, amsgrad=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "adamw_loop": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, foreach=False),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.01, momentum=0.5, centered=True),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.01),
    "adadelta": lambda parameters: torch.optim.Adadelta(parameters, lr=0.5),
}


class Loop:
    """The described training loop, with a log of everything that must be equal."""

    def __init__(self, case: Case, kind: str, group: dist.ProcessGroup) -> None:
        torch.manual_seed(1)
        self.case, self.rank, self.log = case, dist.get_rank(), list[tuple[str, Tensor | None]]()
        self.model = RandomModel(case)
        if case.start_apart:
            with torch.no_grad():
                for tensor in [*self.model.parameters(), *self.model.buffers()]:
                    tensor.add_(self.rank)
        self.trainable = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = OPTIMIZERS[case.optimizer](self.trainable)
        self.trainer: Trainer
        if kind == "plan":
            self.trainer = WithPlan(self.model, case, self.optimizer)
        else:
            self.trainer = {"ddp": WithDDP, "hand": ByHand}[kind](self.model, case, group)

    def run(self) -> list[tuple[str, Tensor | None]]:
        """All steps, then everything that is left."""
        for index, step in enumerate(self.case.steps):
            self._step(index, step)
        self.trainer.close()
        for name, tensor in self.model.state_dict().items():
            self._note(f"{name} at the end", tensor)
        for name, parameter in self.model.named_parameters():
            for key, value in sorted(self.optimizer.state.get(parameter, {}).items()):
                self._note(f"{key} of {name}", torch.as_tensor(value))
        return self.log

    def _step(self, index: int, step: Step) -> None:
        if step.reattach:
            self.trainer.reattach()
        if step.evaluate == self.rank:
            self._evaluate(index)
        if step.zero != "skip":
            self.optimizer.zero_grad(set_to_none=step.zero == "none")
        for micro, synchronized in enumerate(step.syncs):
            with contextlib.nullcontext() if synchronized else self.trainer.no_sync():
                if not self._backward(index, step, micro):
                    self.trainer.gave_up(synchronized)
                    self.model.zero_grad()
                    return
            self.trainer.after_backward(synchronized)
            self._note_gradients(f"step {index}, micro-batch {micro}")
        if step.clip == "norm":
            self._note(f"norm in step {index}", nn.utils.clip_grad_norm_(self.trainable, 0.5))
        elif step.clip == "value":
            nn.utils.clip_grad_value_(self.trainable, 0.01)
        for parameter in self.trainable[index % 2 :: 2]:
            meddle(parameter, step.meddle)
        self.optimizer.step()

    def _evaluate(self, index: int) -> None:
        """This rank alone: a copy's step, the model in evaluation mode, then in training mode without gradients."""
        self.model.moment = (index, 0, self.rank)
        losses_of(copy.deepcopy(self.model)(*self._batch(index, 6)))[1].backward()
        with torch.no_grad():
            self.model.eval()
            self.model(*self._batch(index, 7))
            self.model.train()
            self.model(*self._batch(index, 8))

    def _backward(self, index: int, step: Step, micro: int) -> bool:
        """One micro-batch; whether it came through."""
        self.model.moment = (index, micro, self.rank)
        self.model.bomb = step.raises if micro == 0 else None
        mains, wholes = [], []
        for turn in range(step.forwards):
            x, ids = self._batch(index, 10 * micro + turn)
            with torch.autocast("cpu", torch.bfloat16, enabled=self.case.autocast):
                main, whole = losses_of(self.trainer.forward(x, ids))
            mains.append(main)
            wholes.append(whole)
        loss = torch.stack(wholes).sum()
        self._note(f"loss in step {index}, micro-batch {micro}", loss)
        try:
            if step.probe and self.model.bomb is None:
                self._note("gradient of the input", torch.autograd.grad(loss, x, retain_graph=True)[0])
            if step.backwards > 1:
                torch.stack(mains).sum().backward(retain_graph=True)
                self.trainer.after_backward(step.syncs[micro])
            loss.backward()
        except ArithmeticError:
            return False
        finally:
            self.model.bomb = None
        return True

    def _batch(self, index: int, micro: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1000 * index + 10 * micro + self.rank)
        torch.manual_seed(1000 * index + 10 * micro + self.rank)  # for dropout
        x = torch.randn(BATCH, WIDTH, generator=generator)
        return x.requires_grad_(), torch.randint(0, WIDTH, (BATCH,), generator=generator)

    def _note(self, label: str, tensor: Tensor | None) -> None:
        self.log.append((label, None if tensor is None else tensor.detach().clone()))

    def _note_gradients(self, when: str) -> None:
        for name, parameter in self.model.named_parameters():
            self._note(f"gradient of {name}, {when}", parameter.grad)


def meddle(parameter: nn.Parameter, how: str) -> None:
    """What users do to gradients."""
    gradient = parameter.grad
    if how == "fill":
        parameter.grad = torch.full_like(parameter, 0.25)
    elif gradient is None:
        return
    elif how == "clone":
        parameter.grad = gradient.clone()
    elif how == "double":
        parameter.grad = gradient * 2
    elif how == "in_place":
        gradient.mul_(0.5)
    elif how == "delete":
        parameter.grad = None
    elif how == "alias":
        parameter.grad = gradient.view_as(gradient)
    elif how == "turn" and gradient.dim() >= 2:
        parameter.grad = gradient.transpose(-1, -2).contiguous().transpose(-1, -2)


def bits(tensor: Tensor) -> Tensor:
    """The tensor's bytes."""
    return tensor.detach().flatten().clone(memory_format=torch.contiguous_format).view(torch.uint8)


def first_difference(expected: list[tuple[str, Tensor | None]], found: list[tuple[str, Tensor | None]]) -> str | None:
    """What differs first, in words."""
    for (label, a), (other, b) in zip(expected, found, strict=True):
        assert label == other, (label, other)
        if a is None or b is None:
            if a is not b:
                return f"{label}: expected {'None' if a is None else 'a tensor'}, found {'None' if b is None else b}"
        elif (a.shape, a.dtype) != (b.shape, b.dtype):
            return f"{label}: expected {a.dtype} {tuple(a.shape)}, found {b.dtype} {tuple(b.shape)}"
        elif not torch.equal(bits(a), bits(b)):
            return f"{label}: off by up to {float((a.double() - b.double()).abs().max()):.3g}"
    return None


def difference(case: Case, group: dist.ProcessGroup) -> str | None:
    """Trains by the reference and by the plan; what differs on this rank, between them or between ranks."""
    kind = "ddp" if ddp_can(case) else "hand"
    expected = Loop(case, kind, group).run()
    loop = Loop(case, "plan", group)
    found = loop.run()
    # Parameters and their gradients; buffers belong to each rank where a step was given up.
    kept = [bits(p) for p in loop.model.parameters()]
    kept += [bits(p.grad) for p in loop.model.parameters() if p.grad is not None]
    mine = hashlib.sha256(b"".join(one.numpy().tobytes() for one in kept)).hexdigest()
    digests: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(digests, mine, group=group)
    verdict = first_difference(expected, found)
    if verdict is not None:
        return f"against {kind}: {verdict}"
    if loop.model._forward_hooks or loop.model._forward_pre_hooks:
        return "hooks are left after detach"
    return None if len(set(digests)) == 1 else "the ranks disagree on parameters or gradients"


def one_case(case: Case, group: dist.ProcessGroup) -> str | None:
    """`difference`, or what was raised."""
    faulthandler.dump_traceback_later(CASE_S, exit=True)
    try:
        return difference(case, group)
    except Exception as error:
        return f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
    finally:
        faulthandler.cancel_dump_traceback_later()


def check_cases(lines: list[str], folder: str) -> None:
    """Runs the cases one after the other until one fails on any rank; writes each verdict as it comes."""
    warnings.simplefilter("ignore")  # DDP's advice
    group = dist.new_group(timeout=timedelta(seconds=WAIT_S))
    verdicts = Path(folder, f"rank-{dist.get_rank()}")
    for line in lines:
        verdict = one_case(from_line(line), group)
        gc.collect()  # what a case leaves behind may bring the process down: before it has its verdict
        told: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(told, verdict)
        with verdicts.open("a") as file:
            file.write(json.dumps(verdict) + "\n")
        if any(told):
            return


# Faults that the fuzzer must find.


def _alone(message: Message, group: dist.ProcessGroup) -> Iterator[dist.Work]:
    yield dist.all_reduce(message.flat.clone(), group=group, async_op=True)


def _all_but_the_last(message: Message, group: dist.ProcessGroup) -> Iterator[dist.Work]:
    flat = message.flat
    yield dist.all_reduce(flat[:-1] if flat.numel() > 1 else flat.clone(), group=group, async_op=True)


def _unscaled(slot: Slot, _scale: float) -> None:
    slot.view.copy_(slot.parameter.grad.detach())
    slot.parameter.grad = slot.view


FAULTS: dict[str, tuple[Any, str, Any]] = {
    "nothing is summed": (runtime.modes.base, "collective_of", lambda _bucket: _alone),
    "the last element is not summed": (runtime.modes.base, "collective_of", lambda _bucket: _all_but_the_last),
    "large gradients are not scaled": (Slot, "take", _unscaled),
    "unused parameters count as used": (UsageFlags, "used_somewhere", lambda flags: set(range(flags._parameters))),
    "buffers stay apart": (BufferSync, "_unpack", lambda _self, _source: None),
}


def find_faults(lines: list[str]) -> dict[str, int | None]:
    """For each fault, after how many cases a rank saw a difference."""
    warnings.simplefilter("ignore")  # DDP's advice
    group = dist.new_group(timeout=timedelta(seconds=WAIT_S))
    found: dict[str, int | None] = {}
    for name, (owner, attribute, broken) in FAULTS.items():
        whole = getattr(owner, attribute)
        setattr(owner, attribute, broken)
        found[name] = next((n for n, line in enumerate(lines, 1) if _differs(line, group)), None)
        setattr(owner, attribute, whole)
    return found


def leave_in_flight() -> int:
    """Detaches right after a backward that raised, again and again; how often the ranks lived through it."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 200 * LARGE), nn.Flatten())
    names = ("1.bias", "1.weight", "0.bias", "0.weight")
    plan = Plan(
        model=ModelReference(name="large"),
        world=PlanWorld(ranks=dist.get_world_size()),
        accuracy="exact",
        buckets=tuple(PlanBucket(gradients=(name,)) for name in names),
    )
    model[0].weight.register_hook(_raise)
    for _ in range(5):
        session = runtime.attach(model, None, plan, timeout_s=WAIT_S)
        with contextlib.suppress(ArithmeticError):
            model(torch.ones(1, WIDTH)).sum().backward()
        session.detach()
        del session
        gc.collect()
        dist.barrier()
    return 5


def _raise(_gradient: Tensor) -> None:
    raise ArithmeticError("on purpose")


def faults_and_exceptions(lines: list[str]) -> tuple[dict[str, int | None], int]:
    """Both in one start of processes."""
    return find_faults(lines), leave_in_flight()


def _differs(line: str, group: dist.ProcessGroup) -> bool:
    told: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(told, one_case(from_line(line), group))
    return any(told)
