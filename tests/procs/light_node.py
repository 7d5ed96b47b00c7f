"""One rank of a node that only trains: nothing can be imported but torch, numpy, pydantic and what those three need.

Run as a program in the environment that torchrun makes; its arguments are plans, and it trains a model with each.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from importlib.machinery import BuiltinImporter, FrozenImporter, ModuleSpec, PathFinder
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from typing import Any, ClassVar

ROOTS = ("torch", "numpy", "pydantic")


def normal(name: str) -> str:
    """A distribution's name as indices spell it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def needed(names: Sequence[str]) -> set[str]:
    """Distributions that these need, with themselves; those of extras are not among them."""
    found: set[str] = set()
    queue = list(names)
    while queue:
        name = normal(queue.pop())
        if name in found:
            continue
        found.add(name)
        try:
            lines = requires(name) or []
        except PackageNotFoundError:
            continue  # for another platform
        queue += [re.split(r"[^\w.-]", line)[0] for line in lines if "extra ==" not in line]
    return found


class OnlyNeeded(PathFinder):
    """Finds nothing of a distribution that is not needed, as if it were not installed."""

    missing: ClassVar[set[str]] = set()

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """None for what is missing."""
        return None if name.partition(".")[0] in cls.missing else super().find_spec(name, path, target)


def hide_the_rest() -> None:
    """From now on only what is needed can be imported."""
    allowed = needed(ROOTS)
    for module, owners in packages_distributions().items():
        if module != "runtime" and not {normal(owner) for owner in owners} & allowed:
            OnlyNeeded.missing.add(module)
    OnlyNeeded.missing.add("planner")
    assert OnlyNeeded.missing >= {"scipy", "ortools", "typer", "rich"}
    # Also those that the editable install of a project puts there.
    sys.meta_path[:] = [BuiltinImporter, FrozenImporter, OnlyNeeded]


def main() -> None:
    """Train with each plan."""
    hide_the_rest()
    import torch
    import torch.distributed as dist

    import runtime

    dist.init_process_group("gloo")
    for path in sys.argv[1:]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session = runtime.attach(model, optimizer, path)
        before = model[0].weight.detach().clone()
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(4, 8) * (dist.get_rank() + 1)).square().mean().backward()
            optimizer.step()
        assert not torch.equal(before, model[0].weight)
        session.report()
        session.detach()
    dist.destroy_process_group()
    print("trained")


if __name__ == "__main__":
    main()
