"""CommLib's Algorithm 2 with error feedback, and a flat top-k, in one process that knows every rank's gradients; grids
of ranks, and plans for them.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from lossy_reference import loss_of
from session_checks import plan_of
from torch import Tensor, nn

from runtime.checks.plan import trainable_parameters
from runtime.plan import CompressorSpec, Plan, PlanBucket, PlanWorld


class Algorithm2:
    """All ranks at once, one element after the other in order of magnitude."""

    def __init__(self, model: nn.Module, plan: Plan, nodes: Sequence[Sequence[int]]) -> None:
        self._plan, self._nodes = plan, nodes
        self._shapes = {name: p.shape for name, p in trainable_parameters(model).items()}
        self._ranks = sum(len(node) for node in nodes)
        self.residuals = [{n: torch.zeros(s) for n, s in self._shapes.items()} for _ in range(self._ranks)]
        """By rank and gradient; of hitopk zero outside of the rank's shard."""
        self.lossy = {name for b in plan.buckets if b.compressor.name != "none" for name in b.gradients}

    def step(self, everyone: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Averages from every rank's own gradients; residuals move on."""
        averages: dict[str, Tensor] = {}
        for bucket in self._plan.buckets:
            flats = [self._flat(bucket, own) * (1.0 / self._ranks) for own in everyone]
            held = [self._flat(bucket, residual) for residual in self.residuals]
            if bucket.compressor.name == "none" or self._ranks == 1:  # alone nothing is sent
                total = torch.stack(flats).sum(dim=0)
            elif bucket.algorithm == "hitopk":
                total = self._hitopk(bucket, flats, held)
            else:
                total = torch.zeros_like(flats[0])
                for flat, rest in zip(flats, held, strict=True):
                    total += _select(rest, flat, bucket)
            for rank, rest in enumerate(held):
                self.residuals[rank].update(self._by_name(bucket, rest))
            averages |= self._by_name(bucket, total)
        return averages

    def _hitopk(self, bucket: PlanBucket, flats: Sequence[Tensor], held: Sequence[Tensor]) -> Tensor:
        """Sums inside nodes; each rank selects from its shard; sums over nodes."""
        numel, parts = flats[0].numel(), len(self._nodes[0])
        share = -(-numel // parts)
        total = torch.zeros(numel)
        for node in self._nodes:
            inside = flats[node[0]].clone()
            for rank in node[1:]:
                inside += flats[rank]
            for place, rank in enumerate(node):
                part = slice(min(numel, place * share), min(numel, (place + 1) * share))
                total[part] += _select(held[rank][part], inside[part], bucket, share)
        return total

    def _flat(self, bucket: PlanBucket, by_name: dict[str, Tensor]) -> Tensor:
        return torch.cat([by_name[name].flatten() for name in bucket.gradients])

    def _by_name(self, bucket: PlanBucket, flat: Tensor) -> dict[str, Tensor]:
        parts = flat.split([self._shapes[name].numel() for name in bucket.gradients])
        return {name: part.view(self._shapes[name]) for name, part in zip(bucket.gradients, parts, strict=True)}


def _select(residual: Tensor, gradient: Tensor, bucket: PlanBucket, share: int | None = None) -> Tensor:
    """What is sent of residual + gradient; `residual` becomes the rest. `share`: elements of a shard, padding too."""
    density = bucket.compressor.density
    assert density is not None
    total = residual + gradient
    values = total.tolist()
    k = max(1, int(density * (len(values) if share is None else share)))
    chosen = sorted(range(len(values)), key=lambda index: (-abs(values[index]), index))[:k]
    sent = torch.zeros_like(total)
    sent[chosen] = total[chosen]
    residual.copy_(total - sent)
    return sent


def everyones(model: nn.Module, step: int, group: dist.ProcessGroup) -> list[dict[str, Tensor]]:
    """Gradients of a copy of the model, of all ranks of a group."""
    twin = copy_of(model)
    twin.zero_grad()
    loss_of(twin, step).backward()
    mine = {name: p.grad for name, p in trainable_parameters(twin).items() if p.grad is not None}
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    return everyone


def copy_of(model: nn.Module) -> nn.Module:
    """With weights and buffers of its own."""
    return copy.deepcopy(model)


@contextmanager
def on_grid(nodes: int, ranks_per_node: int) -> Iterator[dist.ProcessGroup | None]:
    """The first ranks as a cluster of so many nodes, as a launcher would say; None on the other ranks."""
    ranks = nodes * ranks_per_node
    group = dist.new_group(list(range(ranks)))
    before = dict(os.environ)
    os.environ["GROUP_RANK"] = str(dist.get_rank() // ranks_per_node)
    os.environ["LOCAL_WORLD_SIZE"] = str(ranks_per_node)
    try:
        yield group if dist.get_rank() < ranks else None
    finally:
        os.environ.clear()
        os.environ.update(before)
        dist.barrier()


def planned(model: nn.Module, ranks: int, forms: list[tuple[str, str, CompressorSpec | None]], group: int = 4) -> Plan:
    """Buckets of `group` gradients that travel as said, in turn."""
    buckets = []
    for index, bucket in enumerate(plan_of(model, group).buckets):
        collective, algorithm, spec = forms[index % len(forms)]
        compressor = spec or CompressorSpec(name="none")
        buckets.append(
            PlanBucket(gradients=bucket.gradients, collective=collective, algorithm=algorithm, compressor=compressor)
        )
    lossy = any(spec is not None for _, _, spec in forms)
    changes: dict[str, Any] = {"world": PlanWorld(ranks=ranks), "buckets": tuple(buckets)}
    return plan_of(model, group, accuracy="bounded" if lossy else "exact", **changes)


SPARSE = CompressorSpec(name="topk", selector="exact", density=0.05)
DENSE = CompressorSpec(name="topk", selector="exact", density=0.6)
TINY = CompressorSpec(name="topk", selector="exact", density=1e-7)
HITOPK = [("sparse", "hitopk", SPARSE)]
BETWEEN = CompressorSpec(name="wire", dtype="int8", rounding="stochastic", links="inter")
NARROW = [("all_reduce", "torus_2d", BETWEEN)]
MIXED = [("sparse", "hitopk", DENSE), ("all_reduce", "torus_2d", None), ("all_reduce", "library", None),
         ("sparse", "hitopk", SPARSE), ("sparse", "naive_all_gather", SPARSE), ("all_reduce", "tree", None),
         ("sparse", "hitopk", TINY)]  # fmt: skip
