"""The options of a compressor against the layers of a bucket: every misfit in words."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TypeVar

from runtime.errors import InputError
from runtime.plan import CompressorSpec
from runtime.plan.names import shorten

HINT = "correct the plan, or make it again with `planner optimize`"

MAX_ELEMENTS = 2**31 - 1
"""Indices are sent as int32."""

Layer = tuple[str, int]

_Value = TypeVar("_Value")


@dataclass(frozen=True)
class Segment:
    """A run of neighbouring elements of which `k` are sent."""

    name: str
    start: int
    elements: int
    k: int


def choose(what: str, name: str, known: Mapping[str, _Value]) -> _Value:
    """Return the value of a name. Raises InputError, with the known names, where there is none."""
    if name not in known:
        raise InputError(f"{what}: found {name!r}, expected one of {', '.join(known)}: {HINT}")
    return known[name]


def check_options(spec: CompressorSpec, known: frozenset[str]) -> None:
    """Raise InputError where the specification says something that its compressor does not understand."""
    given = {field.name for field in fields(spec) if getattr(spec, field.name) is not None} - {"name"}
    wrong = sorted(given - known)
    if wrong:
        expected = f"only {', '.join(sorted(known))}" if known else "none"
        raise InputError(
            f"the compressor {spec.name} has the options {', '.join(wrong)}, which it does not know; expected "
            f"{expected}: leave them out"
        )


def kept_elements(spec: CompressorSpec, layers: Sequence[Layer]) -> tuple[Segment, ...]:
    """Return how many elements of which part of the buffer are sent; parts without elements are left out.

    A density D of n elements keeps max(1, ⌊D·n⌋). Raises InputError: neither or both of `k` and `density`, or they do
    not fit these layers.
    """
    if (spec.k is None) == (spec.density is None):
        found = "neither k nor density" if spec.k is None else "both k and density"
        raise InputError(f"the compressor {spec.name} has {found}; expected one of them: {HINT}")
    total = sum(elements for _, elements in layers)
    if total > MAX_ELEMENTS:
        raise InputError(
            f"{spec.name}: the bucket of {layers[0][0]} … {layers[-1][0]} has {total} elements of one dtype, expected "
            f"at most {MAX_ELEMENTS}, which 32-bit indices reach: divide it into several buckets"
        )
    if spec.k is not None:
        kept = _given_k(spec, spec.k, layers)
    else:
        kept = [_share(spec, elements) for _, elements in layers]
        if spec.scope != "layer":
            name = "\n".join(name for name, _ in layers)
            return _segments([(name, total)], [_share(spec, total)])
    return _segments(layers, kept)


def _segments(layers: Sequence[Layer], kept: Sequence[int]) -> tuple[Segment, ...]:
    segments, start = [], 0
    for (name, elements), k in zip(layers, kept, strict=True):
        if k:
            segments.append(Segment(name, start, elements, k))
        start += elements
    return tuple(segments)


def _share(spec: CompressorSpec, elements: int) -> int:
    density = spec.density
    assert density is not None
    if not 0.0 < density <= 1.0:
        raise InputError(f"{spec.name}: density: found {density}, expected more than 0 and at most 1: {HINT}")
    return min(elements, max(1, math.floor(density * elements)))


def _given_k(spec: CompressorSpec, given: Mapping[str, int], layers: Sequence[Layer]) -> list[int]:
    if spec.scope == "bucket":
        raise InputError(
            f'{spec.name}: found k for each layer and scope "bucket", which is for one density of a whole bucket; '
            f"expected one of them: leave scope out"
        )
    names = [name for name, _ in layers]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InputError(
            f"{spec.name}: k: the layer {twice} lies in the bucket in several runs; expected each layer in one run: "
            f'give a density with scope "layer" instead of k, or send the runs in different buckets'
        )
    unknown = [name for name in given if name not in names]
    if unknown:
        raise InputError(
            f"{spec.name}: k: found the layers {shorten(unknown)}, which the bucket does not have; expected "
            f"{shorten(names)}: {HINT}"
        )
    missing = [name for name, elements in layers if elements and name not in given]
    if missing:
        raise InputError(f"{spec.name}: k: found no number for {shorten(missing)}; expected one for each layer: {HINT}")
    for name, elements in layers:
        k = given.get(name)
        if elements and (not isinstance(k, int) or isinstance(k, bool) or not 1 <= k <= elements):
            raise InputError(
                f"{spec.name}: k of the layer {name}: found {k!r}, expected a whole number from 1 to {elements}, the "
                f"layer's elements: {HINT}"
            )
    return [given[name] if elements else 0 for name, elements in layers]
