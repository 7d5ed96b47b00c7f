"""What local updaters (LAP-SGD, LPP-SGD) are planned from: a section of profile.json. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated

from pydantic import Field

from runtime.errors import InputError
from runtime.plan import MAX_UPDATERS
from runtime.plan.strict_json import Count, PositiveCount, Record, TimeUs

MAX_LAYERS = 20_000


@dataclass(frozen=True, kw_only=True)
class LayerBackward(Record):
    """What backward spends on one run of gradients of equal `layer`, as measured by leaving parts of backward out."""

    layer: str
    gradients: PositiveCount
    """How many gradients the run has, in readiness order."""
    grad_weight_us: TimeUs
    """On these gradients."""
    grad_input_us: TimeUs
    """On the way from here to the next run: what is saved where backward ends with this one. 0 for the last one."""
    update_us: TimeUs
    """On the update of these weights."""


@dataclass(frozen=True, kw_only=True)
class UpdaterRate(Record):
    """What several updaters of a rank get done that share its model, all ranks at once."""

    updaters: Annotated[int, Field(ge=1, le=MAX_UPDATERS)]
    minibatch_us: Annotated[float, Field(gt=0.0, le=1e15)]
    """A rank's time over the minibatches that its updaters got through, all with full backwards, without averagings."""
    averaging_us: TimeUs | None = None
    """The same while ranks average their models without pause; absent on one rank."""
    memory_bytes: Count | None = None
    """What they take in all of a rank's memory (on GPUs: of the device's)."""


@dataclass(frozen=True, kw_only=True)
class LocalAsyncProfile(Record):
    """What local updaters (LAP-SGD, LPP-SGD) are planned from."""

    batch_us: TimeUs = 0.0
    """Making one minibatch, in an updater that is alone."""
    forward_us: TimeUs
    """One forward, interleaved with the backwards that `layers` comes from."""
    loss_us: TimeUs
    """Backward from the loss to the first gradient's layer."""
    layers: Annotated[tuple[LayerBackward, ...], Field(min_length=1, max_length=MAX_LAYERS)]
    """In readiness order."""
    curve: Annotated[tuple[UpdaterRate, ...], Field(min_length=1, max_length=MAX_UPDATERS)]
    """By numbers of updaters, from 1 upwards."""
    memory_available_bytes: Count | None = None
    """Of a rank, for all of its updaters."""

    def check(self, layers: Sequence[str], where: str, cure: str) -> None:
        """Raise InputError where it is not about gradients of these layers, or numbers of updaters are out of order.

        `layers` are those of each gradient, in readiness order; messages begin with `where` and end with `cure`.
        """
        start = 0
        for index, layer in enumerate(self.layers):
            run = layers[start : start + layer.gradients]
            start += layer.gradients
            if len(run) < layer.gradients or set(run) != {layer.layer}:
                raise InputError(
                    f"{where}.layers[{index}]: found {layer.gradients} gradients of the layer {layer.layer!r}, "
                    f"expected the layers of $.compute.gradients, in that order: {cure}"
                )
        if start < len(layers):
            raise InputError(f"{where}.layers: found {start} gradients, expected all {len(layers)}; {cure}")
        counts = [point.updaters for point in self.curve]
        if counts[0] != 1 or any(after <= before for before, after in pairwise(counts)):
            raise InputError(f"{where}.curve: found {counts} updaters, expected growing numbers from 1 upwards; {cure}")
