"""Whether exact plans train as DDP does: first updates and losses of all blocks on all ranks. Never imports torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from planner.comparison.variants import BEST_DDP, DDP

if TYPE_CHECKING:
    from planner.comparison.measure import Measured

LOSS_TOLERANCE = 1e-3
"""Relative."""

SURE_STEPS = 3
"""Sums of more than two ranks may be taken in another order, and training multiplies what they differ by: there no more
than the first losses say whether it is the same training. DDP itself, with other buckets, ends with others."""

NOISE = 3.0
"""Where DDP's own blocks differ, others may differ so many times as much."""


@dataclass(frozen=True)
class Training:
    """What came out."""

    same: dict[str, bool | None]
    """By exact plan; None where that cannot be told."""
    differences: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Difference:
    """Between a block and the first one of plain DDP."""

    step: int
    """From 1."""
    ratio: float
    """More than 1 is more than rounding."""
    words: str


def judge_training(measured: Sequence[Measured]) -> Training:
    """Holds every exact plan against DDP, and DDP against itself, from what each rank saw."""
    sure = SURE_STEPS if len(measured) > 2 else None
    variants = [record.variant for record in measured[0].records]
    own = [
        difference
        for index, one in enumerate(variants)
        if one.name == DDP or one.name.startswith(BEST_DDP)
        for difference in _differences(measured, index, sure)
    ]
    plans = {
        one.name: list(_differences(measured, index, sure))
        for index, one in enumerate(variants)
        if one.kind == "plan" and one.exact
    }
    doubt = max((one for one in own if one.step == 1), key=lambda one: one.ratio, default=None)
    if doubt is not None and doubt.ratio > 1.0:
        return Training(
            same=dict.fromkeys(plans),
            doubts=(
                f"cannot tell whether training is the same with {', '.join(plans)} as with DDP: two blocks of DDP "
                f"itself, from the same weights, batches and random states, differ ({doubt.words}); what is trained "
                f"draws from a generator of its own, or keeps something from step to step",
            ),
        )
    same: dict[str, bool | None] = {}
    differences = []
    for name, found in plans.items():
        # How far blocks of DDP are apart up to a step.
        noise = {one.step: max((o.ratio for o in own if o.step <= one.step), default=0.0) for one in found}
        real = [one for one in found if one.ratio > max(1.0, NOISE * noise[one.step])]
        same[name] = None if not found else not real
        if real:
            first = min(real, key=lambda one: (one.step, -one.ratio))
            differences.append(f"NOT THE SAME TRAINING: {name}: {first.words}; do not train with it, and report it")
    return Training(same=same, differences=tuple(differences))


def _differences(measured: Sequence[Measured], index: int, sure: int | None) -> Iterator[_Difference]:
    """Of all blocks of one variant on all ranks; losses of the first `sure` steps only."""
    for rank, seen in enumerate(measured):
        record = seen.records[index]
        for deviation in record.deviations:
            yield _Difference(
                1,
                deviation.ratio,
                f"on rank {rank} the first update of {deviation.name} is off by {deviation.share:.1%} of its length, "
                f"expected {deviation.allowed:.0%} at most",
            )
        reference = next(one for one in seen.records if one.variant.name == DDP)
        for losses in record.losses:
            for step, (found, expected) in enumerate(zip(losses[:sure], reference.losses[0], strict=False), start=1):
                if found is not None and expected is not None:
                    ratio = abs(found - expected) / (LOSS_TOLERANCE * max(abs(expected), 1e-5))
                    if not (math.isfinite(found) and math.isfinite(expected)):
                        ratio = 0.0 if repr(found) == repr(expected) else math.inf
                    yield _Difference(
                        step,
                        ratio,
                        f"on rank {rank} the loss was {found:.6g} in step {step} of a block, DDP's {expected:.6g}",
                    )
