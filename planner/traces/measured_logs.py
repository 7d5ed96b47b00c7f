"""Costs of collectives for `planner cluster fit`: NCCL Inspector's JSON lines, and traces or profiles made of them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from planner.cost.halves import LIBRARY_GATHER, LIBRARY_SCATTER
from planner.decide.cluster_fit import LogFile, parse_log_argument
from planner.documents.nccl import gpu_named
from planner.documents.nccl_tests import NcclLog
from planner.documents.profile import Profile, load_profile
from planner.traces.of_ranks import read_run
from planner.traces.stream import head_of, is_trace, text_lines
from planner.traces.to_profile import profile_of
from runtime.errors import InputError
from runtime.plan import ModelReference

_COLLECTIVES = {"AllReduce": "all_reduce", "ReduceScatter": "reduce_scatter", "AllGather": "all_gather"}
_KEYS = {"all_reduce": "all_reduce", LIBRARY_GATHER: "all_gather", LIBRARY_SCATTER: "reduce_scatter"}
_OF_PARTS = ("reduce_scatter", "all_gather")
MIN_SAMPLES = 2
"""Sizes of a collective below which nothing is fitted."""

Calls = dict[tuple[int, int, str], dict[int, dict[tuple[Any, Any], float]]]
"""(nodes, ranks, collective) → bytes → (communicator, call) → shortest µs on any rank."""


def measured_logs(path: str) -> list[LogFile]:
    """Return what a directory of NCCL Inspector, a profile, a trace, or a directory of traces holds.

    Raises InputError: it is none of these, or holds no collective of several ranks.
    """
    files = [path] if not os.path.isdir(path) else sorted(str(file) for file in Path(path).rglob("*") if file.is_file())
    logs = [file for file in files if b'"coll_perf"' in head_of(file)]
    if logs:
        return _inspected(path, logs)
    if is_trace(path):
        return _of_profile(path, profile_of(read_run([path]), ModelReference(name="traced")))
    if os.path.isfile(path) and head_of(path).lstrip()[:1] != b"{":
        return [parse_log_argument(path)]  # a log of nccl-tests, before whose name ranks are missing
    return _of_profile(path, load_profile(path))


def _inspected(path: str, files: list[str]) -> list[LogFile]:
    """Return the logs of a directory, one for each number of nodes and ranks."""
    calls: Calls = {}
    skipped = 0
    for file in files:
        for record in _records(file):
            skipped += not _note(calls, record)
    found: dict[tuple[int, int], list[NcclLog]] = {}
    notes = (f"{path}: {skipped} lines of other collectives or of one rank were left out",) if skipped else ()
    for (nodes, ranks, collective), sizes in sorted(calls.items()):
        samples = tuple((float(size), median(times.values())) for size, times in sorted(sizes.items()))
        if len(samples) >= MIN_SAMPLES:
            log = NcclLog(collective=collective, samples=samples, gpu=None, device=None, notes=notes)
            found.setdefault((nodes, ranks), []).append(log)
    if not found:
        raise InputError(
            f"{path}: found no collective of {MIN_SAMPLES} sizes on several ranks, expected JSON lines of NCCL "
            f"Inspector with all-reduces, reduce-scatters or all-gathers; record a run that sends them"
        )
    return [
        LogFile(nodes=nodes, per_node=ranks // nodes, path=path, found=tuple(logs))
        for (nodes, ranks), logs in found.items()
    ]


def _records(path: str) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a file, one a line. Raises InputError at a line that is none, unless it is the last."""
    wrong = None
    for number, line in enumerate(text_lines(Path(path)), 1):
        if wrong is not None:
            raise InputError(f"{path}: line {wrong}: found no JSON object, expected one; fetch the file again")
        try:
            record = json.loads(line) if line.strip() else None
        except (ValueError, RecursionError):
            wrong = number
            continue
        if isinstance(record, dict):
            yield record


def _note(calls: Calls, record: dict[str, Any]) -> bool:
    """Note one call; False where it is of another kind."""
    header, perf, where = (record.get(name) for name in ("header", "coll_perf", "metadata"))
    if not isinstance(header, dict) or not isinstance(perf, dict):
        return False
    name, rate = _COLLECTIVES.get(str(perf.get("coll"))), perf.get("coll_algobw_gbs")
    sizes: list[Any] = [header.get("n_ranks"), header.get("nnodes"), perf.get("coll_msg_size_bytes")]
    ranks, nodes, size, time_us = numbers = [*sizes, perf.get("coll_exec_time_us")]
    if name is None or not all(isinstance(value, int | float) and value > 0 for value in numbers):
        return False
    if not isinstance(ranks, int) or not isinstance(nodes, int) or ranks < 2 or ranks % nodes:
        return False
    # A rank's part of a reduce-scatter or all-gather is recorded; its bandwidth tells that of the whole.
    whole = rate * 1e3 * time_us / size if isinstance(rate, int | float) and rate > 0 else 1.0
    parts = ranks if name in _OF_PARTS and whole > (1 + ranks) / 2 else 1
    process = where.get("hostname") if isinstance(where, dict) and header.get("id") is None else None
    by_call = calls.setdefault((nodes, ranks, name), {}).setdefault(int(size) * parts, {})
    key = header.get("id", process), perf.get("coll_sn")
    by_call[key] = min(by_call.get(key, float("inf")), float(time_us))
    return True


def _of_profile(path: str, profile: Profile) -> list[LogFile]:
    cluster = profile.cluster
    if cluster is None or cluster.ranks < 2 or not cluster.samples:
        raise InputError(
            f"{path}: found no measured collective of several ranks, expected a profile or a trace with messages; "
            f"import the traces of a run on two ranks or more"
        )
    gpu = gpu_named(profile.world.accelerator) if profile.world.accelerator else None
    logs = [
        NcclLog(
            collective=_KEYS[key], samples=samples, gpu=gpu, device=profile.world.accelerator,
            notes=tuple(f"{path}: {note}" for note in profile.notes or () if "upper bounds" in note),
        )
        for key, samples in cluster.samples.items()
        if key in _KEYS
    ]  # fmt: skip
    return [LogFile(nodes=cluster.nodes, per_node=cluster.ranks_per_node, path=path, found=tuple(logs))]
