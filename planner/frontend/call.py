"""The call of the model in a training step, and the model bound to that call: tensors in, tensors out."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel


@dataclass(frozen=True)
class Call:
    """The arguments and context of a step's call of its model."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    autocast: dict[str, torch.dtype] = field(default_factory=dict)
    """Device types under autocast, with the type they cast to."""
    step: Callable[[], object] | None = None
    """The step's whole forward, up to its loss, in place of a call of the model."""

    def tensors(self) -> list[Tensor]:
        """Return the tensors among the arguments, detached from what computed them."""
        return [leaf.detach().requires_grad_(leaf.requires_grad) for leaf in leaves_of((self.args, self.kwargs))]

    @contextmanager
    def context(self) -> Iterator[None]:
        """Enter the surroundings of the call."""
        with ExitStack() as stack:
            for device_type, dtype in self.autocast.items():
                # A cache of casts would outlive the stand-ins that it is keyed by.
                stack.enter_context(torch.autocast(device_type, dtype, cache_enabled=False))
            yield


class Bound(nn.Module):
    """A model bound to its arguments: tensors in, tensors out, everything else fixed.

    So it can be traced for any signature and any containers. The name `module` is one that `canonical_name` removes.
    """

    def __init__(self, model: nn.Module, call: Call) -> None:
        super().__init__()
        self.module = model
        self.training = model.training
        self.mode: AbstractContextManager[Any] = nullcontext()
        """Context in which the forward runs."""
        self._call = call

    def forward(self, *tensors: Any) -> tuple[Any, ...]:
        """Return the tensors of what the model returns; or the loss, of a step that calls only parts of the model."""
        leaves = iter(tensors)
        with self.mode:
            if self._call.step is not None:
                return tuple(leaves_of(until_backward(self._call.step)))
            args, kwargs = map_tensors((self._call.args, self._call.kwargs), lambda _: next(leaves))
            return tuple(leaves_of(self.module(*args, **kwargs)))


def leaves_of(value: Any) -> list[Any]:
    """Return all tensors of a nest of containers, in the order in which `map_tensors` replaces them."""
    found: list[Any] = []

    def take(leaf: Any) -> Any:
        found.append(leaf)
        return leaf

    map_tensors(value, take)
    return found


def map_tensors(value: Any, function: Callable[[Any], Any]) -> Any:
    """Return a copy of a nest of containers with every tensor replaced; objects of other kinds are kept."""
    return map_leaves(value, lambda leaf: isinstance(leaf, Tensor | fx.Proxy), function)


def map_leaves(value: Any, is_leaf: Callable[[Any], bool], function: Callable[[Any], Any]) -> Any:
    """Return a copy of a nest of mappings, lists, tuples and dataclasses with every leaf replaced by a function of it.

    Objects of other kinds are kept, and so are tuples whose constructor takes something else than items.
    """
    if is_leaf(value):
        return function(value)
    inner = partial(map_leaves, is_leaf=is_leaf, function=function)
    kind: Any = type(value)
    if isinstance(value, MutableMapping):
        result = copy.copy(value)
        for key in value:
            result[key] = inner(value[key])
        return result
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return kind(*map(inner, value))
    if isinstance(value, list):
        result = copy.copy(value)
        result[:] = map(inner, value)
        return result
    if isinstance(value, tuple) and kind.__init__ is tuple.__init__ and kind.__new__ is tuple.__new__:
        return kind(map(inner, value))
    if is_dataclass(value) and not isinstance(value, type):
        result = copy.copy(cast(Any, value))
        for entry in fields(value):
            object.__setattr__(result, entry.name, inner(getattr(value, entry.name)))
        return result
    return value


class _CallSeen(BaseException):
    """Ends the step at a call of the model; not an Exception, so that the step's own handlers let it pass."""


class _BackwardSeen(BaseException):
    """Ends the step at the end of its forward, and holds the loss; not an Exception either."""


def first_call(model: nn.Module, run_forward: Callable[[], object]) -> Call:
    """Return the step's first call of the model, which ends the step, or the step itself if it calls a part before."""
    calls: list[Call] = []
    wholes = levels(model)  # the step may call the wrapper or what is in it
    devices = sorted({parameter.device.type for parameter in model.parameters()} - {"meta"})

    def see(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if any(module is whole for whole in wholes):
            casts = {name: torch.get_autocast_dtype(name) for name in devices if torch.is_autocast_enabled(name)}
            calls.append(Call(args, kwargs, casts))
        raise _CallSeen

    with ExitStack() as stack:
        for _, module in hookable(model):
            stack.callback(module.register_forward_pre_hook(see, with_kwargs=True, prepend=True).remove)
        try:
            run_forward()
        except _CallSeen:
            pass
        except Exception:
            if not calls:
                raise
    return calls[0] if calls else Call(step=run_forward)


def goes_on(model: nn.Module, run_forward: Callable[[], object]) -> bool:
    """Return whether the step calls the model, or a part of it, again after its first call; runs the forward."""
    depth, calls = 0, 0

    def enter(*_: Any) -> None:
        nonlocal depth, calls
        calls += depth == 0
        depth += 1

    def leave(*_: Any) -> None:
        nonlocal depth
        depth -= 1

    with ExitStack() as stack:
        for _, module in hookable(model):
            stack.callback(module.register_forward_pre_hook(enter, prepend=True).remove)
            stack.callback(module.register_forward_hook(leave, always_call=True).remove)
        until_backward(run_forward)
    return calls > 1


def until_backward(step: Callable[[], object]) -> object:
    """Return what the step returns, or the tensor on which it calls `backward`, which ends it."""

    def end(tensor: Any, *_: Any, **__: Any) -> None:
        raise _BackwardSeen(tensor)

    places: tuple[Any, ...] = (Tensor, torch.autograd)
    found = [place.backward for place in places]
    try:
        for place in places:
            place.backward = end
        return step()
    except _BackwardSeen as seen:
        return seen.args[0]
    finally:
        for place, function in zip(places, found, strict=True):
            place.backward = function


def hookable(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return all modules but TorchScript's, which take no hooks."""
    return [(name, part) for name, part in model.named_modules() if not isinstance(part, torch.jit.ScriptModule)]


def levels(model: nn.Module) -> list[nn.Module]:
    """Return the model and what it wraps, outermost first."""
    wrapped = isinstance(model, (DistributedDataParallel, DataParallel))
    inner: Any = model.module if wrapped else getattr(model, "_orig_mod", None)
    return [model] if inner is None else [model, *levels(inner)]
