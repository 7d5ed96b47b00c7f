"""Who reads which sample when: the partition, DistributedSampler's contract, and epochs that go on."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
from cache_datasets import Numbers
from hypothesis import given
from hypothesis import strategies as some
from torch.utils.data import DistributedSampler

from runtime.datacache import CachedDataset
from runtime.datacache.partition import Partition, Rules, Stage, epoch_orders, numbered
from runtime.errors import InputError

NODES = some.lists(some.integers(0, 3), min_size=1, max_size=7).map(numbered)
COUNTS = some.integers(1, 60)


@given(COUNTS, NODES, some.integers(0, 5))
def test_every_index_has_one_owner_and_one_slot_there(samples: int, nodes: tuple[int, ...], seed: int) -> None:
    partition = Partition(samples, nodes, seed)
    parts = [partition.part(node) for node in range(partition.nodes)]
    assert sorted(np.concatenate(parts).tolist()) == list(range(samples))
    owners = partition.owners(range(samples))
    for node, part in enumerate(parts):
        slots = [partition.slot(int(index), node) for index in range(samples)]
        assert sorted(slot for slot in slots if slot >= 0) == list(range(partition.size(node)))
        assert [index for index in range(samples) if slots[index] >= 0] == part.tolist()
        assert [index for index in range(samples) if owners[index] == node] == part.tolist()
        assert abs(len(part) - samples * nodes.count(node) / len(nodes)) < 1


@given(COUNTS, NODES, some.booleans(), some.booleans(), some.booleans(), some.integers(0, 3))
def test_an_epoch_is_distributed_samplers(
    samples: int, nodes: tuple[int, ...], shuffle: bool, full: bool, drop_last: bool, epoch: int
) -> None:
    """Equally many for each rank; each sample once, but for as many as ranks do not divide."""
    partition = Partition(samples, nodes)
    orders = epoch_orders(partition, Rules(shuffle, full, 7, drop_last), epoch)
    theirs = [
        DistributedSampler(
            range(samples),  # type: ignore[arg-type]
            len(nodes), rank, shuffle=shuffle, seed=7, drop_last=drop_last,
        )
        for rank in range(len(nodes))
    ]  # fmt: skip
    for sampler in theirs:
        sampler.set_epoch(epoch)
    if full and (not drop_last or samples >= len(nodes)):
        assert orders.tolist() == [list(sampler) for sampler in theirs]
    assert orders.shape == (len(nodes), len(theirs[0]) if not drop_last else samples // len(nodes))
    times = Counter(orders.reshape(-1).tolist())
    spare = orders.size - samples
    if spare >= 0:
        assert set(times) == set(range(samples))
    else:
        assert set(times.values()) <= {1}
    if not full:
        owners = partition.owners(range(samples))
        for rank, node in enumerate(nodes):
            assert not partition.size(node) or {int(owners[index]) for index in orders[rank]} <= {node}


def test_epochs_shuffle_anew_within_the_same_parts() -> None:
    partition = Partition(40, (0, 0, 1, 1))
    epochs = [epoch_orders(partition, Rules(True, False, 0, False), epoch) for epoch in range(3)]
    for one, other in pairwise(epochs):
        assert one.tolist() != other.tolist()
        assert set(one[:2].reshape(-1)) == set(other[:2].reshape(-1))
    ranks_see = [set(epoch[0].tolist()) for epoch in epochs]
    assert ranks_see[0] != ranks_see[1]  # within a node, samples change ranks


STEPS = some.lists(some.tuples(NODES, some.integers(0, 9)), min_size=1, max_size=3)


@given(some.integers(1, 80), STEPS, NODES, some.booleans(), some.booleans())
def test_an_epoch_goes_on_with_what_remains(
    samples: int, steps: list[tuple[tuple[int, ...], int]], nodes: tuple[int, ...], shuffle: bool, full: bool
) -> None:
    """However often it was cut off, and with however many ranks it goes on: nothing twice but padding, nothing left."""
    rules, before, seen = Rules(shuffle, full, 3, False), [], []
    for then, done in steps:
        orders = epoch_orders(Partition(samples, then), rules, 2, tuple(before))
        here = min(done, orders.shape[1])
        if not here:
            continue
        seen += orders[:, :here].reshape(-1).tolist()
        before.append(Stage(then, here))
    rest = epoch_orders(Partition(samples, nodes), rules, 2, tuple(before)).reshape(-1).tolist()
    assert set(seen) | set(rest) == set(range(samples))
    padding = sum(len(then) for then, _ in steps) + len(nodes)
    assert len(seen) + len(rest) - samples < padding
    if before:
        assert not set(seen) & set(rest)


def test_the_sampler_goes_on_in_the_middle_of_an_epoch() -> None:
    cached = CachedDataset(Numbers(samples=20), memory_bytes=10**6)
    whole = cached.sampler(seed=5)
    whole.set_epoch(3)
    order = list(whole)
    assert sorted(order) == list(range(20))
    state = json.loads(json.dumps(whole.state_dict(samples_done=8)))
    again = cached.sampler(seed=5)
    again.load_state_dict(state)
    again.set_epoch(again.epoch)
    assert (again.epoch, len(again)) == (3, 12)
    assert list(again) == order[8:]
    later = again.state_dict(samples_done=4)  # cut off once more
    again = cached.sampler(seed=5)
    again.load_state_dict(later)
    assert list(again) == order[12:]
    assert sorted(again) == list(range(20))  # the next iteration is whole
    again.set_epoch(4)
    assert len(again) == 20
    assert list(again) != order


def test_a_state_of_something_else_is_refused() -> None:
    sampler = CachedDataset(Numbers(samples=20), memory_bytes=10**6).sampler(seed=1)
    other = CachedDataset(Numbers(samples=21), memory_bytes=10**6).sampler(seed=1)
    with pytest.raises(InputError, match=r"samples: found 21, expected 20; give the same dataset"):
        sampler.load_state_dict(other.state_dict(0))
    with pytest.raises(InputError, match="seed: found 2, expected 1"):
        sampler.load_state_dict({**sampler.state_dict(0), "seed": 2})
    with pytest.raises(InputError, match="damaged"):
        sampler.load_state_dict({**sampler.state_dict(0), "stages": [3]})
    with pytest.raises(InputError, match="found nothing"):
        sampler.load_state_dict({})
    with pytest.raises(InputError, match="samples_done: found 21, expected 0 to 20"):
        sampler.state_dict(21)


def test_a_length_that_changes_is_refused_when_an_epoch_begins() -> None:
    data = Numbers(samples=20)
    cached = CachedDataset(data, memory_bytes=10**6)
    sampler = cached.sampler()
    assert len(list(sampler)) == 20
    data.samples = 25
    assert len(cached) == 20
    with pytest.raises(InputError, match="found 25 samples, expected 20, as when the cache was made"):
        list(sampler)


def test_torch_samplers_work_too() -> None:
    cached = CachedDataset(Numbers(samples=10), memory_bytes=10**6)
    theirs: DistributedSampler[int] = DistributedSampler(cached, 2, 1)
    assert sorted(int(cached[index][1]) for index in theirs) == sorted(theirs)
    assert torch.equal(cached[torch.tensor(3)][0], cached[3][0])
    assert cached[-1][1] == 9
    with pytest.raises(IndexError):
        cached[10]
