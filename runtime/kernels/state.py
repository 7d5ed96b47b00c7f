"""State of a selection on its device: places of segments, hints from step to step, and working memory.

Everything is allocated once, in one piece, so that a step allocates nothing and can be captured in a CUDA graph.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.kernels.source import Shape

MAX_ELEMENTS = 2**31 - 1
"""Most elements of all segments together: indices are int32."""

BINS, MOST_CHUNKS = 4096, 1024
"""Bins of a histogram; most pieces of a segment in the later phases."""

SPARE, ROOM = 4096, 6
"""Room for candidates: SPARE + ROOM · k."""

DENSE, SMALL = 4, 65536
"""A segment of more than SMALL elements that sends more than a DENSE-th has no candidates: it is read again."""

LEAD = 3
"""Tiles may begin so many elements before their segment, so that vectors are aligned."""

WARM = (
    "floor", "base", "shift", "multiple", "flags", "threshold", "candidates", "calls", "cold", "hits", "misses",
    "overflows", "filtered", "restarted", "direct", "passes",
)  # fmt: skip
"""The words of `struct Warm` (plan.cu)."""

WORDS_OF_SEGMENT, WORDS_OF_CONTROL = 16, 32

CHECKED: dict[int, tuple[int, ...]] = {}
"""Address of a state's memory → addresses of the tensors of its last call, which share no memory."""


