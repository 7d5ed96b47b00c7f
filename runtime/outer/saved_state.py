"""The state that sessions with outer steps save: the same workers continue exactly, others with the mean of weights.

On another number of workers rounds in flight end at once, every worker begins with the mean of the saved workers'
weights and optimizer states, owners take other parts of the anchors, and residuals are divided so that their sum stays
what it was: no local step is lost. With other outer steps or buckets, or without any, a run begins anew with that mean
less the residuals, which is what `Mode.end` would leave.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from runtime.core.buckets import Part, Slot, lay_out
from runtime.errors import InputError
from runtime.modes.base import Host
from runtime.outer.averages import is_averaged, mean_of
from runtime.outer.rounds import mix_into
from runtime.plan import OuterSpec, Plan
from runtime.plan.executed import executed_bucket
from runtime.sparse.residuals import merged

VERSION = 4
KEYS = {"version", "spec", "buckets", "step", "begun", "ended", "every", "lrs", "distances", "report"}
LOCAL_KEYS = KEYS | {
    "done", "workers", "anchors", "residuals", "launched", "weights", "buffers", "means", "optimizers",
}  # fmt: skip


def buckets_of(plan: Plan) -> list[Any]:
    """Return the gradients of each bucket and how they are sent, from which the layout of the state follows."""
    return [
        (list(bucket.gradients), str(bucket.transport), asdict(bucket.compressor))
        for bucket in map(executed_bucket, plan.buckets)
    ]


def copied(value: Any) -> Any:
    """Return a copy of nested dicts and lists with tensors."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: copied(one) for key, one in value.items()}
    return [copied(one) for one in value] if isinstance(value, list) else value


def states_of(given: Any, rank: int, ranks: int) -> list[dict[str, Any]] | None:
    """Return the `outer` states of all workers, or this rank's alone where it was given alone.

    Returns:
        None for the state of a run without outer steps, which may continue with them.

    Raises:
        InputError: states of other ranks or of another version.
    """
    several = isinstance(given, Sequence) and not isinstance(given, str | bytes)
    everyone: list[Any] = list(given) if several else [given]
    if not any(isinstance(one, Mapping) and "outer" in one for one in everyone):
        return None
    if not all(isinstance(one, Mapping) and {"outer", "rank", "ranks"} <= set(one) for one in everyone):
        raise InputError("found states of several runs, expected those of all ranks of one: load these")
    found, count = [one["rank"] for one in everyone], everyone[0]["ranks"]
    if found != (list(range(count)) if several else [rank]) or not (several or count == ranks):
        whose = f"the states of ranks {found}" if several else f"the state of rank {found[0]}"
        raise InputError(
            f"found {whose} of {count}, this is rank {rank} of {ranks}; expected its own, or a list of those of all "
            f"{count} ranks in order, the same on every rank: load those, from which any number of workers may continue"
        )
    states = [one["outer"] for one in everyone]
    for state in states:
        keys = set(state) if isinstance(state, Mapping) else set()
        local = "begun" in keys and state["begun"] is not None
        if not keys >= (LOCAL_KEYS if local else KEYS) or state["version"] != VERSION:
            raise InputError(
                f"found no state of a run with outer steps in version {VERSION}, expected what Session.state_dict() "
                f"returned of one: install the version of this package that wrote it, or load another checkpoint"
            )
    return states


def other_layout(state: Mapping[str, Any], spec: OuterSpec, plan: Plan) -> str | None:
    """Return how the layout of a state differs from that of a plan; None: it does not."""
    before, now = state["spec"], asdict(spec)
    del now["sharded_step"]  # states of optimizers are saved whole
    if (key := next((key for key in now if before.get(key) != now[key]), None)) is not None:
        return f"another layout (outer.{key} {before.get(key)!r}, here {now[key]!r})"
    return None if state["buckets"] == buckets_of(plan) else "another layout of buckets"


def refuse_alone(states: Sequence[Mapping[str, Any]], different: str | None) -> None:
    """Raise InputError where the state of local steps of one rank was given alone to a run that is `different`."""
    if different is not None and len(states) == 1 and states[0]["begun"] is not None:
        raise InputError(
            f"found one rank's state of a run with {different}, expected those of all its ranks, whose mean any plan "
            f"continues with: give load_state_dict a list of them, the same on every rank"
        )


