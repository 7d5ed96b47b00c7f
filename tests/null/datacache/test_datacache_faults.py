"""What may go wrong with the caches: samples stay right, the run goes on, and it is said once."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import subprocess
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cache_datasets import Raw, reads
from filelock import FileLock

import runtime
from runtime.datacache import CachedDataset

MIB = 2**20
SIZE = 5000
"""20 kB a sample."""
COUNT = 60


def make(folder: Path, log: Path | None = None, **options: object) -> CachedDataset:
    """A cache of 1.2 MB of samples; its dataset has one name, whatever the log."""
    data = Raw(log, samples=COUNT, size=SIZE)
    return CachedDataset(data, local_dir=folder, name="numbers", probe=False, **options)  # type: ignore[arg-type]


def stored(folder: Path) -> dict[int, Path]:
    """The files of the samples in a cache's directory, by index."""
    return {int(path.name): path for path in folder.glob("*/*/*")}


def epoch(cached: CachedDataset) -> None:
    """Reads every sample; each has to be right, in each of its bytes."""
    for index in range(COUNT):
        values, label = cached[index]
        assert (label, values.numel()) == (index, SIZE)
        assert bool((values == index).all())


@contextmanager
def told() -> Iterator[list[str]]:
    """The texts of the cache's warnings."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    texts += [str(one.message) for one in caught if one.category is runtime.CacheWarning]
    assert len(caught) == len(texts), caught


@contextmanager
def mounted(folder: Path, options: str) -> Iterator[None]:
    """A file system in memory of its own; skips where this user may not mount one."""
    folder.mkdir(exist_ok=True)
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "datacache", folder], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"cannot mount: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def test_a_full_disk_stops_nothing(tmp_path: Path) -> None:
    with mounted(tmp_path / "small", "size=700k"), told() as texts:
        cached = make(tmp_path / "small", disk_bytes=100 * MIB)
        epoch(cached)
        assert cached.flush()
        epoch(cached)
        stats = cached.stats()
        cached.close()
    assert stats.not_stored > 20
    assert stats.corrupted == 0
    assert len(texts) == 1
    assert "the disk is full; no more samples are stored, those that are there are used. Free some space" in texts[0]


def in_child(function: Callable[[], None]) -> None:
    """Runs a function in a forked process, and fails where it does."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            function()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_files_that_cannot_grow_stop_nothing(tmp_path: Path) -> None:
    """A limit of the process stands for a quota: any user can have one."""

    def limited() -> None:
        with told() as texts:
            cached = make(tmp_path)
            resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
            epoch(cached)
            assert cached.flush()
            epoch(cached)
        assert len(texts) == 1, texts
        assert cached.stats().not_stored > 20
        assert cached.stats().corrupted == 0

    in_child(limited)
    epoch(make(tmp_path))


