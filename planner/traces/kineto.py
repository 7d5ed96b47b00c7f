"""Read one Kineto trace, as torch.profiler exports it, into arrays of what a step consists of."""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.documents.text import pluralize
from planner.traces.stream import A_TRACE, EventFile, Progress
from runtime.errors import InputError
from runtime.plan.strict_json import MAX_RANKS

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

KERNEL, MESSAGE = range(2)
"""Uses of an accelerator: a kernel, copy or memset; a kernel of a communication library."""
GRADIENT, BUCKET_COPY, BACKWARD, FORWARD, CALL, SENT, LOADING = range(7)
"""Kinds of host operations: AccumulateGrad, DDP's copies from buckets to gradients, operations of autograd's engine,
those that autograd records, calls of a collective, messages of backends without kernels, waits for the data loader."""

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast")
"""Collectives by the names that planner has for them."""
UNREADABLE = "without a name, or of negative or absurd times"
"""Events that are left out, in words."""
_CATEGORIES = {"operator": "cpu_op", "runtime": "cuda_runtime", "memcpy": "gpu_memcpy", "memset": "gpu_memset"}
"""Names of older versions."""
_LIBRARY = re.compile(r"nccl|rccl|msccl|oneccl", re.IGNORECASE)
_LAUNCHES = re.compile(r"launch|memcpy|memset", re.IGNORECASE)
_OPERATIONS = {
    "torch::autograd::AccumulateGrad": GRADIENT, "torch.distributed.ddp.reducer::copy_bucket_to_grad": BUCKET_COPY,
    "record_param_comms": CALL,
}  # fmt: skip
_FAMILIES = {"autograd::engine::evaluate_function": BACKWARD, "c10d::": CALL, "enumerate(DataLoader)": LOADING}
"""Names of operations, and beginnings of others."""
_STEP = re.compile(r"ProfilerStep#(\d{1,15})", re.ASCII)
_HOST_MESSAGE = re.compile(r"(?:gloo|mpi|ucc):(\w+)")
_SAID = ("Optimizer.step#", "DistributedDataParallel.forward", "FSDP::p")
"""Beginnings of annotations that are read."""
_MAX_US = 1e15
"""31 years: longer is an error of the file."""
_NANOSECONDS = 1e17
"""Start times above are in nanoseconds: in microseconds they would lie in the year 5138."""

_DTYPES = {
    "float": "float32", "double": "float64", "half": "float16", "long": "int64", "long int": "int64", "int": "int32",
    "short": "int16", "byte": "uint8", "unsigned char": "uint8", "char": "int8", "signed char": "int8",
}  # fmt: skip
"""Names of dtypes in traces, in small letters → torch's."""


