"""What nccl-tests printed: times of collectives by size. Torch-free.

Logs come from many versions and launchers, so a row counts only where its own numbers agree: its bandwidth is its size
over its time (which also tells the unit of the time), and bus over algorithm bandwidth tells collective and ranks
(github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from planner.documents.nccl import GPUS
from runtime.errors import InputError
from runtime.plan.files import read_text

_TAG = re.compile(r"\[\d+(?:,\d+)*\](?:<std(?:out|err)>:?)?|^\s*\d+:\s(?=\s)", re.ASCII)
_NAME = re.compile(r"\b(all_reduce|reduce_scatter|all_gather)_perf", re.ASCII)
_OTHER = re.compile(r"\b(broadcast|reduce|alltoall|sendrecv|scatter|gather|hypercube)_perf", re.ASCII)
_RANK = re.compile(r"^#?\s*Rank\s+(\d{1,7})\b.*?\bon\s+(\S+)\s+device\s+(\d+\s+\[[^\]]*\])\s*(.*)$", re.ASCII)
_FAILED = re.compile(
    r"Test (?:NCCL|CUDA) failure|NCCL failure|unhandled (?:cuda|system) error|Out of bounds values\s*:\s*[1-9]|"
    r"mpirun noticed|Segmentation fault|NCCL WARN",
    re.ASCII,
)
_VALUE = re.compile(r"\d+(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)
_NAMES = {"allreduce": "all_reduce", "reducescatter": "reduce_scatter", "allgather": "all_gather"}
_STARTS = re.compile(r"Collective test starting:\s*(\w+?)(?:_perf)?\s*$", re.ASCII)

TIME_UNITS = {"ns": 1e-3, "us": 1.0, "ms": 1e3, "s": 1e6}
AGREE = 0.06
"""How far a row's bandwidth may be from its size over its time: both are rounded, and some builds count in 2^30."""
SURE_GB_PER_S = 1.0
"""Below, two decimals are too few to tell anything by."""
WARM_UP = 1.25
"""A first row so many times as slow as the next one is a warm-up."""
MAX_LINES = 1_000_000
LEAST_US, MOST_US, MOST_GB_PER_S = 0.1, 1e10, 1e4
"""No call is shorter, no test lasts longer, and no accelerator's memory is as fast."""


@dataclass(frozen=True, kw_only=True)
class NcclLog:
    """One collective of one log."""

    collective: str
    samples: tuple[tuple[float, float], ...]
    """(bytes, µs), sorted; a size that was run several times counts by its median."""
    gpu: str | None
    """As the catalogue of accelerators names it, where the log says."""
    notes: tuple[str, ...]
    """What was left out, and why."""


@dataclass(frozen=True)
class _Row:
    size_bytes: float
    times: tuple[float, ...]
    """Out of place, in place; in the log's unit; none where they are no numbers."""
    algorithm_gb_per_s: tuple[float, ...]
    bus_gb_per_s: tuple[float, ...]
    wrong: bool


def read_log(path: str | Path, ranks: int, *, per_node: int | None = None, in_place: bool = False) -> list[NcclLog]:
    """Return what a log measured on so many ranks, one record for each collective in it.

    Raises InputError: the file cannot be read, has no rows, was made on other ranks or with more of them on a host
    than `per_node`, holds another collective only, or its numbers do not fit together.
    """
    return parse_log(read_text(path), ranks, str(path), per_node=per_node, in_place=in_place)


def parse_log(
    text: str, ranks: int, where: str, *, per_node: int | None = None, in_place: bool = False
) -> list[NcclLog]:
    """Parse a log's text; as `read_log`."""
    lines = [_TAG.sub(" ", line) for line in text.splitlines()[:MAX_LINES]]
    failures = [line.strip() for line in lines if _FAILED.search(line)]
    _check_ranks(lines, ranks, per_node, where)
    blocks = _blocks(lines)
    if not any(row.times for _, _, rows in blocks for row in rows):
        cause = f"; it says: {failures[0][:120]}" if failures else ""
        raise InputError(
            f"{where}: found no row of results{cause}; expected the output of nccl-tests, lines of size, count, type, "
            f"redop, root, time, algbw, busbw: run for example all_reduce_perf -b 8 -e 8G -f 2"
        )
    gpu = _gpu(lines)
    logs, skipped = [], []
    for name, unit, rows in blocks:
        if not any(row.times for row in rows):
            continue
        collective = _collective(name, rows, ranks, where)
        if collective is None:
            skipped.append(name or "an unknown collective")
            continue
        log = _log(collective, unit, rows, in_place, where, gpu)
        if name is None and collective != "all_reduce":
            note = f"{where}: taken as {collective}, by its bandwidths, which all_gather shares: no line names it"
            log = replace(log, notes=(*log.notes, note))
        logs.append(log)
    if not logs:
        raise InputError(
            f"{where}: found {', '.join(sorted(set(skipped)))}; expected all_reduce, reduce_scatter or all_gather"
        )
    said = tuple(f"{where}: {failure[:120]}" for failure in failures[:1])
    merged = []
    for collective in dict.fromkeys(log.collective for log in logs):
        same = [log for log in logs if log.collective == collective]
        samples = _by_size(sample for log in same for sample in log.samples)
        notes = tuple(dict.fromkeys(note for log in same for note in log.notes))
        merged.append(NcclLog(collective=collective, samples=samples, gpu=gpu, notes=(*notes, *said)))
    return merged


