"""A parameter whose new values are being gathered from other ranks: reading them through torch waits first.

Torch asks a parameter's class before it does anything with its numbers, so for that time the parameter has another
class than before; it stays the same object, in the same memory. What asks nothing of the numbers does not wait.
"""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import reduce_tensor

from runtime.errors import InputError
from runtime.torch_compat import makes_parameter

ATTRIBUTES = frozenset((
    "_backward_hooks", "_post_accumulate_grad_hooks", "_version", "device", "dtype", "grad", "grad_dtype", "grad_fn",
    "is_cpu", "is_cuda", "is_leaf", "is_meta", "is_nested", "is_sparse", "itemsize", "layout", "names", "nbytes",
    "ndim", "requires_grad", "retains_grad", "shape",
))  # fmt: skip
FUNCTIONS = frozenset((
    "__len__", "dim", "element_size", "get_device", "is_complex", "is_contiguous", "is_floating_point", "ndimension",
    "nelement", "numel", "register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "size", "stride",
))  # fmt: skip
"""Attributes and functions that do not read the numbers. All else waits, also what is unknown here."""


_GRAD: Any = torch.Tensor.grad
"""The attribute of any tensor."""


class GatherWaiter(Protocol):
    """Waits for a pending all-gather."""

    def wait_for(self, gather: int) -> None:
        """Make the parameters of a gather plain, which have all their values then. Raises CommunicationError."""
        ...


class AwaitedParameter(nn.Parameter):
    """A parameter whose values are being gathered; `_from` has the waiter, and the number of the gather."""

    # Weakly: torch may keep a parameter where no garbage collector looks.
    _from: tuple[weakref.ref[GatherWaiter], int]

    def __new__(cls, *given: Any, **named: Any) -> nn.Parameter:  # type: ignore[misc]
        """Return a plain one: `type(parameter)(tensor)`, by which scripts make one parameter from another."""
        return nn.Parameter(*given, **named)

    @property
    def grad(self) -> Tensor | None:
        """Gradient, as of any parameter; every step reads it, so by a shorter way than other attributes."""
        with torch._C.DisableTorchFunctionSubclass():
            found: Tensor | None = _GRAD.__get__(self)
            return found

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            _GRAD.__set__(self, gradient)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        if _asks_nothing(func):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **options)
        for parameter in _awaited_in((args, options)):
            come(parameter)
        found = func(*args, **options)  # of plain parameters now: of another class that has a say, if any
        if func is Tensor.detach and makes_parameter(sys._getframe(1)):
            found.__class__ = nn.Parameter  # which is expected of a class other than torch's
        return found

    def as_subclass(self, cls: Any) -> Any:
        """Return the tensor as another class, when its values are there: torch does not ask its class for that."""
        come(self)
        return self.as_subclass(cls)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        come(self)
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        come(self)
        return self.__reduce_ex__(protocol)


def _reduce_shared(parameter: AwaitedParameter) -> Any:
    """Return what torch sends of a parameter to another process: memory that both share from then on."""
    come(parameter)
    return reduce_tensor(parameter)


ForkingPickler.register(AwaitedParameter, _reduce_shared)


def _asks_nothing(func: Callable[..., Any]) -> bool:
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        return getattr(getattr(func, "__self__", None), "__name__", "") in ATTRIBUTES
    return name in FUNCTIONS


def _awaited_in(given: Any) -> Iterator[AwaitedParameter]:
    if type(given) is AwaitedParameter:
        yield given
    elif isinstance(given, list | tuple):
        for one in given:
            yield from _awaited_in(one)
    elif isinstance(given, dict):
        yield from _awaited_in(list(given.values()))


def wait_from_now(parameter: nn.Parameter, who: weakref.ref[GatherWaiter], gather: int) -> None:
    """Let readers of a parameter wait for a gather."""
    parameter.__class__ = AwaitedParameter
    parameter.__dict__["_from"] = who, gather


def make_plain(parameter: nn.Parameter) -> None:
    parameter.__dict__.pop("_from", None)
    parameter.__class__ = nn.Parameter


def come(parameter: AwaitedParameter) -> None:
    """Block until a parameter has its values, and is plain.

    Raises:
        CommunicationError: a rank did not come within the deadline.
        InputError: the session that gathered them is gone.
    """
    who, gather = parameter._from
    owner = who()
    if owner is None:
        raise InputError(
            f"a parameter of shape {tuple(parameter.shape)} was read whose new values were on their way when its model "
            f"and session were dropped; expected it to be read, or session.wait_for_weights() to be called, while the "
            f"model is there: do that first, or keep the model"
        )
    owner.wait_for(gather)
    if type(parameter) is AwaitedParameter:  # another object has changed places with the model's own
        make_plain(parameter)
