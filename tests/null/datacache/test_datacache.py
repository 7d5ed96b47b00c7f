"""The two levels in one process and its DataLoader workers: what is read again, and what is not."""

from __future__ import annotations

import os
import pickle
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cache_datasets import SAMPLES, Given, Numbers, Raw, add_noise, reads
from torch.utils.data import DataLoader, IterableDataset

import runtime
from runtime.datacache import CachedDataset
from runtime.errors import InputError

MIB = 2**20


def everything(cached: CachedDataset) -> None:
    """Reads each sample and compares it with the dataset's."""
    for index in range(len(cached)):
        values, label = cached[index]
        assert label == index
        assert torch.equal(values, torch.full((100,), index, dtype=torch.float32))


@pytest.mark.parametrize("kind", [Numbers, Raw])
def test_memory_spares_the_storage_and_the_decoding(tmp_path: Path, kind: type[Numbers]) -> None:
    cached = CachedDataset(kind(tmp_path / "log"), memory_bytes=MIB, probe=False)
    everything(cached)
    assert sorted(reads(tmp_path / "log")) == list(range(SAMPLES))
    everything(cached)
    assert len(reads(tmp_path / "log")) == SAMPLES
    stats = cached.stats()
    assert (stats.memory_hits, stats.source_reads, stats.samples_in_memory) == (SAMPLES, SAMPLES, SAMPLES)


@pytest.mark.parametrize("kind", [Numbers, Raw])
def test_the_disk_outlives_the_run(tmp_path: Path, kind: type[Numbers]) -> None:
    for run in range(3):
        cached = CachedDataset(kind(tmp_path / "log"), local_dir=tmp_path / "cache", probe=False)
        everything(cached)
        cached.close()
        assert len(reads(tmp_path / "log")) == SAMPLES
        assert cached.stats().disk_hits == (SAMPLES if run else 0)


def test_a_dataset_without_a_name_is_told_by_what_it_holds(tmp_path: Path) -> None:
    """Other options, other samples: nothing of one is given for the other."""
    for size in (100, 101):
        cached = CachedDataset(Numbers(size=size), local_dir=tmp_path / "cache")
        assert cached[3][0].numel() == size
        cached.close()
    assert CachedDataset(Numbers(size=100), local_dir=tmp_path / "cache", probe=False)[3][0].numel() == 100


def test_what_cannot_be_pickled_needs_a_name(tmp_path: Path) -> None:
    data = Raw()
    data.hook = lambda: None  # type: ignore[attr-defined]
    with pytest.raises(InputError, match=r"Raw cannot be pickled .* give CachedDataset a name="):
        CachedDataset(data, local_dir=tmp_path)
    cached = CachedDataset(data, local_dir=tmp_path, name="numbers")
    everything(cached)


@pytest.mark.filterwarnings("ignore::runtime.CacheWarning")
def test_data_that_has_changed_under_its_name_is_not_used(tmp_path: Path) -> None:
    cached = CachedDataset(Raw(), local_dir=tmp_path, name="numbers")
    everything(cached)
    cached.close()
    changed = Raw()
    changed.salt = 1
    with pytest.warns(runtime.CacheWarning, match="the dataset has changed since its samples were stored"):
        cached = CachedDataset(changed, local_dir=tmp_path, name="numbers")
    assert [cached[index][1] for index in range(3)] == [1, 2, 3]


def test_augmentation_runs_after_the_cache_and_harms_nothing() -> None:
    cached = CachedDataset(Numbers(), memory_bytes=MIB, transform=add_noise)
    first, second = cached[5][0], cached[5][0]
    assert not torch.equal(first, second)
    cached.transform = None
    everything(cached)  # add_noise has written to copies


