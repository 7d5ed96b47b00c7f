"""Measurements of nccl-tests and rccl-tests: times of collectives by size. Torch-free.

Logs come from many versions and launchers, so a row counts only where its own numbers agree: its bandwidth is its size
over its time (which also gives the unit of the time), and bus over algorithm bandwidth gives collective and ranks
(github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md). `planner.documents.nccl_printed` reads their forms.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from planner.documents.nccl import gpu_named
from planner.documents.nccl_printed import Printed, Row, read_printed
from planner.documents.profile import merge_duplicates
from runtime.errors import InputError
from runtime.plan.files import read_text

_NAMES = {"allreduce": "all_reduce", "reducescatter": "reduce_scatter", "allgather": "all_gather"}

TIME_UNITS = {"ns": 1e-3, "us": 1.0, "ms": 1e3, "s": 1e6}
AGREE = 0.06
"""Largest relative difference of a row's bandwidth from its size over its time: both are rounded, and some builds count
in 2^30."""
SURE_GB_PER_S = 1.0
"""Least bandwidth that two decimals suffice for, in GB/s."""
WARM_UP = 1.25
"""A first row so many times as slow as the next one is a warm-up."""
LEAST_US, MOST_US, MOST_GB_PER_S = 0.1, 1e10, 1e4
"""No call is shorter, no test lasts longer, and no accelerator's memory is as fast."""


@dataclass(frozen=True, kw_only=True)
class NcclLog:
    """One collective of one log."""

    collective: str
    samples: tuple[tuple[float, float], ...]
    """(bytes, µs), sorted; a size that was run several times counts by its median."""
    gpu: str | None
    """Name in the catalogue of accelerators, if the log has one."""
    device: str | None
    """The accelerator in the log's own words."""
    notes: tuple[str, ...]
    """Rows that were left out, and why."""


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
    printed = read_printed(text, where)
    _check_ranks(printed, ranks, per_node, where)
    measured = [table for table in printed.tables if any(row.places for row in table.rows)]
    if not measured:
        raise InputError(f"{where}: {_without_rows(printed)}")
    device = next((one.name for one in printed.devices if one.name), None)
    logs, skipped = [], []
    for table in measured:
        collective = _collective(table.collective, table.rows, ranks, where)
        if collective is None:
            skipped.append(table.collective or "an unknown collective")
            continue
        log = _log(collective, table.unit, table.rows, in_place, where, device)
        if table.collective is None and collective != "all_reduce":
            note = f"{where}: taken as {collective}, by its bandwidths, which all_gather shares: no line names it"
            log = replace(log, notes=(*log.notes, note))
        logs.append(log)
    if not logs:
        raise InputError(
            f"{where}: found {', '.join(sorted(set(skipped)))}; expected all_reduce, reduce_scatter or all_gather"
        )
    said = (*printed.notes, *(f"{where}: {failure[:120]}" for failure in printed.failures[:1]))
    merged = []
    for collective in dict.fromkeys(log.collective for log in logs):
        same = [log for log in logs if log.collective == collective]
        samples = _by_size(sample for log in same for sample in log.samples)
        notes = tuple(dict.fromkeys(note for log in same for note in log.notes))
        merged.append(replace(same[0], samples=samples, notes=(*notes, *said)))
    return merged


def _without_rows(printed: Printed) -> str:
    """Return why a log has no times."""
    if any(table.rows for table in printed.tables):
        cause = "whose times are numbers"
    elif len(printed.tables) > 1:
        cause = "under the head of its table: the run ended before its first result"
    elif printed.first:
        cause = f"in a text that begins with {printed.first!r}"
    else:
        cause = "in an empty file"
    said = f"; it says: {printed.failures[0][:120]}" if printed.failures else ""
    return (
        f"found no row of results {cause}{said}; expected the output of nccl-tests, lines of size, count, type, redop, "
        f"root, time, algbw, busbw, or what it or rccl-tests write as JSON or CSV: run for example all_reduce_perf "
        f"-b 8 -e 8G -f 2"
    )


