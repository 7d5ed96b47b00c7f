"""Samples as flat bytes and back: what the memory of a node holds, and the disk for datasets without raw samples.

A flat sample is a header, which says how the sample is built, and the bytes of its leaves (tensors, arrays, bytes):

    length of the header (4 bytes) | header (JSON) | 0… | leaf | 0… | leaf …

Leaves begin at multiples of 64 bytes. Nothing is pickled: reading a flat sample runs no code of whoever wrote it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runtime.datacache.unstorable import Unstorable

ALIGNMENT = 64
FORMAT = 4
"""Version of flat samples; others, which an earlier version of this package left on the disk, are not read."""
MAX_DEPTH = 50
"""Levels of nesting; samples have two or three."""

KEPT_HEADER_BYTES = 1024
"""Largest header whose recipe is kept: most samples of a dataset have one of few headers, and a hit parses none."""

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

Form = Any
"""Recipe of a part of a sample, as JSON: a number, a text or None itself, anything else a list, its kind first."""


def pack(sample: Any) -> Tensor:
    """Return the flat sample (uint8, 1-D), with zeros in gaps: equal samples have equal bytes. Raises Unstorable."""
    leaves: list[np.ndarray] = []
    try:
        form = _form(sample, leaves, "sample", 0)
    except Unstorable as error:
        error.sample = sample
        raise
    text = json.dumps([form, [leaf.size for leaf in leaves]], separators=(",", ":"), ensure_ascii=False)
    header = text.encode("utf-8", "surrogatepass")
    header = len(header).to_bytes(4, "little") + header
    places = _places(len(header), [leaf.size for leaf in leaves])
    flat = np.zeros(places[-1].stop if places else len(header), dtype=np.uint8)
    flat[: len(header)] = np.frombuffer(header, dtype=np.uint8)
    for place, leaf in zip(places, leaves, strict=True):
        flat[place] = leaf
    return torch.from_numpy(flat)


def unpack(flat: Tensor) -> Any:
    """Return the sample of `flat` (uint8, 1-D, its memory aligned to 64 bytes), with which it shares memory."""
    data = flat.numpy()
    end = 4 + int.from_bytes(data[:4].tobytes(), "little")
    header = data[4:end].tobytes()
    form, places = (_kept_recipe if len(header) <= KEPT_HEADER_BYTES else _recipe)(header)
    return _build(form, (data[place] for place in places))


def from_bytes(raw: bytes) -> Any:
    """Return the sample of flat bytes, in memory of its own."""
    return unpack(torch.frombuffer(bytearray(raw), dtype=torch.uint8))


def _recipe(header: bytes) -> tuple[Form, list[slice]]:
    """Return the form in a header, and the places of its leaves."""
    form, sizes_bytes = json.loads(header.decode("utf-8", "surrogatepass"))
    return form, _places(4 + len(header), sizes_bytes)


_kept_recipe = lru_cache(maxsize=1024)(_recipe)


def _places(header_bytes: int, sizes_bytes: Sequence[int]) -> list[slice]:
    """Return the place of each leaf in the flat sample."""
    places, end = [], header_bytes
    for size_bytes in sizes_bytes:
        start = -(-end // ALIGNMENT) * ALIGNMENT
        end = start + size_bytes
        places.append(slice(start, end))
    return places


def _pillow() -> Any:
    """Import what keeps Pillow's images, which needs Pillow."""
    from runtime.datacache import images

    return images


def _form(part: Any, leaves: list[np.ndarray], where: str, depth: int) -> Form:
    """Return the form of a part, which errors call `where`, and append its leaves (uint8, 1-D). Raises Unstorable."""
    kind = type(part)
    if depth > MAX_DEPTH:
        raise Unstorable(f"{where[:60]}…: more than {MAX_DEPTH} levels of nesting")
    if kind is int and not -(2**63) <= part < 2**63:
        raise Unstorable(f"{where} is an int of more than 64 bits")
    if part is None or kind in (bool, int, float, str):
        return part
    if kind in (tuple, list):
        return [kind.__name__, [_form(item, leaves, f"{where}[{i}]", depth + 1) for i, item in enumerate(part)]]
    if kind is dict:
        if odd := {type(key) for key in part} - {str, int}:
            raise Unstorable(f"{where} has a key of type {odd.pop().__name__}")
        items = part.items()
        return ["dict", [[key, _form(item, leaves, f"{where}[{key!r}]", depth + 1)] for key, item in items]]
    if kind is Tensor:
        name = str(part.dtype).removeprefix("torch.")
        if part.device.type != "cpu" or part.layout is not torch.strided or part.requires_grad or name not in _DTYPES:
            grad = ", which requires a gradient" if part.requires_grad else ""
            raise Unstorable(f"{where} is a {part.layout} tensor of {part.dtype} on {part.device}{grad}")
        plain = part.resolve_conj().resolve_neg().contiguous()
        leaves.append(plain.reshape(-1).view(torch.uint8).numpy())
        return ["tensor", name, list(part.shape)]
    if isinstance(part, np.ndarray | np.generic):
        array = np.asarray(part)
        if array.dtype.kind not in "biufcSU" or kind not in (np.ndarray, array.dtype.type):
            raise Unstorable(f"{where} is a {kind.__module__}.{kind.__qualname__} of {array.dtype}")
        leaves.append(np.frombuffer(array.tobytes(), dtype=np.uint8))
        return ["array" if kind is np.ndarray else "scalar", array.dtype.str, list(array.shape)]
    if kind in (bytes, bytearray):
        leaves.append(np.frombuffer(part, dtype=np.uint8))
        return [kind.__name__]
    if "PIL.Image" in sys.modules:  # no sample is an image of a package that was not imported
        try:
            found = _pillow().plain_state(part, lambda value, name: _form(value, [], name, depth + 1))
        except Unstorable as error:
            raise Unstorable(f"{where} {error}") from None
        if found is not None:
            return ["pillow", found[0], _form(found[1], leaves, where, depth + 1)]
    raise Unstorable(f"{where} is a {kind.__module__}.{kind.__qualname__}")


def _build(form: Form, leaves: Iterator[np.ndarray]) -> Any:
    """Return the part of a form, whose leaves come next."""
    if not isinstance(form, list):
        return form
    kind, *given = form
    if kind in ("tuple", "list"):
        items = [_build(item, leaves) for item in given[0]]
        return tuple(items) if kind == "tuple" else items
    if kind == "dict":
        return {key: _build(item, leaves) for key, item in given[0]}
    if kind == "pillow":
        return _pillow().MAKE[given[0]](*_build(given[1], leaves))
    leaf = next(leaves)
    if kind == "tensor":
        return torch.from_numpy(leaf).view(_DTYPES[given[0]]).view(given[1])
    if kind in ("array", "scalar"):
        array: np.ndarray = np.ndarray(given[1], given[0], leaf)
        return array if kind == "array" else array[()]
    return (bytes if kind == "bytes" else bytearray)(leaf.tobytes())
