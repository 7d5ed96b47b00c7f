"""Answers to a forward's questions about values (`if x.sum() > 0`, `x[x > 0]`): recorded on data, given without.

With these answers a forward can be traced that would otherwise need values; the graph then holds the path that it
takes with this batch.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

_TENSOR: Any = Tensor
_FAKE: Any = FakeTensor
_FAKE_TOLIST = _FAKE.tolist

QUESTIONS: frozenset[Callable[..., Any]] = frozenset(
    [
        *(_TENSOR.__bool__, _TENSOR.__int__, _TENSOR.__float__, _TENSOR.__complex__, _TENSOR.__index__),
        *(_TENSOR.item, _TENSOR.tolist, _TENSOR.__contains__, _TENSOR.is_nonzero, torch.is_nonzero),
        *(_TENSOR.equal, torch.equal, _TENSOR.allclose, torch.allclose),
        *(_TENSOR.numpy, _TENSOR.__array__, _TENSOR.__format__, _TENSOR.__repr__),
    ]
)
"""Functions that turn a tensor's values into something that torch does not see."""

Site = tuple[Any, str, int]
"""(function, file, line) of a call. Order alone is not enough: some models ask less while they are traced."""


class Recorded(TorchFunctionMode):
    """Records the answers given inside, and the shapes of all results."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: dict[Site, list[Any]] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        answer = copy.deepcopy(result) if func in QUESTIONS else _shapes(result)
        self.answers.setdefault(_site(func), []).append(answer)
        return result


class Answered(TorchFunctionMode):
    """Gives the same answers, from the first on each time that it is entered.

    Sizes that depend on values are those that were recorded.
    """

    def __init__(self, answers: Mapping[Site, Sequence[Any]]) -> None:
        super().__init__()
        self._answers = answers
        self._rest: dict[Site, Iterator[Any]] = {}

    def __enter__(self) -> Any:
        self._rest = {site: iter(answers) for site, answers in self._answers.items()}
        _FAKE.tolist = _TENSOR.tolist  # its own is Python, which asks for each number, and not us
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: object) -> None:
        _FAKE.tolist = _FAKE_TOLIST
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        answer = next(self._rest.get(_site(func), iter(())), None)
        if func in QUESTIONS and answer is not None:
            return copy.deepcopy(answer)
        result = (_FAKE_TOLIST if func is _TENSOR.tolist else func)(*args, **(kwargs or {}))
        return result if answer is None else _with_shapes(result, answer)


def _site(func: Any) -> Site:
    caller = sys._getframe(2)  # who caused the call of `__torch_function__`
    return func, caller.f_code.co_filename, caller.f_lineno


def _shapes(result: Any) -> list[tuple[Any, ...]]:
    return [tuple(value.shape) for value in tree_leaves(result) if _strided(value)]


def _strided(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided


def _with_shapes(result: Any, were: Sequence[tuple[int, ...]]) -> Any:
    """Return the result, with the recorded sizes in place of sizes that depend on values."""
    if all(isinstance(size, int) for shape in _shapes(result) for size in shape):
        return result
    known = iter(were)

    def shaped(value: Any) -> Any:
        if not _strided(value):
            return value
        shape = next(known)
        # A size of 0 or 1 is not believed when it is checked; a view has the sizes that it is given.
        return value if all(isinstance(size, int) for size in value.shape) else value.reshape(shape)

    return tree_map(shaped, result)
