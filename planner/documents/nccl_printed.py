"""Output of nccl-tests and rccl-tests as tables of rows: the printed table, and files of JSON or CSV. Torch-free.

Printed tables are read by their head: a row has a value for each of its columns, and what a launcher, a timestamp or a
colour puts before lines stands before the head and all rows alike (digits may differ). Files are nccl-tests' `-J` (one
object, github.com/NVIDIA/nccl-tests, src/util.cu) and rccl-tests' `-Z json|csv -x` (one record for each buffer
placement of a size, github.com/ROCm/rccl-tests, src/common.cu).
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

from planner.documents.text import sanitize
from runtime.errors import InputError

MAX_LINES = 1_000_000
MOST = 1e300
"""Largest number of any log."""
_COLOUR = re.compile(r"\x1b\[[0-9;:?]*[ -/]*[@-~]|\x1b[@-Z\\-_]", re.ASCII)
_NAME = re.compile(r"\b(all_reduce|reduce_scatter|all_gather)_perf", re.ASCII)
_OTHER = re.compile(r"\b(broadcast|reduce|alltoallv?|sendrecv|scatter|gather|hypercube)_perf", re.ASCII)
_STARTS = re.compile(r"Collective test starting:\s*(\w+?)(?:_perf)?\s*$", re.ASCII)
_DEVICE = re.compile(
    r"(?:^|#)\s*Rank\s+(\d{1,7})\b.*?\bon\s+(\S+)\s+device\s+(\d+\s+\[[^\]]*\])\s*(.*)$", re.ASCII
)  # fmt: skip
_FAILED = re.compile(
    r"Test (?:NCCL|CUDA|RCCL|HIP) failure|NCCL failure|unhandled (?:cuda|system) error|"
    r"Out of bounds values\s*:\s*[1-9]|mpirun noticed|Segmentation fault|NCCL WARN",
    re.ASCII,
)
_HEAD = re.compile(r"#?\s*\bsize\s+count\b.*\balgbw\s+busbw\b.*$", re.ASCII)
_TYPES = r"u?int\d*|char|half|b?float\d*|double|(?:f|fp|float)8\w*"
_ROW = re.compile(rf"(?:^|(?<=[\s:>\])|]))\d+\s+\d+\s+(?:{_TYPES})\s.*$", re.ASCII)
_CALENDAR = re.compile(
    r"\b(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun|Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)\b", re.ASCII
)  # fmt: skip
_UNIT = re.compile(r"\((ns|us|ms|s)\)", re.ASCII)
_VALUE = re.compile(r"\d+(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)
_OBJECTS = re.compile(r"\s*(?:\{|\[\s*[\{\]])")
_PLACE = ("time", "algbw", "busbw")


class Place(NamedTuple):
    """Result of one placement of buffers."""

    time: float
    """Time of a call, in the log's unit."""
    algorithm_gb_per_s: float
    bus_gb_per_s: float


@dataclass(frozen=True)
class Row:
    """Results of one size."""

    size_bytes: float
    places: tuple[Place, ...]
    """Results out of place and in place; none if they are no numbers."""
    wrong: bool
    """Whether elements were wrong."""


@dataclass
class Table:
    """Rows of one collective."""

    collective: str | None = None
    """Name in the log; None if it has none."""
    unit: str | None = None
    """Unit of times, from the head."""
    rows: list[Row] = field(default_factory=list)


@dataclass(frozen=True)
class Device:
    """The accelerator of one rank."""

    rank: int
    host: str
    device: str
    """Number and bus."""
    name: str


@dataclass
class Printed:
    """Everything that is read of one log."""

    tables: list[Table] = field(default_factory=list)
    devices: list[Device] = field(default_factory=list)
    ranks: int | None = None
    """Number of ranks, if the log has it."""
    failures: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    first: str = ""
    """First words of the log, for errors."""


def read_printed(text: str, where: str) -> Printed:
    """Read a log in whichever of its forms.

    Raises InputError: columns of a row do not fit those of its table, or a file of JSON or CSV is damaged.
    """
    if _OBJECTS.match(text):
        return _read_json(text, where)
    lines = [_COLOUR.sub("", line) for line in text.splitlines()[:MAX_LINES]]
    first = next((line for line in lines if line.strip()), "")
    names = [_key(name) for name in first.split(",")]
    if {"size", *_PLACE} <= set(names):
        return _read_records(_csv_records(lines, where), where)
    return _read_text(lines, where)


