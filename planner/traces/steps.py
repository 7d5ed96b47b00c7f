"""Steps of one rank's recording: who launched which kernel, and which gradient it completed."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.documents.profile import DTYPE_BYTES
from planner.documents.text import pluralize
from planner.traces import kineto
from planner.traces.events import Message, Run, Step
from planner.traces.kineto import COLLECTIVES, Collective, Floats, Ints, Recording, column, spelled
from runtime.errors import InputError
from runtime.plan.fully_sharded import ROOT
from runtime.plan.strict_json import MAX_RANKS

MAX_DROPPED = 0.05
"""Share of launches whose kernels may be missing."""
EXCHANGES = ("all_reduce", "reduce_scatter")
"""Collectives that gradients are exchanged with."""
_POINT_TO_POINT = {"send", "recv", "sendrecv", "p2p", "batch_p2p", "coalesced"}
_FSDP = re.compile(r"FSDP::(pre_forward|post_forward|pre_backward|post_backward_reshard)(?: \((.+)\))?")
HOW = "give the profiler a schedule with repeat=1, call prof.step() after each iteration, and record a whole one"


@dataclass(frozen=True)
class _Host:
    """Operations of a host of one kind, by start."""

    start: Floats
    end: Floats
    thread: Ints
    shape: NDArray[np.int32]
    of: NDArray[np.int32]

    def within(self, begin: float, end: float) -> _Host:
        """Return those that start in this time."""
        return self.chosen(slice(*np.searchsorted(self.start, (begin, end))))

    def chosen(self, which: NDArray[Any] | slice) -> _Host:
        return _Host(*(values[which] for values in vars(self).values()))


class Columns:
    """A recording as arrays, ordered by the time when the host launched."""

    def __init__(self, recording: Recording) -> None:
        self.recording, self.names = recording, list(recording.names)
        kinds = column(recording.host, "kind")
        order = np.argsort(column(recording.host, "start"), kind="stable")
        self.host = {
            kind: _Host(*(column(recording.host, name)[at] for name in ("start", "end", "thread", "shape", "of")))
            for kind in (kineto.GRADIENT, kineto.BUCKET_COPY, kineto.BACKWARD, kineto.FORWARD, kineto.CALL, kineto.SENT)
            for at in [order[kinds[order] == kind]]
        }
        self.on_device = len(recording.device["start"]) > 0
        if self.on_device:
            self._from_device()
        else:
            self._from_hosts()
        order = np.argsort(self.launch, kind="stable")
        for name in ("launch", "launcher", "start", "end", "kind", "name", "of", "bytes"):
            setattr(self, name, getattr(self, name)[order])

    def _from_device(self) -> None:
        columns = self.recording.device
        self.start, self.end, self.kind, self.name, self.of, self.bytes = (
            column(columns, name) for name in ("start", "end", "kind", "name", "of", "bytes")
        )
        links, launches = column(columns, "link"), self.recording.launches
        by_link = np.argsort(column(launches, "link"), kind="stable")
        known = column(launches, "link")[by_link]
        at = np.minimum(np.searchsorted(known, links), max(0, len(known) - 1))
        # Kernels without a launch were launched before the recording began.
        self.launch, self.launcher = np.full(len(links), -np.inf), np.full(len(links), -1, dtype=np.int64)
        self.dropped = 1.0
        if len(known):
            found = (known[at] == links) & (links >= 0)
            self.launch[found] = column(launches, "start")[by_link][at][found]
            self.launcher[found] = column(launches, "thread")[by_link][at][found]
            self.dropped -= len(np.unique(at[found])) / len(known)

    def _from_hosts(self) -> None:
        """Operations of hosts as kernels that run while they are launched, and messages of backends such as gloo."""
        works, messages = self.recording.works, self.host[kineto.SENT]
        self.start = np.concatenate([column(works, "start"), messages.start])
        self.end = np.concatenate([column(works, "end"), messages.end])
        own, sent = len(works["start"]), len(messages.start)
        self.kind = np.repeat(np.array([kineto.KERNEL, kineto.MESSAGE], dtype=np.int8), [own, sent])
        self.launch, self.launcher = self.start.copy(), np.full(own + sent, -1, dtype=np.int64)
        self.launcher[:own] = column(works, "thread")
        self.name = np.full(own + sent, -1, dtype=np.int32)
        self.of = np.concatenate([np.full(own, -1, dtype=np.int32), messages.of])
        self.bytes = np.full(own + sent, -1, dtype=np.int64)
        self.dropped = 0.0
        self._match_calls(own)

    def _match_calls(self, first: int) -> None:
        """Date messages of hosts by their calls: the k-th of a collective by the k-th call of it."""
        calls = self.host[kineto.CALL]
        by_name: dict[str, list[int]] = {}
        for index, of in enumerate(calls.of):
            by_name.setdefault(self.names[of].name, []).append(index)
        place: Counter[str] = Counter()
        for at in first + np.argsort(self.start[first:], kind="stable"):
            name = self.names[self.of[at]].name
            known = by_name.get(name, [])
            # Calls before the recording began have no message in it, and messages no call.
            while place[name] < len(known) and calls.end[known[place[name]]] < self.start[at] - 6e7:
                place[name] += 1
            if place[name] < len(known) and calls.start[known[place[name]]] <= self.start[at]:
                call = known[place[name]]
                self.launch[at], self.launcher[at] = calls.start[call], calls.thread[call]
                if self.names[self.of[at]].numel_in is None:
                    self.of[at] = calls.of[call]
                place[name] += 1

    def overhead(self, zero: float, end: float) -> tuple[Floats, Floats]:
        """Return moments after `zero`, and how many operations were recorded since then before each of them."""
        works = self.recording.works
        start, stop, inside = (column(works, name) for name in ("start", "end", "inside"))
        chosen = np.flatnonzero((start >= zero) & (start < end))
        chosen = chosen[np.argsort(start[chosen], kind="stable")]
        after = np.cumsum(1.0 + inside[chosen])
        moments = np.stack([start[chosen], stop[chosen]], axis=1).ravel() - zero
        return np.maximum.accumulate(moments), np.stack([np.concatenate([[0.0], after[:-1]]), after], axis=1).ravel()

    @cached_property
    def metadata(self) -> dict[int, _Host]:
        """Calls of collectives, by thread."""
        calls = self.host[kineto.CALL]
        return {int(thread): calls.chosen(calls.thread == thread) for thread in np.unique(calls.thread)}

    def collective_of(self, at: int) -> Collective:
        """Return a message's collective: by its metadata, by those of the call that launched it, or by its name."""
        if self.of[at] >= 0:
            found: Collective = self.names[self.of[at]]
            return found
        named = Collective(spelled(str(self.names[self.name[at]])))
        calls = self.metadata.get(int(self.launcher[at]))
        if calls is not None:
            place = int(np.searchsorted(calls.start, self.launch[at], side="right")) - 1
            if place >= 0:
                called: Collective = self.names[calls.of[place]]
                return named if named.name in COLLECTIVES and named.name != called.name else called
        return named

    def messages(
        self, sent: Ints, begin: float, end: float
    ) -> list[tuple[Collective, float, tuple[float, float] | None]]:
        """Return (collective, launch, span) of these messages; where there are none, of a single rank's calls."""
        if len(sent):
            times = np.stack([self.launch[sent], self.start[sent], self.end[sent]], axis=1).tolist()
            return [(self.collective_of(at), one[0], (one[1], one[2])) for at, one in zip(sent, times, strict=True)]
        calls = self.host[kineto.CALL].within(begin, end)
        called = [(self.names[of], start) for start, of in zip(calls.start.tolist(), calls.of, strict=True)]
        return [(what, start, None) for what, start in called if what.ranks == 1 and what.name in EXCHANGES]


