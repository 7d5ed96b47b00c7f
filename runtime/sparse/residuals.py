"""The residuals of compressed buckets, in one place for all buckets of an exchange.

A step counts for all buckets or for none: where a gradient of any of them is not finite, an optimizer that looks at
that (as with a GradScaler) skips the step on all ranks, and no residual changes. When a plan whose buckets send
everything follows one whose buckets did not, residuals are sent with its first step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from runtime.core.buckets import BucketBuffer, Slot
from runtime.core.exchange import ErrorFeedback
from runtime.errors import InputError
from runtime.sparse.compressed import BucketResidual, all_finite
from runtime.sparse.samples import Watched

State = dict[str, Any]
"""`residuals` (by gradient, in its shape, times 1/ranks), `steps`, `loss_scale`; with buckets of low rank `starts` (by
gradient, the same on all ranks)."""


class ResidualBucket(Protocol):
    """A bucket that keeps a residual, as an exchange sees it; see `runtime.sparse.compressed.CompressedBucket`."""

    feedback: BucketResidual
    k: int

    @property
    def watched(self) -> Watched | None: ...
    def pack(self, step: int) -> None: ...
    def unpack(self) -> Tensor: ...


class ErrorFeedbackState(ErrorFeedback):
    """Residuals of all buckets of an exchange."""

    workers = 1
    """Number of workers that train alone: what synchronous steps have held back of a mean over all is whole in each."""

    def __init__(
        self, buckets: Sequence[BucketBuffer] = (), lossy: Mapping[int, ResidualBucket] = MappingProxyType({}),
        loss_scale: Callable[[], float] | None = None, parameters: Mapping[str, nn.Parameter] = MappingProxyType({}),
        learning_rate: Callable[[], float] | None = None,
    ) -> None:  # fmt: skip
        """Begin with residuals of zeros.

        Args:
            buckets: of the exchange; a rank alone has none.
            lossy: the compressed ones, by index.
            loss_scale: returns the factor of the losses; None: they have none.
            parameters: of a rank alone, by name: pending residuals are added to their `.grad`.
            learning_rate: returns the rate of the next update, in any unit: residual · rate stays what it is when the
                rate changes. None: the residual does.
        """
        self._buckets = {bucket.index: bucket for bucket in buckets}
        self.lossy, self._parameters = lossy, parameters
        self._pending: dict[str, Tensor] = {}
        """Residuals of earlier buckets, by gradient, whose present buckets keep none: they are sent with the next step.
        """
        self.steps = 0
        self._loss_scale, self._scale = loss_scale, 1.0
        self._learning_rate = learning_rate
        self._rate: float | None = None
        """Rate of the residuals' unit; None: they have that of the next step."""
        self._read: float | None = None
        """The scale of this step's loss, where it has been asked for."""

    @property
    def active(self) -> bool:
        return bool(self.lossy or self._pending)

    def read_scale(self) -> None:
        if self._loss_scale is not None and self.active:
            self._read = checked_scale(self._loss_scale())

    def begin(self) -> None:
        self._drop()
        if not self.active:
            return
        factor, self._rate = self._since_rate()
        if self._loss_scale is not None:
            if self._read is None:  # no forward of the model itself was seen
                self.read_scale()
            # Residuals are gradients of scaled losses, too.
            scale, self._read = self._read or self._scale, None
            factor, self._scale = factor * scale / self._scale, scale
        if factor != 1.0:
            for tensor in chain(*(lossy.feedback.memory() for lossy in self.lossy.values()), self._pending.values()):
                tensor.mul_(factor)

    def _since_rate(self) -> tuple[float, float | None]:
        """Return the factor that makes residuals gradients of the next step, and its rate."""
        if self._learning_rate is None:
            return 1.0, None
        before, rate = self._rate, self._learning_rate()
        if before is None:
            return 1.0, rate
        return (1.0, before) if rate == 0.0 else (before / rate, rate)  # with 0 no gradient makes an update

    def _drop(self) -> None:
        """Forget what a backward that was given up has begun to keep."""
        for lossy in self.lossy.values():
            lossy.feedback.buffers.drop()

    def add_to(self, bucket: BucketBuffer) -> None:
        if self._pending:
            for slot in bucket.slots:
                if slot.name in self._pending:
                    slot.view.add_(self._pending[slot.name])
        if bucket.index in self.lossy:
            self.lossy[bucket.index].pack(self.steps)

    def settle(self, wait: Callable[[BucketBuffer | None], None]) -> None:
        """See `ErrorFeedback.settle`; of a rank alone, which has no buckets, gradients get what is pending."""
        finite = []
        for index, lossy in self.lossy.items():
            wait(self._buckets[index])
            finite.append(lossy.unpack())
        wait(None)
        finite += [
            all_finite(message.flat)
            for bucket in self._buckets.values()
            if not self.compresses(bucket)
            for message in bucket.messages
        ]
        if not self._buckets:
            for name, part in self._pending.items():
                parameter = self._parameters[name]
                if parameter.grad is not None:
                    parameter.grad.add_(part)
                elif bool(part.any()):
                    parameter.grad = part.to(parameter.dtype)
            finite = [all_finite(p.grad) for p in self._parameters.values() if p.grad is not None]
        self.count(torch.stack(finite).all() if finite else torch.tensor(True))

    def count(self, finite: Tensor) -> None:
        """Count a step whose gradients are finite, on all ranks, where `finite` (0-d) is true."""
        for lossy in self.lossy.values():
            lossy.feedback.commit(finite)
        if self._pending and bool(finite):  # once after a change of plans: the host may wait
            self._pending.clear()
        self.steps += 1

    def compresses(self, bucket: BucketBuffer) -> bool:
        return bucket.index in self.lossy

    def brings(self, slot: Slot) -> bool:
        """Tell whether something of earlier steps may come for a gradient."""
        return self.compresses(slot.bucket) or slot.name in self._pending

    def watched(self) -> list[Any]:
        return [one.watched for one in self.lossy.values() if one.watched is not None and one.k]

    def state(self) -> State:
        if not self.active:
            return {}
        kept = [lossy.feedback.residuals() for lossy in self.lossy.values()]
        # As gradients of the next step: it has another rate where a scheduler has gone on.
        factor = self._since_rate()[0] / self.workers
        residuals = {name: part * factor for parts in (*kept, self._pending) for name, part in parts.items()}
        state = {"residuals": residuals, "steps": self.steps, "loss_scale": self._scale}
        starts = [lossy.feedback.starts() for lossy in self.lossy.values()]
        found = {name: start.clone() for parts in starts for name, start in parts.items()}
        return state | {"starts": found} if found else state

    def load_state(self, state: State, parameters: Mapping[str, nn.Parameter]) -> None:
        self.steps, self._scale, self._rate = state.get("steps", 0), state.get("loss_scale", 1.0), None
        self._drop()
        residuals: dict[str, Tensor] = {
            name: part.to(parameters[name].device)
            for name, part in state.get("residuals", {}).items()
            if name in parameters
        }
        if self.workers > 1:
            residuals = {name: part * float(self.workers) for name, part in residuals.items()}
        for lossy in self.lossy.values():
            lossy.feedback.put(residuals)
            lossy.feedback.put_starts(state.get("starts", {}))
        kept = {name for lossy in self.lossy.values() for name in lossy.feedback.residuals()}
        self._pending = {name: part.clone() for name, part in residuals.items() if name not in kept}


