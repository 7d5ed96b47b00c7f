"""Which modules FSDP2 can gather together, and what each of them computes and keeps: observed in a model's steps."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from planner.documents.units import Unit, Units, UnitWeight
from planner.profile.links import synchronize
from runtime.comm.world import World
from runtime.errors import InputError
from runtime.plan.fully_sharded import ROOT
from runtime.sharded.state import state_bytes
from runtime.torch_compat import tree_leaves

REPEATS = 5
WARM_UP = 2
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def candidate_units(model: nn.Module) -> list[str]:
    """Return the paths of modules that could be groups, or parts of one, in the order of registration.

    Those are the members of lists of blocks, and what lies beside the lists; a module is looked into where it has such
    a list inside, but members of lists never are.
    """
    found: list[str] = []

    def look(module: nn.Module, path: str) -> None:
        for name, child in module.named_children():
            below = f"{path}.{name}" if path else name
            if isinstance(child, CONTAINERS):
                found.extend(f"{below}.{key}" for key, _ in child.named_children())
            elif any(isinstance(inner, CONTAINERS) and len(inner) > 1 for inner in child.modules()):
                look(child, below)
            else:
                found.append(below)

    look(model, ROOT)
    modules = dict(model.named_modules(remove_duplicate=False))
    return [path for path in found if next(modules[path].parameters(), None) is not None]


def weights_of(model: nn.Module) -> tuple[UnitWeight, ...]:
    """Return the model's parameters, a tied one once, with all modules that have it."""
    found: dict[int, tuple[nn.Parameter, list[str]]] = {}
    for path, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            found.setdefault(id(parameter), (parameter, []))[1].append(path)
    return tuple(
        UnitWeight(modules=tuple(dict.fromkeys(paths)), shape=tuple(parameter.shape), trainable=parameter.requires_grad)
        for parameter, paths in found.values()
    )


@dataclass(eq=False)
class _Seen:
    """What one step showed of a unit."""

    begun_us: list[float] = field(default_factory=list)
    ended_us: list[float] = field(default_factory=list)
    backward_us: list[float] = field(default_factory=list)
    """When the gradient of its output was there; the first time counts."""
    activation_bytes: int = 0
    input_requires_grad: bool = False
    output: list[Tensor] = field(default_factory=list)