def windows(columns: Columns) -> list[tuple[int, float, float]]:
    """Return (number, start, end) of each step on the host: as `prof.step()` marked them, else from one optimizer's
    step to the next, else from forward to forward.
    """
    recording = columns.recording
    if recording.steps:
        return sorted((number, start, end) for number, (start, end) in recording.steps.items())
    named: dict[str, list[tuple[float, float]]] = {}
    for name, start, end, _ in recording.annotations:
        named.setdefault(name, []).append((start, end))
    updates = [times for name, times in named.items() if name.startswith("Optimizer.step#")]
    if updates:
        # Of several optimizers that of most steps; each step ends with its last one.
        most = max(updates, key=len)
        ends = [end for _, end in sorted(most)]
        everything = min([*columns.host[kineto.FORWARD].start[:1], *columns.start[:1]], default=ends[0])
        return [(index, begin, end) for index, (begin, end) in enumerate(pairwise([min(everything, ends[0]), *ends]))]
    forwards = sorted(start for start, _ in named.get("DistributedDataParallel.forward", []))
    last = max([0.0, *columns.host[kineto.BACKWARD].end[-1:], *columns.end.tolist()[-1:]])
    edges = sorted({*forwards, *([last + 1.0] if forwards else [])})
    return [(index, begin, end) for index, (begin, end) in enumerate(pairwise(edges))]


