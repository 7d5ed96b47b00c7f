"""From a description to a module: what the nodes of a random model hold and do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from models import Case, Node, is_skipped, moments, used_nodes
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from runtime.checks.plan import trainable_parameters

BATCH, WIDTH = 3, 8
LARGE = 2100
"""WIDTH · LARGE float32 are more than the 64 KiB from which gradients are moved one by one."""


class Elementwise(nn.Module):
    """A vector, and a parameter of one element with three dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))
        self.shift = nn.Parameter(torch.randn(1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight + self.shift.reshape(1)


class Shaped(nn.Module):
    """A parameter of any shape whose sum scales the value."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape))

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + self.weight.sin().sum())


class Running(nn.Module):
    """Buffers that forward replaces, changes in place and leaves empty."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("nothing", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0).to(self.mean.dtype)
            self.count += 1
        return (x - self.mean.to(x.dtype)) * self.weight


class Reshaped(nn.Module):
    """A layer that wants another shape than (BATCH, WIDTH)."""

    def __init__(self, layer: nn.Module, *shape: int) -> None:
        super().__init__()
        self.layer, self.shape = layer, shape

    def forward(self, x: Tensor) -> Tensor:
        y = x.view(len(x), *self.shape)
        # An LSTM under bf16 autocast, in DDP as with a plan, raises on processors that have no such primitive.
        narrow = not isinstance(self.layer, nn.LSTM) or torch.ops.mkldnn._is_mkldnn_bf16_supported()
        with torch.autocast("cpu", enabled=torch.is_autocast_enabled("cpu") and narrow):
            y = self.layer(y, y, y) if isinstance(self.layer, nn.MultiheadAttention) else self.layer(y)
        return (y[0] if isinstance(y, tuple) else y).reshape(len(x), -1)


class Dropped(nn.Module):
    """Dropout behind a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(x * self.weight, 0.3, self.training)


MAKERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "large": lambda: nn.Sequential(nn.Linear(WIDTH, LARGE), nn.Tanh(), nn.Linear(LARGE, WIDTH)),
    "conv1d": lambda: Reshaped(nn.Conv1d(2, 2, 3, padding=1), 2, 4),
    "conv2d": lambda: Reshaped(nn.Conv2d(2, 2, 3, padding=1), 2, 2, 2),
    "batch_norm": lambda: nn.BatchNorm1d(WIDTH),
    "layer_norm": lambda: nn.LayerNorm(WIDTH),
    "group_norm": lambda: nn.GroupNorm(2, WIDTH),
    "embedding": lambda: nn.Embedding(WIDTH, WIDTH),
    "lstm": lambda: Reshaped(nn.LSTM(4, 4, batch_first=True), 2, 4),
    "gru": lambda: Reshaped(nn.GRU(4, 4, batch_first=True), 2, 4),
    "attention": lambda: Reshaped(nn.MultiheadAttention(4, 2, batch_first=True), 2, 4),
    "elementwise": Elementwise,
    "scalar": Shaped,
    "odd": lambda: Shaped(1, 5, 1, 3),
    "empty": lambda: Shaped(0, WIDTH),
    "running": Running,
    "concat": lambda: nn.Linear(2 * WIDTH, WIDTH),
    "add": nn.Identity,
    "dropout": Dropped,
    "weight_norm": lambda: parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    "spectral_norm": lambda: parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
}


def relaid(parameter: nn.Parameter, layout: str) -> nn.Parameter:
    """The same values with other strides."""
    values = parameter.detach()
    if layout == "turned" and values.dim() == 4:
        values = values.contiguous(memory_format=torch.channels_last)
    elif layout == "turned" and values.dim() >= 2:
        values = values.transpose(-1, -2).contiguous().transpose(-1, -2)
    elif layout == "gaps" and values.dim() >= 1:
        wide = torch.zeros(*values.shape[:-1], 2 * values.shape[-1], dtype=values.dtype)
        wide[..., ::2] = values
        values = wide[..., ::2]
    return nn.Parameter(values)


def make_module(node: Node) -> nn.Module:
    """The node's module, in its dtype, layout and state of freezing."""
    module = MAKERS[node.kind]().to(getattr(torch, node.dtype))
    if node.layout:
        for owner in module.modules():
            for name, parameter in list(owner._parameters.items()):
                if parameter is not None:
                    setattr(owner, name, relaid(parameter, node.layout))
    for position, parameter in enumerate(module.parameters()):
        if node.frozen == "all" or (node.frozen == "first" and position == 0):
            parameter.requires_grad_(False)
    return module


@dataclass
class Record:
    """A user's own record: torch does not know how to look into it."""

    main: Tensor
    others: list[Tensor]
    note: str = "a string"


class Bomb(torch.autograd.Function):
    """Raises in backward."""

    @staticmethod
    def forward(_context: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_context: Any, _gradient: Tensor) -> Tensor:
        raise ArithmeticError("on purpose")


class RandomModel(nn.Module):
    """The described graph."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.stem = nn.Linear(WIDTH, WIDTH)
        modules: list[nn.Module] = []
        for node in case.nodes:
            module = modules[node.same_as] if node.same_as is not None else make_module(node)
            if node.tied_to is not None:
                module.weight = modules[node.tied_to].weight
            modules.append(module)
        self.nodes = nn.ModuleList(modules)
        self.spare = nn.ModuleList(MAKERS[kind]() for kind in case.spare)
        self.moment = (0, 0, 0)
        """Step, micro-batch and rank, for nodes that are skipped now and then."""
        self.bomb: int | None = None
        """The value whose backward raises."""

    def forward(self, x: Tensor, ids: Tensor) -> Any:
        """The outputs in the described container."""
        values = [self._armed(0, torch.tanh(self.stem(x)))]
        for index, node in enumerate(self.case.nodes):
            first, second = (values[i] for i in node.inputs)
            if is_skipped(node, *self.moment):
                values.append(self._armed(index + 1, first))
            elif node.checkpoint:
                reentrant = node.checkpoint == "reentrant"
                value = checkpoint(self._apply_node, index, first, second, ids, use_reentrant=reentrant)
                values.append(self._armed(index + 1, value))
            else:
                values.append(self._armed(index + 1, self._apply_node(index, first, second, ids)))
        return self._packed(values)

    def _armed(self, index: int, value: Tensor) -> Tensor:
        return Bomb.apply(value) if self.bomb == index and torch.is_grad_enabled() else value

    def _apply_node(self, index: int, first: Tensor, second: Tensor, ids: Tensor) -> Tensor:
        node, module = self.case.nodes[index], self.nodes[index]
        if node.kind == "add":
            return first + second
        x = first.to(getattr(torch, node.dtype))
        if node.kind == "embedding":
            y = x + module(ids)
        elif node.kind == "concat":
            y = module(torch.cat([x, second.to(x.dtype)], 1))
        else:
            y = module(x)
        return torch.tanh(y).to(torch.float32)

    def _packed(self, values: Sequence[Tensor]) -> Any:
        main = values[-1]
        others = [values[i] for i in self.case.outputs]
        lost = [values[i] for i in self.case.lost]
        if self.case.container == "tensor":
            return main
        if self.case.container == "tuple":
            return main, others, lost, None, 3
        if self.case.container == "dict":
            return {"main": main, "others": others, "lost": lost, "ids": main.detach().argmax(1)}
        return {"record": Record(main, others), "lost": lost}


def losses_of(output: Any) -> tuple[Tensor, Tensor]:
    """Two scalars: of the main output, and of all outputs but the lost."""
    if isinstance(output, Tensor):
        wanted = [output]
    elif isinstance(output, tuple):
        wanted = [output[0], *output[1]]
    elif "record" in output:
        wanted = [output["record"].main, *output["record"].others]
    else:
        wanted = [output["main"], *output["others"]]
    terms = [(i + 1) * (one.float() - 0.1).square().sum() for i, one in enumerate(wanted)]
    return terms[0], torch.stack(terms).sum()


def planned_names(model: RandomModel, leave_out_unused: bool) -> list[str]:
    """Names of the gradients of a plan, in order of registration."""
    parameters = trainable_parameters(model)
    if not leave_out_unused:
        return list(parameters)
    used = {id(parameter) for parameter in model.stem.parameters()}
    for index in {index for moment in moments(model.case) for index in used_nodes(model.case, *moment)}:
        used |= {id(parameter) for parameter in model.nodes[index].parameters()}
    return [name for name, parameter in parameters.items() if id(parameter) in used]
