"""What sessions with a delay save: whether it fits, and the whole from what all ranks owned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from runtime.delay.server import Pieces
from runtime.errors import InputError
from runtime.plan import DelaySpec, Plan


def clones(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies, by name."""
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def kept_on_host(parameter: nn.Parameter) -> Tensor:
    """A copy for `pre_weight`: on the host, for a device has better uses of its memory."""
    copy = parameter.detach().to("cpu", copy=True)
    return copy.pin_memory() if parameter.is_cuda else copy


@torch.no_grad()
def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Writes each source into its target."""
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def joined(
    owned: Sequence[Pieces], parameters: Mapping[str, nn.Parameter]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(weights, momenta) by name, in the parameters' shapes, from what all ranks of a run owned."""
    weights: dict[str, Tensor] = {}
    momenta: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        pieces = sorted((one[name] for one in owned if name in one), key=lambda piece: int(piece["start"]))
        if not pieces:  # a parameter without elements has no owner
            weights[name] = parameter.detach().clone()
            continue
        stride = pieces[0]["stride"]
        flat = torch.cat([piece["weights"] for piece in pieces]).to(parameter.device)
        weights[name] = flat.as_strided(parameter.shape, stride)
        buffers = [piece["momentum"] for piece in pieces]
        if all(buffer is not None for buffer in buffers):
            momenta[name] = torch.cat(buffers).to(parameter.device).as_strided(parameter.shape, stride)
    return weights, momenta


def residuals_of(states: Sequence[Mapping[str, Any]], worker: int, workers: int) -> dict[str, Tensor]:
    """One worker's share of what all ranks of a run had yet to push, by gradient: the sum over workers stays the same.

    Args:
        states: of all ranks.
        worker: this one.
        workers: how many there are now.
    """
    total: dict[str, Tensor] = {}
    for state in states[worker::workers]:
        for name, part in state["residuals"].items():
            total[name] = total[name] + part.to(total[name].device) if name in total else part
    return total


KEYS = {"spec", "stage", "step", "steps", "rates", "staleness", "pace", "workers"}
DELAYED_KEYS = KEYS | {
    "pushed", "pieces", "residuals", "weights", "buffers", "pre_weight", "pulls", "told", "words", "memory", "buckets",
}  # fmt: skip


def buckets_of(plan: Plan) -> list[list[str]]:
    """The gradients of each bucket, from which follows what every rank owns."""
    return [list(bucket.gradients) for bucket in plan.buckets]


def check_state(state: Any, spec: DelaySpec, parameters: Mapping[str, nn.Parameter], groups: int) -> None:
    """Raises InputError where it is no state of a run with this delay and model, and so many groups of parameters."""
    keys = set(state) if isinstance(state, Mapping) else set()
    if keys != (DELAYED_KEYS if "stage" in keys and state["stage"] == "delayed" else KEYS):
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
    if keys == DELAYED_KEYS and shapes != expected:
        odd = next(name for name in shapes.keys() | expected.keys() if shapes.get(name) != expected.get(name))
        raise InputError(
            f"found weights of {odd} with the shape {shapes.get(odd)}, expected {expected.get(odd)}: load the "
            f"checkpoint of this model"
        )


@dataclass(frozen=True)
class Place:
    """This rank, and what decides which part of the weights it owns."""

    rank: int
    ranks: int
    workers: int
    buckets: list[list[str]]


def delays_of(given: Any, place: Place) -> tuple[list[Any], bool]:
    """(what `Delay.load` continues from, whether the run had as many ranks and workers and the same buckets), from
    `Session.state_dict()`s.

    Raises:
        InputError: no state of a run with delay; another rank's, or not those of all ranks.
    """
    rank, ranks, workers = place.rank, place.ranks, place.workers
    several = isinstance(given, Sequence) and not isinstance(given, str | bytes)
    everyone: list[Any] = list(given) if several else [given]
    for one in everyone or [None]:
        if not isinstance(one, Mapping) or not {"ranks", "rank", "delay"} <= set(one):
            raise InputError(
                "found no state of a run with delay, expected what Session.state_dict() returned of one: go on with "
                "the plan that the run began with"
            )
    count = everyone[0]["ranks"]
    before = _workers_of(everyone[0]["delay"], count)
    if several and [one["rank"] for one in everyone] == list(range(count)):
        states = [one["delay"] for one in everyone]
        same = (count, before) == (ranks, workers) and _has_buckets(states[0], place)
        return ([states[rank]], True) if same else (states, False)
    if not several and before != workers:
        raise InputError(
            f"found the state of a run with {before} workers, this one has {workers}; expected those of all ranks in "
            f"order: pass a list of them on every rank"
        )
    if several or (count, everyone[0]["rank"]) != (ranks, rank):
        raise InputError(
            f"found the states of ranks {[one['rank'] for one in everyone]} of {count}, this is rank {rank} of "
            f"{ranks}; expected its own, or those of all ranks in order: pass a list of them on every rank"
        )
    if not _has_buckets(everyone[0]["delay"], place):
        raise InputError(
            "found the state of a run with other buckets; expected the plan that the run began with, or the states of "
            "all ranks in order, which may go on with others: pass a list of them on every rank"
        )
    return [everyone[0]["delay"]], True


def _has_buckets(state: Any, place: Place) -> bool:
    """Whether ranks own what they did then; with no owners yet any buckets are right."""
    return not isinstance(state, Mapping) or state.get("buckets", place.buckets) == place.buckets


def _workers_of(state: Any, ranks: int) -> int:
    found: int = state.get("workers", ranks) if isinstance(state, Mapping) else ranks
    return found
