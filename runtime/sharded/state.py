"""The state of an elementwise optimizer, cut to a rank's parts of parameters and put together again.

A tensor of a parameter's shape is by element; everything else (step counters, say) is one value for the parameter,
which every owner of a part has. Cut and put together, a state is the same bit for bit, whatever the number of ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from runtime.comm.world import World
from runtime.core.buckets import Slot, view_of
from runtime.errors import InputError
from runtime.sharded.part import OwnPart

Values = Mapping[str, Any]
"""The state of one parameter, or of a piece of one."""

Masters = Mapping[str, Values]
"""A rank's part of master weights, by parameter: `start`, its first element in memory order, `weights` (1-D, float32)
and the parameter's `stride`.
"""


def cut_value(value: Any, slot: Slot, place: slice) -> Any:
    """Return a copy of one entry of a parameter's state, for the elements in `place` alone where it is by element."""
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    if value.shape != slot.parameter.shape:
        return value.detach().clone()
    flat = value.new_empty(slot.parameter.numel())
    view_of(flat, 0, slot.view).copy_(value.detach())
    return flat[place].clone()


def is_by_element(value: Any, length: int) -> bool:
    """Return whether an entry of the state of a piece of `length` elements is by element."""
    return isinstance(value, Tensor) and value.shape == (length,)


def gathered_state(
    parts: Sequence[OwnPart], mine: Mapping[int, Values], world: World, device: torch.device | None
) -> dict[int, dict[str, Any]]:
    """Return the whole state of every parameter that has any, by its place in the plan; all ranks must call this.
    `mine`: by place in the plan, the state of this rank's pieces; `device`: where the result is to be, None: where the
    parameters are.
    """
    lengths = {index: place.stop - place.start for part in parts for index, (_, place) in part.places.items()}
    forms = {
        index: {key: _Form.of(value, lengths[index]) for key, value in values.items()} for index, values in mine.items()
    }
    known: dict[int, dict[str, _Form]] = {}
    for of_rank in world.gather(forms, "gathering the form of the optimizer's state"):
        for index, keys in of_rank.items():
            known.setdefault(index, {}).update(keys)
    found: dict[int, dict[str, Any]] = {index: {} for index in known}
    for part in parts:
        indices = [slot.index for slot in part.message.slots if slot.index in known]
        kinds = dict.fromkeys((key, form.dtype) for index in indices for key, form in known[index].items())
        for key, dtype in kinds:
            if dtype is None:
                continue
            views = _gathered(part, key, dtype, mine, world)
            for index in (index for index in indices if key in known[index] and known[index][key].dtype == dtype):
                found[index][key] = views[index].to(device or views[index].device, copy=True)
    return {
        index: {key: found[index].get(key, form.value_on(device)) for key, form in keys.items()}
        for index, keys in known.items()
    }


class _Form(NamedTuple):
    """An entry of the state as ranks exchange it: a dtype, if the entry is by element, else its value on the host."""

    dtype: torch.dtype | None
    value: Any = None
    device: str | None = None
    """Kind of device that a tensor for a whole parameter was on."""

    @classmethod
    def of(cls, value: Any, length: int) -> _Form:
        """Return the form of an entry of a piece of `length` elements."""
        if is_by_element(value, length):
            return cls(value.dtype)
        return cls(None, value.detach().cpu(), value.device.type) if isinstance(value, Tensor) else cls(None, value)

    def value_on(self, device: torch.device | None) -> Any:
        """Return the value; a tensor on the device, None: on the kind of device that it was on."""
        return self.value if self.device is None else self.value.to(device or self.device)


def _gathered(
    part: OwnPart, key: str, dtype: torch.dtype, mine: Mapping[int, Values], world: World
) -> dict[int, Tensor]:
    """Gather one entry of the state of all parameters of a message, zero if there is none; views of one vector."""
    own = torch.zeros(part.share, dtype=dtype, device=part.whole.device)
    for index, (_, place) in part.places.items():
        value = mine.get(index, {}).get(key)
        if isinstance(value, Tensor) and value.shape == own[place].shape and value.dtype == dtype:
            own[place] = value
    views = part.views(world.gather_parts(own, "gathering the optimizer's state"))
    return {slot.index: views[slot.name] for slot in part.message.slots}


def master_state(parts: Sequence[OwnPart]) -> dict[str, dict[str, Any]]:
    """Return copies of this rank's master weights; see `Masters`."""
    found = {}
    for part in parts:
        if part.master is None:
            continue
        for slot, start, place in part.cuts():
            weights, stride = part.master[place].clone(), tuple(slot.view.stride())
            found[slot.name] = {"start": start, "weights": weights, "stride": stride}
    return found


def load_masters(parts: Sequence[OwnPart], states: Sequence[Masters]) -> None:
    """Continue with `master_state`s, of one rank or of all, which may have had other buckets and been another number.

    Raises InputError, and nothing has changed: weights that this rank owns are in none of them, or parameters had
    another memory format.
    """
    found: list[tuple[Tensor, Tensor]] = []
    for part in parts:
        if part.master is None:
            continue
        for slot, start, place in part.cuts():
            size, copied = place.stop - place.start, 0
            for saved in (state[slot.name] for state in states if slot.name in state):
                if tuple(saved["stride"]) != tuple(slot.view.stride()):
                    raise InputError(
                        f"found the weights of {slot.name} saved with the strides {tuple(saved['stride'])}, expected "
                        f"{tuple(slot.view.stride())}: give the model the memory format that it had, before attach"
                    )
                first, last = max(start, saved["start"]), min(start + size, saved["start"] + len(saved["weights"]))
                if first < last:
                    given = saved["weights"][first - saved["start"] : last - saved["start"]]
                    found.append((part.master[place][first - start : last - start], given))
                    copied += last - first
            if copied < size:
                raise InputError(
                    f"found {copied} of {size} weights in float32 that this rank has of {slot.name}: the state is of "
                    f"other buckets or ranks; expected its own, or those of all ranks: pass a list of them on every "
                    f"rank"
                )
    for own, given in found:
        own.copy_(given)


def state_bytes(state: Mapping[Any, Values]) -> int:
    """Return what an optimizer with this state keeps from step to step on this rank, scalars left out."""
    values = [value for entries in state.values() for value in entries.values()]
    tensors = [value for value in values if isinstance(value, Tensor) and value.dim() > 0]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