def read_steps(recording: Recording) -> Run:
    """Return the complete steps of a recording.

    Raises InputError: no gradient, no complete step, or kernels were dropped.
    """
    path, columns = recording.path, Columns(recording)
    version = recording.header.get("schemaVersion", 1)
    if version != 1:
        raise InputError(
            f"{path}: $.schemaVersion: found {str(version)[:40]}, expected 1; record it with a torch from 1.12 to 2.13"
        )
    if not len(columns.host[kineto.GRADIENT].start):
        raise InputError(_no_gradients(columns))
    if not columns.on_device and recording.launches["start"]:
        raise InputError(
            f"{path}: found {len(recording.launches['start'])} launches and no kernel, expected the kernels: the "
            f"profiler dropped them, or was not allowed to record them; record with ProfilerActivity.CUDA"
        )
    if columns.dropped > MAX_DROPPED:
        raise InputError(
            f"{path}: found launches of which {columns.dropped:.0%} have no kernel{recording.left_out}, expected all: "
            f"the profiler's buffer dropped them; record fewer steps"
        )
    known = windows(columns)
    steps = [step for window in known for step in _step(columns, *window)]
    if not steps:
        raise InputError(
            f"{path}: found {pluralize(len(known), 'step')}, none with a whole backward, expected one; {HOW}"
        )
    between = {message.collective for step in steps for message in step.others} & _POINT_TO_POINT
    if between and not any(step.buckets for step in steps):
        raise InputError(
            f"{path}: found {', '.join(sorted(between))} and no exchange of gradients, expected data-parallel ranks: "
            f"one rank of a pipeline cannot be planned by itself; name a trace of a job that has them"
        )
    whole = _alike(steps, lambda step: len(step.ready_us))
    sent = [step for step in whole if step.buckets]
    # DDP lays out its buckets anew after its first backward.
    usual = _alike(sent, lambda step: tuple(message.size_bytes for message in step.buckets))
    notes = _notes(recording, len(known), whole, sent, usual)
    whole = _with_gaps(usual or whole)
    info, devices = recording.header.get("distributedInfo"), recording.header.get("deviceProperties")
    device = devices[0] if columns.on_device and isinstance(devices, list) and devices else None
    bucket = next((message for step in whole for message in step.buckets), None)
    optimizers = Counter(name for name, *_ in recording.annotations if name.startswith("Optimizer.step#"))
    others = Counter((message.collective, message.group) for message in whole[0].others)
    groups = max((message.ranks or 0 for step in whole for message in step.messages), default=0)
    world = _field(info, "world_size", int, MAX_RANKS) or groups
    if not world and any(message.duration_us > 0.0 for step in whole for message in step.buckets):
        world = 2
        notes.append("the number of ranks is not in the trace: taken as 2; correct cluster.ranks_per_node")
    rank, base = _field(info, "rank", int) or 0, _field(recording.header, "baseTimeNanoseconds", int)
    return Run(
        paths=(path,), rank=rank, world=world, traced_ranks=(rank,), steps=whole,
        group="" if bucket is None else bucket.group, exchanging=None if bucket is None else bucket.ranks,
        notes=tuple(notes),
        backend=_field(info, "backend", str), device="cuda" if columns.on_device else "cpu",
        devices_per_node=0 if device is None else len(devices),  # type: ignore[arg-type]
        host=_field(recording.header, "host_name", str),
        begun_s=None if base is None else base / 1e9 + whole[0].begin_us / 1e6,
        optimizer=next((name[15:].removesuffix(".step") for name, _ in optimizers.most_common(1)), None),
        accelerator=(_field(device, "name", str) or "")[:200] or None,
        memory_bytes=_field(device, "totalGlobalMem", int) or None,
        unplanned=tuple(
            f"{name.replace('_', '-')} of group {of or 'unknown'}, {times} a step: not planned, left as it is"
            for (name, of), times in sorted(others.items())
            if name not in ("broadcast", "barrier")
        ),
    )  # fmt: skip


