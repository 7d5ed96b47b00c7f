"""Reading and writing of the project's JSON documents: strict on the way in, atomic on the way out.

Records are frozen dataclasses. pydantic validates types and bounds of their fields here, at the file boundary, and
nowhere else; `Record.problem` says what no field shows by itself.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, TypeVar, cast

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from runtime.errors import InputError
from runtime.plan.files import checked_path, read_text, write_text

T = TypeVar("T")

HINT = "correct it, or make the plan again with `planner optimize`"
"""Advice about wrong plans."""

STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
"""Put into a record as `__pydantic_config__`: unknown fields, coercions, NaN and infinity are refused."""


class Record:
    """Base of the records of documents."""

    __pydantic_config__ = STRICT

    def problem(self, path: str) -> str | None:
        """Return what is wrong between the fields, as `PLACE: found …, expected …`; None for a sound record.

        `path` is the record's own place. Records inside of this one are checked by themselves. May raise InputError
        in place of returning.
        """
        return None


class Document(Record):
    """Base of the records that are files of their own, which name their schema."""

    hint: ClassVar[str] = "correct it"
    """Advice about wrong values."""

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read and check a file. Raises InputError."""
        return cls.parse(read_json(path), str(path))

    @classmethod
    def parse(cls, document: Any, where: str) -> Self:
        """Check a parsed document, which `where` names in messages. Raises InputError."""
        expected: str = vars(cls)["schema"]
        return validate(cls, check_schema(document, expected, where), where, hint=cls.hint)

    def to_document(self) -> dict[str, Any]:
        """Return plain JSON types."""
        document: dict[str, Any] = dump(self)
        return document

    def save(self, path: str | Path) -> None:
        """Write the file atomically."""
        write_json(path, self.to_document())


MAX_DEPTH = 100
"""Levels of nesting in a document; ours have fewer than ten."""

MAX_VALUES = 1_000_000
"""Values in a document: 10,000 gradients in as many buckets are some 200,000."""

UNKNOWN = ("unexpected_keyword_argument", "extra_forbidden")

MAX_RANKS = 10**7

TimeUs = Annotated[float, Field(ge=0.0, le=1e15)]
"""A measured time (1e15 µs are 31 years)."""
PredictedUs = Annotated[float, Field(ge=0.0)]
"""A computed time: the sum of any number of measured ones."""
Count = Annotated[int, Field(ge=0, le=2**53)]
PositiveCount = Annotated[int, Field(ge=1, le=2**53)]
Ranks = Annotated[int, Field(ge=1, le=MAX_RANKS)]
Name = Annotated[str, Field(min_length=1, max_length=4096)]

SHOWN_VIOLATIONS = 5
SHOWN_CHARACTERS = 60


class _Twice(dict[str, Any]):
    """An object that gave one field twice; refused where its place in the document is known."""

    field: str


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) == len(pairs):
        return record
    twice, times = _Twice(record), Counter(name for name, _ in pairs)
    twice.field = next(name for name, count in times.items() if count > 1)
    return twice


def _flaw(value: Any, depth: int = 0) -> str | None:
    """Return what no document may hold anywhere, as `.field[0]: found …, expected …`; None for a sound value."""
    if isinstance(value, float):
        return None if math.isfinite(value) else f": found {json.dumps(value)}, expected a finite number; correct it"
    if isinstance(value, str):
        sound = value.isascii() or not any("\ud800" <= character <= "\udfff" for character in value)
        return None if sound else f": found {_shown(value)}, expected Unicode text without lone surrogates; correct it"
    if not isinstance(value, dict | list):
        return None
    if depth == MAX_DEPTH:
        return f": found more than {MAX_DEPTH} levels of nesting, expected fewer; check that it is the right file"
    if isinstance(value, _Twice):
        return f"{json_step(value.field)}: found the field twice in one object, expected it once; take one out"
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        if (flaw := _flaw(key)) is not None:
            return flaw
        if (flaw := _flaw(item, depth + 1)) is not None:
            return json_step(key) + flaw
    return None


