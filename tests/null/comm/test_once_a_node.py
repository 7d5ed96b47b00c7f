"""Messages that the ranks of a node have alike and send once, played by all ranks in one process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from runtime.comm.collectives import naive_all_gather, phases
from runtime.comm.collectives.direct import Factored, Packed, by_message
from runtime.comm.topology import Topology

NODES = Topology(((0, 3), (1, 2)))
NODE_OF = {rank: node for node, ranks in enumerate(NODES.nodes) for rank in ranks}


@pytest.fixture(autouse=True)
def _recorded() -> Iterator[None]:
    """Calls of the backend become tuples, which `together` carries out."""
    with mock.patch.multiple(phases, all_gather=lambda *given: given, exchange=lambda *given: given):
        yield


def together(messages: Sequence[Any], collective: Any = by_message) -> int:
    """Carry out the calls of all ranks; return the bytes that ranks have sent to other nodes' ranks, or gathered."""
    ranks, sent = range(len(messages)), 0
    running = [collective(message, SimpleNamespace(size=lambda: len(messages))) for message in messages]
    while any(calls := [next(one, ()) for one in running]):
        assert all(calls)
        if len(calls[0]) == 3:
            parts = [part.clone() for _, part, _ in calls]
            for whole, *_ in calls:
                whole.copy_(torch.cat(parts))
            sent += sum(part.nbytes for part in parts)
            continue
        given: list[tuple[Tensor, ...]] = [one[1].split(one[3]) for one in calls]
        came = [torch.cat([given[sender][rank] for sender in ranks]) for rank in ranks]
        for rank, (received, *_) in enumerate(calls):
            received.copy_(came[rank])
        sent += sum(given[a][b].nbytes for a in ranks for b in ranks if NODE_OF[a] != NODE_OF[b])
    return sent


@pytest.mark.parametrize("collective", [by_message, naive_all_gather])
@pytest.mark.parametrize("words", [1, 5, 8])
def test_elements_of_a_node_are_gathered_once(words: int, collective: Any) -> None:
    of_nodes = [torch.arange(words, dtype=torch.int32) + 100 * node for node in range(2)]
    messages = [Packed(of_nodes[NODE_OF[rank]].clone(), torch.zeros(4 * words, dtype=torch.int32)) for rank in range(4)]
    for rank, message in enumerate(messages):
        message.send_once(NODES, rank)
    assert together(messages, collective) == 4 * 2 * (words + words % 2)
    for message in messages:
        assert message.copies == 2
        assert torch.equal(message.gathered, torch.cat(of_nodes))


def fill(right: Tensor, left: Tensor) -> None:
    """Fill right factors with an element of left ones."""
    right.fill_(float(left[0]))


@pytest.mark.parametrize("elements", [1, 5, 8])
def test_factors_of_a_node_are_added_up_once(elements: int) -> None:
    """Each becomes the sum over nodes, on all ranks alike."""
    messages = []
    for rank in range(4):
        left, right = torch.full((elements,), 1.0 + NODE_OF[rank]), torch.zeros(elements + 2)
        messages.append(Factored(left, right, partial(fill, right, left), lambda: None))
        messages[-1].send_once(NODES, rank)
    together(messages)
    for message in messages:
        assert message.copies == 2
        assert torch.equal(message.left, torch.full((elements,), 3.0))
        assert torch.equal(message.right, torch.full((elements + 2,), 6.0))
