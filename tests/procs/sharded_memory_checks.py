"""What the ranks of the tests of shared steps do: scripts that give parameters other memory, against DDP."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from interplay_harness import batch, ranks_agree, same
from session_checks import plan_of
from sharded_checks import MAKERS, SHARED
from step_checks import raised
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import runtime

Kept = dict[str, Tensor]
Habit = Callable[[nn.Module, Kept, int], None]
"""(model, tensors that the script keeps, step): between two steps."""


class Twins(nn.Module):
    """Two layers of one shape, and others."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two, self.out = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Logits, shape (batch, 3)."""
        logits: Tensor = self.out(torch.tanh(self.two(torch.tanh(self.one(x)))))
        return logits


def _twins(model: nn.Module) -> tuple[nn.Parameter, nn.Parameter]:
    assert isinstance(model, Twins)
    return model.one.weight, model.two.weight


def exchanged(model: nn.Module, _: Kept, step: int) -> None:
    """Two parameters change places, and sometimes change back."""
    one, two = _twins(model)
    for _time in range(1 + step % 2):
        one.data, two.data = two.data, one.data


def average_for_good(model: nn.Module, kept: Kept, step: int) -> None:
    """Parameters and their moving averages change places; the averages go on."""
    for name, parameter in model.named_parameters():
        if step == 2:
            parameter.data, kept[name].data = kept[name].data, parameter.data
        kept[name].mul_(0.9).add_(parameter.detach(), alpha=0.1)


def average_as_parameter(model: nn.Module, kept: Kept, step: int) -> None:
    """The very tensor that the script keeps becomes a parameter's, which training then changes."""
    for name, parameter in model.named_parameters():
        if step == 2 and not name.startswith("out"):
            kept[f"before {name}"], parameter.data = parameter.data, kept[name]


def average_to_evaluate(model: nn.Module, kept: Kept, step: int) -> None:
    """Averages are in place for a forward."""
    parameters = dict(model.named_parameters())
    before = {name: parameter.data for name, parameter in parameters.items()}
    for name, parameter in parameters.items():
        kept[name].mul_(0.5).add_(parameter.detach(), alpha=0.5)
        parameter.data = kept[name]
    kept[f"seen at {step}"] = model(batch(step)[0]).detach()
    for name, parameter in parameters.items():
        parameter.data = before[name]


def as_vector(model: nn.Module, kept: Kept, step: int) -> None:
    """All parameters become parts of one vector, which the script keeps."""
    if step == 1:
        kept["vector"] = parameters_to_vector(model.parameters()).detach() * 0.9
        vector_to_parameters(kept["vector"], model.parameters())


def in_shared_memory(model: nn.Module, _: Kept, step: int) -> None:
    """One parameter moves to memory that other processes may have."""
    if step == 1:
        one, _two = _twins(model)
        one.share_memory_()


def laid_out_otherwise(model: nn.Module, _: Kept, step: int) -> None:
    """The same values in another order in memory: DDP of torch 2.13 averages their gradients wrongly."""
    if step == 1:
        one, two = _twins(model)
        one.data = one.data.t().contiguous().t()
        two.data = two.data.clone()


def swapped(model: nn.Module, _: Kept, step: int) -> None:
    """A parameter becomes another tensor under the same name: torch refuses that with DDP."""
    if step == 1:
        one, _two = _twins(model)
        torch.utils.swap_tensors(one, nn.Parameter(one.detach() * 0.5))


HABITS: tuple[Habit, ...] = (
    exchanged, average_for_good, average_as_parameter, average_to_evaluate, as_vector, in_shared_memory,
)  # fmt: skip


def _trained(how: str, habit: Habit) -> dict[str, Any]:
    """What a script has at its end: with DDP, gradients averaged by hand, a step that ranks share or not, or changes
    between these two."""
    model = Twins()
    kept = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer, forward, session = MAKERS["AdamW"](model.parameters()), model, None
    updates = None if how == "not shared" else SHARED
    if how == "DDP":
        forward = DistributedDataParallel(model)  # type: ignore[assignment]
    elif how != "by hand":
        session = runtime.attach(model, optimizer, plan_of(model, 3, updates=updates), timeout_s=60)
    for step in range(5):
        optimizer.zero_grad()
        x, y = batch(step)
        functional.cross_entropy(forward(x), y).backward()
        for parameter in model.parameters() if how == "by hand" else ():
            assert parameter.grad is not None
            parameter.grad = parameter.grad.contiguous()
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        optimizer.step()
        habit(model, kept, step)
        if how == "switched" and session is not None:
            session.switch(plan_of(model, 2, updates=None if step % 2 else SHARED))
    state = optimizer.state_dict() if session is None else session.optimizer_state_dict()
    if session is not None:
        session.detach()
    return copy.deepcopy({"parameters": dict(model.named_parameters()), "kept": kept, "state": state["state"]})


def memory() -> dict[str, bool]:
    """Every habit as with DDP, what the script keeps included."""
    torch.set_default_dtype(torch.float64)
    tolerance = 0.0 if dist.get_world_size() == 2 else 1e-12
    results = {}
    for habit in (*HABITS, laid_out_otherwise, swapped):
        expected = _trained("DDP" if habit in HABITS else "by hand", habit)
        for how in ("shared", "switched", "not shared"):
            found = _trained(how, habit)
            results[f"{habit.__name__}, {how}"] = same(expected, found, tolerance)
            results[f"{habit.__name__}, {how}: ranks agree"] = ranks_agree((found["parameters"], found["state"]))
    torch.set_default_dtype(torch.float32)
    return results | _refused()


def _refused() -> dict[str, bool]:
    """Two parameters in one memory, at attach and later; another dtype."""
    results = {}
    model = Twins()
    one, two = _twins(model)
    optimizer = MAKERS["AdamW"](model.parameters())
    apart, one.data = one.data, two.data
    words = "found one.weight and two.weight in the same memory"
    results["tied at attach"] = words in raised(
        lambda: runtime.attach(model, optimizer, plan_of(model, 3, updates=SHARED))
    )
    one.data = apart
    session = runtime.attach(model, optimizer, plan_of(model, 3, updates=SHARED))
    for name, data, said in (("tied", two.data, words), ("half", one.data.half(), "found torch.float16 (6, 6)")):
        before, one.data = one.data, data
        results[f"{name} later"] = all(said in raised(optimizer.step) for _ in range(2))
        one.data = before
    session.detach()
    return results
