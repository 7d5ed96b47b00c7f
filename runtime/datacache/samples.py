"""Samples as flat bytes and back: what the memory of a node holds, and the disk for datasets without raw samples.

A flat sample is a header, which says how the sample is built, and the buffers of its leaves:

    length of the header (4 bytes) | header (JSON) | 0… | leaf | 0… | leaf …

Leaves begin at multiples of 64 bytes. Whatever differs between samples of one kind is in the leaves, numbers and
texts too, so that a dataset has few different headers and each is parsed once. Nothing is pickled: reading a flat
sample runs no code of whoever wrote it.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runtime.datacache.unstorable import Unstorable

ALIGNMENT = 64
FORMAT = 3
"""Of flat samples: those of another number, which an earlier version left on the disk, are not read."""
MAX_DEPTH = 50
"""Levels of nesting; samples have two or three."""

STORABLE = (
    "tensors on the CPU, NumPy arrays and numbers, Pillow images, bytes, str, int, float, bool, None, and tuples, "
    "lists and dicts of these"
)

_DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64,
        torch.bool, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
        torch.float8_e4m3fn, torch.float8_e5m2,
    )
}  # fmt: skip

Form = list[Any]
"""How a part of a sample is built, as JSON: its kind first."""
Leaf = Tensor
"""uint8, one dimension."""
Reader = Callable[[Tensor], Any]
"""Flat sample (uint8) → the part."""


def pack(sample: Any) -> Tensor:
    """Return the flat sample (uint8, 1-D), with zeros in gaps: equal samples have equal bytes. Raises Unstorable."""
    leaves: list[Leaf] = []
    # Offsets follow from the sizes alone, so the header does without them and is known before it is placed.
    try:
        form = _form(sample, leaves, "sample", 0)
    except Unstorable as error:
        error.sample = sample
        raise
    header = json.dumps(form, separators=(",", ":"), ensure_ascii=True).encode()
    end, starts = 4 + len(header), []
    for leaf in leaves:
        starts.append(_aligned(end))
        end = starts[-1] + leaf.numel()
    flat = torch.zeros(end, dtype=torch.uint8)
    flat[: 4 + len(header)] = _leaf(struct.pack("<I", len(header)) + header)
    for start, leaf in zip(starts, leaves, strict=True):
        flat[start : start + leaf.numel()] = leaf
    return flat


def unpack(flat: Tensor) -> Any:
    """The sample of `flat` (uint8, one dimension), whose memory it shares: give a copy, aligned to 64 bytes or so."""
    head = flat.numpy()
    length = int.from_bytes(head[:4].tobytes(), "little")
    return _reader(head[4 : 4 + length].tobytes())(flat)


def from_bytes(raw: bytes) -> Any:
    """The sample of flat bytes, in memory of its own."""
    return unpack(torch.frombuffer(bytearray(raw), dtype=torch.uint8))


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _form(part: Any, leaves: list[Leaf], where: str, depth: int, *, in_header: bool = False) -> Form:
    """Return the form of a part, named `where`, whose leaves are appended; `in_header`: numbers and texts stand in the
    form.
    """
    if depth > MAX_DEPTH:
        raise Unstorable(f"{where[:60]}…: more than {MAX_DEPTH} levels of nesting")
    kind = type(part)
    if part is None or (in_header and kind in _CONSTANTS):
        return ["is", part]
    if in_header and kind in (tuple, list) and all(type(item) in _CONSTANTS for item in part):
        return [f"{kind.__name__} of constants", list(part)]
    if kind in _NUMBERS:
        return _number_form(part, leaves, where)
    deeper = partial(_form, depth=depth + 1, in_header=in_header)
    if kind in (tuple, list):
        return [kind.__name__, [deeper(item, leaves, f"{where}[{i}]") for i, item in enumerate(part)]]
    if kind is dict:
        for key in part:
            if type(key) not in (str, int):
                raise Unstorable(f"{where} has a key of type {type(key).__name__}")
        return ["dict", [[key, deeper(item, leaves, f"{where}[{key!r}]")] for key, item in part.items()]]
    if kind is Tensor:
        return _tensor_form(part, leaves, where)
    if isinstance(part, np.ndarray | np.generic):
        return _array_form(part, leaves, where)
    if kind in (bytes, bytearray, str):
        raw = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        leaves.append(_leaf(raw))
        return [kind.__name__, len(raw)]
    if "PIL.Image" in sys.modules:  # no sample is an image of a package that nobody has imported
        from runtime.datacache.images import plain_state

        try:
            found = plain_state(part, lambda value, name: _form(value, [], name, depth + 1, in_header=True))
        except Unstorable as error:
            raise Unstorable(f"{where} {error}") from None
        if found is not None:
            return ["pillow", found[0], _form(found[1], leaves, where, depth + 1, in_header=True)]
    raise Unstorable(f"{where} is a {kind.__module__}.{kind.__qualname__}")


_NUMBERS: dict[type, str] = {int: "<q", float: "<d", bool: "<?"}
_CONSTANTS = frozenset((type(None), bool, int, float, str))


def _number_form(part: float, leaves: list[Leaf], where: str) -> Form:
    if type(part) is int and not -(2**63) <= part < 2**63:
        raise Unstorable(f"{where} is an int of more than 64 bits")
    leaves.append(_leaf(struct.pack(_NUMBERS[type(part)], part)))
    return [type(part).__name__]


def _leaf(raw: bytes | bytearray) -> Leaf:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)


def _tensor_form(part: Tensor, leaves: list[Leaf], where: str) -> Form:
    name = str(part.dtype).removeprefix("torch.")
    if part.device.type != "cpu" or part.layout is not torch.strided or part.requires_grad or name not in _DTYPES:
        grad = ", which requires a gradient" if part.requires_grad else ""
        raise Unstorable(f"{where} is a {part.layout} tensor of {part.dtype} on {part.device}{grad}")
    plain = part.resolve_conj().resolve_neg().contiguous()
    leaves.append(plain.reshape(-1).view(torch.uint8))
    return ["tensor", name, list(part.shape)]


def _array_form(part: np.ndarray | np.generic, leaves: list[Leaf], where: str) -> Form:
    array = np.asarray(part)
    if array.dtype.kind not in "biufcSU" or type(part) not in (np.ndarray, array.dtype.type):
        raise Unstorable(f"{where} is a {type(part).__module__}.{type(part).__qualname__} of {array.dtype}")
    # A bytearray: torch takes neither big-endian nor read-only memory, which arrays may be.
    leaves.append(_leaf(array.tobytes()))
    return ["array" if isinstance(part, np.ndarray) else "scalar", array.dtype.str, list(array.shape), array.nbytes]


@lru_cache(maxsize=4096)
def _reader(header: bytes) -> Reader:
    return _compile(json.loads(header), 4 + len(header))[0]


def _compile(form: Form, end: int) -> tuple[Reader, int]:
    """(the reader of a part, where it ends) for a part whose first leaf is the first one after `end`."""
    kind = form[0]
    if kind in ("tuple", "list"):
        readers, end = _compile_all(form[1], end)
        made = tuple if kind == "tuple" else list
        return (lambda flat: made([reader(flat) for reader in readers])), end
    if kind == "dict":
        keys = [key for key, _ in form[1]]
        values, end = _compile_all([item for _, item in form[1]], end)
        return (lambda flat: {key: value(flat) for key, value in zip(keys, values, strict=True)}), end
    if kind == "is":
        return (lambda flat: form[1]), end
    if kind.endswith(" of constants"):
        return (lambda flat: (tuple if kind[0] == "t" else list)(form[1])), end
    if kind == "pillow":
        from runtime.datacache.images import MAKE

        make, (state, end) = MAKE[form[1]], _compile(form[2], end)
        return (lambda flat: make(*state(flat))), end
    start = _aligned(end)
    size_bytes, read = _LEAVES[kind](form)
    stop = start + size_bytes
    return (lambda flat: read(flat[start:stop])), stop


def _compile_all(forms: list[Form], end: int) -> tuple[list[Reader], int]:
    readers = []
    for form in forms:
        reader, end = _compile(form, end)
        readers.append(reader)
    return readers, end


def _read_tensor(form: Form) -> tuple[int, Reader]:
    dtype, shape = _DTYPES[form[1]], tuple(form[2])
    elements = int(np.prod(shape, dtype=np.int64))
    if elements == 0:
        return 0, lambda leaf: torch.empty(shape, dtype=dtype)
    return elements * dtype.itemsize, lambda leaf: leaf.view(dtype).view(shape)


def _read_array(form: Form) -> tuple[int, Reader]:
    dtype, shape = np.dtype(form[1]), tuple(form[2])
    if form[3] == 0:
        return 0, lambda leaf: np.empty(shape, dtype=dtype)
    return form[3], lambda leaf: leaf.numpy().view(dtype).reshape(shape)


def _read_scalar(form: Form) -> tuple[int, Reader]:
    size_bytes, array = _read_array(form)
    return size_bytes, lambda leaf: array(leaf)[()]


def _read_number(form: Form) -> tuple[int, Reader]:
    unpacker = struct.Struct({kind.__name__: layout for kind, layout in _NUMBERS.items()}[form[0]])
    return unpacker.size, lambda leaf: unpacker.unpack(leaf.numpy())[0]


def _read_text(form: Form) -> tuple[int, Reader]:
    if form[0] == "str":
        return form[1], lambda leaf: leaf.numpy().tobytes().decode("utf-8", "surrogatepass")
    made = bytes if form[0] == "bytes" else bytearray
    return form[1], lambda leaf: made(leaf.numpy().tobytes())


_LEAVES: dict[str, Callable[[Form], tuple[int, Reader]]] = {
    "tensor": _read_tensor, "array": _read_array, "scalar": _read_scalar,
    "int": _read_number, "float": _read_number, "bool": _read_number,
    "bytes": _read_text, "bytearray": _read_text, "str": _read_text,
}  # fmt: skip
