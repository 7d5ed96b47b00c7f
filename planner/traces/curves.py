"""Costs of a traced run's messages: a cluster with curves, and how messages and compute slow each other down."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from planner.cost.halves import LIBRARY_GATHER, LIBRARY_SCATTER
from planner.documents.accelerators import find_accelerator
from planner.documents.profile import Cluster, Contention, Sample
from planner.documents.text import pluralize
from planner.traces.events import Floats, Message, Run, Step, covered

ALONE, BESIDE, WHOLLY = 0.2, 0.8, 0.99
"""Share of a message during compute up to which it counts as alone, and from which as overlapped; of a kernel."""
LEAST_COMPARED = 0.1
"""Share of what is overlapped that has to have run alone, too."""
SHOWS = 1.03
"""A slow-down below is noise."""
SAME_SIZE = 0.02
_KEYS = {"all_reduce": "all_reduce", "all_gather": LIBRARY_GATHER, "reduce_scatter": LIBRARY_SCATTER}
"""Under which keys of a cluster's samples collectives are."""


def cluster_of(run: Run, steps: Sequence[Step]) -> tuple[Cluster | None, list[str]]:
    """Return the cluster that a run's messages show, and what limits it; None where none was sent."""
    ranks = run.ranks
    nodes, notes = run.nodes, []
    if nodes is None:
        nodes = -(-ranks // run.devices_per_node) if run.devices_per_node else 1
        nodes = nodes if ranks % nodes == 0 else 1
        if ranks > 1:
            notes.append(f"taken as {pluralize(nodes, 'node')}, which one trace does not tell: correct cluster.nodes")
    accelerator = find_accelerator(run.accelerator, run.memory_bytes)
    if ranks == 1:
        return Cluster(nodes=1, accelerator=accelerator, source="a run of one rank"), notes
    messages = [message for step in steps for message in step.messages if message.ranks in (None, ranks)]
    samples: dict[str, tuple[Sample, ...]] = {}
    for collective, key in _KEYS.items():
        found = _curve([m for m in messages if m.collective == collective and m.size_bytes], run)
        if found:
            samples[key] = found
    if "all_reduce" not in samples and LIBRARY_GATHER not in samples:
        notes.append("no message of gradients is in the trace: name a cluster with --cluster when you plan")
        return None, notes
    if "all_reduce" not in samples:
        halves = (samples[LIBRARY_GATHER], samples.get(LIBRARY_SCATTER, samples[LIBRARY_GATHER]))
        samples["all_reduce"] = tuple(sorted((size, 2.0 * time) for size, time in halves[1]))
        notes.append("the cost of an all-reduce was taken as twice that of a reduce-scatter, for none is in the trace")
    if len(run.traced_ranks) < ranks:
        notes.append(
            f"costs of messages are upper bounds: traces of {len(run.traced_ranks)} of {ranks} ranks hold what these "
            f"wait for the others, up to {_longest_wait_us(messages) / 1e3:.3g} ms of a message here; import the "
            f"traces of all ranks"
        )
    contention, said = _contention(steps, messages)
    cluster = Cluster(
        nodes=nodes, ranks_per_node=ranks // nodes, samples=samples, contention=contention, accelerator=accelerator,
        measured_for="exact",
        source=f"messages of {pluralize(len(run.paths), 'trace')}, group {run.group or 'unknown'}",
    )  # fmt: skip
    return cluster, [*notes, *said]


def _longest_wait_us(messages: Sequence[Message]) -> float:
    """Return the most that a message took beyond any message that is as large, or larger."""
    longest_us, least_us = 0.0, dict[str, float]()
    for message in sorted(messages, key=lambda one: (-(one.size_bytes or 0), one.cost_us)):
        least = least_us[message.collective] = min(least_us.get(message.collective, np.inf), message.cost_us)
        longest_us = max(longest_us, message.cost_us - least)
    return longest_us


def _curve(messages: Sequence[Message], run: Run) -> tuple[Sample, ...]:
    """Return (bytes, µs) by size: the median over steps; no larger than that of a larger message, which bounds it."""
    by_size: dict[int, list[float]] = {}
    for message in messages:
        by_size.setdefault(message.size_bytes or 0, []).append(message.cost_us)
    sizes = sorted(by_size)
    times = [float(np.median(by_size[size])) for size in sizes]
    bounded = np.minimum.accumulate(times[::-1])[::-1]
    return tuple((float(size), round(float(time), 3)) for size, time in zip(sizes, bounded, strict=True))


def _contention(steps: Sequence[Step], messages: Sequence[Message]) -> tuple[Contention | None, list[str]]:
    """Return the slow-down of messages and compute by one another, where the same ones ran alone and overlapped."""
    planned = set(map(id, messages))
    rows: tuple[list[Floats], list[Floats]] = [], []
    # Kernels without a grid are the same ones where they have the same place in their steps.
    aligned = len({len(step.compute) for step in steps}) == 1
    for step in steps:
        sent = np.array([(m.start_us, m.end_us, id(m) in planned, m.size_bytes or 0, m.cost_us) for m in step.messages])
        if not len(sent):
            continue
        start, stop = step.compute.T
        shares = _busy(sent)(start, stop)
        names = np.where(step.kernels >= 0, step.kernels, -1 - np.arange(len(start)) if aligned else np.iinfo(int).min)
        same = (shares == 0.0) | (shares >= WHOLLY)
        rows[0].append(np.stack([names, shares, stop - start])[:, same & (names != np.iinfo(int).min)])
        own = sent[(sent[:, 2] == 1.0) & (sent[:, 3] > 0.0)]
        shares = _busy(step.compute)(own[:, 0], own[:, 1])
        clear = (shares <= ALONE) | (shares >= BESIDE)
        rows[1].append(np.stack([np.round(np.log(own[:, 3]) / SAME_SIZE), shares, own[:, 4]])[:, clear])
    compute, network = (max(1.0, _ratio(np.concatenate(of, axis=1))) if of else 1.0 for of in rows)
    if max(network, compute) < SHOWS:
        return None, []
    said = (
        f"contention: compute takes {compute:.2f} times as long during messages, messages {network:.2f} times during "
        f"compute, of what ran both alone and overlapped; compute times are those without messages"
    )
    return Contention(compute=round(compute, 3), network=round(network, 3)), [said]


def _busy(spans: Floats) -> Callable[[Floats, Floats], Floats]:
    """Return a function that gives which share of intervals lies within these, which are ordered by start."""
    edges, before = covered(spans)

    def share(start: Floats, stop: Floats) -> Floats:
        inside = np.interp(stop, edges, before) - np.interp(start, edges, before)
        return np.asarray(inside / np.maximum(stop - start, 1e-9))

    return share


def _ratio(rows: Floats) -> float:
    """Return how many times as long what is overlapped takes in all; 1 where too little of it also ran alone.

    `rows` are keys, shares of overlap and durations. Shape (3, samples).
    """
    overlapped = float(rows[2, rows[1] >= 0.5].sum())
    compared = alone_us = beside_us = 0.0
    ordered = rows[:, np.argsort(rows[0], kind="stable")]
    for shares, durations in np.split(ordered[1:], 1 + np.flatnonzero(np.diff(ordered[0])), axis=1):
        alone, beside = durations[shares < 0.5], durations[shares >= 0.5]
        if len(alone) and len(beside):
            compared += float(beside.sum())
            alone_us += float(len(beside) * np.median(alone))
            beside_us += float(len(beside) * np.median(beside))
    return beside_us / alone_us if alone_us > 0.0 and compared > LEAST_COMPARED * overlapped else 1.0