def test_a_read_only_directory_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    with mounted(folder, "size=50m"):
        cached = make(folder)
        for index in range(COUNT // 2):
            cached[index]
        cached.close()
        subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
        with told() as texts:
            cached = make(folder)
            for _ in range(2):
                epoch(cached)
                cached.flush()
        assert cached.stats().disk_hits == COUNT  # half of them, twice
        cached.close()
    assert len(texts) == 1
    assert (
        "cannot be written to; samples that are there are used, new ones are not stored. Make it writable" in texts[0]
    )


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_without_permission_is_read(tmp_path: Path) -> None:
    epoch(cached := make(tmp_path))
    cached.close()
    tmp_path.chmod(0o555)
    try:
        cached = make(tmp_path)
        epoch(cached)
        assert cached.stats().disk_hits == COUNT
    finally:
        tmp_path.chmod(0o755)


def test_a_read_only_directory_without_anything_is_no_cache(tmp_path: Path) -> None:
    with mounted(tmp_path / "cache", "size=50m,ro"), told() as texts:
        cached = make(tmp_path / "cache")
        epoch(cached)
        cached.flush()
        epoch(cached)
    assert len(texts) == 1
    assert "cannot be written to" in texts[0]


def test_a_deleted_directory_is_made_and_filled_again(tmp_path: Path) -> None:
    folder, log = tmp_path / "cache", tmp_path / "log"
    with told() as texts:
        cached = make(folder, log)
        epoch(cached)
        assert cached.flush()
        shutil.rmtree(folder)
        epoch(cached)
        assert cached.flush()
        epoch(cached)
    assert len(reads(log)) == 2 * COUNT
    assert len(texts) == 1
    assert "was deleted while in use; it is made and filled again" in texts[0]
    cached.close()
    epoch(make(folder, log))
    assert len(reads(log)) == 2 * COUNT


def test_a_corrupted_sample_is_read_again(tmp_path: Path) -> None:
    log = tmp_path / "log"
    epoch(cached := make(tmp_path / "cache", log))
    cached.close()
    for index in (7, 31):
        path = stored(tmp_path / "cache")[index]
        content = bytearray(path.read_bytes())
        content[100] ^= 0x10
        path.write_bytes(content)
    with told() as texts:
        cached = make(tmp_path / "cache", log)
        epoch(cached)
        assert cached.flush()
        assert cached.stats().corrupted == 2
        assert cached.stats().disk_hits == COUNT - 2
        epoch(cached)  # they were stored anew
        assert cached.stats().disk_hits == 2 * COUNT - 2
    assert sorted(reads(log)[COUNT:]) == [7, 31]
    assert len(texts) == 1
    assert "the bytes of sample 7 are not those that were stored; it is read again from the storage" in texts[0]


@pytest.mark.parametrize("seed", range(8))
def test_whatever_happens_to_the_files_samples_stay_right(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.datacache.disk.PAUSE_S", 0.0)
    epoch(cached := make(tmp_path))
    cached.close()
    chance = random.Random(seed)
    files = stored(tmp_path)
    if seed % 2:
        (tmp_path / "used").write_bytes(b"not a number"[: 12 * (seed % 4 == 1)])
    for index in chance.sample(sorted(files), 20):
        content = bytearray(files[index].read_bytes())
        place = chance.choice((0, chance.randrange(len(content))))
        if seed < 4:
            del content[place:]
        else:
            content[place : place + 50] = chance.randbytes(50)
        files[index].write_bytes(content)
    with told() as texts:
        cached = make(tmp_path)
        for _ in range(3):
            epoch(cached)
            assert cached.flush()
        assert cached.stats().corrupted == 20
    assert len(texts) == 1
    again = make(tmp_path)
    epoch(again)
    assert again.stats().disk_hits == COUNT  # the cache has healed
    assert again.stats().disk_used_bytes >= sum(path.stat().st_size for path in stored(tmp_path).values())


def test_the_database_of_an_older_version_is_deleted(tmp_path: Path) -> None:
    """Its bytes would count towards no bound."""
    for name in ("samples.sqlite", "samples.sqlite-wal"):
        (tmp_path / name).write_bytes(bytes(1000))
    with told() as texts:
        cached = make(tmp_path)
        epoch(cached)
        assert cached.flush()
    assert len(texts) == 1
    assert "found samples.sqlite of an older version, which is not read any more; it was deleted" in texts[0]
    assert not list(tmp_path.glob("samples.*"))
    with told() as texts:
        epoch(make(tmp_path))
    assert texts == []


def test_unfinished_files_of_others_may_go_while_room_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process ends with its file after this one has listed the directory."""
    listed = Path.iterdir
    monkeypatch.setattr(Path, "iterdir", lambda folder: iter([*listed(folder), tmp_path / "1-1.new"]))
    with told() as texts:
        cached = make(tmp_path, disk_bytes=64 * 1024)
        epoch(cached)
        assert cached.flush()
    assert texts == []
    assert cached.stats().not_stored > 0


def killed_while_reading(cached: CachedDataset, log: Path, after: int) -> None:
    """Has a child read all samples into the caches, and kills it after so many."""
    child = os.fork()
    if child == 0:
        try:
            while True:
                epoch(cached)
        finally:
            os._exit(1)
    deadline_s = time.monotonic() + 60.0
    while len(reads(log)) < after and time.monotonic() < deadline_s:
        time.sleep(0.0005)
    os.kill(child, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def test_nothing_torn_is_served_after_kill_9(tmp_path: Path) -> None:
    """Killed while both levels are filled, at ten places; what is there is whole, and the rest can be filled."""
    chance, cut_off = random.Random(5), []
    for turn in range(10):
        folder, log = tmp_path / f"cache{turn}", tmp_path / f"log{turn}"
        cached = make(folder, log, memory_bytes=2 * MIB, disk_bytes=5 * MIB)
        killed_while_reading(cached, log, chance.randrange(5, COUNT))
        cut_off.append(cached.stats().samples_in_memory)
        epoch(cached)
        assert cached.stats().samples_in_memory == COUNT
        assert cached.flush()
        cached.close()
        again = make(folder, log)
        epoch(again)
        assert again.stats().corrupted == cached.stats().corrupted == 0
    assert any(0 < held < COUNT for held in cut_off), cut_off


def test_a_writer_that_stalls_holds_nobody_up_for_ever(tmp_path: Path) -> None:
    """A process that is stopped while it holds the lock costs writes, not samples."""
    epoch(cached := make(tmp_path))
    cached.close()
    blocker = FileLock(tmp_path / "lock")
    with blocker, pytest.MonkeyPatch.context() as patch, told() as texts:
        patch.setattr("runtime.datacache.disk.BUSY_S", 0.2)
        other = CachedDataset(Raw(samples=COUNT, size=SIZE), local_dir=tmp_path, name="another", probe=False)
        epoch(other)
        assert other.flush()
    assert len(texts) == 1
    assert "cannot write samples" in texts[0]


def test_two_jobs_share_a_directory(tmp_path: Path) -> None:
    """Two at once fill and read one directory, of the same dataset and of another one."""

    def job(name: str, first: int) -> None:
        data = Raw(tmp_path / "log", samples=COUNT, size=SIZE)
        data.salt = 1000 * first
        cached = CachedDataset(data, local_dir=tmp_path / "cache", name=name, probe=False)
        for _ in range(3):
            for index in range(COUNT):
                assert cached[index][1] == index + 1000 * first
        assert cached.flush()
        assert cached.stats().corrupted == cached.stats().not_stored == 0

    children = []
    for name, first in (("one", 0), ("one", 0), ("two", 1)):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                job(name, first)
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0, 0]
    read = len(reads(tmp_path / "log"))
    job("one", 0)
    job("two", 1)
    assert len(reads(tmp_path / "log")) == read
