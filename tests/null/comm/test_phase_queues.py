"""The order of phases on two kinds of link, and trees, without any process."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from runtime.comm.collectives.tree import parents, tree_rounds
from runtime.comm.phased_communicator import LINKS, PhaseQueues, default_order
from runtime.comm.topology import NodeInfo, Topology, find_topology, node_name
from runtime.plan import parse_plan

TORUS = ("intra", "inter", "intra")
FLAT = ("inter",)


def run(queues: PhaseQueues, arrivals: list[int], chance: random.Random) -> list[tuple[str, tuple[int, int]]]:
    """Carries a step in which buckets come in order and phases take any time: (link, entry), by their end."""
    ended: list[tuple[str, tuple[int, int]]] = []
    busy: dict[str, tuple[int, int]] = {}
    left = list(arrivals)
    while True:
        for link in LINKS:
            if link not in busy and (entry := queues.next(link)) is not None:
                busy[link] = entry
        choices = [*busy, *(["launch"] if left else [])]
        if not choices:
            return ended
        choice = chance.choice(choices)
        if choice == "launch":
            queues.launch(left.pop(0))
            if not left:
                queues.flush()
            continue
        ended.append((choice, busy.pop(choice)))
        queues.done(choice)


@pytest.mark.parametrize("seed", range(30))
def test_every_link_takes_its_phases_in_one_order_whatever_the_times(seed: int) -> None:
    chance = random.Random(seed)
    links: list[Any] = [
        chance.choice([TORUS, FLAT, ("intra", "intra"), ("inter",)]) for _ in range(chance.randint(1, 6))
    ]
    queues = PhaseQueues(links)
    for _ in range(3):
        ended = run(queues, list(range(len(links))), chance)
        for link in LINKS:
            expected = [
                entry for entry in default_order([len(of) for of in links]) if links[entry[0]][entry[1]] == link
            ]
            assert [entry for of, entry in ended if of == link] == expected
        assert queues.complete()
        queues.begin()


def test_the_order_of_the_plan_counts() -> None:
    order = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    ended = run(PhaseQueues([TORUS, TORUS], order), [0, 1], random.Random(0))
    assert [entry for link, entry in ended if link == "intra"] == [(0, 0), (0, 2), (1, 0), (1, 2)]
    assert default_order([3, 3]) == [(0, 0), (0, 1), (1, 0), (0, 2), (1, 1), (1, 2)]


def test_buckets_that_do_not_come_are_not_waited_for() -> None:
    """A backward that raised: the first bucket's gather would come after the second one's scatter."""
    queues = PhaseQueues([TORUS, TORUS, TORUS])
    ended = run(queues, [0], random.Random(0))
    assert [entry for _, entry in ended] == [(0, 0), (0, 1), (0, 2)]
    assert queues.complete()
    assert queues.over(1), "what comes now belongs to the next round"
    queues.begin()
    assert not queues.over(1)


def test_the_second_bucket_is_inside_while_the_first_is_between() -> None:
    queues = PhaseQueues([TORUS, TORUS])
    queues.launch(0)
    assert (queues.next("intra"), queues.next("inter")) == ((0, 0), None)
    queues.done("intra")
    assert (queues.next("intra"), queues.next("inter")) == (None, (0, 1))
    queues.launch(1)
    assert (queues.next("intra"), queues.next("inter")) == ((1, 0), (0, 1))


@pytest.mark.parametrize("ranks", range(1, 18))
@pytest.mark.parametrize("chunks", [2, 5])
def test_every_rank_ends_with_every_contribution_once(ranks: int, chunks: int) -> None:
    """Symbolic chunks: who contributed, and how often, moved along every transfer of every round."""
    held = [[Counter([rank]) for _ in range(chunks)] for rank in range(ranks)]
    for transfers in tree_rounds(ranks, chunks):
        for ends in ([t.source for t in transfers], [t.target for t in transfers]):
            assert len(set(ends)) == len(ends), "one chunk at a time"
        sent = {transfer: Counter(held[transfer.source][transfer.chunk]) for transfer in transfers}
        for transfer, what in sent.items():
            before = held[transfer.target][transfer.chunk] if transfer.adds else Counter()
            held[transfer.target][transfer.chunk] = before + what
    assert all(chunk == Counter(range(ranks)) for rank in held for chunk in rank)


@pytest.mark.parametrize("ranks", range(2, 40))
def test_no_rank_is_inside_both_trees_but_one(ranks: int) -> None:
    inside = [{parent for parent in parents(ranks, tree) if parent is not None} for tree in (0, 1)]
    assert len(inside[0] & inside[1]) <= 1
    for tree in (0, 1):
        above = parents(ranks, tree)
        assert above.count(None) == 1
        assert max(Counter(parent for parent in above if parent is not None).values()) <= 2
        depth = max(_depth(above, rank) for rank in range(ranks))
        assert depth <= ranks.bit_length()


def _depth(above: list[int | None], rank: int) -> int:
    parent = above[rank]
    return 0 if parent is None else 1 + _depth(above, parent)


def test_topologies() -> None:
    def ranks(*nodes: str, **more: Any) -> Topology | str:
        return find_topology([NodeInfo(node, **more) for node in nodes])

    assert ranks("a", "b", "a", "b") == Topology(((0, 2), (1, 3)))
    assert Topology(((0, 2), (1, 3))).cross_node_groups == ((0, 1), (2, 3))
    assert ranks("a", "a", local_ranks="2") == Topology(((0, 1),))
    assert "uneven: node a has 2, node b has 1" in str(ranks("a", "a", "b"))
    assert "was told that its node has 4 ranks" in str(ranks("a", "a", local_ranks="4"))
    assert node_name({"GROUP_RANK": "3"}) == "3"
    assert node_name({}) == node_name({"GROUP_RANK": ""}) != ""


def test_an_order_of_phases_is_part_of_the_plan() -> None:
    document = {
        "schema": "planner.plan/1", "model": {"name": "m"}, "world": {"ranks": 4, "nodes": 2}, "accuracy": "exact",
        "buckets": [{"gradients": ["a"], "collective": "all_reduce", "algorithm": "torus_2d"}],
        "phase_order": [[0, 0], [0, 1], [0, 2]],
    }  # fmt: skip
    plan = parse_plan(document)
    assert plan.phase_order == ((0, 0), (0, 1), (0, 2))
    assert parse_plan(plan.to_document()) == plan
    assert plan.digest() != parse_plan(document | {"phase_order": None}).digest()