def read_json(path: str | Path) -> Any:
    """Parse one JSON file. Raises InputError, which begins with the path: the file cannot be read, is not JSON, is
    nested too deeply, or holds too many values, a duplicate field, NaN or infinity.
    """
    text = read_text(path)
    path = checked_path(path)
    values = sum(map(text.count, "[{,"))
    if values > MAX_VALUES:
        raise InputError(
            f"{path}: found about {values} values, expected at most {MAX_VALUES}; check that it is the right file"
        )
    try:
        document = json.loads(text, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        rest = error.doc[error.pos :].lstrip()
        expected = _JSON_ERRORS.get(error.msg, error.msg.removeprefix("Expecting "))
        if not error.doc.strip():
            found, hint = "an empty file", "check that it is the right file"
        elif not rest or error.msg.startswith("Unterminated"):
            found, hint = "the end of the file too early", "write the file anew"
        else:
            found, hint = json.dumps(rest[:20]), "correct it"
        place = f"line {error.lineno}, column {error.colno}"
        raise InputError(f"{path}: not valid JSON at {place}: found {found}, expected {expected}; {hint}") from None
    except RecursionError:
        raise InputError(
            f"{path}: found a text nested too deeply, expected at most {MAX_DEPTH} levels; check that it is the right "
            f"file"
        ) from None
    except ValueError as error:  # an integer of more digits than Python converts
        raise InputError(
            f"{path}: not valid JSON: {str(error).partition(':')[0]}; expected numbers of a few digits: correct it"
        ) from None
    flaw = _flaw(document)
    if flaw is not None:
        raise InputError(f"{path}: ${flaw}")
    return document


_JSON_ERRORS = {
    "Expecting value": "a value",
    "Expecting property name enclosed in double quotes": "a field name in double quotes",
    "Illegal trailing comma before end of object": "no comma before the end of an object",
    "Illegal trailing comma before end of array": "no comma before the end of a list",
    "Unterminated string starting at": "a string that ends",
    "Extra data": "the end of the file",
    "Invalid control character at": "no control character in a string",
    "Invalid \\escape": "one of JSON's escapes after a backslash",
    "Invalid \\uXXXX escape": "four hexadecimal digits after \\u",
}
"""The parser's words for what it did not find, as what it would have liked to find."""


def write_json(path: str | Path, document: Any) -> None:
    """Writes `document` as indented JSON, atomically (see `write_text`)."""
    write_text(path, json.dumps(document, indent=1, allow_nan=False, ensure_ascii=False) + "\n")


def check_schema(document: Any, expected: str, where: str) -> Mapping[str, Any]:
    """Checks that `document` is an object of the schema `expected`, for example `"planner.plan/1"`."""
    hint = "use a file of that kind and version"
    if not isinstance(document, dict):
        raise InputError(f'{where}: $: found {_kind(document)}, expected an object with "schema": "{expected}"; {hint}')
    found = document.get("schema")
    if found != expected:
        shown = 'no field "schema"' if found is None else f"schema {_shown(found)}"
        raise InputError(f'{where}: $.schema: found {shown}, expected "{expected}"; {hint}')
    return document


def validate(record_type: type[T], document: Any, where: str, *, hint: str = "correct it") -> T:
    """Turn parsed JSON into a record of `record_type`, a frozen dataclass derived from `Record`. `where` names the
    document in messages, `hint` says what to do about wrong values.

    Raises InputError: lists up to five violations of fields, each with its JSON path, what was found, what was expected
    and `hint`; or the first problem between fields.
    """
    try:
        text = json.dumps(document, separators=(",", ":"), allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        flaw = _flaw(document) or f": found what JSON cannot hold ({error}), expected what json.load returns; pass that"
        raise InputError(f"{where}: ${flaw}") from None
    try:
        # Strict JSON semantics, yet from Python objects: lists become tuples, integers become floats.
        record = cast(T, _adapter(record_type).validate_json(text, strict=True))
    except ValidationError as error:
        details = error.errors(include_url=False, include_context=False)
        # A list whose element is wrong is also reported as too short: keep the cause, drop the echo.
        causes = {detail["loc"][:depth] for detail in details for depth in range(len(detail["loc"]))}
        details = [detail for detail in details if detail["type"] != "too_short" or detail["loc"] not in causes]
        lines = []
        for detail in details[:SHOWN_VIOLATIONS]:
            path = _json_path(document, detail["loc"])
            lines.append(f"{where}: {path}: {_violation(detail, record_type, hint)}")
        if len(details) > SHOWN_VIOLATIONS:
            lines.append(f"{where}: and {len(details) - SHOWN_VIOLATIONS} more")
        raise InputError("\n".join(dict.fromkeys(lines))) from None
    try:
        problem = problem_of(record, "$")
    except InputError as error:
        problem = str(error)
    if problem is not None:
        raise InputError(f"{where}: {problem}")
    return record


def problem_of(value: Any, path: str) -> str | None:
    """Return the first problem of a record, or of those inside of it; `path` is its place. None for a sound one."""
    items: Iterable[tuple[Any, Any]]
    if isinstance(value, Record):
        if (problem := value.problem(path)) is not None:
            return problem
        items = vars(value).items()
    else:
        items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in items:
        if isinstance(item, NESTED) and (problem := problem_of(item, path + json_step(key))) is not None:
            return problem
    return None


NESTED = (Record, dict, tuple)
"""Types of values that hold others."""

Item = TypeVar("Item", int, str)


def repeated_item(groups: Iterable[Iterable[Item]]) -> tuple[int, int, Item, int] | None:
    """Return (group, position, item, earlier group) of the first item that groups have twice; None if there is none.

    >>> repeated_item([["a", "b"], ["c", "a"]])
    (1, 1, 'a', 0)
    """
    owner: dict[Item, int] = {}
    for group, items in enumerate(groups):
        for position, item in enumerate(items):
            if item in owner:
                return group, position, item, owner[item]
            owner[item] = group
    return None


def dump(record: Any) -> Any:
    """Return a record as plain JSON types, without the fields that are None."""
    return _adapter(type(record)).dump_python(record, mode="json", exclude_none=True, warnings="error")


_adapters: dict[Any, TypeAdapter[Any]] = {}


def _adapter(record_type: type[Any]) -> TypeAdapter[Any]:
    # Made once: an adapter compiles its validator, which takes longer than most documents.
    if record_type not in _adapters:
        _adapters[record_type] = TypeAdapter(record_type)
    return _adapters[record_type]


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def _shown(value: Any) -> str:
    text = json.dumps(value, allow_nan=True)
    return text if len(text) <= SHOWN_CHARACTERS else f"{_kind(value)} ({text[: SHOWN_CHARACTERS - 20]}…)"


def json_step(key: int | str) -> str:
    """Return one step of a JSON path; a name that is no identifier in quotes, a long one cut short."""
    if isinstance(key, int):
        return f"[{key}]"
    if len(key) > SHOWN_CHARACTERS:
        key = key[:SHOWN_CHARACTERS] + "…"
    return f".{key}" if _PLAIN.fullmatch(key) else f"[{json.dumps(key, ensure_ascii=not key.isprintable())}]"


_PLAIN = re.compile(r"\w+")


def _json_path(document: Any, location: tuple[int | str, ...]) -> str:
    """Return the location as a JSON path; steps that name a union's branch and not a field are left out."""
    path, value = "$", document
    for step in location:
        if isinstance(step, int) and isinstance(value, list):
            path += json_step(step)
            value = value[step] if step < len(value) else None
        elif isinstance(value, dict) and (step in value or step == location[-1]):
            path += json_step(step)
            value = value.get(cast(str, step))
    return path


def _violation(detail: ErrorDetails, record_type: type[Any], hint: str) -> str:
    """Return what is wrong at one place: found, expected, hint."""
    if detail["type"] in UNKNOWN:
        field = str(detail["loc"][-1])
        near = difflib.get_close_matches(field, _field_names(record_type), n=1) if len(field) < 100 else []
        hint = f'did you mean "{near[0]}"?' if near else "remove it or use the version that knows it"
        return f"unknown field; {hint}"
    if detail["type"] in ("missing", "missing_argument", "missing_keyword_only_argument"):
        return "missing field; add it"
    if detail["type"] == "json_invalid":
        return f"not a document of ours: found {detail['msg']}, expected plain JSON; check that it is the right file"
    # `Tuple should have at least 1 item after validation, not 0`, as pydantic puts it → `at least 1 item`.
    expected = detail["msg"].partition(" after validation")[0]
    for start in ("Input should be ", "Value error, ", "Tuple should have ", "String should have ", "String should "):
        expected = expected.removeprefix(start)
    return f"found {_shown(detail['input'])}, expected {_JSON_WORDS.get(expected, expected)}; {hint}"


_JSON_WORDS = {
    "a valid tuple": "a valid list",
    "a valid array": "a valid list",
    "a valid dictionary": "a valid object",
    "match pattern '^sha256:'": '"sha256:" and 64 hexadecimal digits',
}
"""Python's names of types, as JSON's."""


def _field_names(record_type: type[Any]) -> list[str]:
    """Return every field name of a record and of those inside of it, for "did you mean"."""
    schema = _adapter(record_type).json_schema()
    records = [schema, *schema.get("$defs", {}).values()]
    return sorted({name for record in records for name in record.get("properties", ())})
