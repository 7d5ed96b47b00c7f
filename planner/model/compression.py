"""Limits of compression by kind of layer, and gradients that are always sent whole.

A gradient is protected where its limit is 1: biases, what normalization layers hold, and what `protect` names.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np
from numpy.typing import NDArray

from planner.model.problem import Problem
from runtime.errors import InputError

Floats = NDArray[np.float64]

DEFAULT_MAX_RATIO = 1000.0
MAX_RATIO = 1e12

SENSITIVE_MAX_RATIO = 250.0
"""Default limit of recurrent and embedding layers, whose gradients suffer more (LAGS uses 250 for its LSTM)."""
SENSITIVE_KINDS = frozenset({"recurrent", "embedding"})
PROTECTED_KINDS = frozenset({"norm"})

NARROWED = frozenset({"float32", "float16", "bfloat16"})
"""Dtypes of gradients that may be added up in float32."""

NONE = "none"
"""Word in `protect`: only named gradients are protected."""

# Recurrent layers of torch say which bias it is behind the word: bias_ih_l0.
_BIAS = re.compile(r"(.*[._])?bias(_.*)?")
_NORM = re.compile(r"(.*[._0-9])?(bn|ln|norm|layernorm|batchnorm|groupnorm|rmsnorm)[_0-9a-z]*")


def steps_of_ratio(ratio: float) -> float:
    """Return the number of steps T from which on c_max³/T, the second term of LAGS-SGD's convergence bound (Eq. 18), is
    at most 1, constants aside: T of fewer steps does not cover the ratio c_max.
    """
    return ratio**3


def ratio_of_steps(steps: float) -> float:
    """Return the largest ratio for which a run has enough steps, the inverse of `steps_of_ratio`."""
    return max(1.0, math.cbrt(steps))


def check_max_ratio(value: float) -> float:
    """Return a largest ratio. Raises InputError where it is none."""
    if not (math.isfinite(value) and 1.0 <= value <= MAX_RATIO):
        expected = f"a number from 1 (nothing is left out) up to {MAX_RATIO:g}, such as 250"
        raise InputError(f"--max-ratio: found {value:g}, expected {expected}")
    return value


@dataclass(frozen=True, eq=False)
class Limits:
    """Compression allowed for each gradient. Shapes (gradients,)."""

    ratios: Floats
    """The largest ratio of its elements to those that are selected; 1: nothing is selected from it."""
    whole: NDArray[np.bool_]
    """Whether it keeps its dtype on the wire as well."""

    @classmethod
    def nothing(cls, problem: Problem) -> Limits:
        """Return the limits with which all gradients are sent whole."""
        return cls(np.ones(problem.count), np.ones(problem.count, dtype=np.bool_))


def make_limits(problem: Problem, max_ratio: float | None = None, protect: str = "", steps: int = 0) -> Limits:
    """Return the limits that `ratio_limits` says; what `protect` names, and what is of another dtype than those that
    are added up in float32, keeps its dtype. Biases and norms do not: rounding costs them no more than others.

    Raises InputError: as `ratio_limits`.
    """
    gradients = problem.profile.compute.gradients
    named = _patterns(protect)
    whole = [
        gradient.dtype not in NARROWED or any(fnmatchcase(gradient.name, pattern) for pattern in named)
        for gradient in gradients
    ]
    return Limits(ratio_limits(problem, max_ratio, protect, steps), np.array(whole, dtype=np.bool_))


def _patterns(protect: str) -> list[str]:
    return [pattern.strip() for pattern in protect.split("|") if pattern.strip()]


def ratio_limits(problem: Problem, max_ratio: float | None = None, protect: str = "", steps: int = 0) -> Floats:
    """Return the largest ratio of each gradient's elements to those sent; 1 where it is sent whole.

    Args:
        problem: the step.
        max_ratio: for all layers; default: 1000, and 250 for recurrent and embedding layers, or less by `steps`.
        protect: patterns of names that are protected too, separated by `|`, such as `fc.*|*.embed.weight`; with `none`
            among them biases and normalization layers are not.
        steps: steps of the training, which limit the default to what they cover; 0: not known.

    Raises:
        InputError: a ratio below 1, or a pattern that no name matches.
    """
    gradients = problem.profile.compute.gradients
    kinds = _kinds(problem)
    if max_ratio is not None:
        limits = np.full(problem.count, check_max_ratio(max_ratio))
    else:
        sensitive = [kinds.get(index) in SENSITIVE_KINDS for index in range(problem.count)]
        limits = np.where(sensitive, SENSITIVE_MAX_RATIO, DEFAULT_MAX_RATIO)
        limits = np.minimum(limits, ratio_of_steps(steps)) if steps else limits
    patterns = _patterns(protect)
    if NONE not in patterns:
        limits[[*_small(problem, kinds)]] = 1.0
    for pattern in patterns:
        matching = [index for index, gradient in enumerate(gradients) if fnmatchcase(gradient.name, pattern)]
        if not matching and pattern != NONE:
            names = ", ".join(gradient.name for gradient in gradients[:3])
            raise InputError(
                f"--protect: found {pattern!r}, which is the name of no gradient; expected a pattern such as 'fc.*', "
                f"several separated by '|', or {NONE}; the model's first gradients are {names}"
            )
        limits[matching] = 1.0
    return np.asarray(limits, dtype=np.float64)


def _kinds(problem: Problem) -> dict[int, str]:
    """Return the kind of each gradient's layer, by index, where the profile has it."""
    layers = problem.profile.layers or ()
    by_name = {layer.name: layer.kind for layer in layers}
    by_parameter = {name: layer.kind for layer in layers for name in layer.parameters or ()}
    kinds: dict[int, str] = {}
    for index, gradient in enumerate(problem.profile.compute.gradients):
        kind = by_parameter.get(gradient.name, by_name.get(gradient.layer))
        if kind is not None:
            kinds[index] = kind
    return kinds


