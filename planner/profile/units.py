"""The modules that FSDP2 can gather together, with their times and memory, observed in a model's steps."""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from planner.documents.units import Unit, Units, UnitWeight
from planner.profile.bench import synchronize
from planner.profile.compute import Step
from runtime.comm.world import World
from runtime.errors import InputError
from runtime.plan.fully_sharded import ROOT
from runtime.torch_compat import tree_leaves

REPEATS = 5
WARM_UP = 2
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def candidate_units(model: nn.Module) -> list[str]:
    """Return the paths of modules that could be groups, or parts of one, in the order of registration.

    Those are the members of lists of blocks, and the modules next to the lists; a module that has such a list inside is
    replaced by its parts, but a member of a list never is.
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
    paths: dict[nn.Parameter, dict[str, None]] = {}
    for path, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            paths.setdefault(parameter, {})[path] = None
    return tuple(
        UnitWeight(modules=tuple(modules), shape=tuple(parameter.shape), trainable=parameter.requires_grad)
        for parameter, modules in paths.items()
    )


class LiveBytes(TorchDispatchMode):
    """Counts the memory of tensors that operations make, while they live; not of those that were there before.

    FSDP2 resizes the storage of whole parameters without an operation, which is counted, too.
    """

    def __init__(self, fixed: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fixed, self._live = fixed, dict[int, int]()
        self._now_bytes = self._most_bytes = 0
        self._resize = torch.UntypedStorage.resize_
        self.peaks: list[tuple[float, int, int]] = []
        """(time in µs, most bytes since the time before, bytes at that time)."""

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
        """Most bytes of all intervals."""
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
        """Return the most bytes between two times at which intervals ended."""
        return max((most for time_us, most, _ in self.peaks if from_us < time_us <= to_us), default=0)

    def at(self, time_us: float) -> int:
        """Return the bytes when an interval ended."""
        return next(now for marked_us, _, now in self.peaks if marked_us == time_us)


@dataclass(eq=False)
class _Seen:
    """One unit in one step."""

    begun_us: list[float] = field(default_factory=list)
    ended_us: list[float] = field(default_factory=list)
    backward_us: list[float] = field(default_factory=list)
    """Times at which the gradient of its output was there; the first one counts."""
    activation_bytes: int = 0
    input_requires_grad: bool = False
    output: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class _StepSeen:
    """One step, with what was seen of each unit by path."""

    seen: dict[str, _Seen]
    begun_us: float
    backward_us: float
    """Begin of backward."""
    ended_us: float


class Observer:
    """Watches forwards and backwards of a model's units."""

    def __init__(self, model: nn.Module, paths: Sequence[str]) -> None:
        self._model, self._paths = model, list(paths)
        self._modules = dict(model.named_modules(remove_duplicate=False))
        self._device = next(model.parameters()).device
        self._live: LiveBytes | None = None
        self.passes_through = False
        """Whether the model's output was that of the last unit in some step."""
        self._fixed = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}

    def now_us(self) -> float:
        """Return the time, and end an interval of the memory that is counted."""
        synchronize(self._device)
        time_us = time.perf_counter() * 1e6
        if self._live is not None:
            self._live.mark(time_us)
        return time_us

    def working(self, run: Step) -> tuple[NDArray[np.int64], int]:
        """Measure the memory of a step beyond activations and gradients of parameters, in bytes.

        Returns:
            By unit (in its forward, in its backward, when its backward begins), shape (units, 3); and in the loss.
        """
        for parameter in self._model.parameters():
            parameter.grad = None
        with LiveBytes(self._fixed) as live:
            self._live = live
            step = self.step(run)
        self._live = None
        units = [step.seen[path] for path in self._paths]
        ends_us = [step.begun_us, *(unit.ended_us[0] for unit in units)]
        # What the model computes behind its last unit counts as that one's: parameters and buffers are still as there.
        ends_us[-1] = max([ends_us[-1], *self._root.ended_us])
        marks_us = [step.ended_us, *(min(unit.backward_us) for unit in units)]
        found = np.zeros((len(units), 3), dtype=np.int64)
        kept = reduced = 0
        for at, unit in enumerate(units):
            kept += unit.activation_bytes
            found[at, 0] = max(0, live.most(ends_us[at], ends_us[at + 1]) - kept)
        loss = max(0, live.most(ends_us[-1], marks_us[-1]) - kept)
        for at, unit in reversed(list(enumerate(units))):
            found[at, 2] = max(0, live.at(marks_us[at + 1]) - kept - reduced)
            parameters = self._modules[self._paths[at]].parameters()
            reduced += sum(p.numel() * p.element_size() for p in parameters if p.requires_grad)
            found[at, 1] = live.most(marks_us[at + 1], marks_us[at]) - kept - reduced
            kept -= unit.activation_bytes
        return found, loss

    def step(self, run: Step) -> _StepSeen:
        """Run a step, which calls its argument when forward is over."""
        seen = {path: _Seen() for path in self._paths}
        self._root = _Seen()
        over: list[float] = []
        with ExitStack() as stack:
            for path in self._paths:
                self._watch(self._modules[path], seen[path], stack)
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
        return _StepSeen(seen, begun_us, over[0] if over else begun_us, ended_us)

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

    def _watch(self, module: nn.Module, seen: _Seen, stack: ExitStack) -> None:
        def before(_module: nn.Module, given: Any, named: Any) -> None:
            seen.begun_us.append(self.now_us())
            seen.input_requires_grad = any(tensor.requires_grad for tensor in _tensors((given, named)))
            self._now = seen

        def after(_module: nn.Module, _given: Any, output: Any) -> None:
            seen.ended_us.append(self.now_us())
            tensors = _tensors(output)
            if self._live is None:  # while they are held they count as memory of the step
                seen.output.extend(tensors)
            for tensor in tensors:
                if tensor.requires_grad:
                    tensor.register_hook(lambda _grad: seen.backward_us.append(self.now_us()))

        stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
        stack.callback(module.register_forward_hook(after).remove)


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def measure_units(
    model: nn.Module, run: Step, world: World, *, paths: Sequence[str] | None = None, repeats: int = REPEATS
) -> Units:
    """Return what each unit of a model computes and keeps, the same on all ranks: of the slowest rank, as others wait.

    Args:
        model: the plain model.
        run: a step, forward and backward without communication; calls its argument in between.
        world: all of its ranks call this.
        paths: the units; default: `candidate_units`. Those that compute more than once or never in a step, or return
            nothing that has a gradient, are left to the model itself.
        repeats: number of steps, whose median counts.

    Raises:
        InputError: no unit is left.
    """
    wanted = candidate_units(model) if paths is None else paths
    first = Observer(model, wanted).step(run).seen
    once = [path for path in wanted if len(first[path].begun_us) == 1 and first[path].backward_us]
    order = sorted(once, key=lambda path: first[path].begun_us[0])
    if not order:
        raise InputError(
            f"{type(model).__name__}: found no module that computes once in a step, expected some to group; FSDP2 "
            f"would have one group, which needs no plan"
        )
    observer = Observer(model, order)
    for _ in range(WARM_UP):
        observer.step(run)
    times_us = []
    for _ in range(repeats):
        step = observer.step(run)
        ends_us = [step.seen[path].ended_us[0] for path in order]
        marks_us = [min(step.seen[path].backward_us) for path in order]
        ends_us[-1] = marks_us[-1] = max(step.backward_us, ends_us[-1])
        forward_us, backward_us = np.diff([step.begun_us, *ends_us]), -np.diff([step.ended_us, *marks_us])
        times_us.append([forward_us, np.maximum(0.0, backward_us)])
    memory: list[tuple[NDArray[np.int64], int]] = world.gather(observer.working(run), "comparing memory of modules")
    working = np.max([rows for rows, _ in memory], axis=0).tolist()
    mine_us = np.median(times_us, axis=0)
    forwards_us, backwards_us = np.max(world.gather(mine_us, "comparing times of modules"), axis=0).tolist()
    units = Units(
        units=tuple(
            Unit(
                module=path, forward_us=round(forwards_us[at], 3), backward_us=round(backwards_us[at], 3),
                activation_bytes=step.seen[path].activation_bytes, forward_working_bytes=working[at][0],
                backward_working_bytes=working[at][1], carried_bytes=working[at][2],
                input_requires_grad=step.seen[path].input_requires_grad,
            )
            for at, path in enumerate(order)
        ),
        loss_working_bytes=max(loss for _, loss in memory),
        weights=weights_of(model),
        element_bytes=next(model.parameters()).element_size(),
        passes_through=(ROOT,) if observer.passes_through else (),
    )  # fmt: skip
    agreed: Units = world.gather(units, "agreeing on the modules")[0]
    return agreed
