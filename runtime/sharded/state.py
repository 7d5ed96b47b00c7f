"""The state of an optimizer, cut to a rank's parts of parameters and put together again.

A tensor of a parameter's shape is by element; everything else (step counters, a whole matrix's preconditioners) is one
value for the parameter, which every owner of a part has. Cut and put together, a state is the same bit for bit,
whatever the number of ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
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


def cut_value(value: Any, slot: Slot, part: OwnPart) -> Any:
    """Return a copy of one entry of a parameter's state; where it is by element, of this rank's elements alone, on the
    parameter's device.
    """
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    if value.shape != slot.parameter.shape:
        return value.detach().clone()
    flat = value.new_empty(slot.parameter.numel())
    view_of(flat, 0, slot.view).copy_(value.detach())
    if slot.index not in part.places:
        return flat[:0].to(slot.parameter.device, copy=True)
    start, place = part.places[slot.index]
    own = flat[start : start + place.stop - place.start].to(slot.parameter.device, copy=True)
    return part.shaped(own, slot)


def is_by_element(value: Any, shape: Sequence[int]) -> bool:
    """Return whether an entry of the state of a piece of this shape is by element."""
    return isinstance(value, Tensor) and value.shape == tuple(shape)


def piece_of(part: OwnPart, vector: Tensor, slot: Slot) -> Tensor:
    """Return this rank's elements of a parameter in a vector as long as its part, as the optimizer has them."""
    return part.shaped(vector[part.places[slot.index][1]], slot)


def gathered_state(
    parts: Sequence[OwnPart], mine: Mapping[int, Values], world: World, device: torch.device | None,
    others: torch.device | None,
) -> dict[int, dict[str, Any]]:  # fmt: skip
    """Return the whole state of every parameter that has any, by its place in the plan; all ranks must call this.
    `mine`: by place in the plan, the state of this rank's pieces; `device`: where entries by element are to be, and
    `others` the tensors of others, None: where they are now.
    """
    shapes = {
        slot.index: piece_of(part, part.weights, slot).shape
        for part in parts for slot in part.message.slots if slot.index in part.places
    }  # fmt: skip
    forms = {
        index: {key: _Form.of(value, shapes[index]) for key, value in values.items()} for index, values in mine.items()
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
        index: {key: found[index].get(key, form.value_on(others)) for key, form in keys.items()}
        for index, keys in known.items()
    }


class _Form(NamedTuple):
    """An entry of the state as ranks exchange it: a dtype, if the entry is by element, else its value on the host."""

    dtype: torch.dtype | None
    value: Any = None
    device: str | None = None
    """Kind of device that tensors for a whole parameter were on."""

    @classmethod
    def of(cls, value: Any, shape: Sequence[int]) -> _Form:
        """Return the form of an entry of a piece of this shape."""
        if is_by_element(value, shape):
            return cls(value.dtype)
        device = next((one.device.type for one in _tensors(value)), None)
        return cls(None, _moved(value, "cpu"), device)

    def value_on(self, device: torch.device | None) -> Any:
        """Return the value; tensors on the device, None: on the kind of device that they were on."""
        return self.value if self.device is None else _moved(self.value, device or self.device)


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of an entry, also in lists, tuples and dicts."""
    if isinstance(value, Tensor):
        yield value
    for one in value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ():
        yield from _tensors(one)


def _moved(value: Any, device: torch.device | str) -> Any:
    """Return an entry with its tensors, also in lists, tuples and dicts, on a device."""
    if isinstance(value, Tensor):
        return value.detach().to(device)
    if isinstance(value, dict):
        return {key: _moved(one, device) for key, one in value.items()}
    return type(value)(_moved(one, device) for one in value) if type(value) in (list, tuple) else value


def _gathered(
    part: OwnPart, key: str, dtype: torch.dtype, mine: Mapping[int, Values], world: World
) -> dict[int, Tensor]:
    """Gather one entry of the state of all parameters of a message, zero if there is none; views of one vector."""
    own = torch.zeros(part.share, dtype=dtype, device=part.whole.device)
    for slot in (slot for slot in part.message.slots if slot.index in part.places):
        piece, value = piece_of(part, own, slot), mine.get(slot.index, {}).get(key)
        if isinstance(value, Tensor) and value.shape == piece.shape and value.dtype == dtype:
            piece.copy_(value)
    views = part.views(part.gathered(world, own, "gathering the optimizer's state"))
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
    tensors = (one for entries in state.values() for value in entries.values() for one in _tensors(value))
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor.dim() > 0)
