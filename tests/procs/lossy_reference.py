"""What lossy plans should do, in one process: a reference that knows every rank's gradients."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from session_checks import images
from torch import Tensor, nn
from torch.nn import functional

from runtime.checks.plan import trainable_parameters
from runtime.plan import NO_COMPRESSION, CompressorSpec, Plan, PlanBucket
from runtime.plan.names import layer_of
from runtime.sparse.compressors import COMPRESSORS

TOPK = CompressorSpec(name="topk", selector="exact", density=0.05)
RANDOM = CompressorSpec(name="randomk", density=0.2)
WIRE = CompressorSpec(name="wire", dtype="bfloat16")
LOW_RANK = CompressorSpec(name="powersgd", rank=2)
LAYERS = CompressorSpec(name="topk", selector="exact", density=0.1, scope="layer")


def lossy(plan: Plan, compressors: Sequence[CompressorSpec | None]) -> Plan:
    """The plan with compressors, taken in turn by its buckets; None sends everything."""
    buckets = []
    for index, bucket in enumerate(plan.buckets):
        spec = compressors[index % len(compressors)]
        sparse = spec is not None and COMPRESSORS[spec.name].selects
        collective, algorithm = ("sparse", "flat") if sparse else ("all_reduce", "library")
        compressor = spec or NO_COMPRESSION
        buckets.append(
            PlanBucket(gradients=bucket.gradients, collective=collective, algorithm=algorithm, compressor=compressor)
        )
    return Plan(model=plan.model, world=plan.world, accuracy="bounded", buckets=tuple(buckets))


class Reference:
    """Error feedback and top-k for all ranks, in one process, one element after the other in order of magnitude."""

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        self._plan = plan
        self._shapes = {name: tuple(p.shape) for name, p in trainable_parameters(model).items()}
        ranks = range(dist.get_world_size())
        self.residuals = [{name: torch.zeros(shape) for name, shape in self._shapes.items()} for _ in ranks]

    def step(self, gradients: Sequence[dict[str, Tensor]], scale: float | None = None) -> dict[str, Tensor]:
        """Averages from every rank's own gradients; residuals move on. `scale`: in place of 1/ranks."""
        scale = 1.0 / len(gradients) if scale is None else scale
        averages: dict[str, Tensor] = {}
        for bucket in self._plan.buckets:
            names, spec = bucket.gradients, bucket.compressor
            if spec.name == "none":
                averages |= {n: torch.stack([g[n] * scale for g in gradients]).sum(dim=0) for n in names}
                continue
            total = torch.zeros(sum(self._numel(name) for name in names))
            for rank, own in enumerate(gradients):
                residual = torch.cat([self.residuals[rank][name].flatten() for name in names])
                gradient = torch.cat([own[name].flatten() * scale for name in names])
                total += self._split(names, spec, residual + gradient, rank)
            averages |= self._by_name(names, total)
        return averages

    def _numel(self, name: str) -> int:
        return int(torch.Size(self._shapes[name]).numel())

    def _by_name(self, names: Sequence[str], flat: Tensor) -> dict[str, Tensor]:
        parts = flat.split([self._numel(name) for name in names])
        return {name: part.view(self._shapes[name]) for name, part in zip(names, parts, strict=True)}

    def _split(self, names: Sequence[str], spec: CompressorSpec, accumulated: Tensor, rank: int) -> Tensor:
        """What is sent; the rest becomes the rank's residual."""
        runs = [list(group) for _, group in groupby(names, key=layer_of)] if spec.scope == "layer" else [list(names)]
        sent, start = torch.zeros_like(accumulated), 0
        for run in runs:
            numel = sum(self._numel(name) for name in run)
            values = accumulated[start : start + numel].tolist()
            assert spec.density is not None
            chosen = sorted(range(numel), key=lambda i: (-abs(values[i]), i))[: max(1, int(spec.density * numel))]
            for index in chosen:
                sent[start + index] = values[index]
            start += numel
        self.residuals[rank].update(self._by_name(names, accumulated - sent))
        return sent


def loss_of(model: nn.Module, step: int) -> Tensor:
    """This rank's loss of a step."""
    x, y = images(step)
    return functional.cross_entropy(model(x), y)


def everyones_gradients(model: nn.Module, step: int) -> list[dict[str, Tensor]]:
    """Of a copy of the model, of all ranks."""
    twin = copy.deepcopy(model)
    twin.zero_grad()
    loss_of(twin, step).backward()
    mine = {name: p.grad for name, p in trainable_parameters(twin).items() if p.grad is not None}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    """Bit for bit."""
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """By name."""
    return {name: p.grad for name, p in trainable_parameters(model).items() if p.grad is not None}
