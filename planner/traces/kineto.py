"""Read one Kineto trace, as torch.profiler exports it, into arrays of what a step consists of."""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.traces.stream import A_TRACE, EventFile, Progress
from runtime.errors import InputError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

KERNEL, MESSAGE, COPY = range(3)
"""What occupies an accelerator: a kernel, a kernel of a communication library, a copy or a memset."""
GRADIENT, BUCKET_COPY, BACKWARD, FORWARD, CALL, LOADING = range(6)
"""What a host operation is: AccumulateGrad, DDP's copies from buckets to gradients, an operation of autograd's engine,
one that autograd records, a call of a collective, a wait for the data loader."""

_CATEGORIES = {"operator": "cpu_op", "runtime": "cuda_runtime", "memcpy": "gpu_memcpy", "memset": "gpu_memset"}
"""Names of older versions."""
_LIBRARY = re.compile(r"nccl|rccl|msccl|oneccl", re.IGNORECASE)
_LAUNCHES = re.compile(r"launch|memcpy|memset", re.IGNORECASE)
_OPERATIONS = {
    "torch::autograd::AccumulateGrad": GRADIENT, "torch.distributed.ddp.reducer::copy_bucket_to_grad": BUCKET_COPY,
    "record_param_comms": CALL,
}  # fmt: skip
_FAMILIES = {"autograd::engine::evaluate_function": BACKWARD, "c10d::": CALL, "enumerate(DataLoader)": LOADING}
"""Names of operations, and what others begin with."""
_STEP = re.compile(r"ProfilerStep#(\d{1,15})", re.ASCII)
_HOST_MESSAGE = re.compile(r"(?:gloo|mpi|ucc):(\w+)")
_MAX_US = 1e15
"""31 years: longer is an error of the file."""
_NANOSECONDS = 1e17
"""Start times above are in nanoseconds: in microseconds they would lie in the year 5138."""

