"""A compiled model in a profile: places where its graph can be cut, and what each cut costs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Self

from pydantic import Field

from runtime.plan.strict_json import Name, PositiveCount, Record, TimeUs, repeated_item

if TYPE_CHECKING:
    from planner.documents.profile import Gradient

MAX_CUTS = 128
"""More blocks than models have, with which the search takes seconds."""


@dataclass(frozen=True, kw_only=True)
class Cut(Record):
    """A module at which the graph can be cut: a region begins with it."""

    module: Name
    """Path of the module."""
    after: PositiveCount
    """Number of gradients, the first ones in the profile, that belong to this module and those behind it."""
    forward_us: TimeUs = 0.0
    """Time that the cut adds to forward: another launch, lost fusion, activations that are stored between."""
    backward_us: TimeUs = 0.0
    """The same of backward."""


@dataclass(frozen=True, kw_only=True)
class CompiledProfile(Record):
    """Form of a compiled model. The times of the profile's gradients are those of regions between all of its cuts,
    less what the cuts cost."""

    backend: Name
    cuts: Annotated[tuple[Cut, ...], Field(max_length=MAX_CUTS)]
    """Cuts in the order in which backward comes to them: `after` rises."""
    breaks: tuple[PositiveCount, ...] = ()
    """Numbers of gradients, the first ones, that the uncut form has before all others: at graph breaks of its own."""
    whole_us: TimeUs | None = None
    """Forward and backward of one graph, as measured."""
    compile_s: Annotated[float, Field(ge=0.0, le=1e6)] | None = None
    """Seconds of compiling that the measurement took."""

    @property
    def measured(self) -> bool:
        """Return whether costs of cuts were measured; else they are assumed."""
        return self.whole_us is not None

    def problem_among(self, gradients: Sequence[Gradient], path: str) -> str | None:
        """Return what is wrong with the places of cuts among the profile's gradients."""
        afters = [(f"cuts[{index}].after", cut.after) for index, cut in enumerate(self.cuts)]
        for places in (afters, [(f"breaks[{index}]", stop) for index, stop in enumerate(self.breaks)]):
            for (_, before), (name, stop) in pairwise([("", 0), *places]):
                if not before < stop < len(gradients):
                    return (
                        f"{path}.{name}: found {stop}, expected more than {before} and fewer than all {len(gradients)} "
                        f"gradients: correct it"
                    )
        if (twice := repeated_item([cut.module] for cut in self.cuts)) is not None:
            return f"{path}.cuts[{twice[0]}].module: found {twice[2]!r} again, expected each once: take one out"
        return None

    def chosen(self, modules: Collection[str]) -> Self:
        """Return it with some of the cuts alone."""
        return type(self)(
            backend=self.backend, breaks=self.breaks, whole_us=self.whole_us, compile_s=self.compile_s,
            cuts=tuple(cut for cut in self.cuts if cut.module in modules),
        )  # fmt: skip
