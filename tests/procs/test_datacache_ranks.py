"""The data cache on four ranks of two nodes: each sample once an epoch, read from the storage once at all."""

from __future__ import annotations

from collections import Counter
from typing import Any

import datacache_checks
import pytest
from datacache_checks import EPOCHS, SAMPLES

from planner.jobs.launch import LocalWorld, run_ranks


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Results of four ranks."""
    return run_ranks(LocalWorld(ranks=4), datacache_checks.all_checks, str(tmp_path_factory.mktemp("ranks")))


def test_four_ranks_read_each_sample_once_in_each_of_three_epochs(ranks: list[dict[str, Any]]) -> None:
    by_rank = [rank["within_nodes"]["epochs"] for rank in ranks]
    for epoch in range(EPOCHS):
        assert Counter(label for mine in by_rank for label in mine[epoch]) == Counter(range(SAMPLES))
    for mine in by_rank:
        assert len({tuple(epoch) for epoch in mine}) == EPOCHS  # in another order each time


def test_nodes_keep_to_their_parts(ranks: list[dict[str, Any]]) -> None:
    found = [rank["within_nodes"] for rank in ranks]
    for first, second in ((found[0], found[1]), (found[2], found[3])):
        part = set(first["epochs"][0]) | set(second["epochs"][0])
        assert Counter(first["read"]) == Counter(part)  # from the storage, each once, in all epochs and both ranks
        assert first["held"] == len(part) == SAMPLES // 2
        assert first["hits"] == (EPOCHS - 1) * len(part)
        for epoch in range(EPOCHS):
            assert set(first["epochs"][epoch]) | set(second["epochs"][epoch]) == part


def test_a_later_run_reads_the_disk_alone(ranks: list[dict[str, Any]]) -> None:
    found = [rank["within_nodes"] for rank in ranks]
    assert Counter(label for one in found for label in one["again"]) == Counter(range(SAMPLES))
    assert [one["read_later"] for one in found] == [[]] * 4
    assert [one["later_hits"] for one in found] == [SAMPLES // 2] * 4


@pytest.mark.parametrize("workers", ["here", "fork", "spawn"])
def test_full_shuffling_is_distributed_samplers(ranks: list[dict[str, Any]], workers: str) -> None:
    for rank in ranks:
        found = rank["over_all"]["epochs"][workers]
        assert found == rank["over_all"]["expected"][: len(found)]
        assert len(found) == (1 if workers == "spawn" else EPOCHS)


def test_full_shuffling_reads_the_storage_once(ranks: list[dict[str, Any]]) -> None:
    """What other nodes hold comes from them: seven epochs, every sample read on one node and once."""
    nodes = [ranks[0]["over_all"], ranks[2]["over_all"]]
    assert Counter(nodes[0]["read"] + nodes[1]["read"]) == Counter(range(SAMPLES))
    assert all(one["fetched"] > (2 * EPOCHS + 1) * SAMPLES // 8 for one in nodes)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("lengths", "ranks have different lengths of the dataset (rank 0: 90, rank 1: 91, rank 2: 92, rank 3: 93)"),
        ("bounds", "ranks of one node gave different datasets, memory_bytes, disk_bytes or local_dir"),
        ("one", "memory_bytes: found -"),
        ("first read", "this sample is broken"),
    ],
)
def test_every_rank_is_told_what_is_wrong(ranks: list[dict[str, Any]], what: str, words: str) -> None:
    for rank in ranks:
        assert words in rank["refusals"][what]


def test_a_sample_that_its_node_cannot_read_is_told(ranks: list[dict[str, Any]]) -> None:
    said = [rank["refusals"]["broken"] for rank in ranks]
    assert any(text == "OSError: this sample is broken" for text in said)
    for text in said:
        assert "this sample is broken" in text or "could not read one of the samples" in text or text == "nothing"


def test_a_rank_that_stays_away_is_missed(ranks: list[dict[str, Any]]) -> None:
    said = [rank["a_rank_that_stays_away"] for rank in ranks]
    assert said[3] == "away"
    for text in said[:3]:
        assert "exchanging samples between nodes: another rank died, or did not read a batch within 2 s" in text
