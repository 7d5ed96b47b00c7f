"""A parameter server as collectives: gradients are pushed to their owners, and now and then new weights are pulled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from runtime.torch_compat import all_gather_single, all_to_all_single

if TYPE_CHECKING:
    from runtime.delayed import StepEnd
    from runtime.sharded import OwnPart, Usage
    from runtime.shards import Shard


class PushPull:
    """A reduce-scatter of gradients, as all-to-all and a sum in order of rank; all-gathers of weights."""

    def run(self, message: Shard | StepEnd | OwnPart | Usage, group: dist.ProcessGroup) -> Iterator[dist.Work]:
        """See `Collective.run`."""
        return message.phases(group)


def push(shard: Shard | OwnPart, group: dist.ProcessGroup) -> Iterator[dist.Work]:
    """Sends a message's gradients to their owners; each adds up what it owns."""
    # As bytes: backends know few dtypes.
    received, pushed = (tensor.view(torch.uint8) for tensor in (shard.received, shard.pushed))
    yield all_to_all_single(received, pushed, group=group, async_op=True)
    shard.add_up()


def pull(shard: Shard | OwnPart, pulled: torch.Tensor, group: dist.ProcessGroup) -> Iterator[dist.Work]:
    """Fills `pulled` (ranks · share elements) with the weights of all owners."""
    yield all_gather_single(pulled.view(torch.uint8), shard.weights.view(torch.uint8), group=group, async_op=True)


def compare(told: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup) -> Iterator[dist.Work]:
    """Fills `told` with every rank's `own`, one after the other."""
    yield all_gather_single(told, own, group=group, async_op=True)