def _read_text(lines: Sequence[str], where: str) -> Printed:
    found = Printed(first=sanitize(next((line.strip() for line in lines if line.strip()), ""), 60))
    table, layout = Table(), None
    found.tables.append(table)
    for number, line in enumerate(lines, 1):
        if (device := _DEVICE.search(line)) is not None:
            found.devices.append(Device(int(device[1]), device[2], device[3], device[4].strip()))
        if _FAILED.search(line):
            found.failures.append(line.strip())
        started = _STARTS.search(line) or _NAME.search(line) or _OTHER.search(line)
        if (head := _HEAD.search(line)) is not None:
            layout = _Layout.of_head(line, head, number, where)
            table = Table(table.collective)
            found.tables.append(table)
        elif (row := _ROW.search(line)) is not None and not line[: row.start()].rstrip().endswith("#"):
            words = row[0].split("|")[0].split()
            layout = layout or _Layout.of_row(line[: row.start()], words, number, where)
            if len(words) < len(layout.columns) and not any(map(str.strip, lines[number:])):
                found.notes.append(f"{where}: left out its last line, which ends before its last column")
                continue
            layout.check(line[: row.start()], words, number, where)
            table.rows.append(layout.row(words))
        elif started is not None:
            if table.rows:  # of the next test in the same log, whose table may have no head
                table = Table()
                found.tables.append(table)
            table.collective = started[1]
        elif not table.rows and "(GB/s)" in line and (unit := _UNIT.search(line)) is not None:
            table.unit = unit[1]
    if found.devices:
        found.ranks = 1 + max(device.rank for device in found.devices)
    return found


@dataclass(frozen=True)
class _Layout:
    """The columns of a table, and what stands before its lines."""

    columns: tuple[str, ...]
    before: str
    line: int

    @classmethod
    def of_head(cls, line: str, head: re.Match[str], number: int, where: str) -> _Layout:
        columns = tuple(word.lstrip("#") for word in head[0].replace("# ", " ").split())
        if "time" not in columns:
            raise InputError(
                f"{where}: line {number}: found {'cputime' if 'cputime' in columns else 'no time'} among the columns, "
                f"expected the time of the collective; run it without -C"
            )
        # A timestamp is one column of the head, and a date and a time of day in rows.
        columns = tuple(name for one in columns for name in ([one, one] if one == "timestamp" else [one]))
        return cls(columns, line[: head.start()], number)

    @classmethod
    def of_row(cls, before: str, words: Sequence[str], number: int, where: str) -> _Layout:
        """Return the columns of a table without its head, in versions with and without `root` and checked results."""
        start, pair = ["size", "count", "type", "redop", "root"], [*_PLACE, "wrong"]
        for columns in ([*start[:few], *pair * places] for few in (3, 4, 5) for places in (1, 2)):
            if len(columns) == len(words):
                return cls(tuple(columns), before, number)
        raise InputError(
            f"{where}: line {number}: found {len(words)} columns without a head that says what they are, expected 7 "
            f"to 9 or 11 to 13; keep the line of size, count, type, redop, root, time, algbw, busbw above them"
        )

    def check(self, before: str, words: Sequence[str], number: int, where: str) -> None:
        """Raise InputError where a line does not fit."""
        if _shape(before) != _shape(self.before):
            raise InputError(
                f"{where}: line {number}: found {sanitize(before.strip(), 40)!r} before the row, expected "
                f"{sanitize(self.before.strip(), 40)!r} as in line {self.line}; take out what was written before lines"
            )
        if len(words) != len(self.columns):
            raise InputError(
                f"{where}: line {number}: found {len(words)} columns, expected the {len(self.columns)} of line "
                f"{self.line} ({' '.join(self.columns)}); correct the line, or take it out"
            )

    def row(self, words: Sequence[str]) -> Row:
        at = [index for index in range(len(self.columns)) if self.columns[index : index + 3] == _PLACE]
        places = []
        for start in at:
            checked = self.columns[start + 3 : start + 4] in (("wrong",), ("error",), ("res",))
            places.append((*words[start : start + 3], words[start + 3] if checked else "0"))
        return _row(words[0], places)


def _shape(before: str) -> str:
    """Return what stands before a line, for comparison: digits, days and spaces differ between lines of a launcher."""
    return re.sub(r"\d+", "0", re.sub(r"\s+", " ", _CALENDAR.sub("day", before))).strip()


def _row(size: object, places: Iterable[Sequence[object]]) -> Row:
    """Return a row of (time, algorithm bandwidth, bus bandwidth, wrong elements) by placement of buffers."""
    found: list[Place] = []
    wrong = False
    for *values, check in places:
        numbers = [number for value in values if (number := _number(value)) is not None]
        if len(numbers) < len(Place._fields):
            break
        found.append(Place(*numbers))
        wrong = wrong or _is_wrong(check)
    return Row(_number(size) or 0.0, tuple(found), wrong)


def _number(value: object) -> float | None:
    """Return a number that is no less than 0, from JSON or text; else None."""
    if isinstance(value, str):
        value = float(value) if _VALUE.fullmatch(value.strip()) else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MOST:
        return None
    return float(value)


