"""Section `fsdp2` of plan.json: modules that FSDP2 gathers together, fetches ahead and keeps. Torch-free.

Modules are named by their paths, as `named_modules()` gives them; the model itself is `""`. A group is named by its
first module. Parameters in no group are the root's, which is a group of its own without being listed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from typing import Annotated, Literal

from pydantic import Field

from runtime.plan.strict_json import Count, Name, PositiveCount, PredictedUs, Ranks, Record, json_step, repeated_item

ROOT = ""
"""The path of the model itself."""

ModulePath = Annotated[str, Field(max_length=4096)]
Groups = Annotated[tuple[Annotated[tuple[Name, ...], Field(min_length=1)], ...], Field(max_length=20_000)]
Prefetch = dict[ModulePath, Annotated[tuple[ModulePath, ...], Field(min_length=1)]]
Reshard = bool | Annotated[int, Field(ge=2, le=10**7)]
"""True: parameters are freed after forward and gathered again; False: they are kept; a number: they are kept in parts,
and this number of ranks together have all."""


@dataclass(frozen=True, kw_only=True)
class MemoryPoint(Record):
    """The fastest wrapping found whose peak is at most so large."""

    peak_bytes: Count
    iteration_us: PredictedUs
    groups: Count
    kept: Count
    """Groups whose parameters stay after forward."""


@dataclass(frozen=True, kw_only=True)
class FullyShardPlan(Record):
    """Arguments of `fully_shard`, and the planner's predictions."""

    groups: Groups
    """Modules that are gathered together, and whose gradients are reduce-scattered together."""
    forward_prefetch: Prefetch = field(default_factory=dict)
    """Group → groups whose gathers it begins before its own forward; absent: FSDP2's own rule."""
    backward_prefetch: Prefetch = field(default_factory=dict)
    """Group → groups whose gathers it begins before its own backward; absent: the one that is next."""
    reshard_after_forward: dict[ModulePath, Reshard] = field(default_factory=dict)
    """Whether parameters are freed after forward, by group; absent: FSDP2's own rule, which is to free what is not the
    root's."""
    shard_ranks: Ranks | None = None
    """Ranks that hold one copy of the parameters (HSDP's inner dimension); absent: all."""
    reduce_scatter_max_input_buffers: PositiveCount | None = None
    """Reduce-scatters under way before the next one waits; absent: 1, FSDP2's own."""
    reduce_dtype: Literal["bfloat16"] | None = None
    """Dtype in which gradients are added up, which rounds them: of bounded plans alone; absent: their own."""
    peak_bytes: Count | None = None
    """Predicted, of one rank."""
    memory_bytes: Count | None = None
    """The limit that it was planned for."""
    lost_without_buffers_us: PredictedUs | None = None
    """Time that the step would lose with one reduce-scatter at a time, which older versions of FSDP2 have."""
    frontier: tuple[MemoryPoint, ...] | None = None
    """Time over memory."""

    @property
    def names(self) -> tuple[str, ...]:
        """Return the groups by name, the root last."""
        return (*(group[0] for group in self.groups), ROOT)

    def shard_size(self, ranks: int) -> int:
        """Return how many of all ranks hold one copy of the parameters."""
        return self.shard_ranks or ranks

    def problem_on(self, ranks: int, path: str) -> str | None:
        """Return what no model could be wrapped by, as `place: found …, expected …`; None where nothing is wrong."""
        if (twice := repeated_item(self.groups)) is not None:
            index, position, module, earlier = twice
            place = f"{path}.groups[{index}][{position}]: found {module!r}"
            return f"{place}, which is in group {earlier} already; expected each once: take one out"
        for index, group in enumerate(self.groups):
            for position, module in enumerate(group):
                inside = next((other for other in group if contains(other, module)), None)
                if inside is not None:
                    return (
                        f"{path}.groups[{index}][{position}]: found {module!r} beside {inside!r}, of which it is a "
                        f"part; expected the latter alone: take it out"
                    )
        if nesting_order(self.groups) is None:
            return (
                f"{path}.groups: found groups that are parts of each other, expected modules whose parts are grouped "
                f"before they are; take one apart"
            )
        return self._names_problem(path) or self._sizes_problem(ranks, path)

    def _names_problem(self, path: str) -> str | None:
        known = set(self.names)
        lists: Sequence[tuple[str, Mapping[str, object]]] = (
            ("forward_prefetch", self.forward_prefetch), ("backward_prefetch", self.backward_prefetch),
            ("reshard_after_forward", self.reshard_after_forward),
        )  # fmt: skip
        for name, by_group in lists:
            for key, value in by_group.items():
                place = f"{path}.{name}{json_step(key)}"
                if key not in known:
                    return f'{place}: found {key!r}, expected the first module of a group, or "" for the model itself'
                for position, target in enumerate(value if isinstance(value, tuple) else ()):
                    if target not in known or target == key:
                        return (
                            f"{place}[{position}]: found {target!r}, expected the first module of another group; "
                            f"correct it"
                        )
        return None

    def _sizes_problem(self, ranks: int, path: str) -> str | None:
        shard = self.shard_size(ranks)
        if ranks % shard:
            return f"{path}.shard_ranks: found {shard} of {ranks} ranks, expected a divisor of them; correct it"
        for key, value in self.reshard_after_forward.items():
            if not isinstance(value, bool) and (value >= shard or shard % value):
                return (
                    f"{path}.reshard_after_forward{json_step(key)}: found {value} of {shard} ranks, expected a divisor "
                    f"of them below {shard}, true or false; correct it"
                )
        return None


def contains(outer: str, inner: str) -> bool:
    """Return whether a module is a part of another one, by their paths.

    >>> contains("layers.1", "layers.1.mlp"), contains("layers.1", "layers.10"), contains("", "a"), contains("a", "a")
    (True, False, True, False)
    """
    return outer != inner and (outer == ROOT or inner.startswith(f"{outer}."))


def nesting_order(groups: Sequence[Sequence[str]]) -> list[int] | None:
    """Return an order of the groups in which parts come before what they are parts of; None where there is none.

    >>> nesting_order([["a"], ["b.c"], ["a.b", "b"]])
    [1, 2, 0]
    """
    owner = {module: index for index, group in enumerate(groups) for module in group}
    sorter: TopologicalSorter[int] = TopologicalSorter({index: () for index in range(len(groups))})
    for module, index in owner.items():
        steps = module.split(".")
        for other in (owner.get(".".join(steps[:count])) for count in range(1, len(steps))):
            if other is not None and other != index:
                sorter.add(other, index)
    try:
        return list(sorter.static_order())
    except CycleError:
        return None
