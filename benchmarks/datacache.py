"""What DataCache saves behind slow storage, on real JPEGs.

    python -m benchmarks.datacache              # 20,000 JPEGs of 256²; a table; exit code 1 where a target is missed
    python -m benchmarks.datacache --quick      # 1,000 of them
    python -m benchmarks.datacache --write docs/results/datacache.md

Pillow makes the JPEGs. The storage is a dataset that waits: 2 ms for each file that is opened, and until the file would
have come through a link of 20 MB/s, which all workers share. FUSE would do the same below the file system; it needs
packages and rights that most machines lack, and adds costs of its own to both sides.

Every epoch is one of a DataLoader with its usual worker processes. `I/O` epochs read files and decode nothing;
`training` epochs decode, crop and flip at random after the cache, and train a small convolutional network, which is
input-bound here.
"""

from __future__ import annotations

import argparse
import fcntl
import io
import mmap
import os
import platform
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler

from benchmarks.marked import publish
from runtime.datacache import CachedDataset

OPEN_S, BYTES_PER_S = 2e-3, 20e6
SIDE, CROP = 256, 128
BATCH = 32
HIT_BYTES, HIT_LIMIT_US = 150_000, 30.0


class Link:
    """A link of so many bytes per second that processes share: each transfer begins when the last one has ended."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("link")
        os.ftruncate(self.descriptor, mmap.PAGESIZE)
        self._map = mmap.mmap(self.descriptor, mmap.PAGESIZE)

    def transfer(self, size_bytes: int) -> None:
        """Waits until a file that is opened now would have come."""
        opened_s = time.monotonic() + OPEN_S
        fcntl.lockf(self.descriptor, fcntl.LOCK_EX)
        free_s = struct.unpack_from("<d", self._map)[0]
        done_s = max(opened_s, free_s) + size_bytes / BYTES_PER_S
        struct.pack_into("<d", self._map, 0, done_s)
        fcntl.lockf(self.descriptor, fcntl.LOCK_UN)
        time.sleep(max(0.0, done_s - time.monotonic()))


LINK = Link()
"""Inherited by forked workers."""


class Files:
    """The files of a directory as raw samples, over the link; a sample is its bytes."""

    def __init__(self, folder: str) -> None:
        self.paths = sorted(str(path) for path in Path(folder).iterdir())

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        return self.decode(self.read(index))

    def read(self, index: int) -> bytes:
        """The file's content."""
        with open(self.paths[index], "rb") as file:
            raw = file.read()
        LINK.transfer(len(raw))
        return raw

    def decode(self, raw: bytes) -> Any:
        """Nothing to do."""
        return raw


class Jpegs(Files):
    """The same, decoded: a uint8 tensor of shape [3, 256, 256]."""

    def decode(self, raw: bytes) -> Tensor:
        """By Pillow."""
        from PIL import Image

        with Image.open(io.BytesIO(raw)) as image:
            return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1).contiguous()


def augment(image: Tensor) -> Tensor:
    """A random crop, flipped or not: uint8, shape [3, 128, 128]."""
    row, column = torch.randint(0, SIDE - CROP, (2,)).tolist()
    crop = image[:, row : row + CROP, column : column + CROP]
    return crop.flip(-1) if torch.rand(()) < 0.5 else crop


class Augmented(Jpegs):
    """What one has without a cache."""

    def __getitem__(self, index: int) -> Tensor:
        return augment(super().__getitem__(index))


def make_jpegs(folder: Path, count: int) -> int:
    """Writes JPEGs of smooth noise, all different; returns their size in bytes."""
    from PIL import Image

    generator = np.random.default_rng(0)
    coarse = [generator.integers(0, 255, (17, 17, 3), dtype=np.uint8) for _ in range(64)]
    grain = generator.normal(0.0, 12.0, (2 * SIDE, 2 * SIDE, 3)).astype(np.float32)
    total = 0
    for number in range(count):
        smooth = Image.fromarray(coarse[number % 64]).resize((SIDE, SIDE), Image.Resampling.BICUBIC)
        row, column = generator.integers(0, SIDE, 2)
        pixels = np.asarray(smooth, dtype=np.float32) + grain[row : row + SIDE, column : column + SIDE]
        path = folder / f"{number:06d}.jpg"
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(path, quality=90)
        total += path.stat().st_size
    return total