def _field(of: Any, name: str, kind: type, most: int = 2**62) -> Any:
    """Return a field of the header; None where it is missing, or no text, or no number from 0 to `most`."""
    value: Any = of.get(name) if isinstance(of, dict) else None
    if type(value) is not kind:
        return None
    return None if isinstance(value, int) and not 0 <= value <= most else value


def _alike(steps: Sequence[Step], key: Callable[[Step], Any]) -> list[Step]:
    """Return the steps of the most common key; of several that of the last step."""
    most = Counter(map(key, reversed(steps))).most_common(1)
    return [step for step in steps if key(step) == most[0][0]]


def _no_gradients(columns: Columns) -> str:
    path = columns.recording.path
    if len(columns.host[kineto.BACKWARD].start):
        return (
            f"{path}: found a backward without AccumulateGrad, expected gradients of parameters; the part of a job "
            f"that trains no parameters of its own cannot be planned: name the trace of another rank"
        )
    if not len(columns.recording.works["start"]):
        found = "kernels" if columns.on_device else "steps"
        return (
            f"{path}: found {found} and no operations of the host, expected both; record with "
            f"activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], and schedule(..., repeat=1)"
        )
    return (
        f"{path}: found no backward, expected steps of training (an inference has nothing to plan); record steps that "
        f"call backward"
    )


def _notes(recording: Recording, windows: int, whole: list[Step], sent: list[Step], usual: list[Step]) -> list[str]:
    left_out = {
        "whose backward is not whole": windows - len(whole),
        "without messages (accumulation of gradients)": len(whole) - len(sent or whole),
        "with buckets of other sizes, as DDP's first step has": len(sent) - len(usual),
    }
    notes = [f"left out: {pluralize(count, 'step')} {which}" for which, count in left_out.items() if count]
    if whole[0].micro_batches > 1:
        notes.append(f"the last of {whole[0].micro_batches} micro-batches of a step was taken: it synchronizes")
    if whole[0].estimated:
        notes.append(f"sizes of {whole[0].estimated} gradients: those of messages that take as long; not recorded")
    if recording.unreadable:
        notes.append(f"left out: {pluralize(recording.unreadable, 'event')} {kineto.UNREADABLE}")
    return notes


def _with_gaps(steps: list[Step]) -> list[Step]:
    """Add what lies between two consecutive steps."""
    begun = {step.number - 1: step.begin_us for step in steps}
    ends = [(step, step.begin_us + step.span_us) for step in steps]
    return [
        replace(step, gap_us=max(0.0, begun[step.number] - end) if step.number in begun else None) for step, end in ends
    ]


def _step(columns: Columns, number: int, begin: float, end: float) -> Iterator[Step]:
    """Yield the step of this window of the host, if its backward is whole."""
    backwards = columns.host[kineto.BACKWARD].within(begin, end)
    if not len(backwards.start):
        return
    forwards = _outside(columns.host[kineto.FORWARD].within(begin, end), backwards)
    # A forward behind a backward begins another micro-batch.
    edges = forwards[np.unique(np.searchsorted(forwards, backwards.start))[:-1]] if len(forwards) else forwards
    edges = edges[edges > backwards.start[0]] if len(edges) else edges
    parts = list(pairwise([begin, *np.unique(edges).tolist(), end]))
    found = [step for part in parts for step in _backward(columns, number, *part)]
    if found:
        best = max(found, key=lambda step: (len(step.buckets) > 0, len(step.ready_us), step.begin_us))
        waits = [(start, stop) for start, stop in columns.recording.loading if begin <= start < end]
        yield replace(best, micro_batches=len(found), input_us=sum(stop - start for start, stop in waits))


def _outside(forwards: _Host, backwards: _Host) -> Floats:
    """Return the starts of forward operations that no backward runs: those of recomputation are part of backward."""
    at = np.searchsorted(backwards.start, forwards.start, side="right") - 1
    reach = np.maximum.accumulate(backwards.end)
    inside = (at >= 0) & (reach[np.maximum(at, 0)] > forwards.start)
    return forwards.start[~inside]


