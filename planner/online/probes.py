"""Work that is timed behind the steps of a run: messages of some sizes, and encoding in narrow dtypes.

The same pieces on every rank, in one order; their number and sizes depend on the model alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from planner.documents.profile import Sample
from planner.profile.bench import sizes_up_to
from planner.profile.links import QUEUED, make_payload, undisturbed
from planner.profile.request import ALL_REDUCE, NARROW_SUMS
from planner.profile.selection import ENCODINGS, TimedBucket
from runtime.comm.by_device import make_communicator
from runtime.comm.collectives import COLLECTIVES
from runtime.comm.communicator import CommTiming, Payload
from runtime.session.session import Session

SMALLEST_BYTES, LARGEST_BYTES = 1024, 4 * 1024 * 1024
"""Sizes of all-reduces that are sent to time them; larger ones are timed as steps send them."""
NARROW_BYTES = (4096, 64 * 1024, 1024 * 1024)
"""Sizes of messages in narrow dtypes: beyond them time is a line, as narrow steps are not measured."""
ENCODED_BYTES = (64 * 1024, 2 * 1024 * 1024)
"""Sizes of buckets that are encoded, as float32."""
START_UP_US = 500.0
"""Expected start-up time of a message before one has been seen."""
ENCODE_START_UP_US, ENCODE_US_PER_BYTE = 200.0, 4e-3
"""Expected time of encoding and decoding before either has been seen."""
PASSES = 3
"""Number of times that each piece is timed."""

Curve = tuple[Sample, ...]
Times = tuple[float, ...]
"""Time of each part of a piece in microseconds: of messages the whole, of a bucket encoding and decoding."""


@dataclass(frozen=True)
class Piece:
    """Messages of one size by one collective, or a bucket that is encoded and decoded."""

    name: str
    """Name of the samples, or of the dtype on the wire."""
    size_bytes: int
    encodes: bool = False

    @property
    def calls(self) -> int:
        """Return how many messages follow one another, so that short ones are no matter of a single wake-up."""
        if self.encodes:
            return 1
        return 4 if self.size_bytes <= 64 * 1024 else 2 if self.size_bytes <= 1024 * 1024 else 1

    def expected_us(self, us_per_byte: float) -> float:
        """Return the time that is expected before it was timed; `us_per_byte`: of a message."""
        if self.encodes:
            return ENCODE_START_UP_US + self.size_bytes * ENCODE_US_PER_BYTE
        return self.calls * (START_UP_US + self.size_bytes * us_per_byte)


def probe_sizes(model_bytes: int) -> list[int]:
    """Return the sizes of all-reduces that are sent to time them."""
    largest = max(SMALLEST_BYTES, min(LARGEST_BYTES, model_bytes))
    sizes = [SMALLEST_BYTES * 4**power for power in range(20)]
    return [*(size for size in sizes if size < largest), largest]


def pieces_of(model_bytes: int, *, narrow: bool) -> list[Piece]:
    """Return what is timed for plans of a model; `narrow`: also what those in narrow dtypes need."""
    pieces = [Piece(ALL_REDUCE, size) for size in probe_sizes(model_bytes)]
    if narrow:
        pieces += [Piece(name, size) for name in NARROW_SUMS for size in sizes_up_to(NARROW_BYTES, model_bytes)]
        encoded = sizes_up_to(ENCODED_BYTES, model_bytes)
        pieces += [Piece(dtype, size, encodes=True) for dtype in ENCODINGS for size in encoded]
    return pieces


@dataclass(frozen=True)
class Costs:
    """Times by size in bytes."""

    messages: Mapping[str, Curve] = field(default_factory=dict)
    """Curves by collective, over the bytes that are sent."""
    encode: Mapping[str, Curve] = field(default_factory=dict)
    """Curves by dtype on the wire, over the bytes of elements as float32."""
    decode: Mapping[str, Curve] = field(default_factory=dict)

    @property
    def all_reduce(self) -> Curve:
        return self.messages[ALL_REDUCE]


def costs_of(pieces: Sequence[Piece], ranks: Sequence[Sequence[Times]]) -> Costs:
    """Return the median over passes of what each piece takes, from all ranks' times of whole passes over the pieces.

    The straggler waits for no other rank, so of messages the shortest time of all ranks counts. A message waits for the
    rank that encodes slowest.
    """
    messages, encode, decode = dict[str, list[Sample]](), dict[str, list[Sample]](), dict[str, list[Sample]]()
    for at, piece in enumerate(pieces):
        times_us = np.array([rank[at :: len(pieces)] for rank in ranks])  # (ranks, passes, parts)
        if piece.encodes:
            for curves, time_us in zip((encode, decode), np.median(times_us.max(axis=0), axis=0), strict=True):
                curves.setdefault(piece.name, []).append((float(piece.size_bytes), float(time_us)))
        else:
            time_us = np.median(times_us.min(axis=0)) / piece.calls
            messages.setdefault(piece.name, []).append((float(piece.size_bytes), float(time_us)))
    return Costs(
        {name: undisturbed(curve) for name, curve in messages.items()},
        {name: tuple(curve) for name, curve in encode.items()},
        {name: tuple(curve) for name, curve in decode.items()},
    )


class Probes:
    """Does the pieces right behind steps, when all ranks have just met: as in a queue of buckets."""

    def __init__(self, session: Session, pieces: Iterable[Piece]) -> None:
        self.pieces = list(pieces)
        self._clock = session._recorder.clock
        world, device = session._world, session._device
        names = list(dict.fromkeys(piece.name for piece in self.pieces if not piece.encodes))
        self._communicator = make_communicator(world, [COLLECTIVES[QUEUED[name]] for name in names], device)
        self._marks: list[list[tuple[Any, Any]]] = []

        def payload(piece: Piece) -> Payload:
            zeros = torch.zeros(max(1, piece.size_bytes // 4), device=device)
            return make_payload(piece.name, zeros, world.ranks, names.index(piece.name))

        self._payloads = {piece: payload(piece) for piece in self.pieces if not piece.encodes}
        self._buckets = {
            piece: TimedBucket(ENCODINGS[piece.name][1.0], piece.size_bytes, world.ranks, device, PASSES)
            for piece in self.pieces
            if piece.encodes
        }
        self.close = self._communicator.close

    def time(self, piece: Piece) -> None:
        """Do a piece and wait for it; on a device, the host does not wait for it."""
        self._marks.append(self._encode(self._buckets[piece]) if piece.encodes else self._send(piece))

    def _send(self, piece: Piece) -> list[tuple[Any, Any]]:
        timings = [CommTiming() for _ in range(piece.calls)]
        for timing in timings:
            self._communicator.launch(self._payloads[piece], timing)
        self._communicator.wait()
        return [(timings[0].start, timings[-1].end)]

    def _encode(self, bucket: TimedBucket) -> list[tuple[Any, Any]]:
        parts = []
        for before, part in ((bucket.begin, bucket.pack), (bucket.receive, bucket.unpack)):
            before()
            start = self._clock.mark()
            part()
            parts.append((start, self._clock.mark()))
        bucket.end()
        return parts

    def times_us(self) -> list[Times]:
        """Return this rank's time of each piece that was done, in order."""
        return [tuple(self._clock.between_us(start, end) for start, end in parts) for parts in self._marks]