def test_augmentation_inside_is_found() -> None:
    class Noisy(Numbers):
        def __getitem__(self, index: int) -> Any:
            return torch.rand(3)

    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    with pytest.raises(InputError, match=r"sample 0 differs between two reads.*transform="):
        CachedDataset(Noisy(), memory_bytes=MIB)
    assert torch.equal(torch.rand(2), expected)  # the run's random numbers are as without it


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_workers_share_both_levels(tmp_path: Path, start: str) -> None:
    cached = CachedDataset(Raw(tmp_path / "log"), local_dir=tmp_path / "cache", memory_bytes=MIB, probe=False)
    sampler = cached.sampler()
    loader = DataLoader(
        cached, batch_size=4, sampler=sampler, num_workers=2, multiprocessing_context=start, persistent_workers=True
    )
    for epoch in range(2):
        sampler.set_epoch(epoch)
        labels = [label for values, batch in loader for label in batch.tolist() if values.shape == (4, 100)]
        assert sorted(labels) == list(range(SAMPLES))
    assert Counter(reads(tmp_path / "log")) == Counter(range(SAMPLES))  # by whichever worker, once
    everything(cached)
    stats = cached.stats()
    assert (stats.memory_hits, stats.source_reads) == (2 * SAMPLES, SAMPLES)
    del loader
    again = CachedDataset(Raw(tmp_path / "log"), local_dir=tmp_path / "cache", probe=False)
    everything(again)
    assert again.stats().disk_hits == SAMPLES  # workers have written all as they ended