def _blocks(lines: Sequence[str]) -> list[tuple[str | None, str | None, list[_Row]]]:
    """(collective as named, unit of time as named, rows) of each table in the log."""
    name: str | None = None
    unit: str | None = None
    columns: list[str] | None = None
    blocks: list[tuple[str | None, str | None, list[_Row]]] = [(None, None, [])]
    for line in lines:
        started = _STARTS.search(line)
        called = started or _NAME.search(line) or _OTHER.search(line)
        if called:
            name = called[1]
        words = line.replace("#wrong", "wrong").lstrip("# \t").split()
        if "size" in words and "time" in words:
            columns = words
            blocks.append((name, unit, []))
            continue
        units = re.findall(r"\((ns|us|ms|s)\)", line)
        if columns and units and line.lstrip().startswith("#"):
            unit = units[0]
            blocks[-1] = (name, unit, blocks[-1][2])
            continue
        if called and not blocks[-1][2]:
            blocks[-1] = (name, unit, [])
        row = _row(line, columns)
        if row is not None:
            blocks[-1][2].append(row)
    return blocks


def _row(line: str, columns: Sequence[str] | None) -> _Row | None:
    words = line.split("|")[0].split()
    if len(words) < 7 or not words[0].isdecimal() or not words[1].isdecimal():
        return None
    if not columns or len(columns) < len(words):
        columns = _usual(len(words))
    at = [index for index, name in enumerate(columns) if name == "time"]
    times: list[float] = []
    algorithm: list[float] = []
    bus: list[float] = []
    wrong = False
    for place in at:
        numbers = words[place : place + 3]
        if len(numbers) < 3 or not all(_VALUE.fullmatch(number) for number in numbers):
            return _finished(words[0], times, algorithm, bus, wrong)
        times.append(float(numbers[0]))
        algorithm.append(float(numbers[1]))
        bus.append(float(numbers[2]))
        check = words[place + 3] if place + 3 < len(words) else "0"
        # Old versions print the largest error of a sum, new ones how many elements were wrong.
        wrong = wrong or (check.isdecimal() and bool(check.strip("0"))) or check.lower() in ("nan", "inf", "failed")
    return _finished(words[0], times, algorithm, bus, wrong) if times else None


def _finished(size: str, times: Sequence[float], algorithm: Sequence[float], bus: Sequence[float], wrong: bool) -> _Row:
    return _Row(float(size), tuple(times), tuple(algorithm), tuple(bus), wrong)


def _usual(count: int) -> list[str]:
    """The columns of a row of so many, in versions with and without `root` and the check of results."""
    head = ["size", "count", "type", "redop"]
    pair = ["time", "algbw", "busbw", "wrong"]
    rooted = [*head, "root"]
    for start, tail in ((head, pair * 2), (rooted, pair * 2), (head[:3], pair * 2), (head, pair), (rooted, pair)):
        if len(start) + len(tail) == count:
            return [*start, *tail]
    return [*head, "root", *pair, *pair]


def _check_ranks(lines: Sequence[str], ranks: int, per_node: int | None, where: str) -> None:
    found = [match for line in lines if (match := _RANK.match(line.strip()))]
    listed = {int(match[1]) for match in found}
    if listed and max(listed) + 1 != ranks:
        raise InputError(
            f"{where}: found a log of {max(listed) + 1} ranks, expected {ranks}, as its name says; "
            f"write the nodes and the GPUs of each before it, for example 2x8:{Path(where).name}"
        )
    hosts: dict[str, set[str]] = {}
    for match in found:
        # Containers may share a name: what counts is how many accelerators differ in number or bus.
        hosts.setdefault(match[2], set()).add(match[3])
    for host, devices in hosts.items():
        if per_node is not None and len(devices) > per_node:
            raise InputError(
                f"{where}: found {len(devices)} GPUs on {host}, expected at most {per_node}, as its name says; write "
                f"the nodes and the GPUs of each before it, for example 2x8:{Path(where).name}"
            )


def _gpu(lines: Sequence[str]) -> str | None:
    for line in lines:
        match = _RANK.match(line.strip())
        if match is None:
            continue
        words = re.findall(r"[a-z0-9]+", match[4].lower())
        for name in sorted(GPUS, key=len, reverse=True):
            if name in words or name.removeprefix("rtx") in words:
                return name
    return None


