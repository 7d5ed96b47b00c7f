"""Long tensors in short parts: arithmetic in several passes finds a part in the cache, and needs no memory for all.

Temporary tensors as large as a model cost more than the arithmetic on them: the allocator gives them back to the
system, which clears every page anew. On a device, where each call costs more than a pass over a small part, and whose
allocator keeps what it has, tensors stay whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

CHUNK = 16_384
"""Elements of a part: several fit into a core's second-level cache, and what is that short the allocator keeps."""


def chunks(*lists: Sequence[Tensor]) -> Iterator[tuple[list[Tensor], ...]]:
    """Yield views of tensors that belong together, to be written to by `torch._foreach_…`, a list for each given."""
    if any(tensor.device.type != "cpu" for tensors in lists for tensor in tensors):
        yield tuple(map(list, lists))
        return
    for tensors in zip(*lists, strict=True):
        flat = _flat(tensors)
        if flat is None:
            yield tuple([tensor] for tensor in tensors)
            continue
        for start in range(0, flat[0].numel(), CHUNK):
            yield tuple([tensor[start : start + CHUNK]] for tensor in flat)


def _flat(tensors: Sequence[Tensor]) -> list[Tensor] | None:
    """1-D views in one order of elements; None where there is none, or they are short already."""
    first = tensors[0]
    if first.numel() <= CHUNK:
        return None
    if all(tensor.is_contiguous() for tensor in tensors):
        return [tensor.view(-1) for tensor in tensors]
    if first.dim() == 4 and all(tensor.is_contiguous(memory_format=torch.channels_last) for tensor in tensors):
        return [tensor.permute(0, 2, 3, 1).view(-1) for tensor in tensors]
    return None
