"""Times at which forward needs each weight, which all-gathers during forward have to meet.

A layer needs its weights when it begins, which is where the layers before it end. Where the profile knows its layers,
their forward times say so, stretched to the measured sum; a weight that several layers use is needed by the first. Else
forward is taken to pass through the layers of gradients in the reverse of readiness order, each with that share of
forward which it has of backward: both pass over the same operations. What a module itself holds, beside its parts, is
waited for when the module begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from planner.documents.profile import Layer
from planner.model.problem import Problem

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Needs:
    """Times at which an undisturbed forward reaches the layer of each gradient."""

    need_us: Floats
    """Microseconds from the start of forward, in readiness order. Shape (count,)."""
    source: str
    """Description of the source."""

    @property
    def ordered(self) -> bool:
        """Return whether gradients that are ready later in backward are never needed later in forward."""
        return bool(np.all(np.diff(self.need_us) <= 0.0))


@lru_cache(maxsize=8)
def needs(problem: Problem) -> Needs:
    """Return when forward needs the weights of a problem, by the best that its profile knows."""
    layers = problem.profile.layers or ()
    forward_us = [layer.forward_us or 0.0 for layer in layers]
    source = "forward times of its layers"
    if sum(forward_us) <= 0.0:
        forward_us, source = [layer.flops for layer in layers], "FLOPs of its layers"
    if sum(forward_us) > 0.0:
        known = _by_layer(problem, layers, forward_us)
        if known is not None:
            return Needs(need_us=_of_modules(problem, known), source=source)
    return Needs(need_us=_of_modules(problem, _mirrored(problem)), source="backward's share of each layer")


def _of_modules(problem: Problem, need_us: Floats) -> Floats:
    """Return the earliest need in the module that holds each gradient's weight, whose start waits for all of them.

    Where no name has a dot, as in traces of layers, each is a module of its own.
    """
    holders = [gradient.name.split(".")[:-1] for gradient in problem.profile.compute.gradients]
    if not any(holders):
        return need_us
    earliest: dict[tuple[str, ...], float] = {}
    for holder, need in zip(holders, need_us.tolist(), strict=True):
        for depth in range(len(holder) + 1):
            module = tuple(holder[:depth])
            earliest[module] = min(need, earliest.get(module, need))
    return np.array([earliest[tuple(holder)] for holder in holders])


def _by_layer(problem: Problem, layers: Sequence[Layer], weights: Sequence[float]) -> Floats | None:
    """Return needs by layers in forward order, each with its weight; None where they name no gradient.

    A gradient that no layer names is needed with the one that is ready behind it, which is not too late.
    """
    whole, begun = sum(weights), 0.0
    first: dict[str, float] = {}
    for layer, weight in zip(layers, weights, strict=True):
        for name in (layer.name, *(layer.parameters or ())):
            first.setdefault(name, begun / whole * problem.forward_us)
        begun += weight
    need_us, before_us, known = np.zeros(problem.count), 0.0, False
    for index in reversed(range(problem.count)):
        gradient = problem.profile.compute.gradients[index]
        found = first.get(gradient.name, first.get(gradient.layer))
        known |= found is not None
        need_us[index] = before_us = before_us if found is None else found
    return need_us if known else None


def _mirrored(problem: Problem) -> Floats:
    """Return needs where a layer begins after those with later gradients, each taking its share of backward."""
    backward_us = problem.backward_us
    scale = problem.forward_us / backward_us if backward_us > 0.0 else 0.0
    need_us = np.zeros(problem.count)
    for start, stop in problem.layer_runs:
        need_us[start:stop] = (problem.compute_end_us - problem.ready_us[stop - 1]) * scale
    return need_us
