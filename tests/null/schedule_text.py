"""The inverse of `str` of a schedule, so that tests can write schedules as text, and see that the text says all."""

from __future__ import annotations

import re

from planner.ir import Bucket, Codec, Dense, Mode, Schedule, Synchronous
from planner.model.codecs import Form, LowRank, TopK, Wire
from planner.model.modes.delayed import Delayed
from planner.model.modes.late_gather import LateGather
from planner.model.modes.local_updaters import LocalUpdaters
from planner.model.modes.sharded import Sharded
from runtime.plan.transports import FLAT, transport_of

BUCKET = re.compile(
    r"\[([0-9,\-]+)\] ([a-z0-9_]+)/([a-z0-9_]+) ([a-z0-9_]+)(?: dtype=([a-z0-9_]+))?(?: rank=([0-9]+))?"
    r"(?: k=([0-9]+))?(?: ks=([0-9]+(?:,[0-9]+)*))?"
)
NORMS = re.compile(r"norms ([0-9]+(?:,[0-9]+)*)")
DELAY = re.compile(r"delay k=([1-9][0-9]*)")
LATE_GATHER = re.compile(r"late_gather ([0-9,\-;]+)")
UPDATERS = re.compile(r"updaters ([1-9][0-9]*)( wait)? every ([1-9][0-9]*),([1-9][0-9]*)(?: blocks ([0-9,\-;]+))?")


def parse_schedule(text: str) -> Schedule:
    """The schedule whose `str` is `text`; raises AssertionError where there is none."""
    lines = text.splitlines()
    mode = parse_mode(lines[0]) if lines else None
    lines = lines[1:] if mode else lines
    norms = NORMS.fullmatch(lines[0]) if lines else None
    return Schedule(
        buckets=tuple(map(parse_bucket, lines[1:] if norms else lines)),
        mode=mode or Synchronous(),
        norms=tuple(map(int, norms[1].split(","))) if norms else None,
    )


def parse_mode(line: str) -> Mode | None:
    """The mode of its line; None for a line of something else."""
    if line == str(Sharded()):
        return Sharded()
    if line == str(LateGather()):
        return LateGather()
    if match := LATE_GATHER.fullmatch(line):
        return LateGather(tuple(parse_indices(group)[::-1] for group in match[1].split(";")))
    if match := DELAY.fullmatch(line):
        return Delayed(int(match[1]))
    if match := UPDATERS.fullmatch(line):
        blocks = [parse_indices(block) for block in match[5].split(";")] if match[5] else []
        members = [index for block in blocks for index in block]
        assert members == list(range(len(members))), line
        stops = tuple(block[-1] + 1 for block in blocks) or None
        every, then_every = int(match[3]), int(match[4])
        waits = match[2] is not None
        return LocalUpdaters(count=int(match[1]), stops=stops, average_every=every, then_every=then_every, waits=waits)
    return None


def parse_bucket(text: str) -> Bucket:
    """The bucket of its line."""
    match = BUCKET.fullmatch(text)
    assert match is not None, text
    indices, collective, algorithm, codec, *options = match.groups()
    dtype, rank, k, ks = options
    codecs: dict[str, Codec] = {
        "none": Dense(),
        "wire": Wire(dtype or ""),
        "powersgd": LowRank(int(rank or 0)),
        "topk": TopK(int(k or 0), None if ks is None else tuple(map(int, ks.split(",")))),
    }
    return Bucket(parse_indices(indices), transport_of(collective, algorithm), codecs[codec])


def parse_indices(text: str) -> tuple[int, ...]:
    """Indices of their runs: '0-2,5' → (0, 1, 2, 5)."""
    runs = [[int(index) for index in run.split("-")] for run in text.split(",")]
    return tuple(index for run in runs for index in range(run[0], run[-1] + 1))


def at_ratios(*ratios: float) -> list[Form]:
    """Forms on one network that send the largest elements at these ratios."""
    return [Form(FLAT, TopK(), ratio) for ratio in ratios]
