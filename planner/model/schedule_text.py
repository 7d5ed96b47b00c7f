"""Reads schedules as `str` prints them: the inverse of `planner.ir.Schedule.__str__`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from planner.ir import Bucket, Codec, Dense, Mode, OperatorShares, Schedule, Synchronous, parse_indices
from planner.model.codecs import LOSSY
from planner.model.modes import MODES
from runtime.errors import InputError
from runtime.plan.transports import transport_of

_HEADER = re.compile(r"after [a-z_0-9]+ \([0-9.]+ ms\):")
_NORMS = re.compile(r"norms ([0-9]{1,9}(?:,[0-9]{1,9})*)")
_BUCKET = re.compile(r"\[([0-9,-]+)\] ([a-z0-9_]+)/([a-z0-9_]+) (.*)")
_EXAMPLES = "a bucket such as '[0-2,5] all_reduce/library none'"


@dataclass(frozen=True, kw_only=True)
class ScheduleText:
    """A schedule that was read, and where its buckets stand in the text."""

    schedule: Schedule
    lines: tuple[int, ...]
    """Line number of each bucket, counted from 1."""


def parse_schedule(text: str) -> Schedule:
    """Return the schedule whose `str` is `text`. Raises InputError as `read_schedule` does."""
    return read_schedule(text).schedule


def read_schedule(text: str, path: str = "schedule") -> ScheduleText:
    """Read a schedule: its mode unless synchronous, shared norms and operators if any, then a line for each bucket.

    Blank lines are skipped, and so is the line `after PASS (… ms):` that `--print-after` prints above a schedule.

    Args:
        text: the schedule.
        path: the name of the text in messages.

    Raises:
        InputError: a line cannot be read, or there are several schedules; names the line.
    """
    mode: Mode | None = None
    norms: tuple[int, ...] | None = None
    operators: OperatorShares | None = None
    buckets: list[Bucket] = []
    lines: list[int] = []
    header = False
    for number, line in enumerate(text.splitlines(), start=1):
        line = line.strip()
        if not line:
            continue
        where, first = f"{path}: line {number}", not buckets and norms is None and operators is None
        if _HEADER.fullmatch(line):
            if header or buckets or norms or operators or mode:
                raise InputError(f"{where}: found a second schedule, expected one; leave the others out")
            header = True
            continue
        try:
            found = _parse_mode(line) if first and mode is None else None
            if found is not None:
                mode = found
            elif first and (match := _NORMS.fullmatch(line)):
                norms = tuple(map(int, match[1].split(",")))
            elif not buckets and operators is None and (shares := OperatorShares.parse(line)):
                operators = shares
            else:
                buckets.append(parse_bucket(line))
                lines.append(number)
        except ValueError as error:
            raise InputError(f"{where}: {error}; correct it") from None
    schedule = Schedule(buckets=tuple(buckets), mode=mode or Synchronous(), norms=norms, operators=operators)
    return ScheduleText(schedule=schedule, lines=tuple(lines))


def _parse_mode(line: str) -> Mode | None:
    return next(filter(None, (mode.parse(line) for mode in MODES)), None)


def parse_bucket(line: str) -> Bucket:
    """Return the bucket of a line.

    Raises:
        ValueError: the line is no bucket.
    """
    match = _BUCKET.fullmatch(line)
    codecs: tuple[type[Codec], ...] = (Dense, *LOSSY)
    codec = match and next(filter(None, (each.parse(match[4]) for each in codecs)), None)
    if not match or codec is None:
        raise ValueError(f"found {line[:80]!r}, expected {_EXAMPLES}, and before buckets a mode, norms or operators")
    return Bucket(parse_indices(match[1]), transport_of(match[2], match[3]), codec)
