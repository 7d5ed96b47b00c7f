"""Measurements from which local updaters (LAP-SGD, LPP-SGD) are planned: a section of profile.json. Torch-free."""

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
    """Backward time of one run of gradients of equal `layer`, as measured by leaving parts of backward out."""

    layer: str
    gradients: PositiveCount
    """Number of gradients in the run, in readiness order."""
    grad_weight_us: TimeUs
    """Time of these gradients."""
    grad_input_us: TimeUs
    """Time from here to the next run: what is saved if backward ends with this one. 0 for the last one."""
    update_us: TimeUs
    """Time of the update of these weights."""


@dataclass(frozen=True, kw_only=True)
class UpdaterRate(Record):
    """Throughput of several updaters of a rank that share its model, all ranks at once."""

    updaters: Annotated[int, Field(ge=1, le=MAX_UPDATERS)]
    minibatch_us: Annotated[float, Field(gt=0.0, le=1e15)]
    """A rank's time over the minibatches that its updaters got through, all with full backwards, without averagings."""
    averaging_us: TimeUs | None = None
    """The same while ranks average their models without pause; absent on one rank."""
    memory_bytes: Count | None = None
    """Memory that they use, of all of a rank's memory (on GPUs: of the device's)."""


@dataclass(frozen=True, kw_only=True)
class LocalAsyncProfile(Record):
    """Measurements from which local updaters (LAP-SGD, LPP-SGD) are planned."""

    batch_us: TimeUs = 0.0
    """Making one minibatch, in an updater that is alone."""
    forward_us: TimeUs
    """One forward, interleaved with the backwards that `layers` comes from."""
    loss_us: TimeUs
    """Backward from the loss to the first gradient's layer."""
    layers: Annotated[tuple[LayerBackward, ...], Field(min_length=1, max_length=MAX_LAYERS)]
    """Runs of gradients, in readiness order."""
    curve: Annotated[tuple[UpdaterRate, ...], Field(min_length=1, max_length=MAX_UPDATERS)]
    """Throughput by numbers of updaters, from 1 upwards."""
    memory_available_bytes: Count | None = None
    """Memory of a rank for all of its updaters."""

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
