"""Algorithm 1, written down as one sequential program: ranks are list entries, and everything happens in turn."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from local_async_jobs import Net, batch, loss
from torch import Tensor

LR, MOMENTUM = 0.05, 0.9


class ReferenceRank:
    """One rank's model, and its updaters' snapshots, gradients and momenta."""

    def __init__(self, rank: int) -> None:
        torch.manual_seed(7)
        self.rank, self.model = rank, Net()
        self.gradients: dict[str, dict[str, Tensor]] = {}
        self.momenta: dict[str, dict[str, Tensor]] = {}
        self.next_number = 2
        self.numbers = {"0": 0, "1": 1}

    def snapshot(self, updater: str) -> None:
        """An updater reads the model, and its gradient is computed of that; statistics of norms go to the model."""
        copied = copy.deepcopy(self.model)
        loss(copied, batch(self.numbers[updater], self.rank)).backward()
        self.gradients[updater] = {name: p.grad for name, p in copied.named_parameters() if p.grad is not None}
        for mine, theirs in zip(self.model.buffers(), copied.buffers(), strict=True):
            mine.copy_(theirs)

    @torch.no_grad()
    def update(self, updater: str) -> None:
        """It changes the model as it is now, and takes the next minibatch."""
        momenta = self.momenta.setdefault(updater, {})
        for name, parameter in self.model.named_parameters():
            if name in self.gradients[updater]:
                before = momenta.get(name)
                gradient = self.gradients[updater][name]
                momenta[name] = gradient.clone() if before is None else MOMENTUM * before + gradient
                parameter.add_(momenta[name], alpha=-LR)
        self.numbers[updater], self.next_number = self.next_number, self.next_number + 1

    def averaged(self) -> list[Tensor]:
        """What is averaged."""
        trained = [p.data for p in self.model.parameters() if p.requires_grad]
        return trained + [buffer for buffer in self.model.buffers() if buffer.is_floating_point()]


@torch.no_grad()
def average(ranks: Sequence[ReferenceRank]) -> None:
    """Snapshots of all ranks' models are averaged; the difference is added."""
    for tensors in zip(*(rank.averaged() for rank in ranks), strict=True):
        snapshots = [tensor.clone() for tensor in tensors]
        mean = sum(snapshots[1:], snapshots[0]) / len(snapshots)
        for tensor, snapshot in zip(tensors, snapshots, strict=True):
            tensor.add_(mean - snapshot)


def reference(turns: Sequence[str], ranks: int) -> list[dict[str, Tensor]]:
    """All ranks' models after the turns, which are the same on each."""
    them = [ReferenceRank(rank) for rank in range(ranks)]
    for turn in turns:
        what, _, updater = turn.partition(" ")
        if what == "average":
            average(them)
            continue
        for one in them:
            one.snapshot(updater) if what == "snapshot" else one.update(updater)
    average(them)
    return [{name: tensor.detach().clone() for name, tensor in one.model.state_dict().items()} for one in them]
