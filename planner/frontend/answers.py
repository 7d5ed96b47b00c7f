"""What a forward asks of its tensors' values (`if x.sum() > 0`, `x.item()`): recorded on data, answered without.

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
from torch.overrides import TorchFunctionMode

_TENSOR: Any = Tensor

QUESTIONS: frozenset[Callable[..., Any]] = frozenset(
    [
        *(_TENSOR.__bool__, _TENSOR.__int__, _TENSOR.__float__, _TENSOR.__complex__, _TENSOR.__index__),
        *(_TENSOR.item, _TENSOR.tolist, _TENSOR.__contains__, _TENSOR.is_nonzero, torch.is_nonzero),
        *(_TENSOR.equal, torch.equal, _TENSOR.allclose, torch.allclose),
        *(_TENSOR.numpy, _TENSOR.__array__),
    ]
)
"""What turns a tensor's values into something that torch does not see."""

Question = tuple[Callable[..., Any], str, int]
"""What is asked, in which file and line. Order alone would not do, for some models ask less while they are traced."""

Answers = Mapping[Question, Sequence[Any]]
"""All answers to a question, in order."""


class Recorded(TorchFunctionMode):
    """Writes down all answers that are given inside."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: dict[Question, list[Any]] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in QUESTIONS:
            self.answers.setdefault(_question(func), []).append(copy.deepcopy(result))
        return result


class Answered(TorchFunctionMode):
    """Gives the same answers, from the first on each time that it is entered."""

    def __init__(self, answers: Answers) -> None:
        super().__init__()
        self._answers = answers
        self._rest: dict[Question, Iterator[Any]] = {}

    def __enter__(self) -> Any:
        self._rest = {question: iter(answers) for question, answers in self._answers.items()}
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in QUESTIONS:
            return func(*args, **(kwargs or {}))
        question = _question(func)
        for answer in self._rest.get(question, ()):
            return copy.deepcopy(answer)
        raise RuntimeError(f"{question[1]}, line {question[2]}: asked more often while traced than before")


def _question(func: Callable[..., Any]) -> Question:
    caller = sys._getframe(2)  # who caused the call of `__torch_function__`
    return func, caller.f_code.co_filename, caller.f_lineno