def element_bytes(dtype: str) -> int:
    """Return the bytes of an element, which torch's name of its dtype tells."""
    bits = re.search(r"\d+", dtype)
    return 1 if bits is None else max(1, int(bits[0]) // 8)


@dataclass(frozen=True)
class Collective:
    """One collective as a trace records it; sizes are None where it does not."""

    name: str
    """`all_reduce`, `broadcast`, `all_to_all`, …"""
    numel_in: int | None = None
    numel_out: int | None = None
    dtype: str | None = None
    group: str = ""
    ranks: int | None = None

    @property
    def size_bytes(self) -> int | None:
        """Bytes of the whole message: of an all-gather what it returns, else what it is given."""
        if self.numel_in is None or self.dtype is None:
            return None
        numel = max(self.numel_in, self.numel_out or 0) if "gather" in self.name else self.numel_in
        return numel * element_bytes(self.dtype)


@dataclass
class Recording:
    """One rank's trace, as columns that grow; times in microseconds of the trace's clock."""

    path: str
    header: dict[str, Any] = field(default_factory=dict)
    device: dict[str, array[Any]] = field(
        default_factory=lambda: _columns(start="d", end="d", kind="b", link="q", name="i", bytes="q", of="i")
    )
    """Kernels and copies: `link` is the launch's correlation, `name` a message's, or a kernel's with its grid, `of` the
    collective."""
    launches: dict[str, array[Any]] = field(default_factory=lambda: _columns(start="d", thread="q", link="q"))
    host: dict[str, array[Any]] = field(
        default_factory=lambda: _columns(start="d", end="d", kind="b", thread="q", shape="i", of="i")
    )
    """Operations on hosts: `shape` is −1 where none was recorded, `of` is the dtype or the collective."""
    works: dict[str, array[Any]] = field(default_factory=lambda: _columns(start="d", end="d", thread="q", inside="q"))
    """Operations that no other one of their thread contains, and how many they contain."""
    names: dict[Any, int] = field(default_factory=dict)
    """Kernels, dtypes, shapes and collectives, with the number of each."""
    steps: dict[int, tuple[float, float]] = field(default_factory=dict)
    """ProfilerStep → its start and end on the host."""
    annotations: list[tuple[str, float, float, int]] = field(default_factory=list)
    """(name, start, end, thread) of annotations that say what a script does."""
    loading: list[tuple[float, float]] = field(default_factory=list)
    """(start, end) of waits for the data loader."""
    unreadable: int = 0
    """Events without a name, or whose times are no finite numbers, or below zero."""

    @property
    def left_out(self) -> str:
        """Number of unreadable events in words, for the end of a clause; empty where all are read."""
        return f", and {pluralize(self.unreadable, 'event')} {UNREADABLE}" if self.unreadable else ""

    def number(self, name: Any) -> int:
        """Return the number of a name."""
        return self.names.setdefault(name, len(self.names))


@lru_cache(maxsize=100_000)
def _has(pattern: re.Pattern[str], name: str) -> bool:
    """Return whether a pattern is in a name; names are few."""
    return pattern.search(name) is not None


def _columns(**kinds: str) -> dict[str, array[Any]]:
    return {name: array(kind) for name, kind in kinds.items()}


def column(of: dict[str, array[Any]], name: str) -> NDArray[Any]:
    """Return a column as an array that shares its memory."""
    return np.frombuffer(of[name], dtype=of[name].typecode) if len(of[name]) else np.empty(0, of[name].typecode)


_Act = Callable[[Recording, str, float, float, int, dict[str, Any]], None]
"""Notes an event: its recording, name, start, end, thread and arguments."""


def read_kineto(path: str | Path, progress: Progress | None = None) -> Recording:
    """Read a trace. Raises InputError: the file is damaged, or holds no event of torch.profiler."""
    with EventFile(path, progress) as file:
        found = Recording(path=file.path)
        _read(found, file)
        found.header = file.header
    for of in found.works.values() if found.device["start"] else ():
        del of[1:]  # with an accelerator they tell no more than that there are some
    if not (found.host["start"] or found.works["start"] or found.device["start"] or found.steps):
        raise InputError(
            f"{path}: found {file.events} events, none of an operation or a kernel{found.left_out}, {A_TRACE}; name "
            f"another file, or record with schedule(..., repeat=1): a second cycle of the schedule clears the first"
        )
    return found


def _read(found: Recording, events: Iterable[dict[str, Any]]) -> None:
    """Note all events of a file. This runs for each of millions."""
    inside: dict[int, tuple[float, int]] = {}
    works_start, works_end, works_thread, works_inside = found.works.values()
    for event in events:
        if event.get("ph") != "X":
            continue
        category = event.get("cat")
        if not isinstance(category, str) or (act := _act_of(category)) is None:
            continue
        try:
            start, duration, name = float(event["ts"]), float(event.get("dur", 0.0)), event["name"]
        except (KeyError, TypeError, ValueError, OverflowError):
            found.unreadable += 1
            continue
        if start > _NANOSECONDS:
            start, duration = start / 1e3, duration / 1e3
        if not (0.0 <= duration <= _MAX_US and 0.0 <= start <= _NANOSECONDS and isinstance(name, str)):
            found.unreadable += 1
            continue
        arguments, thread = event.get("args"), event.get("tid")
        if not isinstance(arguments, dict):
            arguments = {}
        if not isinstance(thread, int) or abs(thread) >= 2**62:
            thread = _integer(thread)
        if act is _operation:
            reach, work = inside.get(thread, (-math.inf, 0))
            if start >= reach:
                inside[thread] = start + duration, len(works_start)
                works_start.append(start)
                works_end.append(start + duration)
                works_thread.append(thread)
                works_inside.append(0)
            else:
                works_inside[work] += 1
        act(found, name, start, start + duration, thread, arguments)


@lru_cache(maxsize=1000)
def _act_of(category: str) -> _Act | None:
    """Return what notes the events of a category; None for those that steps are not made of."""
    small = category.lower()
    small = _CATEGORIES.get(small, small)
    if small.endswith(("_runtime", "_driver")):
        return _launch
    known: dict[str, _Act] = {
        "cpu_op": _operation, "user_annotation": _annotation, "kernel": _device, "gpu_memcpy": _device,
        "gpu_memset": _device,
    }  # fmt: skip
    return known.get(small)


def _launch(found: Recording, name: str, start: float, end: float, thread: int, arguments: dict[str, Any]) -> None:
    """Note a call that may launch a kernel or a copy."""
    if _has(_LAUNCHES, name):
        _add(found.launches, start, thread, _integer(arguments.get("correlation")))


def _device(found: Recording, name: str, start: float, end: float, thread: int, arguments: dict[str, Any]) -> None:
    """Note a kernel, copy or memset; kernels of communication libraries are messages."""
    sends = _has(_LIBRARY, name)
    sent = _collective(arguments) if sends else None
    name_or_grid = name if sends else (name, str(arguments["grid"])) if "grid" in arguments else None
    link, size_bytes = _integer(arguments.get("correlation")), _integer(arguments.get("bytes"))
    number, of = (-1 if what is None else found.number(what) for what in (name_or_grid, sent))
    _add(found.device, start, end, MESSAGE if sends else KERNEL, link, number, size_bytes, of)


def _operation(found: Recording, name: str, start: float, end: float, thread: int, arguments: dict[str, Any]) -> None:
    """Note an operation of a host, where steps are made of such ones."""
    kind, shape, of = _kind_of(name), -1, -1
    if kind == FORWARD:
        if "Sequence number" not in arguments or arguments.get("Fwd thread id") != 0:
            return
    elif arguments.get("Input type") == [""] and kind == GRADIENT:
        return  # no tensor: the parameter has no gradient
    elif kind in (GRADIENT, BUCKET_COPY):
        dims, dtype = _shape(arguments), _input_dtype(arguments)
        shape, of = (-1 if what is None else found.number(what) for what in (dims, dtype))
    elif kind == CALL:
        collective = _collective(arguments)
        if collective is None and name != "record_param_comms":
            collective = _by_input(name[6:], arguments)
        if collective is None:
            return
        of = found.number(collective)
    elif kind == LOADING:
        found.loading.append((start, end))
        return
    _add(found.host, start, end, kind, thread, shape, of)


def _add(columns: dict[str, array[Any]], *values: float) -> None:
    """Add a row to columns."""
    for of, value in zip(columns.values(), values, strict=True):
        of.append(value)


@lru_cache(maxsize=100_000)
def _kind_of(name: str) -> int:
    """Return what an operation of this name is; one that autograd may record, where steps are made of no such one."""
    if name in _OPERATIONS:
        return _OPERATIONS[name]
    return next((kind for start, kind in _FAMILIES.items() if name.startswith(start)), FORWARD)


def _input_dtype(arguments: dict[str, Any]) -> str | None:
    """Return the dtype of the first recorded input."""
    types = arguments.get("Input type")
    return _dtype(types[0]) if isinstance(types, list) and types else None


def _dtype(name: Any) -> str | None:
    """Return a dtype as torch names it."""
    if not isinstance(name, str):
        return None
    small = name.lower().removeprefix("c10::")
    return _DTYPES.get(small, small)


def _by_input(name: str, arguments: dict[str, Any]) -> Collective:
    """Return a collective without metadata, as its recorded inputs tell."""
    shape = _shape(arguments)
    return Collective(spelled(name), None if shape is None else math.prod(shape), None, _input_dtype(arguments))


def _annotation(found: Recording, name: str, start: float, end: float, thread: int, arguments: dict[str, Any]) -> None:
    """Note what a script, torch or a communication library says it does."""
    if (step := _STEP.fullmatch(name)) is not None:
        found.steps[int(step[1])] = (start, end)
    elif (message := _HOST_MESSAGE.match(name)) is not None:
        _add(found.host, start, end, SENT, thread, -1, found.number(_by_input(message[1], arguments)))
    elif name.startswith("nccl:") and "Input Dims" in arguments:
        _add(found.host, start, end, CALL, thread, -1, found.number(_by_input(name[5:], arguments)))
    elif name.startswith("enumerate(DataLoader)"):
        found.loading.append((start, end))
    elif name.startswith(_SAID):
        found.annotations.append((name, start, end, thread))


def _collective(arguments: dict[str, Any]) -> Collective | None:
    """Return the collective that the metadata of a kernel or a call name; None where there is none."""
    name = arguments.get("Collective name")
    if not isinstance(name, str):
        return None
    group, described = arguments.get("Process Group Name"), arguments.get("Process Group Description")
    return Collective(
        spelled(name), _count(arguments.get("In msg nelems")), _count(arguments.get("Out msg nelems")),
        _dtype(arguments.get("dtype")),
        " ".join(str(part) for part in (group, described) if part not in (None, "", "undefined")),
        _count(arguments.get("Group size"), MAX_RANKS) or None,
    )  # fmt: skip


def spelled(name: str) -> str:
    """Return the collective's name as planner spells it."""
    plain = name.lower().replace("_", "")
    return next(
        (one for one in COLLECTIVES if one.replace("_", "") in plain), "sendrecv" if "sendrecv" in plain else plain
    )


def _count(value: Any, most: int = 2**53) -> int | None:
    return value if type(value) is int and 0 <= value <= most else None


def _integer(value: Any) -> int:
    """Return a number of the file, −1 where it is none that arrays hold."""
    if isinstance(value, str) and value.isascii() and value.isdecimal():
        value = int(value[:19])
    return value if isinstance(value, int) and -(2**62) < value < 2**62 else -1


def _shape(arguments: dict[str, Any]) -> tuple[int, ...] | None:
    """Return the shape of the recorded first input; of a list of tensors, their elements in all."""
    dims = arguments.get("Input Dims")
    first = dims[0] if isinstance(dims, list) and dims else None
    if not isinstance(first, list) or (not first and _input_dtype(arguments) == "tensorlist"):
        return None
    if first and all(isinstance(part, list) for part in first):
        return (min(sum(math.prod(_sizes(part)) for part in first), 2**40),)
    shape = _sizes(first)
    return shape if math.prod(shape) <= 2**40 else None


def _sizes(dims: list[Any]) -> tuple[int, ...]:
    return tuple(size if isinstance(size, int) and 0 <= size < 2**40 else 0 for size in dims)
