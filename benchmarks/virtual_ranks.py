"""Ranks within one process: each has a residual and a message of its own, and the runtime's compressors encode them.

Used where the arithmetic of an exchange counts, not its time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import singledispatch
from typing import Any

import torch
from torch import Tensor, nn

from runtime.comm.collectives.direct import Factored, Narrowed, Packed
from runtime.core.buckets import make_plain_buckets
from runtime.plan import CompressorSpec, ModelReference, Plan, PlanBucket, PlanWorld
from runtime.sparse.layout import make_lossy


class VirtualRanks:
    """One compressed bucket on each of several ranks."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], spec: CompressorSpec, ranks: int) -> None:
        """Begin with residuals of zeros; `parameters`: those of the bucket, by name."""
        plan = Plan(
            model=ModelReference(name="simulated"), world=PlanWorld(ranks=ranks), accuracy="bounded",
            buckets=(PlanBucket(gradients=tuple(parameters), compressor=spec),),
        )  # fmt: skip
        self._buckets = [make_plain_buckets(plan, parameters)[0] for _ in range(ranks)]
        self._lossy = [make_lossy(bucket, spec, ranks, rank=rank) for rank, bucket in enumerate(self._buckets)]

    @property
    def k(self) -> int:
        """Number of elements that a rank sends."""
        return self._lossy[0].k

    def residual(self) -> Tensor:
        """Return the sum of the ranks' residuals. Shape (elements,)."""
        return torch.stack([one.feedback.unsent() for one in self._lossy]).sum(0)

    def exchange(self, gradients: Tensor, step: int) -> Tensor:
        """Return the sum of what ranks send in this step. `gradients`: shape (ranks, elements). Shape (elements,)."""
        for bucket, lossy, gradient in zip(self._buckets, self._lossy, gradients, strict=True):
            bucket.messages[0].flat.copy_(gradient)
            lossy.pack(step)
        _reduce(self._lossy[0].packed, [one.packed for one in self._lossy])
        finite = self._lossy[0].unpack()
        for one in self._lossy:
            one.feedback.commit(finite)
        return self._buckets[0].messages[0].flat


@singledispatch
def _reduce(first: Any, messages: Sequence[Any]) -> None:
    """Do what the message's collective does; of what all ranks get alike, only the first rank gets it."""
    raise TypeError(f"found a message of type {type(first).__name__}, expected one of a flat compressor")


@_reduce.register
def _(first: Narrowed, messages: Sequence[Narrowed]) -> None:
    for owner, message in enumerate(messages):
        message.received.copy_(torch.stack([one.rows[owner] for one in messages]))
        message.narrow()
    first.gathered.copy_(torch.cat([one.own for one in messages]))


@_reduce.register
def _(first: Packed, messages: Sequence[Packed]) -> None:
    first.gathered.copy_(torch.cat([one.flat for one in messages]))


@_reduce.register
def _(first: Factored, messages: Sequence[Factored]) -> None:
    left = torch.stack([one.left for one in messages]).sum(0)
    for one in messages:
        one.left.copy_(left)
        one.project()
    right = torch.stack([one.right for one in messages]).sum(0)
    for one in messages:
        one.right.copy_(right)
        one.subtract()