class Observer:
    """Watches forwards and backwards of a model's units."""

    def __init__(self, model: nn.Module, paths: Sequence[str]) -> None:
        self._model, self._paths = model, list(paths)
        self._modules = dict(model.named_modules(remove_duplicate=False))
        self._device = next(model.parameters()).device
        self.passes_through = False
        """Whether the model's output is that of the last unit."""
        self._fixed = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}

    def now_us(self) -> float:
        synchronize(self._device)
        return time.perf_counter() * 1e6

    def step(self, run: Callable[[Callable[[], None]], object]) -> tuple[dict[str, _Seen], float, float, float]:
        """Run a step, which calls what it is given when forward is over.

        Return what was seen by path, and when it began, backward began, and it ended.
        """
        seen = {path: _Seen() for path in self._paths}
        self._root = _Seen()
        over: list[float] = []
        with ExitStack() as stack:
            for path in self._paths:
                stack.enter_context(self._watch(self._modules[path], seen[path], path))
            handle = self._model.register_forward_hook(
                lambda _module, _given, output: self._root.output.extend(_tensors(output))
            )
            stack.callback(handle.remove)
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._keep, lambda tensor: tensor))
            self._now: _Seen | None = None
            self._stored: set[int] = set()
            begun_us = self.now_us()
            run(lambda: over.append(self.now_us()))
            ended_us = self.now_us()
        last = max((one for one in seen.values() if one.ended_us), key=lambda one: one.ended_us[0], default=self._root)
        outputs = set(map(id, last.output))
        self.passes_through = any(id(tensor) in outputs for tensor in self._root.output)
        for one in (*seen.values(), self._root):
            one.output.clear()
        return seen, begun_us, over[0] if over else begun_us, ended_us

    def _keep(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        pointer = storage.data_ptr()
        if self._now is not None and pointer not in self._fixed and pointer not in self._stored:
            self._stored.add(pointer)
            self._now.activation_bytes += storage.nbytes()
        return tensor

    @contextmanager
    def _watch(self, module: nn.Module, seen: _Seen, path: str) -> Iterator[None]:
        def before(_module: nn.Module, given: Any, named: Any) -> None:
            seen.begun_us.append(self.now_us())
            seen.input_requires_grad = any(tensor.requires_grad for tensor in _tensors((given, named)))
            self._now = seen

        def after(_module: nn.Module, _given: Any, output: Any) -> None:
            seen.ended_us.append(self.now_us())
            tensors = _tensors(output)
            seen.output.extend(tensors)
            for tensor in tensors:
                if tensor.requires_grad:
                    tensor.register_hook(lambda _grad: seen.backward_us.append(self.now_us()))

        handles = (
            module.register_forward_pre_hook(before, with_kwargs=True),
            module.register_forward_hook(after),
        )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def measure_units(
    model: nn.Module, run: Callable[[Callable[[], None]], object], optimizer: torch.optim.Optimizer | None,
    world: World, *, paths: Sequence[str] | None = None, repeats: int = REPEATS, update_us: float = 0.0,
) -> Units:  # fmt: skip
    """Return what each unit of a model computes and keeps, the same on all ranks: of the slowest rank, as others wait.

    Args:
        model: the plain model.
        run: a step, forward and backward without communication; calls what it is given in between.
        optimizer: whose state counts as memory; None: none.
        world: all of its ranks call this.
        paths: the units; default: `candidate_units`.
        repeats: of which the median counts.
        update_us: of all parameters.

    Raises InputError: units are called more than once or never in a step, or return nothing that has a gradient; ones
    that come to nothing but this are left to the model itself by default.
    """
    given = paths is not None
    wanted = list(paths if paths is not None else candidate_units(model))
    first, _, _, _ = Observer(model, wanted).step(run)
    odd = [path for path in wanted if len(first[path].begun_us) != 1 or not first[path].backward_us]
    if odd and given:
        times = len(first[odd[0]].begun_us)
        raise InputError(
            f"{odd[0]}: found {times} forwards in a step, or no gradient of its output, expected one: leave it out"
        )
    order = sorted((path for path in wanted if path not in odd), key=lambda path: first[path].begun_us[0])
    if not order:
        raise InputError(
            f"{type(model).__name__}: found no module that computes once in a step, expected some to group; FSDP2 "
            f"would have one group, which needs no plan"
        )
    observer = Observer(model, order)
    for _ in range(WARM_UP):
        observer.step(run)
    forward: list[list[float]] = []
    backward: list[list[float]] = []
    for _ in range(repeats):
        seen, begun_us, over_us, ended_us = observer.step(run)
        ends = [seen[path].ended_us[0] for path in order]
        ends[-1] = max(over_us, ends[-1])
        forward.append([end - start for start, end in zip([begun_us, *ends], ends, strict=False)])
        marks = [min(seen[path].backward_us) for path in order]
        marks[-1] = max(over_us, seen[order[-1]].ended_us[0])
        backward.append([max(0.0, until - at) for at, until in zip(marks, [ended_us, *marks], strict=False)])
    mine = [[statistics.median(times) for times in zip(*every, strict=True)] for every in (forward, backward)]
    everyone = world.gather(mine, "comparing times of modules")
    forward_us, backward_us = (
        [max(times) for times in zip(*(one[way] for one in everyone), strict=True)] for way in (0, 1)
    )
    parameters_bytes = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    units = Units(
        units=tuple(
            Unit(
                module=path, forward_us=round(forward_us[index], 3), backward_us=round(backward_us[index], 3),
                activation_bytes=seen[path].activation_bytes, input_requires_grad=seen[path].input_requires_grad,
            )
            for index, path in enumerate(order)
        ),
        weights=weights_of(model),
        element_bytes=next(model.parameters()).element_size(),
        state_factor=round(state_bytes(optimizer) / parameters_bytes, 3) if optimizer and parameters_bytes else 0.0,
        passes_through=(ROOT,) if observer.passes_through else (),
        update_us=update_us,
    )  # fmt: skip
    agreed: Units = world.gather(units, "agreeing on the modules")[0]
    return agreed