def _is_wrong(check: object) -> bool:
    """Return whether elements were wrong. Old versions print the largest error of a sum, new ones their number."""
    if isinstance(check, int | float):
        return check != 0
    text = str(check).strip()
    return (text.isdecimal() and bool(text.strip("0"))) or text.lower() in ("nan", "inf", "failed")


def _read_json(text: str, where: str) -> Printed:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{where}: found JSON that cannot be read ({sanitize(str(error), 80)}), expected the file that nccl-tests "
            f"-J or rccl-tests -Z json wrote; was the run ended before it wrote all?"
        ) from error
    if isinstance(document, list):
        return _read_records(document, where)
    results = document.get("results")
    if not isinstance(results, list) or not all(isinstance(one, dict) for one in results):
        raise InputError(f'{where}: found JSON without "results", expected the file that nccl-tests -J wrote')
    found = Printed(first="JSON")
    program = " ".join(str(word) for word in _list(document.get("args"))[:1])
    named = _NAME.search(program) or _OTHER.search(program)
    table = Table(None if named is None else named[1], "us")
    for at, result in enumerate(results):
        table.rows.append(_row(result.get("size"), _placements(result, f"{where}: $.results[{at}]")))
    found.tables.append(table)
    found.failures += [str(error) for error in _list(document.get("errors")) if error]
    config = document.get("config")
    _read_config(config if isinstance(config, dict) else {}, found)
    return found


def _placements(result: Mapping[str, object], where: str) -> Iterator[Sequence[object]]:
    for key in ("out_of_place", "in_place"):
        place = result.get(key)
        if isinstance(place, dict):
            if "time" not in place and "cpu_time" in place:
                raise InputError(f"{where}: found cpu_time, expected the time of the collective; run it without -C")
            yield [place.get(name) for name in ("time", "alg_bw", "bus_bw")] + [place.get("nwrong") or 0]


def _read_config(config: Mapping[str, object], found: Printed) -> None:
    """Add ranks and devices. A process of several accelerators is listed with its first one alone."""
    listed = [one for one in _list(config.get("devices")) if isinstance(one, dict)]
    each = int(_number(config.get("nthreads")) or 1) * int(_number(config.get("ngpus")) or 1)
    if listed:
        found.ranks = len(listed) * each
    for one in listed:
        rank, device = _number(one.get("rank")), f"{one.get('device')} [{one.get('device_hex')}]"
        found.devices.append(Device(int(rank or 0), str(one.get("hostname")), device, str(one.get("device_info"))))


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _key(name: object) -> str:
    """Return a column's name: rccl-tests writes `#wrong` and `inplace` in CSV, `wrong` and `inPlace` in JSON."""
    return str(name).strip().strip('"').lstrip("#").lower()


def _csv_records(lines: Sequence[str], where: str) -> list[object]:
    reader = csv.reader(line for line in lines if line.strip())
    head = [_key(name) for name in next(reader)]
    records: list[object] = []
    for values in reader:
        if len(values) != len(head):
            raise InputError(
                f"{where}: record {len(records) + 1}: found {len(values)} columns, expected the {len(head)} of its "
                f"head ({','.join(head)}); correct the line, or take it out"
            )
        records.append(dict(zip(head, values, strict=True)))
    return records


def _read_records(records: Sequence[object], where: str) -> Printed:
    """Read what rccl-tests writes: one record for each size and placement of buffers."""
    found = Printed(first="records")
    known: list[dict[str, object]] = []
    for at, record in enumerate(records):
        one = {_key(name): value for name, value in record.items()} if isinstance(record, dict) else {}
        one.setdefault("collective", one.get("name"))
        if missing := [name for name in ("size", *_PLACE) if name not in one]:
            raise InputError(
                f"{where}: record {at + 1}: found no {', '.join(missing)}, expected the records that rccl-tests "
                f"-Z json or -Z csv writes"
            )
        known.append(one)
    for collective, of_one in groupby(known, key=lambda one: one["collective"]):
        table = Table(None if collective is None else str(collective), "us")
        found.tables.append(table)
        for size, cycle in groupby(of_one, key=lambda one: (one["size"], one.get("numcycle"), one.get("type"))):
            both = sorted(cycle, key=lambda one: str(one.get("inplace")))
            table.rows.append(_row(size[0], [[*(one[name] for name in _PLACE), one.get("wrong", 0)] for one in both]))
    counts = {_ranks_of(one) for one in known} - {None}
    if len(counts) > 1:
        raise InputError(f"{where}: found records of {sorted(map(str, counts))} ranks, expected one number; split it")
    found.ranks = next(iter(counts), None)
    return found


def _ranks_of(record: Mapping[str, object]) -> int | None:
    """Return the number of accelerators of all ranks of a record."""
    ranks, each = _number(record.get("ranks")), _number(record.get("gpusperrank"))
    if ranks is None:
        ranks, each = _number(record.get("gpus")), 1
    return None if ranks is None else int(ranks) * int(each or 1)
