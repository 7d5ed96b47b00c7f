"""Which gradients came on any rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from runtime.core.buckets import Message


class UsageFlags:
    """How many ranks produced each gradient, carried by a few elements behind the last bucket.

    A parameter that no rank used must keep its `.grad` as it was, and a rank cannot know what others used. So each
    rank adds one per used parameter, several counters to an element, as many as the dtype sums exactly.
    """

    def __init__(self, parameters: int, ranks: int, dtype: torch.dtype) -> None:
        exact_bits = {torch.float64: 52, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}.get(dtype, 1)
        self._bits = min(exact_bits, max(1, ranks.bit_length()))
        self._per_element = max(1, exact_bits // self._bits)
        self._parameters, self._dtype = parameters, dtype
        self._counters = -(-parameters // self._per_element)
        self.elements = self._counters + 1
        """How many elements carry the counters of all parameters, and the one of ranks that gave the step up."""

    def lie_in(self, message: Message) -> None:
        """Says where they travel: in the last `elements` of a message."""
        self._message = message
        self._everything = self._pack(range(self._parameters)).to(message.flat.device)

    @property
    def _tail(self) -> Tensor:
        return self._message.flat[-self.elements :]

    def write(self, unused: Sequence[int]) -> None:
        """Before the message leaves: counts this rank in for every parameter but the unused."""
        left_out = set(unused)
        used = (index for index in range(self._parameters) if index not in left_out)
        self._tail.copy_(self._pack(used) if unused else self._everything)

    def write_given_up(self) -> None:
        """Before the message leaves: an exception ended this rank's backward, which counts for no parameter."""
        self._tail.zero_()
        self._tail[-1] = 1

    def given_up(self) -> int:
        """After the message has come: how many ranks gave the step up. Waits for the device."""
        found = self._message.flat[-1]
        return int(found.real if found.is_complex() else found)

    def used_somewhere(self) -> set[int]:
        """After the message has come: the parameters that any rank used. Waits for the device."""
        tail = self._tail.real if self._tail.is_complex() else self._tail
        values = [int(value) for value in tail.double().cpu().tolist()]
        if self._per_element == 1:
            return {index for index, value in enumerate(values[: self._counters]) if value}
        mask = (1 << self._bits) - 1
        return {
            index
            for index in range(self._parameters)
            if (values[index // self._per_element] >> (self._bits * (index % self._per_element))) & mask
        }

    def _pack(self, used: Iterable[int]) -> Tensor:
        packed = [0] * self.elements
        for index in used:
            packed[index // self._per_element] += 1 << (self._bits * (index % self._per_element))
        return torch.tensor(packed, dtype=torch.float64).to(self._dtype)