def checked_scale(scale: Any) -> float:
    """Return the scale of the loss; raises InputError where it is none."""
    if not isinstance(scale, float | int) or not 0.0 < scale < math.inf:
        raise InputError(
            f"loss_scale: found {scale!r} from it, expected a positive number; pass for example scaler.get_scale"
        )
    return float(scale)


def state_of_rank(given: Any, rank: int, ranks: int, shapes: Mapping[str, torch.Size]) -> State:
    """Return what a rank takes over of `Session.state_dict()`s: its own, or all ranks'. Raises InputError."""
    several = isinstance(given, Sequence) and not isinstance(given, str | bytes)
    everyone: Sequence[Any] = given if several else [given]
    for one in everyone or [None]:
        _check_state(one, shapes)
    states: list[State] = [one.get("carried", {}) for one in everyone]
    if several:
        if [one.get("rank", index) for index, one in enumerate(everyone)] != list(range(everyone[0]["ranks"])):
            raise InputError(
                f"found the states of {len(everyone)} ranks, of a run with {everyone[0]['ranks']}; expected those of "
                f"all its ranks, in order"
            )
        return states[rank] if len(states) == ranks else merged(states, rank, ranks)
    if states[0] and (everyone[0]["ranks"], everyone[0]["rank"]) != (ranks, rank):
        raise InputError(
            f"found the state of rank {everyone[0]['rank']} of {everyone[0]['ranks']}, this is rank {rank} of {ranks}; "
            f"expected its own, or those of all ranks, of which each takes a share: pass a list of them on every rank"
        )
    return states[0]


