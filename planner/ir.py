"""The schedule: which gradients travel together, in which order, and how; each record has a text form.

`parse(str(record)) == record`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from runtime.errors import InputError

_BUCKET = re.compile(
    r"\[([0-9,\-]+)\] ([a-z0-9_]+)/([a-z0-9_]+) ([a-z0-9_]+)(?: k=([0-9]+))?(?: ks=([0-9]+(?:,[0-9]+)*))?"
)
_DELAY = re.compile(r"delay k=([1-9][0-9]*)")
_UPDATERS = re.compile(r"updaters ([1-9][0-9]*)( wait)? every ([1-9][0-9]*),([1-9][0-9]*)(?: blocks ([0-9,\-;]+))?")
_NORMS = re.compile(r"norms ([0-9]+(?:,[0-9]+)*)")
_SHARDED = "sharded"
_RUN = re.compile(r"([0-9]+)(?:-([0-9]+))?")


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """Gradients that travel as one message per dtype; indices in readiness order.

    >>> str(Bucket(gradients=(0, 1, 2, 5)))
    '[0-2,5] all_reduce/library none'
    >>> str(Bucket(gradients=(3,), collective="sparse", algorithm="flat", compressor="topk", k=120))
    '[3] sparse/flat topk k=120'
    >>> str(Bucket(gradients=(3, 4), collective="sparse", algorithm="flat", compressor="topk", k=121, ks=(120, 1)))
    '[3-4] sparse/flat topk k=121 ks=120,1'
    """

    gradients: tuple[int, ...]
    collective: str = "all_reduce"
    algorithm: str = "library"
    compressor: str = "none"
    k: int | None = None
    """Elements that the compressor selects of the bucket (for `hitopk`: of each shard of a node)."""
    ks: tuple[int, ...] | None = None
    """The same by layer: for each run of gradients of one layer in the bucket; their sum is `k`. None: from all."""

    def __str__(self) -> str:
        text = f"[{format_indices(self.gradients)}] {self.collective}/{self.algorithm} {self.compressor}"
        text = text if self.k is None else f"{text} k={self.k}"
        return text if self.ks is None else f"{text} ks={','.join(map(str, self.ks))}"

    @classmethod
    def parse(cls, text: str) -> Bucket:
        """The inverse of `str`. Raises InputError on anything else."""
        match = _BUCKET.fullmatch(text)
        if match is None:
            raise InputError(f"found {text!r}, expected a bucket such as '[0-2,5] all_reduce/library none'")
        indices, collective, algorithm, compressor, k, ks = match.groups()
        return cls(
            gradients=parse_indices(indices),
            collective=collective,
            algorithm=algorithm,
            compressor=compressor,
            k=None if k is None else int(k),
            ks=None if ks is None else tuple(map(int, ks.split(","))),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Updaters:
    """Local updaters of each rank: they share its model, and ranks average their models beside them.

    >>> str(Updaters(count=4, stops=(2, 3), then_every=8))
    'updaters 4 every 1,8 blocks 0-1;2'
    >>> str(Updaters(count=1, average_every=16, waits=True))
    'updaters 1 wait every 16,16'
    """

    count: int
    stops: tuple[int, ...] | None = None
    """Where blocks end: gradients [0, stops[0]) are the first one (LPP-SGD). None: all update all (LAP-SGD)."""
    average_every: int = 1
    """Updates of a rank between averagings in the first half of training."""
    then_every: int = 16
    """The same in the second half."""
    waits: bool = False
    """Whether updaters wait for averagings, as local SGD does."""

    @property
    def blocks(self) -> tuple[range, ...]:
        """The gradients of each block; none where all update the full model."""
        stops = self.stops or ()
        return tuple(range(start, stop) for start, stop in pairwise((0, *stops)))

    def __str__(self) -> str:
        text = f"updaters {self.count}{' wait' if self.waits else ''} every {self.average_every},{self.then_every}"
        return f"{text} blocks {';'.join(map(format_indices, self.blocks))}" if self.stops is not None else text

    @classmethod
    def parse(cls, text: str) -> Updaters:
        """The inverse of `str`. Raises InputError on anything else."""
        match = _UPDATERS.fullmatch(text)
        blocks = [parse_indices(block) for block in match[5].split(";")] if match and match[5] else []
        members = [index for block in blocks for index in block]
        if match is None or members != list(range(len(members))):
            raise InputError(f"found {text!r}, expected updaters such as 'updaters 2 every 1,16 blocks 0-3;4-9'")
        return cls(
            count=int(match[1]),
            stops=tuple(block[-1] + 1 for block in blocks) or None,
            average_every=int(match[3]),
            then_every=int(match[4]),
            waits=match[2] is not None,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """Buckets in launch order; `str` gives one line each, after those of delay, updaters, norms and a shared step where
    there are any.

    >>> str(Schedule(buckets=(Bucket(gradients=(0,)),), delay=4))
    'delay k=4\\n[0] all_reduce/library none'
    >>> str(Schedule(buckets=(Bucket(gradients=(0,)),), norms=(0, 2)))
    'norms 0,2\\n[0] all_reduce/library none'
    >>> str(Schedule(buckets=(Bucket(gradients=(0,)),), sharded=True))
    'sharded\\n[0] all_reduce/library none'
    """

    buckets: tuple[Bucket, ...]
    delay: int | None = None
    """SSD-SGD's k: buckets are pushed in every step, and new weights pulled after every k-th one. None: synchronous."""
    updaters: Updaters | None = None
    """Local updaters, whose averagings send the model in these buckets. None: ranks exchange gradients."""
    norms: tuple[int, ...] | None = None
    """By layer of `Problem.norm_layers`, the rank that computes its norms for all. None: every rank does."""
    sharded: bool = False
    """Whether ranks share the optimizer's step: buckets are reduce-scattered, and weights gathered after the update."""

    def __str__(self) -> str:
        head = [] if self.delay is None else [f"delay k={self.delay}"]
        head += [] if self.updaters is None else [str(self.updaters)]
        head += [] if self.norms is None else [f"norms {','.join(map(str, self.norms))}"]
        head += [_SHARDED] if self.sharded else []
        return "\n".join([*head, *map(str, self.buckets)])

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """The inverse of `str`. Raises InputError on anything else."""
        lines = text.splitlines()
        delay = _DELAY.fullmatch(lines[0]) if lines else None
        lines = lines[1:] if delay else lines
        updaters = Updaters.parse(lines[0]) if lines and lines[0].startswith("updaters") else None
        lines = lines[1:] if updaters else lines
        norms = _NORMS.fullmatch(lines[0]) if lines else None
        lines = lines[1:] if norms else lines
        sharded = bool(lines) and lines[0] == _SHARDED
        lines = lines[1:] if sharded else lines
        return cls(
            buckets=tuple(map(Bucket.parse, lines)),
            delay=int(delay[1]) if delay else None,
            updaters=updaters,
            norms=tuple(map(int, norms[1].split(","))) if norms else None,
            sharded=sharded,
        )

    @classmethod
    def from_boundaries(cls, stops: Iterable[int], algorithm: str = "library") -> Schedule:
        """Exact buckets [0, stops[0]), [stops[0], stops[1]), …, all-reduced by one algorithm.

        >>> str(Schedule.from_boundaries([2, 3]))
        '[0-1] all_reduce/library none\\n[2] all_reduce/library none'
        """
        buckets, start = [], 0
        for stop in stops:
            buckets.append(Bucket(gradients=tuple(range(start, stop)), algorithm=algorithm))
            start = stop
        return cls(buckets=tuple(buckets))


def format_indices(indices: Sequence[int]) -> str:
    """Runs of consecutive indices: (0, 1, 2, 5) → '0-2,5'."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][1] + 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def parse_indices(text: str) -> tuple[int, ...]:
    """The inverse of `format_indices`. Raises InputError on anything else."""
    indices: list[int] = []
    for run in text.split(","):
        match = _RUN.fullmatch(run)
        members = range(int(match[1]), int(match[2] or match[1]) + 1) if match else range(0)
        if not members:
            raise InputError(f"found {text!r}, expected indices such as '0-2,5'")
        indices.extend(members)
    return tuple(indices)


Places = slice | int | NDArray[np.int64]
"""Places between gradients: one, a slice or an array of them."""


TIE = 1e-12
"""Relative difference of finishing times below which two schedules count as equal."""
