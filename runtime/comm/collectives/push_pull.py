"""A parameter server as collectives: gradients are pushed to their owners, and now and then new weights are pulled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch.distributed as dist


class Phased(Protocol):
    """A message that knows what has to be started for it, one after the other."""

    def phases(self, group: dist.ProcessGroup) -> Iterator[dist.Work]:
        """See `Collective.run`."""
        ...


class PushPull:
    """A reduce-scatter of gradients, as all-to-all and a sum in order of rank; all-gathers of weights."""

    def run(self, message: Phased, group: dist.ProcessGroup) -> Iterator[dist.Work]:
        """See `Collective.run`."""
        return message.phases(group)