def merged(states: Sequence[State], rank: int, ranks: int) -> State:
    """Return one rank's share of the states of all ranks of a run with another number of them: their sum stays what it
    was.
    """
    known = next((state for state in states if state), None)
    if known is None:
        return {}
    total = {name: torch.zeros_like(part) for name, part in known["residuals"].items()}
    for state in states[rank::ranks]:
        for name, part in state.get("residuals", {}).items():
            scaled = part.to(total[name].device) * (known["loss_scale"] / state["loss_scale"])
            total[name] = total[name] + scaled
    return known | {"residuals": total}


def _check_state(one: Any, shapes: Mapping[str, torch.Size]) -> None:
    """Raise InputError where it is no state of a session with these parameters."""
    if isinstance(one, dict) and one.get("delay") is not None:
        raise InputError(
            "found the state of a run with delay, expected one of a run without (on one rank alone no run has one): go "
            "on with the plan and the ranks that the run began with, or end the delay there first (session.switch to a "
            "plan without one, then save)"
        )
    if isinstance(one, dict) and one.get("outer") is not None:
        raise InputError(
            "found the state of a run with outer steps, expected one of a run without: continue with a plan with outer "
            "steps, or one of synchronous steps that are not sharded, or end the outer steps there first "
            "(session.switch to a plan without them, then save)"
        )
    carried = one.get("carried", {}) if isinstance(one, dict) else None
    good = (
        isinstance(one, dict)
        and {"plan", "ranks"}
        <= set(one)
        <= {"plan", "ranks", "rank", "tried", "carried", "weights", "step", "phase", "weight_unit"}
        and isinstance(carried, dict)
        and (not carried or ("rank" in one and set(carried) - {"starts"} == {"residuals", "steps", "loss_scale"}))
        and all(
            isinstance(number, int)
            for number in (one["ranks"], one.get("rank", 0), one.get("step", 0), carried.get("steps", 0))
        )
        and all(isinstance(carried.get(parts, {}), dict) for parts in ("residuals", "starts"))
        and all(
            isinstance(part, Tensor) for parts in ("residuals", "starts") for part in carried.get(parts, {}).values()
        )
    )
    if not good:
        found = f"a dict with {sorted(map(str, one))}" if isinstance(one, dict) else type(one).__name__
        raise InputError(f"found {found}, expected what Session.state_dict() returned")
    assert isinstance(carried, dict)
    if carried:
        checked_scale(carried["loss_scale"])
    for name, part in carried.get("residuals", {}).items():
        if name not in shapes or part.shape != shapes[name]:
            found = f"{name} {tuple(part.shape)}"
            expected = f"shape {tuple(shapes[name])}" if name in shapes else "a parameter of this model"
            raise InputError(f"found a residual of {found}, expected {expected}: load the checkpoint of this model")