@dataclass(frozen=True)
class Layout:
    """Places of everything in a state's memory. The same for all states of the same segments."""

    elements: tuple[int, ...]
    k: tuple[int, ...]
    shape: Shape
    capacity: int | None
    """Room for candidates in each segment; None: as `make_state` finds right."""

    @functools.cached_property
    def capacities(self) -> tuple[int, ...]:
        """Candidates that there is room for, by segment, as all lists here."""
        if self.capacity is not None:
            return tuple(self.capacity if n else 0 for n in self.elements)
        return tuple(
            0 if n > SMALL and k * DENSE > n else min(n, SPARE + ROOM * k)
            for n, k in zip(self.elements, self.k, strict=True)
        )

    @functools.cached_property
    def tiles(self) -> tuple[int, ...]:
        return tuple(-(-(n + LEAD) // self.shape.tile) if n else 0 for n in self.elements)

    @functools.cached_property
    def tiles_per_chunk(self) -> tuple[int, ...]:
        return tuple(max(1, -(-tiles // MOST_CHUNKS)) for tiles in self.tiles)

    @functools.cached_property
    def chunks(self) -> tuple[int, ...]:
        return tuple(-(-tiles // each) for tiles, each in zip(self.tiles, self.tiles_per_chunk, strict=True))

    @functools.cached_property
    def parts(self) -> dict[str, slice]:
        """Pieces of the memory by name, in order, as int32; each begins at a multiple of 256 bytes."""
        segments, tiles, chunks = len(self.elements), sum(self.tiles), sum(self.chunks)
        sizes = {
            "segments": 8 * WORDS_OF_SEGMENT * segments,
            "tile_segments": 4 * tiles,
            "chunk_segments": 4 * chunks,
            "warm": 4 * len(WARM) * segments,
            "progress": 4 * 16 * segments,
            "control": 4 * WORDS_OF_CONTROL,
            "histograms": 4 * BINS * segments,
            "candidates": 8 * sum(self.capacities),
            "tiles": 8 * tiles,
            "tile_counts": 8 * tiles,
            "chunk_counts": 8 * chunks,
        }
        parts, start = {}, 0
        for name, size_bytes in sizes.items():
            parts[name] = slice(start // 4, (start + size_bytes) // 4)
            start += -(-size_bytes // 256) * 256
        return parts

    @functools.cached_property
    def size_bytes(self) -> int:
        last: slice = list(self.parts.values())[-1]
        return -(-4 * int(last.stop) // 256) * 256

    @property
    def numbers(self) -> list[int]:
        """Return the numbers that define the layout, for `layout_of`."""
        shape, capacity = self.shape, -1 if self.capacity is None else self.capacity
        return [shape.threads, shape.vectors, shape.min_blocks, capacity, *self.elements, *self.k]

    def table(self) -> Tensor:
        """Return `struct Segment` (keys.cu) of each segment. Shape (segments, 16), int64, on the CPU."""
        starts = _sums(self.elements)
        columns = zip(
            starts, starts, starts, self.elements, self.k, _sums(self.k), starts, _sums(self.tiles), self.tiles,
            _sums(self.chunks), self.chunks, self.tiles_per_chunk, _sums(self.capacities), self.capacities, strict=True,
        )  # fmt: skip
        return torch.tensor([[*row, 0, 0] for row in columns], dtype=torch.int64)

    def owners(self, counts: Sequence[int]) -> Tensor:
        """Return the segment that each tile, or chunk, belongs to. 1-D int32, on the CPU."""
        return torch.repeat_interleave(torch.arange(len(counts), dtype=torch.int32), torch.tensor(counts))


def _sums(values: Sequence[int]) -> list[int]:
    """Sum everything before each."""
    return list(itertools.accumulate(values, initial=0))[:-1]


@functools.lru_cache(maxsize=256)
def layout_of(numbers: tuple[int, ...]) -> Layout:
    """Return the layout of these `Layout.numbers`."""
    threads, vectors, min_blocks, capacity, *segments = numbers
    elements, k = tuple(segments[: len(segments) // 2]), tuple(segments[len(segments) // 2 :])
    shape = Shape(threads=threads, vectors=vectors, min_blocks=min_blocks)
    return Layout(elements, k, shape, None if capacity < 0 else capacity)


@dataclass(eq=False)
class TopkState:
    """State of one place that selects: made by `make_state`.

    What a step leaves to the next makes it faster and never changes a result, so a state need not be saved; zeros, and
    even garbage in `warm`, are sound. One state serves one call after another on one stream, never two at once.
    """

    layout: Layout
    memory: Tensor
    """1-D int64, on the device; zeros but for the tables."""

    @property
    def k(self) -> int:
        return sum(self.layout.k)

    @property
    def elements(self) -> int:
        return sum(self.layout.elements)

    def part(self, name: str) -> Tensor:
        return self.memory.view(torch.int32)[self.layout.parts[name]]

    @property
    def warm(self) -> Tensor:
        """Return the hints from one step to the next. Shape (segments, 16), int32; see `WARM`."""
        return self.part("warm").view(-1, len(WARM))

    @property
    def nonfinite(self) -> Tensor:
        """1 where a segment held NaN or ±Inf in the last call, for loss scalers. Shape (segments,), int32."""
        return self.warm[:, WARM.index("flags")]

    def counters(self) -> list[dict[str, int]]:
        """`warm` by name, for each segment. Waits for the device."""
        return [dict(zip(WARM, row, strict=True)) for row in self.warm.tolist()]

    def reset(self) -> None:
        self.warm.zero_()


def make_state(
    elements: Sequence[int], k: Sequence[int], device: torch.device | str, *, shape: Shape | None = None,
    capacity: int | None = None,
) -> TopkState:  # fmt: skip
    """Make room for a selection of k[i] of elements[i] elements for each segment i.

    Args:
        elements: of each segment, at least 0; together less than 2³¹.
        k: of each segment, from 1 to its elements (0 where it has none).
        device: where the gradients are.
        shape: threads and elements that work together; results do not depend on it.
        capacity: room for candidates, for tests.

    Raises:
        ValueError: names the argument.
    """
    if not elements or len(elements) != len(k):
        raise ValueError(
            f"k: found {len(k)} numbers for {len(elements)} segments; expected one for each, and a segment"
        )
    for i, (n, kept) in enumerate(zip(elements, k, strict=True)):
        if not (1 <= kept <= n or kept == n == 0):
            raise ValueError(f"k: found {kept} for segment {i} of {n} elements; expected from 1 to these (0 of none)")
    if sum(elements) > MAX_ELEMENTS:
        raise ValueError(
            f"elements: found {sum(elements)} in all; expected at most {MAX_ELEMENTS}, which int32 indices reach: "
            f"select from parts of them"
        )
    layout = Layout(tuple(elements), tuple(k), shape or Shape(), capacity)
    memory = torch.zeros(layout.size_bytes // 8, dtype=torch.int64, device=device)
    # The allocator may have given an earlier state's memory again, whose tensors lay elsewhere.
    CHECKED.pop(memory.data_ptr(), None)
    state = TopkState(layout, memory)
    state.part("segments").view(torch.int64).view(-1, WORDS_OF_SEGMENT).copy_(layout.table())
    state.part("tile_segments").copy_(layout.owners(layout.tiles))
    state.part("chunk_segments").copy_(layout.owners(layout.chunks))
    return state