def _collective(name: str | None, rows: Sequence[_Row], ranks: int, where: str) -> str | None:
    """The collective by its name, held against what bus over algorithm bandwidth says; None for another one."""
    ratios = [
        bus / algorithm
        for row in rows
        for bus, algorithm in zip(row.bus_gb_per_s, row.algorithm_gb_per_s, strict=True)
        if algorithm >= 5.0 * SURE_GB_PER_S
    ]
    named = _NAMES.get((name or "").lower().replace("_", ""), name)
    if named is not None and named not in _NAMES.values():
        return None
    expected = {"all_reduce": 2.0 * (ranks - 1) / ranks, "half": (ranks - 1) / ranks}
    if ratios:
        seen = median(ratios)
        kind = min(expected, key=lambda key: abs(math.log(expected[key] / seen)))
        # Two decimals of at least 5 GB/s tell 0.2 %; neighbouring powers of two of ranks differ by more up to 256.
        if abs(seen / expected[kind] - 1.0) > max(0.004, 0.4 / ranks):
            raise InputError(
                f"{where}: found bus bandwidths of {seen:.4f} times the algorithm's, expected "
                f"{expected['all_reduce']:.4f} (all-reduce) or {expected['half']:.4f} (reduce-scatter, all-gather) on "
                f"{ranks} ranks; correct the nodes and GPUs before its name"
            )
        if named is None:
            return "all_reduce" if kind == "all_reduce" else "reduce_scatter"
        if (named == "all_reduce") != (kind == "all_reduce"):
            raise InputError(f"{where}: found {named} with the bus bandwidths of another collective; check the file")
    return named or "all_reduce"


def _log(
    collective: str, unit: str | None, rows: Sequence[_Row], in_place: bool, where: str, gpu: str | None
) -> NcclLog:
    notes = []
    readable = [row for row in rows if row.times]
    if len(readable) < len(rows):
        unreadable = len(rows) - len(readable)
        notes.append(f"{where}: left out {unreadable} of {len(rows)} rows of {collective} whose times are no numbers")
    good = [row for row in readable if not row.wrong]
    if len(good) < len(readable):
        wrong = len(readable) - len(good)
        notes.append(f"{where}: left out {wrong} of {len(rows)} rows of {collective} with wrong results")
    column = 1 if in_place and all(len(row.times) > 1 for row in good) else 0
    if in_place and not column:
        notes.append(f"{where}: took times of {collective} out of place: not every row has one in place")
    scale = _scale(good, unit, column, where)
    kept, odd = [], 0
    for row in good:
        time_us = row.times[column] * scale
        if row.size_bytes <= 0 or time_us <= 0:
            continue
        rate = row.algorithm_gb_per_s[column]
        unlike = rate >= SURE_GB_PER_S and not abs(row.size_bytes / time_us / 1e3 / rate - 1.0) <= 0.1
        impossible = not LEAST_US <= time_us <= MOST_US or not row.size_bytes <= time_us * MOST_GB_PER_S * 1e3
        if unlike or impossible:
            odd += 1
            continue
        kept.append((row.size_bytes, time_us))
    if odd:
        notes.append(
            f"{where}: left out {odd} rows of {collective} whose time and bandwidth disagree or are impossible"
        )
    if len(kept) > 1 and kept[0][0] <= kept[1][0] and kept[0][1] > WARM_UP * max(time for _, time in kept[1:3]):
        notes.append(f"{where}: left out the first row of {collective}, {kept[0][1]:.0f} µs, as a warm-up")
        kept = kept[1:]
    if not kept:
        raise InputError(f"{where}: found no row of {collective} with right results and possible times; run it again")
    return NcclLog(collective=collective, samples=_by_size(kept), gpu=gpu, notes=tuple(notes))


def _scale(rows: Sequence[_Row], unit: str | None, column: int, where: str) -> float:
    """Microseconds of one unit of the log's times: as rows' own bandwidths say, else as its head does."""
    implied = [
        row.size_bytes / row.times[column] / 1e3 / row.algorithm_gb_per_s[column]
        for row in rows
        if row.times[column] > 0 and row.algorithm_gb_per_s[column] >= SURE_GB_PER_S
    ]
    if not implied:
        return TIME_UNITS.get(unit or "us", 1.0)
    seen = median(implied)
    # Some builds count GB as 2^30, which is 7 % less.
    for scale in TIME_UNITS.values():
        if abs(seen / scale - 1.0) <= AGREE or abs(seen / scale / 1.073741824 - 1.0) <= 0.02:
            return scale
    raise InputError(
        f"{where}: found times and bandwidths that do not fit together (size over time over bandwidth is {seen:.3g}), "
        f"expected times in ns, us, ms or s, sizes in bytes and bandwidths in GB/s; check the file"
    )


def _by_size(samples: Iterable[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    by_size: dict[float, list[float]] = {}
    for size_bytes, time_us in samples:
        by_size.setdefault(size_bytes, []).append(time_us)
    return tuple((size, float(median(times))) for size, times in sorted(by_size.items()))