def test_a_fork_in_the_middle_of_writing_is_safe(tmp_path: Path) -> None:
    """Children neither inherit a database nor write what their parent writes; both go on."""
    cached = CachedDataset(Raw(tmp_path / "log"), local_dir=tmp_path / "cache", probe=False)
    for index in range(SAMPLES // 2):
        cached[index]
        if index % 3 == 0:
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    code = int(cached[index + SAMPLES // 2][1] != index + SAMPLES // 2 or not cached.flush(20.0))
                finally:
                    os._exit(code)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert cached.flush()
    read = len(reads(tmp_path / "log"))
    for index in (*range(SAMPLES // 2), *range(SAMPLES // 2, SAMPLES, 3)):
        assert cached[index][1] == index
    assert len(reads(tmp_path / "log")) == read


def test_memory_stays_within_its_bound_and_is_used() -> None:
    bound = 2 * MIB
    cached = CachedDataset(Numbers(samples=1000, size=2000), memory_bytes=bound)  # 8 MB of samples
    for index in range(1000):
        assert cached[index][1] == index
    stats = cached.stats()
    assert 0.95 * bound <= stats.memory_used_bytes <= bound
    held = stats.samples_in_memory
    for index in range(1000):  # a second epoch hits what is held: nothing was thrown out for nothing
        assert cached[index][1] == index
    assert cached.stats().memory_hits == held == cached.stats().samples_in_memory


def test_the_disk_stays_within_its_bound_and_is_used(tmp_path: Path) -> None:
    bound = 4 * MIB
    cached = CachedDataset(Raw(samples=400, size=10_000), local_dir=tmp_path, disk_bytes=bound)  # 16 MB
    for index in range(400):
        cached[index]
    assert cached.flush()
    assert 0.6 * bound < cached.stats().disk_used_bytes <= bound
    assert cached.stats().not_stored > 200
    hits = cached.stats().disk_hits
    for index in range(400):
        assert cached[index][1] == index
    assert cached.stats().disk_hits - hits > 60
    assert sum(entry.stat().st_size for entry in tmp_path.iterdir()) <= bound


def test_old_datasets_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(name: str) -> int:
        cached = CachedDataset(
            Raw(samples=60, size=10_000), local_dir=tmp_path, disk_bytes=2 * MIB, name=name, probe=False
        )
        for _ in range(2):
            for index in range(60):
                assert cached[index][1] == index
            cached.flush()
        cached.close()
        return cached.stats().disk_hits

    alone = fill("first")
    assert alone > 25
    assert fill("second") == 0  # the first one is in use
    monkeypatch.setattr("runtime.datacache.disk.KEPT_FOR_S", -1.0)
    assert fill("third") == alone
    assert fill("first") == alone


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"memory_bytes": 1000}, r"memory_bytes: found 1000, expected at least \d+: one decoded sample has \d+ bytes"),
        ({"disk_bytes": 1000}, r"disk_bytes: found 1000, expected at least \d+: one raw sample has 400 bytes"),
        ({"memory_bytes": -1}, "memory_bytes: found -1, expected a number of bytes"),
        ({"memory_bytes": "1 GB"}, "memory_bytes: found '1 GB', expected a number of bytes"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"local_dir": __file__}, "is a file, expected a directory"),
        ({"local_dir": ""}, "empty path"),
    ],
)
def test_bounds_and_directories_that_are_none(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        CachedDataset(Raw(), **{"local_dir": tmp_path, **options})


def test_bounds_that_hold_one_sample_do(tmp_path: Path) -> None:
    data = Numbers(samples=4)
    for name in ("memory_bytes", "disk_bytes"):
        folder = tmp_path if name == "disk_bytes" else None
        with pytest.raises(InputError) as caught:
            CachedDataset(data, local_dir=folder, **{name: 1})
        least = int(str(caught.value).split("at least ")[1].split(":")[0])
        cached = CachedDataset(data, local_dir=folder, **{name: least})
        for _ in range(2):
            cached[2]
            cached.flush()
        assert cached.stats().memory_hits + cached.stats().disk_hits == 1


def test_a_network_file_system_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.datacache.node.file_system", lambda folder: "nfs4")
    with pytest.raises(InputError, match=r"network file system \(nfs4\), expected a disk of this node"):
        CachedDataset(Raw(), local_dir=tmp_path)


def test_what_is_no_map_style_dataset_is_refused() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(())

    for data in (Stream(), object()):
        with pytest.raises(InputError, match="expected a map-style dataset"):
            CachedDataset(data)
    with pytest.raises(InputError, match="without samples"):
        CachedDataset([])

    class Text(Raw):
        def read(self, index: int) -> Any:
            return "text"

    with pytest.raises(InputError, match=r"dataset.read\(0\): found a str, expected bytes"):
        CachedDataset(Text(), memory_bytes=MIB)


def test_samples_that_cannot_be_stored_are_named(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"sample 0: sample\[1\] is a .*Numbers, which cannot be stored; expected tensors"
    ):
        CachedDataset(Given((1, Numbers())), memory_bytes=MIB)
    odd = Given(1, 2, 3, 4, 5, {6}, 7, 8)
    cached = CachedDataset(odd, local_dir=tmp_path, memory_bytes=MIB, probe=False, name="odd")
    with pytest.warns(runtime.CacheWarning, match=r"sample 5: sample is a builtins.set, which cannot be stored"):
        assert [cached[index] for index in range(8)] == list(odd.given)
    assert [cached[index] for index in range(8)] == list(odd.given)  # said once, counted twice
    assert cached.stats().unstorable == 2


def test_without_caches_it_is_the_dataset() -> None:
    cached = CachedDataset(Given({1}, {2}))
    assert [cached[0], cached[1]] == [{1}, {2}]


def test_it_is_not_for_pickling() -> None:
    with pytest.raises(InputError, match="expected it to stay on its node"):
        pickle.dumps(CachedDataset(Numbers(), memory_bytes=MIB))


@pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")
def test_batches_may_be_pinned() -> None:
    cached = CachedDataset(Numbers(), memory_bytes=MIB)
    for _ in range(2):
        loader = DataLoader(cached, batch_size=4, pin_memory=True, sampler=cached.sampler())
        batches = [values for values, _ in loader]
        assert len(batches) == SAMPLES // 4
        assert all(batch.is_pinned() for batch in batches) or not torch.cuda.is_available()
