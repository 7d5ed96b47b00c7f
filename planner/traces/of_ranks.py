"""The traces of a job: one file, or one for each of several ranks, as one run."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from planner.documents.text import pluralize
from planner.traces.events import Message, Run, Step
from planner.traces.kineto import read_kineto
from planner.traces.steps import read_steps
from planner.traces.stream import ENDINGS, Progress
from runtime.errors import InputError

APART_S = 60.0
"""Clocks of hosts differ by less; recordings further apart are of two runs."""


def trace_files(paths: Sequence[str]) -> list[str]:
    """Return the trace files that are named, directories by what is in them. Raises InputError: there is none."""
    found: list[str] = []
    for path in paths:
        if not os.path.isdir(path):
            found.append(path)
            continue
        inside = sorted(str(file) for file in Path(path).iterdir() if file.name.endswith(ENDINGS) and file.is_file())
        if not inside:
            endings = ", ".join(ENDINGS)
            raise InputError(f"{path}: found no file that ends in {endings}, expected traces; name their folder")
        found += inside
    return found


def read_run(paths: Sequence[str], opened: Callable[[str], Progress | None] = lambda path: None) -> Run:
    """Return the run that these traces are of, one file a rank.

    Args:
        paths: files, or directories of them.
        opened: gets the path of each file before it is read, and returns what is called with the bytes read.

    Raises InputError: a file is no trace of training steps, or they are not of one run.
    """
    runs = [read_steps(read_kineto(file, opened(file))) for file in trace_files(paths)]
    _check_same_run(runs)
    hosts = {run.host for run in runs} - {None}
    nodes = len(hosts) if len(runs) == runs[0].world and hosts and len(runs) % len(hosts) == 0 else None
    return replace(runs[0] if len(runs) == 1 else _merged(runs), nodes=nodes)


def _check_same_run(runs: Sequence[Run]) -> None:
    """Raise InputError at the first file that does not belong to the run of the first one."""
    first, seen = runs[0], {runs[0].rank: runs[0].paths[0]}
    for run in runs[1:]:
        where, other = run.paths[0], first.paths[0]
        numbers = [[step.number for step in one.steps] for one in (run, first)]
        if run.world != first.world:
            problem = f"{pluralize(run.world, 'rank')}, and {first.world} in {other}"
        elif run.rank in seen:
            problem = f"rank {run.rank} once more (the default without distributedInfo), as in {seen[run.rank]}"
        elif numbers[0] != numbers[1]:
            problem = f"the steps {_range(numbers[0])}, and {_range(numbers[1])} in {other}"
        elif abs((run.begun_s or 0.0) - (first.begun_s or 0.0)) > APART_S and run.begun_s and first.begun_s:
            problem = f"steps that began {abs(run.begun_s - first.begun_s):.0f} s apart from those of {other}"
        elif len(run.steps[0].ready_us) != len(first.steps[0].ready_us):
            problem = f"{len(run.steps[0].ready_us)} gradients, and {len(first.steps[0].ready_us)} in {other}"
        elif len({one.steps[0].numel for one in (run, first) if one.steps[0].numel and not one.steps[0].estimated}) > 1:
            problem = f"gradients of other sizes than in {other}"
        elif [m.size_bytes for m in run.steps[0].buckets] != [m.size_bytes for m in first.steps[0].buckets]:
            problem = f"messages of gradients of other sizes than in {other}"
        else:
            seen[run.rank] = where
            continue
        raise InputError(f"{where}: found {problem}; expected one trace of each rank of one run: name those alone")


def _range(numbers: Sequence[int]) -> str:
    return f"{numbers[0]} to {numbers[-1]} ({len(numbers)})" if numbers else "none"


def _merged(runs: Sequence[Run]) -> Run:
    """Return the run of several ranks: a gradient is ready when it is on all of them, forward is their median."""
    runs = sorted(runs, key=lambda run: run.rank)
    ranks = tuple(run.rank for run in runs)
    steps = [_merged_step(steps, ranks) for steps in zip(*(run.steps for run in runs), strict=True)]
    notes = dict.fromkeys(note for run in runs for note in run.notes)
    return replace(
        runs[0], paths=tuple(path for run in runs for path in run.paths), steps=steps, traced_ranks=ranks,
        notes=tuple(notes),
    )  # fmt: skip


def _merged_step(steps: Sequence[Step], ranks: Sequence[int]) -> Step:
    keyed = [_by_key(step) for step in steps]
    # The slowest rank's messages wait least: the others wait for it.
    slowest = int(np.argmin([sum(message.duration_us for message in step.buckets) for step in steps]))

    def merge(key: tuple[str, str, int]) -> Message:
        messages = [messages.get(key) for messages in keyed]
        mine = messages[slowest]
        assert mine is not None
        if None in messages:
            return mine
        durations = [message.duration_us for message in messages if message is not None]
        # They end together, so that who begins last takes least; clocks of hosts need not agree.
        arrivals = tuple(max(durations) - duration for duration in durations)
        return replace(mine, least_us=min(durations), last_rank=ranks[int(np.argmin(durations))], arrivals_us=arrivals)

    chosen = {id(message): merge(key) for key, message in keyed[slowest].items()}
    buckets, others = (
        tuple(chosen[id(message)] for message in of) for of in (steps[slowest].buckets, steps[slowest].others)
    )
    return replace(
        steps[slowest], forward_us=float(np.median([step.forward_us for step in steps])), buckets=buckets,
        ready_us=np.max([step.ready_us for step in steps], axis=0), others=others,
        parts_us=tuple((step.last_gradient_us, step.input_us) for step in steps),
    )  # fmt: skip


def _by_key(step: Step) -> dict[tuple[str, str, int], Message]:
    """Return messages by collective, group and their number among these."""
    found: dict[tuple[str, str, int], Message] = {}
    count: Counter[tuple[str, str]] = Counter()
    for message in step.messages:
        key = message.collective, message.group
        found[(*key, count[key])] = message
        count[key] += 1
    return found
