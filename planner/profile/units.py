"""Which modules FSDP2 can gather together, and what each of them computes and keeps: observed in a model's steps."""

from __future__ import annotations

import statistics
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

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


class LiveBytes(TorchDispatchMode):
    """Counts the memory of tensors that operations make, while they live; not of those that were there before.

    FSDP2 gives whole parameters memory and takes it away without an operation, which is seen, too.
    """

    def __init__(self, fixed: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fixed, self._live = fixed, dict[int, int]()
        self._now_bytes = self._most_bytes = 0
        self._resize = torch.UntypedStorage.resize_
        self.peaks: list[tuple[float, int, int]] = []
        """(time, the most since the time before, what is there at that time)."""

    def __torch_dispatch__(
        self, operation: Any, types: Any, given: tuple[Any, ...] = (), named: dict[str, Any] | None = None
    ) -> Any:
        if any(kind not in (Tensor, nn.Parameter) for kind in types):
            return NotImplemented  # a DTensor, of which the tensors that it is made of come by
        result = operation(*given, **(named or {}))
        for tensor in _tensors(result):
            self._see(tensor.untyped_storage())
        return result

    def __enter__(self) -> Self:
        def resize(storage: torch.UntypedStorage, size_bytes: int) -> Any:
            resized = self._resize(storage, size_bytes)
            self._see(storage)
            return resized

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    @property
    def total_bytes(self) -> int:
        """The most of all intervals."""
        return max(self._most_bytes, *(most for _, most, _ in self.peaks), 0)

    def _see(self, storage: torch.UntypedStorage) -> None:
        key, size_bytes = storage._cdata, storage.nbytes()
        if key not in self._live:
            if not size_bytes or storage.data_ptr() in self._fixed:
                return
            weakref.finalize(storage, self._freed, key)
        self._now_bytes += size_bytes - self._live.get(key, 0)
        self._live[key] = size_bytes
        self._most_bytes = max(self._most_bytes, self._now_bytes)

    def _freed(self, key: int) -> None:
        self._now_bytes -= self._live.pop(key, 0)

    def mark(self, time_us: float) -> None:
        """End an interval."""
        self.peaks.append((time_us, self._most_bytes, self._now_bytes))
        self._most_bytes = self._now_bytes

    def most(self, from_us: float, to_us: float) -> int:
        """Return the most between two times at which intervals ended."""
        return max((most for time_us, most, _ in self.peaks if from_us < time_us <= to_us), default=0)

    def at(self, time_us: float) -> int:
        """Return what was there when an interval ended."""
        return next(now for marked_us, _, now in self.peaks if marked_us == time_us)


class Working(NamedTuple):
    """What a unit takes beyond activations and gradients of parameters, in bytes."""

    forward: int
    backward: int
    carried: int
    """When its backward begins."""


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
        self._live: LiveBytes | None = None
        self.passes_through = False
        """Whether the model's output is that of the last unit."""
        self._fixed = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}

    def now_us(self) -> float:
        synchronize(self._device)
        time_us = time.perf_counter() * 1e6
        if self._live is not None:
            self._live.mark(time_us)
        return time_us

    def working(self, run: Callable[[Callable[[], None]], object]) -> tuple[list[Working], int]:
        """Return what a step takes beyond activations and gradients: units, in the order of `paths`, and the loss."""
        for parameter in self._model.parameters():
            parameter.grad = None
        with LiveBytes(self._fixed) as live:
            self._live = live
            seen, begun_us, _, ended_us = self.step(run)
        self._live = None
        ends_us = [begun_us, *(seen[path].ended_us[0] for path in self._paths)]
        # What the model computes behind its last unit counts as that one's: parameters and buffers are still as there.
        ends_us[-1] = max([ends_us[-1], *self._root.ended_us])
        marks_us = [ended_us, *(min(seen[path].backward_us) for path in self._paths)]
        found: list[Working] = []
        kept = reduced = 0
        for place, path in enumerate(self._paths):
            kept += seen[path].activation_bytes
            found.append(Working(max(0, live.most(ends_us[place], ends_us[place + 1]) - kept), 0, 0))
        loss = max(0, live.most(ends_us[-1], marks_us[-1]) - kept)
        for place, path in reversed(list(enumerate(self._paths))):
            carried = max(0, live.at(marks_us[place + 1]) - kept - reduced)
            reduced += sum(p.numel() * p.element_size() for p in self._modules[path].parameters() if p.requires_grad)
            most = live.most(marks_us[place + 1], marks_us[place]) - kept - reduced
            found[place] = Working(found[place].forward, most, carried)
            kept -= seen[path].activation_bytes
        return found, loss

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
            stack.callback(self._model.register_forward_hook(self._ended).remove)
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._keep, lambda tensor: tensor))
            self._now: _Seen | None = None
            self._stored: set[int] = set()
            begun_us = self.now_us()
            run(lambda: over.append(self.now_us()))
            ended_us = self.now_us()
        last = max((one for one in seen.values() if one.ended_us), key=lambda one: one.ended_us[0], default=self._root)
        outputs = set(map(id, last.output))
        self.passes_through = self.passes_through or any(id(tensor) in outputs for tensor in self._root.output)
        for one in (*seen.values(), self._root):
            one.output.clear()
        return seen, begun_us, over[0] if over else begun_us, ended_us

    def _ended(self, _model: nn.Module, _given: Any, output: Any) -> None:
        self._root.ended_us.append(self.now_us())
        if self._live is None:
            self._root.output.extend(_tensors(output))

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
            if self._live is None:  # held, they would count as memory of the step
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
    memory: list[tuple[list[Working], int]] = world.gather(observer.working(run), "comparing memory of modules")
    working = [Working(*map(max, zip(*ranks, strict=True))) for ranks in zip(*(one for one, _ in memory), strict=True)]
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
                activation_bytes=seen[path].activation_bytes, forward_working_bytes=working[index].forward,
                backward_working_bytes=working[index].backward, carried_bytes=working[index].carried,
                input_requires_grad=seen[path].input_requires_grad,
            )
            for index, path in enumerate(order)
        ),
        loss_working_bytes=max(loss for _, loss in memory),
        weights=weights_of(model),
        element_bytes=next(model.parameters()).element_size(),
        state_factor=(
            round(state_bytes(optimizer.state) / parameters_bytes, 3) if optimizer and parameters_bytes else 0.0
        ),
        passes_through=(ROOT,) if observer.passes_through else (),
        update_us=update_us,
    )  # fmt: skip
    agreed: Units = world.gather(units, "agreeing on the modules")[0]
    return agreed
