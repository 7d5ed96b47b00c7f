"""Hooks on modules that a copy of the module does not inherit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def no_hook(*_: Any) -> None:
    """What a copied or loaded module has in place of a session's hook."""


def _get_no_hook() -> Callable[..., None]:
    return no_hook


class ModuleHook:
    """Calls a session's method; `copy.deepcopy` (EMA) and pickling (`torch.save`) of the module make it nothing."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, *arguments: Any) -> None:
        """The hook."""
        self._call(*arguments)

    def __deepcopy__(self, _memo: dict[int, Any]) -> Callable[..., None]:
        return no_hook

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _get_no_hook, ()