def _check_ranks(printed: Printed, ranks: int, per_node: int | None, where: str) -> None:
    advice = f"write the nodes and the GPUs of each before it, for example 2x8:{Path(where).name}"
    if printed.ranks not in (None, ranks):
        raise InputError(f"{where}: found a log of {printed.ranks} ranks, expected {ranks}, as its name says; {advice}")
    hosts: dict[str, set[str]] = {}
    for one in printed.devices:
        # Containers may share a name: what counts is how many accelerators differ in number or bus.
        hosts.setdefault(one.host, set()).add(one.device)
    for host, devices in hosts.items():
        if per_node is not None and len(devices) > per_node:
            raise InputError(
                f"{where}: found {len(devices)} GPUs on {host}, expected at most {per_node}, as its name says; {advice}"
            )


def _collective(name: str | None, rows: Sequence[Row], ranks: int, where: str) -> str | None:
    """Return the collective by its name, checked against bus over algorithm bandwidth; None for another one."""
    ratios = [
        place.bus_gb_per_s / place.algorithm_gb_per_s
        for row in rows
        for place in row.places
        if place.algorithm_gb_per_s >= 5.0 * SURE_GB_PER_S
    ]
    named = _NAMES.get((name or "").lower().replace("_", ""), name)
    if named is not None and named not in _NAMES.values():
        return None
    expected = {"all_reduce": 2.0 * (ranks - 1) / ranks, "half": (ranks - 1) / ranks}
    if ratios:
        seen = median(ratios)
        kind = min(expected, key=lambda key: abs(expected[key] - seen))
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
    collective: str, unit: str | None, rows: Sequence[Row], in_place: bool, where: str, device: str | None
) -> NcclLog:
    notes = []
    readable = [row for row in rows if row.places]
    if len(readable) < len(rows):
        unreadable = len(rows) - len(readable)
        notes.append(f"{where}: left out {unreadable} of {len(rows)} rows of {collective} whose times are no numbers")
    good = [row for row in readable if not row.wrong]
    if len(good) < len(readable):
        wrong = len(readable) - len(good)
        notes.append(f"{where}: left out {wrong} of {len(rows)} rows of {collective} with wrong results")
    column = 1 if in_place and all(len(row.places) > 1 for row in good) else 0
    if in_place and not column:
        notes.append(f"{where}: took times of {collective} out of place: not every row has one in place")
    results = [(row.size_bytes, row.places[column].time, row.places[column].algorithm_gb_per_s) for row in good]
    scale = _scale(results, unit, where)
    kept = [(size, time * scale) for size, time, rate in results if _is_possible(size, time * scale, rate)]
    if len(kept) < len(results):
        odd = len(results) - len(kept)
        notes.append(
            f"{where}: left out {odd} rows of {collective} whose time and bandwidth disagree or are impossible"
        )
    if len(kept) > 1 and kept[0][0] <= kept[1][0] and kept[0][1] > WARM_UP * max(time for _, time in kept[1:3]):
        notes.append(f"{where}: left out the first row of {collective}, {kept[0][1]:.0f} µs, as a warm-up")
        kept = kept[1:]
    if not kept:
        raise InputError(f"{where}: found no row of {collective} with right results and possible times; run it again")
    return NcclLog(
        collective=collective, samples=_by_size(kept), gpu=gpu_named(device or ""), device=device, notes=tuple(notes)
    )  # fmt: skip


def _is_possible(size_bytes: float, time_us: float, rate: float) -> bool:
    """Return whether a result is one that machines can have, and fits its own bandwidth (GB/s)."""
    if rate >= SURE_GB_PER_S and time_us > 0 and not abs(size_bytes / time_us / 1e3 / rate - 1.0) <= 0.1:
        return False
    return LEAST_US <= time_us <= MOST_US and 0 < size_bytes <= time_us * MOST_GB_PER_S * 1e3


def _scale(results: Sequence[tuple[float, float, float]], unit: str | None, where: str) -> float:
    """Return the microseconds of one unit of the log's times: as the bandwidths of its (size, time, rate) say, else as
    its head does.
    """
    implied = [size / time / 1e3 / rate for size, time, rate in results if time > 0 and rate >= SURE_GB_PER_S]
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
    """Return the samples by size; of a size that was run several times, the median."""
    return tuple(sorted(merge_duplicates(samples).items()))