def _small(problem: Problem, kinds: dict[int, str]) -> Iterator[int]:
    """Biases, and what layers hold that have one element per channel: their errors matter more than their bytes."""
    gradients = problem.profile.compute.gradients
    for index, gradient in enumerate(gradients):
        layer, _, parameter = gradient.name.rpartition(".")
        named = bool(layer) and (
            _BIAS.fullmatch(parameter) is not None or _NORM.fullmatch(layer.rpartition(".")[2].lower()) is not None
        )
        known = index in kinds
        if named or (kinds[index] in PROTECTED_KINDS if known else _per_channel(problem, index)):
            yield index


def _per_channel(problem: Problem, index: int) -> bool:
    """Return whether a gradient called weight is as long as the bias of its layer, as in normalization layers."""
    layer, names = problem.layers_by_name[index], problem.profile.compute.gradients
    if names[index].name != f"{layer}.weight":
        return False
    beside = [near for near in (index - 1, index + 1) if 0 <= near < problem.count]
    return any(names[near].name == f"{layer}.bias" and names[near].numel == names[index].numel for near in beside)


def segments(problem: Problem, limits: Floats) -> list[tuple[int, int]]:
    """(start, stop) of runs of gradients of one layer, by name, and one limit: a bucket has one k for each."""
    edges = [
        index
        for index in range(problem.count)
        if index == 0
        or problem.layers_by_name[index] != problem.layers_by_name[index - 1]
        or limits[index] != limits[index - 1]
    ]
    return list(zip(edges, [*edges[1:], problem.count], strict=True))


def partially_protected_boundaries(problem: Problem, limits: Floats) -> tuple[int, ...]:
    """Return the places where the limit changes within a layer: no bucket of selected elements holds both sides."""
    return tuple(
        start
        for start, _ in segments(problem, limits)[1:]
        if problem.layers_by_name[start] == problem.layers_by_name[start - 1]
    )


def selected(numel: int, limit: float, ratio: float) -> int:
    """Return k of a run of gradients: the fewest elements within a ratio and the run's own limit."""
    return math.ceil(numel / min(limit, ratio))


def shard_elements(problem: Problem, numel: int) -> int:
    """Return the elements of each shard of a node."""
    return math.ceil(numel / problem.cost.cluster.ranks_per_node)
