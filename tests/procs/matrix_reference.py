"""What every way of a bucket should come to, in one process that knows every rank's gradients.

Selecting and rounding are the compressors' own, each of which has its tests; here it is about who sends what to whom.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from runtime.comm.collectives import is_narrow_between
from runtime.plan import Plan, PlanBucket
from runtime.plan.transports import HITOPK, NATIVE
from runtime.sparse.compressed import layer_runs
from runtime.sparse.compressors import make_compressor
from runtime.sparse.compressors.magnitudes import seed_of
from runtime.sparse.compressors.powersgd import make_low_rank
from runtime.sparse.compressors.sparse import SparseCompressor
from runtime.sparse.compressors.wire import NO_RESIDUAL, StepResidual, make_wire


class Everyone:
    """All ranks' residuals, and the averages that they come to."""

    def __init__(self, model: nn.Module, plan: Plan, nodes: Sequence[Sequence[int]]) -> None:
        self._plan, self._nodes = plan, nodes
        self._parameters = dict(model.named_parameters())
        self._ranks = sum(len(node) for node in nodes)
        lossy = [b for b in plan.buckets if b.compressor.name != "none" and b.compressor.error_feedback is not False]
        self.residuals = [{name: self._zeros(b, name) for b in lossy for name in b.gradients} for _ in self._numbers]
        """By rank and gradient."""
        self._starts: dict[PlanBucket, Tensor] = {}

    @property
    def _numbers(self) -> range:
        return range(self._ranks)

    def _wide(self, bucket: PlanBucket) -> torch.dtype:
        """The dtype that a lossy bucket is added up in."""
        double = any(self._parameters[name].dtype == torch.float64 for name in bucket.gradients)
        return torch.float64 if double else torch.float32

    def _zeros(self, bucket: PlanBucket, name: str) -> Tensor:
        return torch.zeros(self._parameters[name].shape, dtype=self._wide(bucket))

    def step(self, everyone: Sequence[dict[str, Tensor]], number: int) -> dict[str, Tensor]:
        """Averages by name, of those that some rank used or that something comes for."""
        averages: dict[str, Tensor] = {}
        for bucket in self._plan.buckets:
            if bucket.compressor.name == "none":
                averages |= {name: self._sum(name, everyone) for name in bucket.gradients}
                continue
            added = [self._flat(bucket, own) / self._ranks for own in everyone]
            held = [self._flat(bucket, residual) for residual in self.residuals]
            total = self._sent(bucket, added, held, number)
            for rank, rest in enumerate(held):
                if bucket.compressor.error_feedback is not False:
                    self.residuals[rank] |= self._by_name(bucket, rest)
            averages |= {
                name: part.to(self._parameters[name].dtype) for name, part in self._by_name(bucket, total).items()
            }
        used = {name for own in everyone for name in own}
        return {name: part for name, part in averages.items() if name in used or bool(part.any())}

    def _sum(self, name: str, everyone: Sequence[dict[str, Tensor]]) -> Tensor:
        parts = [own[name] / self._ranks for own in everyone if name in own]
        return sum(parts, torch.zeros_like(self._parameters[name].detach()))

    def _sent(self, bucket: PlanBucket, added: Sequence[Tensor], held: Sequence[Tensor], number: int) -> Tensor:
        """The sum of what is sent of gradients and residuals; these become the rest."""
        if is_narrow_between(bucket):
            return self._narrow_torus(bucket, added, held, number)
        if bucket.compressor.name == "wire":
            return self._narrowed(bucket, added, held, number, self._numbers)
        if bucket.compressor.name == "powersgd":
            return self._low_rank(bucket, added, held)
        if bucket.transport == HITOPK:
            return self._hitopk(bucket, added, held, number)
        layers = layer_runs((name, self._parameters[name].numel()) for name in bucket.gradients)
        compressor = make_compressor(bucket.compressor, layers, ranks=self._ranks)
        assert isinstance(compressor, SparseCompressor)
        return sum(
            (_select(compressor, g, r, number) for g, r in zip(added, held, strict=True)), torch.zeros_like(held[0])
        )

    def _hitopk(self, bucket: PlanBucket, added: Sequence[Tensor], held: Sequence[Tensor], number: int) -> Tensor:
        """Algorithm 2: sums inside nodes; each rank selects from its shard; sums over nodes."""
        parts, numel = len(self._nodes[0]), added[0].numel()
        share = -(-numel // parts)
        compressor = make_compressor(bucket.compressor, [("shard", share)], ranks=len(self._nodes))
        assert isinstance(compressor, SparseCompressor)
        total = torch.zeros(parts * share, dtype=held[0].dtype)
        for node in self._nodes:
            inside = torch.zeros_like(total)
            inside[:numel] = sum((added[rank] for rank in node), torch.zeros_like(added[0]))
            for place, rank in enumerate(node):
                shard, residual = slice(place * share, (place + 1) * share), torch.zeros_like(total)
                residual[:numel] = held[rank]
                total[shard] += _select(compressor, inside[shard], residual[shard], number)
                held[rank].copy_(residual[:numel])
        return total[:numel]

    def _narrow_torus(self, bucket: PlanBucket, added: Sequence[Tensor], held: Sequence[Tensor], number: int) -> Tensor:
        """Sums inside nodes; of these, the ranks of one place add up their shard as all ranks do a narrow bucket."""
        parts, numel = len(self._nodes[0]), added[0].numel()
        share = -(-numel // parts)
        total = torch.zeros(parts * share, dtype=held[0].dtype)
        for place in range(parts):
            shard, ranks = slice(place * share, (place + 1) * share), sorted(node[place] for node in self._nodes)
            shards, residuals = [], []
            for rank in ranks:
                node = next(node for node in self._nodes if rank in node)
                inside, residual = torch.zeros_like(total), torch.zeros_like(total)
                inside[:numel] = sum((added[one] for one in node), torch.zeros_like(added[0]))
                residual[:numel] = held[rank]
                shards.append(inside[shard]), residuals.append(residual[shard])
            total[shard] = self._narrowed(bucket, shards, residuals, number, ranks)
            for rank, residual in zip(ranks, residuals, strict=True):
                mine = held[rank][shard]
                mine.copy_(residual[: mine.numel()])
        return total[:numel]

    def _narrowed(
        self, bucket: PlanBucket, added: Sequence[Tensor], held: Sequence[Tensor], number: int, ranks: Sequence[int]
    ) -> Tensor:
        """All elements encoded; each rank adds up its part, and encodes the sum, or the backend does it all."""
        native, owners = bucket.transport == NATIVE, len(ranks)
        compressor = make_wire(bucket.compressor, owners, native=native)
        cut = compressor.cut(added[0].numel(), 1 if native else owners, added[0].dtype)
        total = torch.zeros_like(held[0])
        for rank, gradient, residual in zip(ranks, added, held, strict=True):
            rows = torch.zeros(1 if native else owners, cut.row_bytes, dtype=torch.uint8)
            rest, sent = torch.zeros_like(residual), torch.empty_like(residual)
            kept = StepResidual(residual, rest) if compressor.error_feedback else NO_RESIDUAL
            seed = seed_of(f"sent\n{rank}\n{bucket.gradients[0]}", number)
            compressor.compress(gradient, kept, rows, cut, seed)
            compressor.decode(rows, sent, cut)
            total += sent
            residual.copy_(rest)
        if native:
            return total.to(compressor.dtype).to(total.dtype)  # of two ranks: in any order
        if self._plan.sharded:
            return total  # each owner keeps its part
        result = torch.empty_like(total)
        for owner, (rank, residual) in enumerate(zip(ranks, held, strict=True)):
            own = slice(owner * cut.share, (owner + 1) * cut.share)
            row, lost = torch.zeros(1, cut.row_bytes, dtype=torch.uint8), torch.empty_like(total[own])
            seed = seed_of(f"summed\n{rank}\n{bucket.gradients[0]}", number)
            kept = StepResidual(torch.zeros_like(lost), lost) if compressor.error_feedback else NO_RESIDUAL
            compressor.compress(total[own], kept, row, cut, seed)
            compressor.decode(row, result[own], cut)
            if compressor.error_feedback:
                residual[own] += lost
        return result

    def _low_rank(self, bucket: PlanBucket, added: Sequence[Tensor], held: Sequence[Tensor]) -> Tensor:
        """Algorithm 1, of two ranks: their sums are the same in any order."""
        factors = make_low_rank(bucket.compressor).factors([self._parameters[name] for name in bucket.gradients])
        left, right = (held[0].new_zeros(stacks.elements) for stacks in (factors.left, factors.right))
        seeds, start = factors.seeds(bucket.gradients, left), self._starts.get(bucket, torch.zeros_like(right))
        for gradient, residual in zip(added, held, strict=True):
            residual += gradient
            part = torch.empty_like(left)
            factors.begin(residual, start, seeds, part)
            left += part
        whole, total = torch.zeros_like(held[0]), torch.zeros_like(held[0])
        for residual in held:
            projected, part = left.clone(), torch.empty_like(right)
            factors.project(residual, projected, part)
            factors.subtract(residual, projected, part)
            right += part
            for place in factors.whole:
                whole[place] += residual[place]
                residual[place] = 0.0
        factors.multiply(projected, right, total)
        self._starts[bucket] = right
        return total + whole

    def _flat(self, bucket: PlanBucket, by_name: dict[str, Tensor]) -> Tensor:
        wide = self._wide(bucket)
        return torch.cat([by_name.get(n, self._zeros(bucket, n)).to(wide).flatten() for n in bucket.gradients])

    def _by_name(self, bucket: PlanBucket, flat: Tensor) -> dict[str, Tensor]:
        parts = flat.split([self._parameters[name].numel() for name in bucket.gradients])
        return {n: part.view(self._parameters[n].shape) for n, part in zip(bucket.gradients, parts, strict=True)}


def _select(compressor: SparseCompressor, gradient: Tensor, residual: Tensor, number: int) -> Tensor:
    """What one rank sends, zero elsewhere; `residual` becomes the rest."""
    rest, sent = torch.empty_like(residual), torch.zeros_like(residual)
    values, indices = compressor.compress(gradient, residual, rest, number)
    sent[indices.long()] = values
    residual.copy_(rest)
    return sent