def plain_states(given: Any, step: int) -> Any:
    """Return states as given to `Mode.load`, as those of a run without outer steps, whose next step has this number."""
    if not isinstance(given, dict):
        return [plain_states(one, step) for one in given]
    plain = given | {"step": step}
    del plain["outer"]
    return plain


def as_synchronous(given: Any, host: Host) -> Any:
    """Return states of any run, as given to `Session.load_state_dict`, as those of one without outer steps. If steps
    were local, model, buffers and optimizers take the workers' mean here. Raises InputError as `refuse_alone`.
    """
    states = states_of(given, host.world.rank, host.world.ranks)
    if states is None:
        return given
    refuse_alone(states, "outer steps")
    if states[0]["begun"] is not None:
        take_mean(states, host)
    return plain_states(given, states[0]["step"])


def merged_state(states: Sequence[dict[str, Any]], parameters: Mapping[str, nn.Parameter]) -> dict[str, Any]:
    """Return the state with which one of another number of workers continues; its residuals are those of all together.

    Args:
        states: of all ranks that there were.
        parameters: of the model, by name.

    Raises:
        InputError: the weights are another model's.
    """
    for name, weights in states[0]["weights"].items():
        if name not in parameters or parameters[name].shape != weights.shape:
            found = f"{name} {tuple(weights.shape)}"
            raise InputError(f"found weights of {found}, which this model has not: load the checkpoint of this model")
    spec, own = states[0]["spec"], [copied(state["weights"]) for state in states]
    fragments = spec["fragments"] or [list(own[0])]
    fragment_of = {name: index for index, names in enumerate(fragments) for name in names}
    for name, anchor in _whole_anchors(states, parameters).items():
        for state, weights in zip(states, own, strict=True):
            if state["launched"][fragment_of[name]] is not None:
                mix_into(weights[name], anchor, spec["mix"])
    return {
        **states[0],
        "weights": {name: mean_of([weights[name] for weights in own]) for name in own[0]},
        "buffers": [
            mean_of([state["buffers"][i] for state in states]) if buffer.is_floating_point() else buffer
            for i, buffer in enumerate(states[0]["buffers"])
        ],
        "launched": [None] * len(fragments),
        "means": None,
        "residuals": [merged(of_one, 0, 1) for of_one in zip(*(state["residuals"] for state in states), strict=True)],
        "optimizers": [
            _merged_optimizer(of_one) for of_one in zip(*(state["optimizers"] for state in states), strict=True)
        ],
    }


def _whole_anchors(states: Sequence[dict[str, Any]], parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Return the anchors of the run by parameter, from the parts of all its ranks."""
    found: dict[str, Tensor] = {}
    for index, (names, *_) in enumerate(states[0]["buckets"]):
        for number, message in enumerate(lay_out([Slot(name, 0, parameters[name]) for name in names])):
            parts = [state["anchors"][index][number]["anchor"] for state in states]
            whole = Part(message, 0, 1)
            # Of a compressed bucket each rank has all of it.
            found |= whole.views(torch.cat(parts if parts[0].numel() < whole.numel else parts[:1]))
    return found


def take_mean(states: Sequence[dict[str, Any]], host: Host) -> None:
    """Give model, buffers and optimizers what all workers come to where outer steps end. Raises InputError: the states
    are another model's.
    """
    found = merged_state(states, host.parameters)
    for residuals in found["residuals"]:
        for name, part in residuals.get("residuals", {}).items():
            weights = found["weights"][name]
            weights.copy_(weights.to(part.dtype) - part)
    with torch.no_grad():
        for name, weights in found["weights"].items():
            host.parameters[name].copy_(weights)
        for buffer, value in zip(host.synced_buffers(), found["buffers"], strict=True):
            buffer.copy_(value)
    for optimizer, state in zip(host.optimizers, found["optimizers"], strict=True):
        optimizer.load_state_dict(copied(state))


def _merged_optimizer(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the mean of optimizers' states; what has none (see `is_averaged`) is the first's."""
    found: dict[str, Any] = copied(states[0])
    for parameter in {parameter for state in states for parameter in state["state"]}:
        held = [state["state"][parameter] for state in states if state["state"].get(parameter)]
        for key, value in held[0].items() if held else ():
            same = [one[key] for one in held if key in one]
            found["state"].setdefault(parameter, {})[key] = mean_of(same) if is_averaged(key, value) else value
    return found
