"""Read one Kineto trace, as torch.profiler exports it, into arrays of what a step consists of."""

from __future__ import annotations

import math
import re
from array import array
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
GRADIENT, BUCKET_COPY, BACKWARD, FORWARD, CALL = range(5)
"""What a host operation is: AccumulateGrad, DDP's copies between bucket and gradient, another operation of autograd's
engine, an operation that autograd records, a call of a collective."""

_CATEGORIES = {"operator": "cpu_op", "runtime": "cuda_runtime", "memcpy": "gpu_memcpy", "memset": "gpu_memset"}
"""Names of older versions."""
_DEVICE = {"kernel": KERNEL, "gpu_memcpy": COPY, "gpu_memset": COPY}
_LIBRARY = re.compile(r"nccl|rccl|msccl|oneccl", re.IGNORECASE)
_LAUNCHES = re.compile(r"launch|memcpy|memset", re.IGNORECASE)
_ACCUMULATE, _ENGINE = "torch::autograd::AccumulateGrad", "autograd::engine::evaluate_function"
_BUCKET_COPIES = ("torch.distributed.ddp.reducer::copy_bucket_to_grad", "torch::distributed::reducer::mul_out")
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
        default_factory=lambda: _columns(
            start="d", end="d", kind="b", stream="q", link="q", name="i", bytes="q", of="i"
        )
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


def read_kineto(path: str | Path, progress: Progress | None = None) -> Recording:
    """Read a trace. Raises InputError: the file is damaged, or holds no event of torch.profiler."""
    with EventFile(path, progress) as file:
        found = Recording(path=file.path)
        works_start, works_end, works_thread, works_inside = found.works.values()
        on_device, on_host = _DEVICE.get, {"cpu_op": _operation, "user_annotation": _annotation}
        inside: dict[int, tuple[float, int]] = {}
        for event in file:
            if event.get("ph") != "X":
                continue
            category = event.get("cat")
            if not isinstance(category, str):
                continue
            category = _CATEGORIES.get(small := category.lower(), small)
            kind, act = on_device(category), on_host.get(category)
            runtime = kind is None and act is None and category.endswith(("_runtime", "_driver"))
            if kind is None and act is None and not runtime:
                continue
            try:
                start, duration, name = float(event["ts"]), float(event.get("dur", 0.0)), event["name"]
            except (KeyError, TypeError, ValueError, OverflowError):
                found.unreadable += 1
                continue
            if not (math.isfinite(start) and math.isfinite(duration) and isinstance(name, str)):
                found.unreadable += 1
                continue
            if start > _NANOSECONDS:
                start, duration = start / 1e3, duration / 1e3
            if duration < 0.0 or duration > _MAX_US:
                found.negative += 1
                continue
            arguments = event.get("args")
            arguments = arguments if isinstance(arguments, dict) else {}
            if kind is not None:
                _occupation(found, kind, name, start, duration, arguments)
            elif runtime:
                if _LAUNCHES.search(name):
                    found.launches["start"].append(start)
                    found.launches["thread"].append(_thread(event))
                    found.launches["link"].append(_integer(arguments.get("correlation")))
            else:
                thread = _thread(event)
                if category == "cpu_op":
                    reach, work = inside.get(thread, (-math.inf, 0))
                    if start >= reach:
                        inside[thread] = start + duration, len(works_start)
                        works_start.append(start)
                        works_end.append(start + duration)
                        works_thread.append(thread)
                        works_inside.append(0)
                    else:
                        works_inside[work] += 1
                assert act is not None
                act(found, name, start, start + duration, thread, arguments)
        found.header = file.header
    if not (found.host["start"] or found.works["start"] or found.device["start"] or found.steps):
        raise InputError(
            f"{path}: found {file.events} events, none of an operation or a kernel, {A_TRACE}; check that it is the "
            f"right file"
        )
    return found


def _occupation(
    found: Recording, kind: int, name: str, start: float, duration: float, arguments: dict[str, Any]
) -> None:
    """Note what occupies an accelerator."""
    of = -1
    if kind == KERNEL and _LIBRARY.search(name):
        kind = MESSAGE
        collective = _collective(arguments)
        of = -1 if collective is None else found.number(collective)
    columns = found.device
    columns["start"].append(start)
    columns["end"].append(start + duration)
    columns["kind"].append(kind)
    columns["stream"].append(_integer(arguments.get("stream")))
    columns["link"].append(_integer(arguments.get("correlation")))
    columns["name"].append(found.number(name if kind != KERNEL else (name, str(arguments.get("grid", "")))))
    columns["bytes"].append(_integer(arguments.get("bytes")))
    columns["of"].append(of)


def _operation(found: Recording, name: str, start: float, end: float, thread: int, arguments: dict[str, Any]) -> None:
    """Note an operation of a host, where steps are made of such ones."""
    numel, of = -1, -1
    if name == _ACCUMULATE or name in _BUCKET_COPIES:
        kind = GRADIENT if name == _ACCUMULATE else BUCKET_COPY
        numel = _numel(arguments.get("Input Dims"))
        dtypes = arguments.get("Input type")
        if isinstance(dtypes, list) and dtypes and isinstance(dtypes[0], str):
            of = found.number(dtypes[0])
        if name == _BUCKET_COPIES[1]:
            return
    elif name.startswith(_ENGINE):
        kind = BACKWARD
    elif name == "record_param_comms" or name.startswith("c10d::"):
        kind, collective = CALL, _collective(arguments)
        if collective is None:
            if name == "record_param_comms":
                return
            types = arguments.get("Input type")
            dtype = types[0] if isinstance(types, list) and types and isinstance(types[0], str) else None
            count = _numel(arguments.get("Input Dims"))
            collective = Collective(_spelled(name[6:]), None if count < 0 else count, None, dtype)
        of = found.number(collective)
    elif name.startswith("enumerate(DataLoader)"):
        found.loading.append((start, end))
        return
    elif "Sequence number" in arguments and "Fwd thread id" in arguments and not arguments["Fwd thread id"]:
        kind = FORWARD
    else:
        return
    columns = found.host
    columns["start"].append(start)
    columns["end"].append(end)
    columns["kind"].append(kind)
    columns["thread"].append(thread)
    columns["numel"].append(numel)
    columns["of"].append(of)


def _annotation(found: Recording, name: str, start: float, end: float, thread: int, arguments: dict[str, Any]) -> None:
    """Note what a script, torch or a communication library says it does."""
    if (step := _STEP.fullmatch(name)) is not None:
        found.steps[int(step[1])] = (start, end)
    elif (message := _HOST_MESSAGE.match(name)) is not None:
        types = arguments.get("Input type")
        dtype = types[0] if isinstance(types, list) and types and isinstance(types[0], str) else None
        numel = _numel(arguments.get("Input Dims"))
        found.host_messages["start"].append(start)
        found.host_messages["end"].append(end)
        found.host_messages["of"].append(
            found.number(Collective(_spelled(message[1]), None if numel < 0 else numel, None, dtype))
        )
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
    if isinstance(value, str) and value.isascii() and value.isdecimal():
        value = int(value[:19])
    return value if isinstance(value, int) and -(2**62) < value < 2**62 else -1


def _thread(event: dict[str, Any]) -> int:
    return _integer(event.get("tid"))


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
