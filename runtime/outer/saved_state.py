"""The state that sessions with outer steps save: the same workers continue exactly, others with the mean of weights.

On another number of workers rounds in flight end at once, every worker begins with the mean of the saved workers'
weights and optimizer states, owners take other parts of the anchors, and residuals are divided so that their sum stays
what it was: no local step is lost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from torch import Tensor

from runtime.errors import InputError
from runtime.outer.averages import mean_of
from runtime.outer.rounds import mix_into
from runtime.plan import OuterSpec, Plan
from runtime.plan.executed import executed_bucket
from runtime.sparse.residuals import merged

VERSION = 3
KEYS = {"version", "spec", "buckets", "step", "begun", "ended", "every", "lrs", "distances", "report"}
LOCAL_KEYS = KEYS | {
    "done", "workers", "anchors", "residuals", "launched", "weights", "buffers", "means", "optimizers",
}  # fmt: skip

ELSEWHERE = (
    "continue with the plan that the run began with, or end the outer steps there first (session.switch to a plan "
    "without them, then save)"
)


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


def states_of(given: Any, rank: int, ranks: int, spec: OuterSpec, plan: Plan) -> list[dict[str, Any]] | None:
    """Return the `outer` states of all workers, or this rank's alone where it was given alone.

    Returns:
        None for the state of a run without outer steps, which may continue with them.

    Raises:
        InputError: states of other ranks, of another layout or of another version.
    """
    several = isinstance(given, Sequence) and not isinstance(given, str | bytes)
    everyone: list[Any] = list(given) if several else [given]
    if not any(isinstance(one, Mapping) and "outer" in one for one in everyone):
        return None
    if not all(isinstance(one, Mapping) and {"outer", "rank", "ranks"} <= set(one) for one in everyone):
        raise InputError(f"found states of several runs, expected those of all ranks of one: {ELSEWHERE}")
    found, count = [one["rank"] for one in everyone], everyone[0]["ranks"]
    if found != (list(range(count)) if several else [rank]) or not (several or count == ranks):
        whose = f"the states of ranks {found}" if several else f"the state of rank {found[0]}"
        raise InputError(
            f"found {whose} of {count}, this is rank {rank} of {ranks}; expected its own, or a list of those of all "
            f"{count} ranks in order, the same on every rank: load those, from which any number of workers may continue"
        )
    states = [one["outer"] for one in everyone]
    for state in states:
        _check(state, spec, plan)
    return states


def _check(state: Any, spec: OuterSpec, plan: Plan) -> None:
    keys = set(state) if isinstance(state, Mapping) else set()
    local = "begun" in keys and state["begun"] is not None
    if not keys >= (LOCAL_KEYS if local else KEYS) or state["version"] != VERSION:
        raise InputError(
            f"found no state of a run with outer steps in version {VERSION}, expected what Session.state_dict() "
            f"returned of one: install the version of this package that wrote it, or load another checkpoint"
        )
    for what, before, now in (("outer", state["spec"], asdict(spec)), ("buckets", state["buckets"], buckets_of(plan))):
        if before != now:
            raise InputError(
                f"found the state of a run with another layout of {what} ({_first_difference(before, now)}), expected "
                f"that of this plan: {ELSEWHERE}"
            )


def _first_difference(before: Any, now: Any) -> str:
    if isinstance(before, Mapping):
        key = next(key for key in now if before.get(key) != now[key])
        return f"{key} {before.get(key)!r}, here {now[key]!r}"
    index = next((i for i, pair in enumerate(zip(before, now, strict=False)) if pair[0] != pair[1]), len(now))
    return f"bucket {index}"


def merged_state(
    states: Sequence[dict[str, Any]], wholes: Sequence[dict[str, Tensor]], rank: int, ranks: int, mix: float
) -> dict[str, Any]:
    """Return the state with which one of another number of workers continues.

    Args:
        states: of all workers that there were.
        wholes: the whole anchors of each fragment, by parameter.
        rank: this worker's number.
        ranks: number of workers now.
        mix: see `OuterSpec.mix`.
    """
    own = [copied(state["weights"]) for state in states]
    for index, whole in enumerate(wholes):
        for state, weights in zip(states, own, strict=True):
            if state["launched"][index] is not None:
                for name, anchor in whole.items():
                    mix_into(weights[name], anchor, mix)
    return {
        **states[0],
        "weights": {name: mean_of([weights[name] for weights in own]) for name in own[0]},
        "buffers": [
            mean_of([state["buffers"][i] for state in states]) if buffer.is_floating_point() else buffer
            for i, buffer in enumerate(states[0]["buffers"])
        ],
        "launched": [None] * len(wholes),
        "means": None,
        "residuals": [
            merged([state["residuals"][bucket] for state in states], rank, ranks) if residuals else {}
            for bucket, residuals in enumerate(states[0]["residuals"])
        ],
        "optimizers": [
            _merged_optimizer(of_one) for of_one in zip(*(state["optimizers"] for state in states), strict=True)
        ],
    }


def _merged_optimizer(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the mean of optimizers' states; what is one number for a parameter (a step count) is the first's."""
    found: dict[str, Any] = copied(states[0])
    for parameter in {parameter for state in states for parameter in state["state"]}:
        held = [state["state"][parameter] for state in states if state["state"].get(parameter)]
        for key, value in held[0].items() if held else ():
            averaged = isinstance(value, Tensor) and value.is_floating_point() and value.numel() > 1
            same = [one[key] for one in held if key in one]
            found["state"].setdefault(parameter, {})[key] = mean_of(same) if averaged else value
    return found
