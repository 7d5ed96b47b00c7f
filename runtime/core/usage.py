"""Track which parameters were used on any rank (for `find_unused_parameters`), by sums of flags or by gathering them.

A parameter that no rank used must keep its `.grad` as it was, and a rank cannot know what others used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from runtime.comm.collectives.phases import gather
from runtime.core.buckets import Message
from runtime.torch_compat import queued_to


class UsageFlags:
    """Counters of the ranks that produced each gradient, sent behind the last bucket; an element holds as many counters
    as the dtype sums exactly.
    """

    def __init__(self, parameters: int, ranks: int, dtype: torch.dtype) -> None:
        exact_bits = {torch.float64: 52, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}.get(dtype, 1)
        self._bits = min(exact_bits, max(1, ranks.bit_length()))
        self._per_element = max(1, exact_bits // self._bits)
        self._parameters, self._dtype, self.ranks = parameters, dtype, ranks
        self._counters = -(-parameters // self._per_element)
        self._shifts = self._bits * torch.arange(self._per_element)
        """Places of an element's counters, in bits."""
        self.elements = self._counters + 1
        """Number of elements for the counters of all parameters and for that of ranks that gave the step up."""
        self._marks = ranks * (ranks + 2) < 1 << exact_bits
        """Whether the dtype sums marks and ranks that gave up exactly, in one element."""

    def lie_in(self, message: Message) -> None:
        """Place them in the last `elements` of a message."""
        self._message = message
        self._everything = self._pack([]).to(message.flat.device)

    @property
    def on_host(self) -> bool:
        """True if flags are on the host, which may read them without waiting for a device."""
        return self._message.flat.device.type == "cpu"

    @property
    def _tail(self) -> Tensor:
        return self._message.flat[-self.elements :]  # a message may have got other memory

    @property
    def _last(self) -> int:
        return int(self._message.flat[-1].item().real)

    def write(self, unused: Sequence[int]) -> None:
        """Count this rank in, before the message leaves, for every parameter but the unused."""
        self._tail.copy_(queued_to(self._pack(unused), self._tail.device) if unused else self._everything)

    def write_given_up(self) -> None:
        """Record, before the message is sent, that an exception ended this rank's backward: no parameter counts."""
        self._tail.zero_()
        self._tail[-1:].fill_(1)

    @property
    def can_mark(self) -> bool:
        """True if ranks may mark their message, and read marks as soon as it has come; equal on all ranks. Flags behind
        a bucket that is compressed, with no gradients in their message, are summed where it is decoded.
        """
        return self._marks and self.on_host and bool(self._message.slots)

    def mark(self) -> None:
        """Mark this rank's message, before it leaves and after `write`."""
        self._tail[-1:].fill_(self.ranks + 1)

    def marked(self) -> bool:
        """Return, after the message has come, whether a rank has marked its own, and none gave the step up."""
        marks, given_up = divmod(self._last, self.ranks + 1)
        return marks > 0 and not given_up

    def given_up(self) -> int:
        """Return, after the message has come, how many ranks gave the step up. Waits for the device."""
        return self._last % (self.ranks + 1)

    def used_somewhere(self) -> set[int]:
        """Return, after the message has come, the parameters that any rank used. Waits for the device."""
        tail = self._tail.real if self._tail.is_complex() else self._tail
        counters = tail[: self._counters].double().cpu().long()[:, None] >> self._shifts
        if self._per_element > 1:
            counters &= (1 << self._bits) - 1
        return set(counters.flatten()[: self._parameters].nonzero().flatten().tolist())

    def _pack(self, unused: Sequence[int]) -> Tensor:
        counters = torch.zeros(self.elements * self._per_element, dtype=torch.int64)
        counters[: self._parameters] = 1
        counters[list(unused)] = 0
        return (counters.view(self.elements, -1) << self._shifts).sum(dim=1).to(self._dtype)


def used_on_any(reported: Tensor) -> Tensor:
    """Return of each gradient whether it came on any rank. Shapes (ranks, gradients) → (gradients,), bool."""
    return reported.bool().any(dim=0)


class GatheredUsage:
    """Flags of every rank, gathered in a message of their own behind the last bucket; see `UsageFlags`."""

    def __init__(self, gradients: int, ranks: int, device: torch.device) -> None:
        self._own = torch.ones(gradients + 1, dtype=torch.uint8, device=device)
        """Flags of this rank: for each gradient whether it was produced, and at last whether the step was given up."""
        self.ranks, self._told = ranks, self._own.new_zeros(ranks, gradients + 1)
        self.on_host = device.type == "cpu"
        """True if flags are on the host, which may read them without waiting for a device."""

    def phases(self, group: dist.ProcessGroup) -> Iterator[dist.Work]:
        return gather(self._told.view(-1), self._own, group)

    def write(self, unused: Sequence[int]) -> None:
        # Slices: assigning a number to one element copies it from the host, which then waits for the device.
        self._own[:-1].fill_(1)
        self._own[-1:].zero_()
        if unused:
            self._own.index_fill_(0, queued_to(torch.tensor(unused), self._own.device), 0)

    def write_given_up(self) -> None:
        self._own[:-1].zero_()
        self._own[-1:].fill_(1)

    def given_up(self) -> int:
        return int(self._told[:, -1].sum())

    def used_somewhere(self) -> set[int]:
        return self._reported(1)

    def _reported(self, word: int) -> set[int]:
        """Return the gradients of which any rank has reported this."""
        return set(used_on_any(self._told[:, :-1] == word).nonzero().flatten().tolist())


Usage = UsageFlags | GatheredUsage