def _backward(columns: Columns, number: int, begin: float, end: float) -> Iterator[Step]:
    gradients = columns.host[kineto.GRADIENT].within(begin, end)
    backwards = columns.host[kineto.BACKWARD].within(begin, end)
    if not len(gradients.start):
        return
    first, stop = np.searchsorted(columns.launch, (begin, end))
    kinds = columns.kind[first:stop]
    kernels = first + np.flatnonzero(kinds != kineto.MESSAGE)
    if not columns.on_device:
        # Python and the data loader run before the first operation of forward, on the same thread.
        starts = columns.host[kineto.FORWARD].within(begin, end).start
        zero = float(starts[0]) if len(starts) else begin
        kernels = kernels[columns.start[kernels] >= zero]
    if not len(kernels):
        return
    if columns.on_device:
        zero = float(columns.start[kernels].min())
    launch, ends = columns.launch[kernels], columns.end[kernels]
    in_forward = launch < backwards.start[0]
    if columns.on_device:
        forward_us = float(ends[in_forward].max()) - zero if in_forward.any() else 0.0
        own = columns.launcher[kernels] == gradients.thread[0]
        reached = np.maximum.accumulate(ends[own]) if own.any() else np.array([zero])
        at = np.searchsorted(launch[own], gradients.start, side="right") - 1
        ready = np.where(at >= 0, reached[np.maximum(at, 0)], zero + forward_us) - zero
    else:
        forward_us = float(backwards.start[0]) - zero
        ready = gradients.start - zero
    ready = np.maximum.accumulate(np.maximum(ready, forward_us))
    sent = first + np.flatnonzero(kinds == kineto.MESSAGE)
    copies = columns.host[kineto.BUCKET_COPY].within(begin, end)
    inside = sent[(columns.launch[sent] > backwards.start[0]) & (columns.launch[sent] < gradients.start[0])]
    if columns.on_device and len(inside) == len(ready):
        # A compiled backward copies and sends all gradients before parameters get them.
        moments, unknown = columns.launch[inside], np.full(len(ready), -1, dtype=np.int32)
        ready = np.full(len(ready), max(forward_us, float(ends[launch < moments[0]].max()) - zero))
        gradients = replace(gradients, start=moments)
        copies = _Host(np.append(backwards.start[0], moments[:-1]), moments, gradients.thread, unknown, unknown)
    messages = [_message(*what, zero, gradients, ready) for what in columns.messages(sent, begin, end)]
    buckets = _buckets(messages)
    order = np.argsort(columns.start[kernels], kind="stable")
    shapes, estimated = _shapes(columns, gradients, copies, buckets)
    copied = not columns.on_device and len(copies.start) == len(ready)
    compute = np.stack([columns.start[kernels], ends], axis=1)[order] - zero
    groups = _groups(columns, begin, end)
    yield Step(
        number=number, forward_us=forward_us, ready_us=ready, modules=_modules(gradients, groups),
        forwards_us=_forwards_us(columns, groups, begin, float(backwards.start[0])),
        shapes=shapes, estimated=estimated,
        dtypes=_dtypes(columns, gradients, buckets), buckets=buckets,
        others=tuple(message for message in messages if message not in buckets),
        compute=compute, kernels=columns.name[kernels][order], begin_us=zero,
        span_us=float(max([compute[:, 1].max(), *(message.end_us for message in buckets)])),
        overhead=None if columns.on_device else columns.overhead(zero, end),
        copied_us=tuple((copies.end - copies.start).tolist()) if copied else None,
    )  # fmt: skip


def _groups(columns: Columns, begin: float, end: float) -> list[tuple[str, str, float, float]]:
    """Return (call, module, start, end) of FSDP2's hooks in this time, by start."""
    found = []
    for name, start, stop, _ in columns.recording.annotations:
        if begin <= start < end and (match := _FSDP.fullmatch(name)) is not None:
            found.append((match[1], (match[2] or ROOT).partition(", ")[0], start, stop))
    return sorted(found, key=lambda hook: hook[2])


def _forwards_us(
    columns: Columns, groups: Sequence[tuple[str, str, float, float]], begin: float, end: float
) -> dict[str, float]:
    """Return how long kernels of each group's forward run: those launched between its two hooks; all others' are of the
    root.
    """

    def compute_us(first: float, last: float) -> float:
        start, stop = np.searchsorted(columns.launch, (first, last))
        return float((columns.end - columns.start)[start:stop][columns.kind[start:stop] != kineto.MESSAGE].sum())

    found: dict[str, float] = {}
    begun: dict[str, float] = {}
    for call, module, start, _ in groups:
        if call == "pre_forward":
            begun[module] = start
        elif call == "post_forward" and module in begun and module != ROOT:
            found[module] = compute_us(begun[module], start)
    ordered = {module: found[module] for module in begun if module in found}
    return {**ordered, ROOT: max(0.0, compute_us(begin, end) - sum(found.values()))} if groups else {}


