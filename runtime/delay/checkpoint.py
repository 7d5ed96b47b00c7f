"""The state that sessions with a delay save, and checks that the same ranks, workers and buckets continue from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from runtime.errors import InputError
from runtime.plan import DelaySpec, Plan


def clones(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def kept_on_host(parameter: nn.Parameter) -> Tensor:
    """Return a copy for `pre_weight`: on the host, for a device has better uses of its memory."""
    copy = parameter.detach().to("cpu", copy=True)
    return copy.pin_memory() if parameter.is_cuda else copy


@torch.no_grad()
def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


VERSION = 2
"""Version of the saved state. Version 1, which names none, has other names of two entries."""
RENAMED = {"told": "reported", "words": "distance"}
"""Names in version 1, and those of today."""

KEYS = {"spec", "stage", "step", "steps", "rates", "staleness", "pace", "workers"}
DELAYED_KEYS = KEYS | {
    "pushed", "pieces", "residuals", "weights", "buffers", "pre_weight", "pulls", "reported", "distance", "buckets",
}  # fmt: skip


def buckets_of(plan: Plan) -> list[list[str]]:
    """Return the gradients of each bucket, from which follows what every rank owns."""
    return [list(bucket.gradients) for bucket in plan.buckets]


def check_state(state: Any, spec: DelaySpec, parameters: Mapping[str, nn.Parameter], groups: int) -> None:
    """Raise InputError where it is no state of a run with this delay and model, and so many groups of parameters."""
    keys = set(state) if isinstance(state, Mapping) else set()
    delayed = "stage" in keys and state["stage"] == "delayed"
    if not keys >= (DELAYED_KEYS if delayed else KEYS):
        raise InputError("found no state of a run with delay, expected what Session.state_dict() returned of one")
    if state["spec"] != asdict(spec):
        raise InputError(
            f"found the state of a run with the delay {state['spec']}, expected {asdict(spec)}: go on with the plan "
            f"that the run began with"
        )
    found = len(state["rates"][-1]) if state["rates"] else groups
    if found != groups:
        raise InputError(
            f"found the state of a run whose optimizer has {found} groups of parameters, expected {groups} as this one "
            f"has: make the optimizer that the run began with"
        )
    shapes = {name: tuple(weight.shape) for name, weight in state.get("weights", {}).items()}
    expected = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    if delayed and shapes != expected:
        odd = next(name for name in shapes.keys() | expected.keys() if shapes.get(name) != expected.get(name))
        raise InputError(
            f"found weights of {odd} with the shape {shapes.get(odd)}, expected {expected.get(odd)}: load the "
            f"checkpoint of this model"
        )


ELSEWHERE = (
    "go on as the run began, or end the delay there first (session.switch to a plan without one, then save): from "
    "there any number of ranks may go on, with any plan"
)
"""Hint for the state of other ranks, workers or buckets, with which other ranks own each part of the weights."""


def _upgraded(state: Any) -> Any:
    """Return the state with the entries of this version. Raises InputError for one of a later version."""
    if not isinstance(state, Mapping):
        return state  # refused by `check_state`
    version = state.get("version", 1)
    if version not in (1, VERSION):
        raise InputError(
            f"found the state of a run with delay in version {version}, expected at most {VERSION}: install the "
            f"version of this package that wrote it, or a later one"
        )
    return {RENAMED.get(name, name): value for name, value in state.items()}


def own_state(given: Any, rank: int, ranks: int, workers: int, buckets: list[list[str]]) -> Any:
    """Return what `Delayed.load` continues from, of this rank's `Session.state_dict()` or all. Raises InputError."""
    several = isinstance(given, Sequence) and not isinstance(given, str | bytes)
    everyone: list[Any] = list(given) if several else [given]
    for one in everyone or [None]:
        if not isinstance(one, Mapping) or any(key not in one for key in ("ranks", "rank", "delay")):
            raise InputError(
                "found no state of a run with delay, expected what Session.state_dict() returned of one: go on with "
                "the plan that the run began with"
            )
    found, count = [one["rank"] for one in everyone], everyone[0]["ranks"]
    if count != ranks or found != (list(range(ranks)) if several else [rank]):
        whose = f"the states of ranks {found}" if several else f"the state of rank {found[0]}"
        raise InputError(
            f"found {whose} of {count}, this is rank {rank} of {ranks}; expected its own, or those of all ranks in "
            f"order: {ELSEWHERE}"
        )
    state = _upgraded(everyone[rank if several else 0]["delay"])
    if isinstance(state, Mapping) and state.get("workers", workers) != workers:
        raise InputError(
            f"found the state of a run with {state['workers']} workers, expected {workers}, as here: {ELSEWHERE}"
        )
    if isinstance(state, Mapping) and state.get("buckets", buckets) != buckets:
        raise InputError(f"found the state of a run with other buckets, expected those of this plan: {ELSEWHERE}")
    return state
