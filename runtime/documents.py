"""Reading and writing of the project's JSON documents: strict on the way in, atomic on the way out.

Records are frozen dataclasses; pydantic validates them here, at the file boundary, and nowhere else.
"""

from __future__ import annotations

import difflib
import errno
import json
import math
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, cast, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from runtime.errors import EnvironmentFailure, InputError

T = TypeVar("T")

STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
"""Put into a record as `__pydantic_config__`: unknown fields, coercions, NaN and infinity are refused."""

MAX_FILE_BYTES = 256 * 1024 * 1024
"""A document larger than this is a mistake (10,000 gradients take about 1 MB)."""

MAX_DEPTH = 100
"""Levels of nesting in a document; ours have fewer than ten."""


class _Twice(dict[str, Any]):
    """An object that gave one field twice; refused where its place in the document is known."""

    field: str


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) == len(pairs):
        return record
    names = [name for name, _ in pairs]
    twice = _Twice(record)
    twice.field = next(name for index, name in enumerate(names) if name in names[:index])
    return twice


def _flaw(value: Any, depth: int = 0) -> str | None:
    """What no document may hold anywhere, as `.field[0]: found …, expected …`; None for a sound value."""
    if isinstance(value, float):
        return None if math.isfinite(value) else f": found {json.dumps(value)}, expected a finite number"
    if isinstance(value, str):
        sound = value.isascii() or not any("\ud800" <= character <= "\udfff" for character in value)
        return None if sound else f": found {_shown(value)}, expected Unicode text without lone surrogates"
    if not isinstance(value, dict | list):
        return None
    if depth == MAX_DEPTH:
        return f": found more than {MAX_DEPTH} levels of nesting, expected a document of ours"
    if isinstance(value, _Twice):
        return f".{value.field}: found the field twice in one object, expected it once"
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        if (flaw := _flaw(key)) is not None:
            return flaw
        if (flaw := _flaw(item, depth + 1)) is not None:
            return (f"[{key}]" if isinstance(key, int) else f".{key}") + flaw
    return None


