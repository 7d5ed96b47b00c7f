"""`optimizer.state` between the steps that ranks share: by parameter, though each rank keeps that of its part alone.

What a script resets there is reset: `state[p]["exp_avg"].zero_()`, `state[p] = {}`, `del state[p]`, `state.clear()`.
What is by element is shown as a `ShardedEntry`, with the parameter's shape and this rank's part.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import nn

from runtime.core.buckets import Slot
from runtime.sharded.gradient import ShardedEntry
from runtime.sharded.part import OwnPart
from runtime.sharded.state import cut_value, is_by_element

Entries = dict[str, Any]
"""The state of this rank's part of a parameter."""


class ShardedState(MutableMapping[Any, Any]):
    """The state of all parameters of an optimizer; of others than the plan's, and of other keys, what it holds itself.

    Of a parameter of which this rank has no part the optimizer keeps nothing here. A script that goes through the state
    finds the entries of its neighbours there, without elements, so that it does the same on all ranks.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, own: dict[Any, Entries], slots: Mapping[int, Slot],
        pieces: Mapping[int, nn.Parameter], parts: Sequence[OwnPart],
    ) -> None:  # fmt: skip
        """`own`: what the optimizer's step uses, by piece. `slots` and `pieces`: by `id` of the parameter. `parts`:
        this rank's of all messages.
        """
        self.own, self._optimizer, self._slots, self._pieces = own, optimizer, slots, pieces
        self._part_of = {slot.index: part for part in parts for slot in part.message.slots}
        self._without_part: dict[int, Entries] = {}

    def begin_step(self) -> None:
        """Forget what a script has done to the state of parameters of which this rank has no part."""
        self._without_part.clear()

    def __getitem__(self, key: Any) -> Any:
        slot = self._slots.get(id(key))
        return self.own[key] if slot is None else ParameterState(self, slot, self._entries(slot))

    def __setitem__(self, key: Any, value: Any) -> None:
        slot = self._slots.get(id(key))
        if slot is None:
            self.own[key] = value
            return
        entries = {name: self.part_of(one, slot) for name, one in value.items()}
        held = self._entries(slot)
        held.clear()
        held.update(entries)

    def __delitem__(self, key: Any) -> None:
        if key not in self:
            raise KeyError(key)
        slot = self._slots.get(id(key))
        if slot is None:
            del self.own[key]
        else:
            self._entries(slot).clear()

    def __contains__(self, key: object) -> bool:
        slot = self._slots.get(id(key))
        return key in self.own if slot is None else bool(self._entries(slot))

    def __iter__(self) -> Iterator[Any]:
        listed = [one for group in self._optimizer.param_groups for one in group["params"] if one in self]
        known = {*map(id, self._pieces.values()), *map(id, listed)}
        return iter([*listed, *(key for key in self.own if id(key) not in known)])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[Any, Any]:
        return {key: copy.deepcopy(value, memo) for key, value in self.items()}

    def part_of(self, value: Any, slot: Slot) -> Any:
        """Return what this rank keeps of an entry for a whole parameter."""
        if isinstance(value, ShardedEntry) and value.place == slot.index:
            return value.part
        return cut_value(value, slot, self._part_of[slot.index])

    def shown(self, key: str, value: Any, slot: Slot) -> Any:
        """Return what a script sees of an entry of the parameter."""
        piece = self._pieces.get(id(slot.parameter))
        if not is_by_element(value, (0,) if piece is None else piece.shape):
            return value
        return ShardedEntry.of(slot.parameter, f"{key} of {slot.name} in the optimizer's state", slot.index, value)

    def _entries(self, slot: Slot) -> Entries:
        key = id(slot.parameter)
        if (piece := self._pieces.get(key)) is not None:
            return self.own.setdefault(piece, {})
        if key not in self._without_part:
            self._without_part[key] = self._without_elements(slot)
        return self._without_part[key]

    def _without_elements(self, slot: Slot) -> Entries:
        """Return the entries that others in the parameter's group have here, if any, else others, of no elements."""
        group = next(
            (one["params"] for one in self._optimizer.param_groups if any(p is slot.parameter for p in one["params"])),
            (),
        )
        pieces = [self._pieces[id(p)] for p in group if id(p) in self._pieces] + list(self._pieces.values())
        piece = next((one for one in pieces if self.own.get(one)), None)
        if piece is None:
            return {}
        return {
            key: value.new_empty(0) if is_by_element(value, piece.shape) else copy.deepcopy(value)
            for key, value in self.own[piece].items()
        }


class ParameterState(MutableMapping[str, Any]):
    """The state of one parameter."""

    def __init__(self, of: ShardedState, slot: Slot, entries: Entries) -> None:
        self._of, self._slot, self._entries = of, slot, entries

    def __getitem__(self, key: str) -> Any:
        return self._of.shown(key, self._entries[key], self._slot)

    def __setitem__(self, key: str, value: Any) -> None:
        self._entries[key] = self._of.part_of(value, self._slot)

    def __delitem__(self, key: str) -> None:
        del self._entries[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __deepcopy__(self, memo: dict[int, Any]) -> Entries:
        return {key: copy.deepcopy(value, memo) for key, value in self.items()}

    def __repr__(self) -> str:
        return repr(dict(self))