def _modules(gradients: _Host, groups: Sequence[tuple[str, str, float, float]]) -> tuple[str, ...] | None:
    """Return the group of each gradient: the last one whose backward had begun and not ended; else the root."""
    if not groups:
        return None
    edges = [hook for hook in groups if hook[0] in ("pre_backward", "post_backward_reshard")]
    found, open_, at = [], [ROOT], 0
    for moment in gradients.start:
        for call, module, start, _ in edges[at:]:
            if start > moment:
                break
            at += 1
            if call == "pre_backward":
                open_.append(module)
            elif module in open_:
                open_.remove(module)
        found.append(open_[-1] if open_ else ROOT)
    return tuple(found)


def _message(
    what: Collective, launched: float, span: tuple[float, float] | None, zero: float, gradients: _Host, ready: Floats
) -> Message:
    """Return a message; one of a single rank, which has no span, takes no time."""
    count = int(np.searchsorted(gradients.start, launched, side="right"))
    ready_us = float(ready[count - 1]) if count else launched - zero
    start_us, end_us = (ready_us, ready_us) if span is None else (span[0] - zero, span[1] - zero)
    return Message(
        collective=what.name, size_bytes=what.size_bytes, dtype=what.dtype, group=what.group, ranks=what.ranks,
        gradients=count, ready_us=ready_us, start_us=start_us, end_us=end_us, exchanges=what.name in EXCHANGES,
    )  # fmt: skip


def _buckets(messages: list[Message]) -> tuple[Message, ...]:
    """Return the messages of gradients: those of the group that reduces most after the first gradient is ready."""
    able = [
        message
        for message in messages
        if message.gradients and message.exchanges and message.dtype in (None, *DTYPE_BYTES)
    ]
    weight: Counter[tuple[str, str]] = Counter()
    for message in able:
        weight[message.collective, message.group] += 1 + (message.size_bytes or 0)
    if not weight:
        return ()
    chosen = weight.most_common(1)[0][0]
    return tuple(message for message in able if (message.collective, message.group) == chosen)


def _dtypes(columns: Columns, gradients: _Host, buckets: tuple[Message, ...]) -> tuple[str, ...]:
    sent = next((message.dtype for message in buckets if message.dtype is not None), "float32")
    known = [str(columns.names[of]) if of >= 0 else sent for of in gradients.of]
    return tuple(dtype if dtype in DTYPE_BYTES else sent for dtype in known)


def _shapes(
    columns: Columns, gradients: _Host, copies: _Host, buckets: tuple[Message, ...]
) -> tuple[tuple[tuple[int, ...], ...] | None, int]:
    """Return the shape of each gradient, and how many of them are estimated.

    As recorded, or by copies of them on the host, which follow in the same order: then of one dimension. Where the copy
    of a gradient that is sent alone is a kernel, the size of a message that takes as long counts.
    """
    for operations in (gradients, copies):
        if len(operations.start) == len(gradients.start) and (operations.shape >= 0).all():
            return tuple(columns.names[shape] for shape in operations.shape), 0
    if len(copies.start) != len(gradients.start):
        return None, 0
    element = DTYPE_BYTES[_dtypes(columns, gradients, buckets)[0]]
    sizes = np.full(len(copies.start), -1, dtype=np.int64)
    for at, edges in enumerate(zip(copies.start, copies.end, strict=True)):
        copied = columns.bytes[slice(*np.searchsorted(columns.launch, edges))]
        sizes[at] = max(-1, *copied.tolist()) if len(copied) else -1
    known, unknown = np.flatnonzero(sizes >= 0), np.flatnonzero(sizes < 0)
    if len(unknown) and (len(buckets) != len(sizes) or not len(known)):
        return None, 0
    if len(unknown):
        durations = np.array([message.duration_us for message in buckets])
        order = known[np.argsort(durations[known], kind="stable")]
        sizes[unknown] = np.interp(durations[unknown], durations[order], np.maximum.accumulate(sizes[order]))
    return tuple((max(1, int(size) // element),) for size in sizes), len(unknown)
