"""Updates that are lost by races, counted on a probe: a tensor to which every update adds 1 as it adds to the weights.

An addition in place reads, adds and writes, and no step of it is atomic over processes: of two that overlap in an
element one is lost. Weights do not show it, because their updates differ; of the probe the sum is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.local_async.shared import Layout


@dataclass(frozen=True, kw_only=True)
class Races:
    """Additions to the probe of one rank, and how many of them its sum lacks."""

    additions: int
    """Additions to single elements, counted exactly: by updates of this rank and by its averagings."""
    lost: int
    """Number of these additions that the sum of the probe lacks."""
    worst: float
    """Largest share of its additions that one element has lost."""

    @property
    def share(self) -> float:
        """Share of additions that were lost."""
        return self.lost / self.additions if self.additions else 0.0


def probe_places(layout: Layout, names: Iterable[str] | None = None) -> list[slice]:
    """Return the places of the probe that stand for parameters, in proportion to their elements.

    Args:
        layout: of the model.
        names: of parameters; None: all trained ones.
    """
    wanted = None if names is None else set(names)
    trained = [slot for slot in layout.slots if slot.role == "trained"]
    total = sum(slot.numel for slot in trained)
    found: list[slice] = []
    end = 0
    for slot in trained:
        start, end = end, end + slot.numel
        if wanted is None or slot.name in wanted:
            place = slice(start * layout.probe_elements // total, end * layout.probe_elements // total)
            if found and found[-1].stop == place.start:
                place = slice(found.pop().start, place.stop)
            found.append(place)
    return found


@torch.no_grad()
def add_to_probe(probe: Tensor, places: Sequence[slice]) -> None:
    """Add 1 in place, without a lock, as an optimizer's step adds to the weights."""
    for place in places:
        probe[place].add_(1)


def count_races(probe: Tensor, updates: Iterable[tuple[Sequence[slice], int]]) -> Races:
    """Return what the probe lacks.

    Args:
        probe: the probe after a run. Shape (elements,), int32.
        updates: places, and the exact number of additions to each element there.
    """
    expected = torch.zeros(probe.numel(), dtype=torch.int64)
    for places, number in updates:
        for place in places:
            expected[place] += number
    # A killed updater may have added what it did not count.
    lost = (expected - probe.cpu()).clamp_(min=0)
    worst = float((lost / expected.clamp(min=1)).max()) if probe.numel() else 0.0
    return Races(additions=int(expected.sum()), lost=int(lost.sum()), worst=worst)