def read_json(path: str | Path) -> Any:
    """Parses one JSON file.

    Raises:
        InputError: the file is missing, unreadable, too large, not UTF-8, not JSON, nested too deeply, or
            holds a duplicate field, NaN or infinity. The message starts with the path.
    """
    path = Path(path)
    try:
        if path.is_dir():
            raise InputError(f"{path}: found a directory, expected a JSON file")
        if path.stat().st_size > MAX_FILE_BYTES:
            raise InputError(f"{path}: found {path.stat().st_size} bytes, expected at most {MAX_FILE_BYTES}")
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; check the path") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: expected UTF-8 text, found byte {error.start} that is not") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        document = json.loads(text, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        raise InputError(f"{path}: not valid JSON at line {error.lineno}, column {error.colno}: {error.msg}") from None
    except RecursionError:
        raise InputError(f"{path}: not a document of ours: nested too deeply") from None
    except ValueError as error:  # for instance an integer of more digits than Python converts
        raise InputError(f"{path}: not valid JSON: {error}") from None
    flaw = _flaw(document)
    if flaw is not None:
        raise InputError(f"{path}: ${flaw}")
    return document


def write_text(path: str | Path, text: str) -> None:
    """Writes a file so that it is either the old one or the whole new one. A device or pipe is written to.

    Raises:
        InputError: the path cannot be written.
        EnvironmentFailure: the disk is full.
    """
    path = Path(path)
    try:
        if path.is_dir():
            raise InputError(f"{path}: found a directory, expected a file name to write to")
        if path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8")
        else:
            _replace(path, text)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise EnvironmentFailure(f"{path}: not written, the disk is full; nothing was changed") from None
        raise InputError(f"{path}: cannot be written: {error.strerror}; choose another output path") from None


def _replace(path: Path, text: str) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def write_json(path: str | Path, document: Any) -> None:
    """Writes `document` as indented JSON, atomically (see `write_text`)."""
    write_text(path, json.dumps(document, indent=1, allow_nan=False, ensure_ascii=False) + "\n")


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current


def check_schema(document: Any, expected: str, where: str) -> Mapping[str, Any]:
    """Checks that `document` is an object of the schema `expected`, for example `"planner.plan/1"`."""
    if not isinstance(document, dict):
        raise InputError(f'{where}: $: found {_kind(document)}, expected an object with "schema": "{expected}"')
    found = document.get("schema")
    if found != expected:
        shown = 'no field "schema"' if found is None else f"schema {json.dumps(found)}"
        raise InputError(
            f'{where}: $.schema: found {shown}, expected "{expected}"; use a file of that kind and version'
        )
    return document


def validate(record_type: type[T], document: Any, where: str, path: str = "$") -> T:
    """Turns parsed JSON into a record of `record_type`.

    Raises:
        InputError: lists up to five violations, each with its JSON path, what was found and what was expected.
    """
    try:
        # Strict JSON semantics, yet from Python objects: lists become tuples, integers become floats.
        return cast(T, _adapter(record_type).validate_json(_compact(document), strict=True))
    except ValidationError as error:
        raise InputError(_describe(error, document, record_type, where, path)) from None


def dump(record: Any) -> Any:
    """A record as plain JSON types, without the fields that are None."""
    return _adapter(type(record)).dump_python(record, mode="json", exclude_none=True, warnings="error")


_adapters: dict[Any, TypeAdapter[Any]] = {}


def _adapter(record_type: type[Any]) -> TypeAdapter[Any]:
    if record_type not in _adapters:
        _adapters[record_type] = TypeAdapter(record_type)
    return _adapters[record_type]


def _compact(document: Any) -> bytes:
    return json.dumps(document, separators=(",", ":"), allow_nan=True).encode()


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def _shown(value: Any) -> str:
    text = json.dumps(value, allow_nan=True)
    return text if len(text) <= 60 else f"{_kind(value)} ({text[:40]}…)"


def _json_path(root: str, document: Any, location: tuple[int | str, ...]) -> str:
    """The location as a JSON path; steps that name a union's branch and not a field are left out."""
    path, value = root, document
    for step in location:
        if isinstance(step, int) and isinstance(value, list):
            path += f"[{step}]"
            value = value[step] if step < len(value) else None
        elif isinstance(value, dict) and (step in value or step == location[-1]):
            path += f".{step}"
            value = value.get(cast(str, step))
    return path


def _describe(error: ValidationError, document: Any, record_type: type[Any], where: str, path: str) -> str:
    lines = []
    details = error.errors(include_url=False, include_context=False)
    # A list whose element is wrong is also reported as too short: keep the cause, drop the echo.
    causes = {detail["loc"][:depth] for detail in details for depth in range(len(detail["loc"]))}
    details = [detail for detail in details if detail["type"] != "too_short" or detail["loc"] not in causes]
    for detail in details[:5]:
        place = _json_path(path, document, detail["loc"])
        if detail["type"] == "unexpected_keyword_argument" or detail["type"] == "extra_forbidden":
            field = str(detail["loc"][-1])
            near = difflib.get_close_matches(field, _field_names(record_type), n=1)
            cure = f'; did you mean "{near[0]}"?' if near else "; remove it or use the version that knows it"
            lines.append(f"{where}: {place}: unknown field{cure}")
        elif detail["type"] in ("missing", "missing_argument", "missing_keyword_only_argument"):
            lines.append(f"{where}: {place}: missing field; add it")
        elif detail["type"] == "json_invalid":
            lines.append(f"{where}: {path}: not a document of ours: {detail['msg']}")
        else:
            lines.append(f"{where}: {place}: found {_shown(detail['input'])}, expected {_expected(detail['msg'])}")
    if len(details) > 5:
        lines.append(f"{where}: and {len(details) - 5} more")
    return "\n".join(dict.fromkeys(lines))  # the branches of a union may say the same


def _expected(message: str) -> str:
    """`Tuple should have at least 1 item after validation, not 0`, as pydantic puts it → `at least 1 item`."""
    for start in ("Input should be ", "Value error, ", "Tuple should have ", "String should have "):
        message = message.removeprefix(start)
    return message.partition(" after validation")[0]


def _field_names(record_type: type[Any]) -> tuple[str, ...]:
    """Every field name reachable from a record type, for "did you mean"."""
    names: set[str] = set()
    todo: list[Any] = [record_type]
    seen: set[Any] = set()
    while todo:
        current = todo.pop()
        if current in seen:
            continue
        seen.add(current)
        if hasattr(current, "__dataclass_fields__"):
            hints = get_type_hints(current)
            names.update(current.__dataclass_fields__)
            todo.extend(hints.values())
        todo.extend(argument for argument in getattr(current, "__args__", ()) if argument is not Ellipsis)
    return tuple(sorted(names))
