"""Names of a package that are imported when they are first asked for, so that importing the package takes no time."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def lazy(package: str, names: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package; `names`: by the module that has them."""
    where = {name: module for module, listed in names.items() for name in listed}

    def imported(name: str) -> Any:
        if name not in where:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(where[name]), name)

    return imported
