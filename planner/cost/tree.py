"""Cost of an all-reduce over two binary trees as `runtime/comm/collectives/tree.py` executes it, with its figures.

A message is sent in c chunks, half of them up and down each tree (Sanders, Speck, Träff, Parallel Computing 35, 2009;
the trees are NCCL 2.4's). Ranks go round by round: in each they send at most one chunk and receive at most one. By that
paper a pipelined broadcast over two trees takes 2⌈log2 P⌉ + c rounds, so an all-reduce, which goes up as well as down,
twice that. The runtime's rounds are nearly as many, 4⌈log2 P⌉ − 2 for the first two chunks, but 2.5 and not 2 for each
further one, for it gives rounds to transfers in their order and not by colours of the edges.

Ranks of a node share its cards, so that in a round several chunks may follow one another there. Nodes hold consecutive
ranks; then the chunks that a card takes one after the other depend on the number of nodes alone: 5⌈log2 m⌉ + 1 for two,
and for each further one up to 6. Tests hold these numbers against the rounds themselves, on 2 to 128 ranks:
times come within 15 % where ranks share a card, and rounds within 22 %, or 4 of them.
"""

from __future__ import annotations

from typing import NamedTuple

from planner.cost.collectives import Coefficients, log2_steps
from planner.cost.curve import CostCurve
from planner.documents.profile import Link

CHUNK_BYTES = 256 * 1024
"""Smallest chunk, as in the runtime, as long as there are two."""
FEWEST_CHUNKS, MOST_CHUNKS = 2, 16
MORE_ROUNDS = 2.5
"""Rounds that each chunk after the second one takes."""


class Rounds(NamedTuple):
    """Numbers of what ranks wait for, one after the other, during a message."""

    inside: float
    """Rounds in which nothing is sent between nodes."""
    between: float
    """Rounds in which something is."""
    on_cards: float
    """Chunks that the busiest card sends or receives one after the other."""


def rounds(nodes: int, per_node: int, chunks: int, cards: int = 1) -> Rounds:
    """Return the rounds of a message of at least 2 chunks, on nodes of `per_node` ranks that share so many cards."""
    ranks, further = nodes * per_node, chunks - FEWEST_CHUNKS
    if ranks == 1:
        return Rounds(0.0, 0.0, 0.0)
    all_rounds = float(chunks) if ranks == 2 else 4 * log2_steps(ranks) - 2 + MORE_ROUNDS * further
    if nodes == 1:
        return Rounds(all_rounds, 0.0, 0.0)
    inside = min(max(0.0, 4.0 * log2_steps(per_node) - 4.0), all_rounds)
    between = all_rounds - inside
    if per_node <= cards:
        return Rounds(inside, between, between)
    # For each chunk after the second one 6 where a node has three neighbours in a tree, fewer on few nodes.
    shared = 5.0 * log2_steps(nodes) + 1.0 + min(6.0, 0.7 + 2.0 * log2_steps(nodes)) * further
    return Rounds(inside, between, max(min(between, shared), shared / cards))


def chunks_of(size_bytes: float) -> int:
    """Return in how many chunks the runtime sends a message."""
    return int(max(FEWEST_CHUNKS, min(MOST_CHUNKS, size_bytes // CHUNK_BYTES)))


def double_binary_tree(
    nodes: int, per_node: int, chunks: int, intra: Link | None, inter: Link | None, cards: int = 1
) -> Coefficients:
    """Return the line of messages that are sent in this number of chunks.

    `intra` is not needed with one rank a node, nor `inter` on one node. Half of what a rank receives it adds up: as
    many bytes as the message has.
    """
    taken = rounds(nodes, per_node, chunks, cards)
    start_up_us, per_byte_us = 0.0, 0.0
    for link, count, sent in ((intra, taken.inside, taken.inside), (inter, taken.between, taken.on_cards)):
        if link is not None and count:
            start_up_us += count * link.alpha_us
            per_byte_us += sent * link.beta_us_per_byte / chunks
    adds = inter if nodes > 1 else intra
    if adds is not None and nodes * per_node > 1:
        per_byte_us += adds.gamma_us_per_byte
    return Coefficients(start_up_us, per_byte_us)


def tree_curve(nodes: int, per_node: int, intra: Link | None, inter: Link | None, cards: int = 1) -> CostCurve:
    """Time over bytes: a line for each number of chunks, with a step where there is one more of them."""
    lines = {
        chunks: double_binary_tree(nodes, per_node, chunks, intra, inter, cards)
        for chunks in range(FEWEST_CHUNKS, MOST_CHUNKS + 1)
    }
    sizes = [0.0]
    for chunks in range(FEWEST_CHUNKS + 1, MOST_CHUNKS + 1):
        sizes += [chunks * CHUNK_BYTES - 1.0, float(chunks * CHUNK_BYTES)]
    sizes.append(2.0 * MOST_CHUNKS * CHUNK_BYTES)
    times = [(lines[chunks_of(size)].start_up_us + lines[chunks_of(size)].per_byte_us * size) for size in sizes]
    return CostCurve.from_samples(list(zip(sizes, times, strict=True)), lines[MOST_CHUNKS])