def count_bytes(batch: list[bytes]) -> int:
    """For epochs of I/O alone: what was read stays in the worker."""
    return sum(map(len, batch))


def epoch_s(dataset: Any, workers: int, use: Callable[[Any], object]) -> float:
    """How long an epoch takes, in random order."""
    loader: DataLoader[Any] = DataLoader(
        dataset, batch_size=BATCH, sampler=RandomSampler(dataset), num_workers=workers,
        collate_fn=count_bytes if use is ignore else None,
    )  # fmt: skip
    start = time.perf_counter()
    for batch in loader:
        use(batch)
    return time.perf_counter() - start


def ignore(batch: Any) -> None:
    """For epochs of I/O alone."""


class Training:
    """A small network that is trained on whatever comes."""

    def __init__(self) -> None:
        self.model = nn.Sequential(
            nn.Conv2d(3, 8, 8, stride=8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * (CROP // 8) ** 2, 10)
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)

    def __call__(self, images: Tensor) -> None:
        """One step."""
        self.optimizer.zero_grad()
        self.model(images.to(torch.float32) / 255).square().mean().backward()
        self.optimizer.step()


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    what: str
    measured: str
    target: str
    held: bool | None = None


def hit_us() -> float:
    """Median time of a hit in memory for a sample of 150 kB, in this process, in random order."""
    images = [torch.randint(0, 255, (HIT_BYTES,), dtype=torch.uint8) for _ in range(8)]
    data = [images[index % 8] for index in range(2000)]
    cached = CachedDataset(data, memory_bytes=2**29)
    for index in range(len(data)):
        cached[index]
    order = np.random.default_rng(1).permutation(len(data)).tolist()
    times = []
    for index in order:
        start = time.perf_counter()
        cached[index]
        times.append((time.perf_counter() - start) * 1e6)
    assert cached.stats().memory_hits >= len(data)
    return median(times)


def bounded_memory(folder: str, samples: int) -> tuple[int, int]:
    """(bound, what the system says is used) for a bound of a quarter of the decoded samples."""
    bound_bytes = samples * 3 * SIDE * SIDE // 4
    image = torch.zeros((3, SIDE, SIDE), dtype=torch.uint8)
    cached = CachedDataset([image] * samples, memory_bytes=bound_bytes)
    for index in range(samples):
        cached[index]
    return bound_bytes, cached.stats().memory_used_bytes


def measure(folder: str, workers: int, cache: Path) -> Iterator[Row]:
    """The rows about epochs, one after the other."""
    samples = len(Files(folder))
    plain_s = epoch_s(Files(folder), workers, ignore)
    files = CachedDataset(Files(folder), local_dir=cache / "files", probe=False)
    first_s = epoch_s(files, workers, ignore)
    second_s = epoch_s(files, workers, ignore)
    plain_s = (plain_s + epoch_s(Files(folder), workers, ignore)) / 2  # before and after: machines drift
    assert files.stats().disk_hits > 0.95 * samples, files.stats()
    files.close()
    yield Row(
        "I/O of an epoch without a cache, mean of two",
        f"{plain_s:.2f} s, {plain_s / samples * 1e3:.2f} ms a sample",
        "",
    )
    yield over("I/O of epoch 1, which fills the disk", first_s, plain_s, "≤ 1.05 × of that", first_s <= 1.05 * plain_s)
    yield under("I/O of epoch 2, from the disk", plain_s, second_s, "≥ 10 × faster", plain_s >= 10 * second_s)
    train = Training()
    plain_s = epoch_s(Augmented(folder), workers, train)
    both = CachedDataset(
        Jpegs(folder),
        local_dir=cache / "both",
        memory_bytes=2 * samples * 3 * SIDE * SIDE,
        transform=augment,
        probe=False,
    )
    first_s = epoch_s(both, workers, train)
    second_s = epoch_s(both, workers, train)
    assert both.stats().memory_hits == samples, both.stats()
    both.close()
    later = CachedDataset(Jpegs(folder), local_dir=cache / "both", transform=augment, probe=False)
    later_s = epoch_s(later, workers, train)
    yield Row("training an epoch without a cache", f"{plain_s:.2f} s, {samples / plain_s:,.0f} samples/s", "")
    yield over("training in epoch 1, which fills both levels", first_s, plain_s, "≤ 1.05 ×", first_s <= 1.05 * plain_s)
    yield under("training in epoch 2, from memory", plain_s, second_s, "≥ 2 × the samples/s", plain_s >= 2 * second_s)
    yield Row("training in a later run's epoch 1, from the disk", f"{later_s:.2f} s, {plain_s / later_s:.1f} ×", "")


def over(what: str, time_s: float, base_s: float, target: str, held: bool) -> Row:
    """A line that says how much more time something takes."""
    return Row(what, f"{time_s:.2f} s, {time_s / base_s:.3f} ×", target, held)


def under(what: str, base_s: float, time_s: float, target: str, held: bool) -> Row:
    """A line that says how many times faster something is."""
    return Row(what, f"{time_s:.2f} s, {base_s / time_s:.1f} × faster", target, held)


@contextmanager
def jpegs(samples: int) -> Iterator[tuple[str, Path, int]]:
    """(directory of JPEGs, directory for caches, bytes of the JPEGs)."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "jpegs").mkdir()
        size_bytes = make_jpegs(Path(folder) / "jpegs", samples)
        yield str(Path(folder) / "jpegs"), Path(folder) / "cache", size_bytes


def text_of(rows: list[Row], head: str) -> str:
    """The table, as Markdown."""
    lines = [head, "", "| what | measured | target | |", "| --- | --- | --- | --- |"]
    for row in rows:
        verdict = {None: "", True: "held", False: "**missed**"}[row.held]
        lines.append(f"| {row.what} | {row.measured} | {row.target} | {verdict} |")
    return "\n".join(lines)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--samples", type=int, default=20_000)
    parser.add_argument("--quick", action="store_true", help="1,000 samples")
    parser.add_argument("--workers", type=int, default=2, help="of the DataLoader")
    parser.add_argument("--write", help="a document whose table is replaced")
    options = parser.parse_args()
    samples = 1000 if options.quick else options.samples
    with jpegs(samples) as (folder, cache, size_bytes):
        rows = []
        for row in measure(folder, options.workers, cache):
            rows.append(row)
            print(f"{row.what}: {row.measured}", file=sys.stderr, flush=True)
        bound_bytes, used_bytes = bounded_memory(folder, samples)
    share = used_bytes / bound_bytes
    rows.append(
        Row("memory used, of a bound of a quarter of the samples", f"{share:.1%}", "95 to 105 %", 0.95 <= share <= 1.05)
    )
    hit = hit_us()
    rows.append(
        Row(f"a hit in memory, {HIT_BYTES // 1000} kB", f"{hit:.1f} µs", f"≤ {HIT_LIMIT_US:g} µs", hit <= HIT_LIMIT_US)
    )
    head = (
        f"{samples:,} JPEGs of {SIDE}², {size_bytes / samples / 1e3:.1f} kB each, behind {OPEN_S * 1e3:g} ms per open "
        f"and {BYTES_PER_S / 1e6:g} MB/s; {options.workers} workers on {os.cpu_count()} cores; Python "
        f"{platform.python_version()}, torch {torch.__version__}."
    )
    publish(Path(options.write) if options.write else None, {"datacache": text_of(rows, head)})
    sys.exit(any(row.held is False for row in rows))


if __name__ == "__main__":
    main()