ELEMENT_BYTES = {
    "float": 4, "double": 8, "half": 2, "bfloat16": 2, "float32": 4, "float64": 8, "float16": 2, "long": 8, "int": 4,
    "long int": 8, "byte": 1, "char": 1, "unsigned char": 1, "signed char": 1, "bool": 1, "short": 2, "int64": 8,
    "int32": 4, "uint8": 1, "int8": 1, "c10::half": 2, "c10::bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip
"""Bytes of an element, by the names that traces have for dtypes, in small letters."""
DTYPES = {
    "float": "float32", "double": "float64", "half": "float16", "c10::half": "float16", "c10::bfloat16": "bfloat16",
    "float32": "float32", "float64": "float64", "float16": "float16", "bfloat16": "bfloat16",
}  # fmt: skip
"""Those of gradients, as torch names them."""


@dataclass(frozen=True)
class Collective:
    """What a trace records of one collective; sizes are None where it does not."""

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
        return numel * ELEMENT_BYTES.get(self.dtype.lower(), 4)


@dataclass
class Recording:
    """What one rank's trace holds, as columns that grow; times in microseconds of the trace's clock."""

    path: str
    header: dict[str, Any] = field(default_factory=dict)
    device: dict[str, array[Any]] = field(
        default_factory=lambda: _columns(start="d", end="d", kind="b", link="q", name="i", bytes="q", of="i")
    )
    """Kernels and copies: `link` is the launch's correlation, `of` the collective."""
    launches: dict[str, array[Any]] = field(default_factory=lambda: _columns(start="d", thread="q", link="q"))
    host: dict[str, array[Any]] = field(
        default_factory=lambda: _columns(start="d", end="d", kind="b", thread="q", numel="q", of="i")
    )
    """Operations on hosts: `numel` is −1 where no shapes were recorded, `of` is the dtype or the collective."""
    works: dict[str, array[Any]] = field(default_factory=lambda: _columns(start="d", end="d", thread="q", inside="q"))
    """Operations that no other one of their thread contains, and how many they contain."""
    host_messages: dict[str, array[Any]] = field(default_factory=lambda: _columns(start="d", end="d", of="i"))
    """Messages of backends without kernels, such as gloo."""
    names: dict[Any, int] = field(default_factory=dict)
    """Names of kernels and operations, dtypes, and collectives, by their number."""
    steps: dict[int, tuple[float, float]] = field(default_factory=dict)
    """ProfilerStep → its start and end on the host."""
    annotations: list[tuple[str, float, float, int]] = field(default_factory=list)
    """(name, start, end, thread) of annotations that say what a script does."""
    loading: list[tuple[float, float]] = field(default_factory=list)
    """When the script waited for its data loader."""
    launching: dict[str, bool] = field(default_factory=dict)
    """Name of a call → whether it launches something."""
    kinds: dict[str, int] = field(default_factory=dict)
    """Name of an operation → what it is."""
    negative: int = 0
    """Events whose duration is below zero."""
    unreadable: int = 0
    """Events whose times are no finite numbers."""

    def number(self, name: Any) -> int:
        """Return the number of a name."""
        return self.names.setdefault(name, len(self.names))

    def known(self) -> list[Any]:
        """Return every name, by its number."""
        return list(self.names)


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
    if not (found.host["start"] or found.works["start"] or found.device["start"] or found.steps):
        raise InputError(
            f"{path}: found {file.events} events, none of an operation or a kernel, {A_TRACE}; check that it is the "
            f"right file"
        )
    return found


def _read(found: Recording, events: Iterable[dict[str, Any]]) -> None:
    """Note all events of a file. This runs for each of millions."""
    acts: dict[Any, _Act | None] = {}
    inside: dict[int, tuple[float, int]] = {}
    works_start, works_end, works_thread, works_inside = found.works.values()
    for event in events:
        if event.get("ph") != "X":
            continue
        try:
            act = acts[event.get("cat")]
        except KeyError:
            act = acts[event.get("cat")] = _act_of(event["cat"])
        except TypeError:
            continue
        if act is None:
            continue
        try:
            start, duration, name = float(event["ts"]), float(event.get("dur", 0.0)), event["name"]
        except (KeyError, TypeError, ValueError, OverflowError):
            found.unreadable += 1
            continue
        if start > _NANOSECONDS:
            start, duration = start / 1e3, duration / 1e3
        if not (0.0 <= duration <= _MAX_US and 0.0 <= start <= _NANOSECONDS and isinstance(name, str)):
            found.negative += duration < 0.0 or duration > _MAX_US
            found.unreadable += not (duration < 0.0 or duration > _MAX_US)
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


def _act_of(category: Any) -> _Act | None:
    """Return what notes the events of a category; None for those that steps are not made of."""
    if not isinstance(category, str):
        return None
    small = category.lower()
    small = _CATEGORIES.get(small, small)
    if small.endswith(("_runtime", "_driver")):
        return _launch
    known: dict[str, _Act] = {
        "cpu_op": _operation, "user_annotation": _annotation, "kernel": _kernel, "gpu_memcpy": _copy,
        "gpu_memset": _copy,
    }  # fmt: skip
    return known.get(small)


def _launch(found: Recording, name: str, start: float, end: float, thread: int, arguments: dict[str, Any]) -> None:
    """Note a call that may launch a kernel or a copy."""
    columns = found.launches
    launches = found.launching.get(name)
    if launches is None:
        launches = found.launching[name] = _LAUNCHES.search(name) is not None
    if launches:
        columns["start"].append(start)
        columns["thread"].append(thread)
        columns["link"].append(_integer(arguments.get("correlation")))


def _kernel(found: Recording, name: str, start: float, end: float, thread: int, arguments: dict[str, Any]) -> None:
    """Note a kernel; those of communication libraries are messages."""
    if _LIBRARY.search(name) is None:
        _occupy(found, KERNEL, (name, str(arguments.get("grid", ""))), start, end, arguments, -1)
    else:
        what = _collective(arguments)
        _occupy(found, MESSAGE, name, start, end, arguments, -1 if what is None else found.number(what))


def _copy(found: Recording, name: str, start: float, end: float, thread: int, arguments: dict[str, Any]) -> None:
    """Note a copy or a memset."""
    _occupy(found, COPY, name, start, end, arguments, -1)


def _occupy(
    found: Recording, kind: int, name: Any, start: float, end: float, arguments: dict[str, Any], of: int
) -> None:
    """Note what occupies an accelerator."""
    columns = found.device
    columns["start"].append(start)
    columns["end"].append(end)
    columns["kind"].append(kind)
    columns["link"].append(_integer(arguments.get("correlation")))
    columns["name"].append(found.number(name))
    columns["bytes"].append(_integer(arguments.get("bytes")))
    columns["of"].append(of)


def _operation(found: Recording, name: str, start: float, end: float, thread: int, arguments: dict[str, Any]) -> None:
    """Note an operation of a host, where steps are made of such ones."""
    kind = found.kinds.get(name)
    if kind is None:
        kind = found.kinds[name] = _kind_of(name)
    numel = of = -1
    if kind == FORWARD:
        if "Sequence number" not in arguments or arguments.get("Fwd thread id") != 0:
            return
    elif kind in (GRADIENT, BUCKET_COPY):
        numel, dtype = _numel(arguments.get("Input Dims")), _input_dtype(arguments)
        of = -1 if dtype is None else found.number(dtype)
    elif kind == CALL:
        collective = _collective(arguments)
        if collective is None:
            if name == "record_param_comms":
                return
            collective = _by_input(name[6:], arguments)
        of = found.number(collective)
    elif kind == LOADING:
        found.loading.append((start, end))
        return
    columns = found.host
    columns["start"].append(start)
    columns["end"].append(end)
    columns["kind"].append(kind)
    columns["thread"].append(thread)
    columns["numel"].append(numel)
    columns["of"].append(of)


def _kind_of(name: str) -> int:
    """Return what an operation of this name is; one that autograd may record, where steps are made of no such one."""
    if name in _OPERATIONS:
        return _OPERATIONS[name]
    return next((kind for start, kind in _FAMILIES.items() if name.startswith(start)), FORWARD)


def _input_dtype(arguments: dict[str, Any]) -> str | None:
    """Return the dtype of the first recorded input."""
    types = arguments.get("Input type")
    return types[0] if isinstance(types, list) and types and isinstance(types[0], str) else None


def _by_input(name: str, arguments: dict[str, Any]) -> Collective:
    """Return a collective without metadata, as its recorded inputs tell."""
    numel = _numel(arguments.get("Input Dims"))
    return Collective(_spelled(name), None if numel < 0 else numel, None, _input_dtype(arguments))


def _annotation(found: Recording, name: str, start: float, end: float, thread: int, arguments: dict[str, Any]) -> None:
    """Note what a script, torch or a communication library says it does."""
    if (step := _STEP.fullmatch(name)) is not None:
        found.steps[int(step[1])] = (start, end)
    elif (message := _HOST_MESSAGE.match(name)) is not None:
        found.host_messages["start"].append(start)
        found.host_messages["end"].append(end)
        found.host_messages["of"].append(found.number(_by_input(message[1], arguments)))
    elif name.startswith("enumerate(DataLoader)"):
        found.loading.append((start, end))
    elif name.startswith(("Optimizer.step#", "DistributedDataParallel.forward", "FSDP::", "nccl:")):
        found.annotations.append((name, start, end, thread))


def _collective(arguments: dict[str, Any]) -> Collective | None:
    """Return what the metadata of a kernel or a call says; None where there is none."""
    name = arguments.get("Collective name")
    if not isinstance(name, str):
        return None
    numel_in, numel_out = arguments.get("In msg nelems"), arguments.get("Out msg nelems")
    dtype, ranks, group = arguments.get("dtype"), arguments.get("Group size"), arguments.get("Process Group Name")
    described = arguments.get("Process Group Description")
    label = " ".join(str(part) for part in (group, described) if part not in (None, "", "undefined"))
    return Collective(
        _spelled(name), _count(numel_in), _count(numel_out), dtype if isinstance(dtype, str) else None, label,
        _count(ranks),
    )  # fmt: skip


def _spelled(name: str) -> str:
    """Return the collective's name as planner spells it."""
    plain = name.lower().strip("_").removeprefix("nccl:").replace("_coalesced", "").replace("_base", "")
    for short, known in (
        ("allreduce", "all_reduce"), ("reduce_scatter", "reduce_scatter"), ("reducescatter", "reduce_scatter"),
        ("allgather", "all_gather"), ("all_gather", "all_gather"), ("alltoall", "all_to_all"),
        ("all_to_all", "all_to_all"), ("broadcast", "broadcast"),
    ):  # fmt: skip
        if short in plain:
            return known
    return plain


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53 else None


def _integer(value: Any) -> int:
    """Return a number of the file, −1 where it is none that arrays hold."""
    if value is None:
        return -1
    if isinstance(value, str) and value.isascii() and value.isdecimal():
        value = int(value[:19])
    return value if isinstance(value, int) and -(2**62) < value < 2**62 else -1


def _numel(dims: Any) -> int:
    """Return the elements of a recorded first input, a tensor or a list of tensors; −1 where there is none."""
    if not isinstance(dims, list) or not dims or not isinstance(dims[0], list):
        return -1
    first = dims[0]
    if first and all(isinstance(part, list) for part in first):
        return sum(_product(part) for part in first)
    return _product(first)


def _product(shape: list[Any]) -> int:
    sizes = [size if isinstance(size, int) and 0 <= size < 2**40 else 0 for size in shape]
    return min(math.prod(sizes), 2**53)
