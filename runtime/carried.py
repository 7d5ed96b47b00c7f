"""What an exchange carries from step to step: residuals of lossy buckets, in one place for all buckets.

A step counts for all buckets or for none: where a gradient of any of them is not finite, an optimizer that looks at
that (as with a GradScaler) skips the step on all ranks, and no residual changes. When a plan whose buckets send
everything follows one whose buckets did not, what was held back travels with its first step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from runtime.buckets import BucketBuffer
from runtime.errors import InputError

State = dict[str, Any]
"""`residuals` (by gradient, in its shape, times 1/ranks), `steps`, `loss_scale`."""


class Carried:
    """Residuals of all buckets of an exchange."""

    def __init__(self, buckets: Sequence[BucketBuffer], loss_scale: Callable[[], float] | None = None) -> None:
        self._buckets = buckets
        self._lossy = [bucket.lossy for bucket in buckets if bucket.lossy is not None]
        self._late: dict[str, Tensor] = {}
        """Of gradients whose buckets send everything: what has yet to travel."""
        self._steps = 0
        self._loss_scale, self._scale = loss_scale, 1.0 if loss_scale is None else loss_scale()

    @property
    def active(self) -> bool:
        """Whether anything is carried."""
        return bool(self._lossy or self._late)

    def begin(self) -> None:
        """A step begins: residuals follow the scale of the loss."""
        if self._loss_scale is None:
            return
        scale = self._loss_scale()
        if scale == self._scale or not self.active:
            return
        for tensor in self._tensors():
            tensor.mul_(scale / self._scale)
        self._scale = scale

    def _tensors(self) -> Iterator[Tensor]:
        yield from (lossy.carrier.residual for lossy in self._lossy)
        yield from self._late.values()

    def add_to(self, bucket: BucketBuffer) -> None:
        """All gradients of a bucket are there, and it is about to leave."""
        if bucket.lossy is not None:
            bucket.lossy.pack(self._steps)
        elif self._late:
            for slot in bucket.slots:
                if slot.name in self._late:
                    slot.view.add_(self._late[slot.name])

    def settle(self) -> None:
        """Everything has come: gradients become the sums, and what was sent counts as sent if all of it is finite."""
        if not self.active:
            return
        finite = [lossy.unpack() for lossy in self._lossy]
        finite += [
            torch.isfinite(message.flat.sum(dtype=torch.float64))
            for bucket in self._buckets
            if bucket.lossy is None
            for message in bucket.messages
        ]
        everything = torch.stack(finite).all()
        for lossy in self._lossy:
            lossy.commit(everything)
        if self._late and bool(everything):  # once after a change of plans: the host may wait
            self._late.clear()
        self._steps += 1

    def state(self) -> State:
        """Copies; what `take_over` continues from. Empty where nothing is carried."""
        if not self.active:
            return {}
        residuals = {name: part.clone() for lossy in self._lossy for name, part in lossy.carrier.residuals().items()}
        late = {name: part.clone() for name, part in self._late.items()}
        return {"residuals": residuals | late, "steps": self._steps, "loss_scale": self._scale}

    def take_over(self, state: State) -> None:
        """Goes on from another exchange's `state`, whatever its buckets were."""
        if not state:
            return
        residuals: Mapping[str, Tensor] = state["residuals"]
        factor = self._scale / state["loss_scale"]
        self._late = {}
        for bucket in self._buckets:
            here = {slot.name: slot for slot in bucket.slots}
            mine = {name: residuals[name] * factor for name in here if name in residuals}
            if bucket.lossy is not None:
                bucket.lossy.carrier.take_over(mine)
            else:
                late = {name: part.to(here[name].view.device) for name, part in mine.items() if bool(part.any())}
                self._late.update(late)
        self._steps = state["steps"]


def carried_part(given: Any, rank: int, ranks: int, shapes: Mapping[str, torch.Size]) -> State:
    """What a rank takes over from `Session.state_dict()`s: its own, or those of all ranks of a run with any number.

    Raises:
        InputError: other state, of other parameters, or one rank's of another number of ranks.
    """
    several = isinstance(given, Sequence) and not isinstance(given, str | bytes)
    everyone: Sequence[Any] = given if several else [given]
    for one in everyone:
        if not isinstance(one, dict) or not {"plan", "ranks"} <= set(one) <= {"plan", "ranks", "carried"}:
            found = f"a dict with {sorted(map(str, one))}" if isinstance(one, dict) else type(one).__name__
            raise InputError(f"found {found}, expected what Session.state_dict() returned")
        _check_residuals(one.get("carried", {}), shapes)
    states: list[State] = [one.get("carried", {}) for one in everyone]
    if several:
        if {one["ranks"] for one in everyone} != {len(everyone)}:
            raise InputError(
                f"found the state of {len(everyone)} ranks, of a run with {everyone[0]['ranks']}; expected those of "
                f"all its ranks, in order"
            )
        return states[rank] if len(states) == ranks else merged(states, rank, ranks)
    if states[0] and everyone[0]["ranks"] != ranks:
        raise InputError(
            f"found one rank's state of a run with {everyone[0]['ranks']} ranks, there are {ranks} now; expected those "
            f"of all its ranks, so that each takes a share: pass a list of them on every rank"
        )
    return states[0]


def merged(states: Sequence[State], rank: int, ranks: int) -> State:
    """One rank's share of the states of all ranks of a run with another number of them: their sum stays what it was."""
    known = next((state for state in states if state), None)
    if known is None:
        return {}
    total: dict[str, Tensor] = {}
    for state in states[rank::ranks]:
        for name, part in state.get("residuals", {}).items():
            scaled = part * (known["loss_scale"] / state["loss_scale"])
            total[name] = total[name] + scaled if name in total else scaled
    return {"residuals": total, "steps": known["steps"], "loss_scale": known["loss_scale"]}


def _check_residuals(state: State, shapes: Mapping[str, torch.Size]) -> None:
    for name, part in state.get("residuals", {}).items():
        if name not in shapes or part.shape != shapes[name]:
            found = f"{name} {tuple(part.shape)}"
            expected = f"shape {tuple(shapes[name])}" if name in shapes else "a parameter of this model"
            raise InputError(f"found a residual of {found}, expected {expected}: load the checkpoint of this model")
