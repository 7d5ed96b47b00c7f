"""What a step costs whose weights are sharded too (FSDP2, ZeRO-3), on all ranks or inside groups of them (HSDP).

Blocks of layers are gathered just before they compute, forward and again backward, the next one beside the one that
computes; behind its backward a block's gradients are reduce-scattered and, with several groups, its part all-reduced
between them. Messages follow one another on one network. While they do, computation is slower by a factor, for NCCL's
kernels take multiprocessors and memory bandwidth from it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

from planner.cost.halves import ALL_GATHER, REDUCE_SCATTER, half
from planner.cost.model import communication_cost
from planner.cost.phases import phase_of
from planner.documents.profile import Cluster
from planner.model.problem import Problem

_BLOCK = re.compile(r"(.*?\.\d+)\.|(.*?)(?:\.|$)", re.ASCII)
SLOWDOWN = 1.5
"""Of computation beside messages, with whatever else grows with them: set on the rows of A100 of MPT's published
throughputs, where no slow-down leaves 4.1 % of error, this 3.6 % and 2.0 3.2 %; kernels alone are not known to slow
one another down by more. Rows of H100 were held back (docs/results/validation.md)."""
Cost = Callable[[float], float]
"""Bytes → µs."""


@dataclass(frozen=True)
class Block:
    """Layers that are gathered together."""

    name: str
    size_bytes: float
    forward_us: float
    backward_us: float


@dataclass(frozen=True)
class Messages:
    """What moving a block costs."""

    gather_us: Cost
    scatter_us: Cost
    reduce_us: Cost
    """Between groups, over a block's whole bytes; 0 where there is one group."""


@dataclass(frozen=True)
class ShardedStep:
    """One step."""

    iteration_us: float
    exposed_us: float
    """Beyond what computes alone takes."""
    busy_us: float
    """Of the network."""


def blocks_of(problem: Problem) -> list[Block]:
    """Return runs of gradients of one block, in forward order: names up to the first number, `model.layers.3`.

    Forward is shared out as backward is.
    """
    gradients = list(reversed(problem.profile.compute.gradients))
    backward = problem.profile.compute.backward_us or 1.0
    share = problem.forward_us / backward
    found = []
    for name, run in groupby(gradients, key=lambda gradient: _block_name(gradient.name)):
        members = list(run)
        back_us = sum(gradient.backward_us for gradient in members)
        found.append(Block(name, float(sum(gradient.size_bytes for gradient in members)), share * back_us, back_us))
    return _without_crumbs(found)


def _block_name(name: str) -> str:
    match = _BLOCK.match(name)
    return (match[1] or match[2]) if match else name


def _without_crumbs(blocks: Sequence[Block]) -> list[Block]:
    """Blocks of less than a hundredth of the largest join the one before: nobody gathers a norm by itself."""
    least = max(block.size_bytes for block in blocks) / 100.0
    joined: list[Block] = []
    for block in blocks:
        if joined and (block.size_bytes < least or joined[-1].size_bytes < least):
            last = joined.pop()
            block = Block(
                last.name, last.size_bytes + block.size_bytes, last.forward_us + block.forward_us,
                last.backward_us + block.backward_us,
            )  # fmt: skip
        joined.append(block)
    return joined


def messages_on(cluster: Cluster, shard_ranks: int | None = None, reduce_factor: float = 1.0) -> Messages:
    """Return the costs on a cluster: over all ranks, or inside nodes with all-reduces between them.

    `reduce_factor` is how many times as many bytes gradients have as weights, 2 where those are reduced in FP32.
    Raises InputError: a cost is not known.
    """
    inside = shard_ranks is not None and shard_ranks < cluster.ranks
    cost = communication_cost(cluster, shard_ranks if inside else None)
    gather, scatter = half(cost, ALL_GATHER).curve, half(cost, REDUCE_SCATTER).curve
    between = None
    if inside and shard_ranks is not None:
        between = phase_of(cluster, "all_reduce", "ring", "inter", cluster.nodes, share=1.0 / shard_ranks)
    return Messages(
        gather_us=gather.at,
        scatter_us=lambda size: scatter.at(reduce_factor * size),
        reduce_us=lambda size: 0.0 if between is None else between.time_us(reduce_factor * size),
    )


def sharded_step(
    blocks: Sequence[Block],
    messages: Messages,
    update_us: float,
    *,
    recompute: bool = False,
    keep_weights: bool = False,
    slowdown: float = SLOWDOWN,
) -> ShardedStep:
    """Simulate one step.

    Args:
        blocks: in forward order.
        messages: what moving them costs.
        update_us: of a rank's own part.
        recompute: blocks are computed once more before their backward, and only their inputs kept.
        keep_weights: gathered weights stay for backward (SHARD_GRAD_OP, `reshard_after_forward=False`).
        slowdown: of computation beside messages.
    """
    network = compute = busy = 0.0
    gathers = [messages.gather_us(block.size_bytes) for block in blocks]
    for at, block in enumerate(blocks):
        if at == 0:
            network = gathers[0]
            busy += gathers[0]
        start = max(compute, network)
        if at + 1 < len(blocks):
            network = max(network, start) + gathers[at + 1]
            busy += gathers[at + 1]
        compute = start + block.forward_us
    network = max(network, compute if keep_weights else 0.0)
    ready = compute  # the last block's weights are still there
    for at in range(len(blocks) - 1, -1, -1):
        block = blocks[at]
        start = max(compute, ready)
        ready = start
        if at > 0 and not keep_weights:
            network = max(network, start) + gathers[at - 1]
            busy += gathers[at - 1]
            ready = network
        compute = start + block.backward_us + (block.forward_us if recompute else 0.0)
        sent = messages.scatter_us(block.size_bytes) + messages.reduce_us(block.size_bytes)
        network = max(network, compute) + sent
        busy += sent
    end = max(compute, network)
    alone = sum(block.forward_us * (2.0 if recompute else 1.0) + block.backward_us for block in blocks)
    hidden = max(0.0, busy - (end - alone))
    iteration_us = end + (slowdown - 1.0) * hidden + update_us
    return ShardedStep(iteration_us, iteration_us - alone - update_us, busy)
