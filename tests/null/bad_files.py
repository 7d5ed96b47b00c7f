"""Sound documents with every field, and every way in which a file can be wrong."""

from __future__ import annotations

import copy
import gzip
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import contract_examples

KINDS = ("profile", "cluster", "plan")


def full(kind: str) -> dict[str, Any]:
    """A document that a reader accepts, with all optional fields."""
    cluster = json.loads(contract_examples.CLUSTER)
    cluster |= {"contention": {"compute": 1.1, "network": 1.2}, "back_to_back": {"all_reduce": [[1024, 600.0]]}}
    cluster["collectives"]["all_reduce"] |= {"r_squared": 0.9, "mean_error": 0.1}
    if kind == "cluster":
        return dict(cluster)
    if kind == "profile":
        document: dict[str, Any] = json.loads(contract_examples.PROFILE)
        document["layers"] = json.loads(contract_examples.LAYERS)
        document["tracing"] = {"method": "hooks", "grad_weight_share": {"estimated": 0.5, "measured": 0.4}}
        document["compute"] |= {"repeats": 5, "step_spread_us": 1.0}
        norms = [{"name": "fc.bias", "norm_us": 3.0}]
        document["compute"]["norms"] = {"optimizer": "LARS", "row_bytes": 8, "layers": norms}
        document["compute"]["gradients"][0]["spread_us"] = 2.0
        document["world"] |= {"threads_per_rank": 1, "cores": 2}
        return document | {"cluster": cluster}
    document = json.loads(contract_examples.PLAN)
    document |= {"delay": json.loads(contract_examples.DELAY), "phase_order": [[0, 0]]}
    document["updates"] = {"norms": {"shares": [["fc.bias"], []], "replicated_us": 9.5, "shared_us": 1.5}}
    document["local_async"] = json.loads(contract_examples.LOCAL_ASYNC)
    document["buckets"][0] |= {"size_bytes": 40, "reason": "alone"}
    document["buckets"][0]["compressor"] = json.loads(contract_examples.COMPRESSORS[1]) | {"density": 0.5}
    return document | {"fallback": json.loads(contract_examples.PLAN)}


def places(value: Any, path: str = "$") -> Iterator[tuple[str, Any, Any]]:
    """(JSON path, container, key) of every value in a document."""
    for key in list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        plain = isinstance(key, str) and key.replace("_", "").isalnum()
        step = f"[{json.dumps(key)}]" if not plain else f".{key}"
        yield path + step, value, key
        yield from places(value[key], path + step)


def with_value(kind: str, place: str, value: Any) -> dict[str, Any]:
    """A full document in which one place holds another value; ... takes it out."""
    document = copy.deepcopy(full(kind))
    owner, key = next((owner, key) for path, owner, key in places(document) if path == place)
    if value is ...:
        del owner[key]
    else:
        owner[key] = value
    return document


def text(content: str | bytes) -> Callable[[Path, str], None]:
    """Writes the same content whatever the kind."""
    data = content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content
    return lambda path, _: _ignore(path.write_bytes(data))


def _ignore(_: object) -> None:
    return None


def _document(change: Callable[[str], str | bytes]) -> Callable[[Path, str], None]:
    """Writes what becomes of the text of a full document."""

    def write(path: Path, kind: str) -> None:
        content = change(json.dumps(full(kind)))
        path.write_bytes(content if isinstance(content, bytes) else content.encode())

    return write


def _sparse(path: Path, _: str) -> None:
    with path.open("wb") as file:
        file.truncate(300 * 1024 * 1024)


def _too_many(path: Path, _: str) -> None:
    path.write_text("[" + "[]," * 1_000_001 + "0]")


def _last_field(content: str) -> str:
    return content[:-1] + ', "zzz": 1}'


FILES: dict[str, tuple[Callable[[Path, str], None], str]] = {
    "missing": (lambda path, _: None, "no such file; check the path"),
    "in a missing folder": (lambda path, _: path.symlink_to("absent/x.json"), "no such file; check the path"),
    "directory": (lambda path, _: path.mkdir(), "found a directory, expected a JSON file"),
    "link to itself": (lambda path, _: path.symlink_to(path), "cannot be read: Too many levels of symbolic links"),
    "pipe": (lambda path, _: os.mkfifo(path), "found a pipe or device, expected a JSON file; write"),
    "zeros": (lambda path, _: path.symlink_to("/dev/zero"), "found a pipe or device, expected"),
    "null device": (lambda path, _: path.symlink_to(os.devnull), "found a pipe or device, expected"),
    "huge": (_sparse, "found 314572800 bytes, expected at most"),
    "many values": (_too_many, "values, expected at most 1000000"),
    "empty": (text(""), "line 1, column 1: found an empty file, expected a value"),
    "white": (text(" \n\t\n"), "found an empty file, expected a value"),
    "prose": (text("no JSON at all"), 'line 1, column 1: found "no JSON at all", expected a value'),
    "truncated": (_document(lambda s: s[: len(s) // 2]), "found the end of the file too early, expected"),
    "cut at the end": (_document(lambda s: s[:-1]), "found the end of the file too early, expected ',' delimiter"),
    "two documents": (_document(lambda s: s + s), "expected the end of the file; correct it"),
    "trailing comma": (_document(lambda s: s[:-1] + ",}"), "expected a field name in double quotes"),
    "single quotes": (_document(lambda s: s.replace('"', "'")), "expected a field name in double quotes"),
    "UTF-16": (_document(lambda s: s.encode("utf-16")), "expected UTF-8 text, found byte 0 that is not"),
    "gzip": (_document(lambda s: gzip.compress(s.encode())), "expected UTF-8 text, found byte 1 that is not"),
    "Latin-1": (text('{"name": "möbius"}'.encode("latin-1")), "expected UTF-8 text, found byte 11 that is not"),
    "binary": (text(bytes(range(128, 256))), "expected UTF-8 text, found byte 0 that is not"),
    "open brackets": (text("[" * 100_000), "found a text nested too deeply, expected at most 100 levels"),
    "deep lists": (text("[" * 100_000 + "]" * 100_000), "found a text nested too deeply"),
    "deep objects": (text('{"a":' * 900 + "1" + "}" * 900), "found more than 100 levels of nesting, expected fewer"),
    "many digits": (text('{"a": ' + "9" * 5000 + "}"), "not valid JSON: Exceeds the limit"),
    "number": (text("3"), "$: found a number, expected an object"),
    "string": (text('"planner.plan/1"'), "$: found a string, expected an object"),
    "null": (text("null"), "$: found null, expected an object"),
    "list": (text("[1, 2]"), "$: found a list, expected an object"),
    "no schema": (text("{}"), '$.schema: found no field "schema", expected "planner.'),
    "next version": (_document(lambda s: s.replace('/1"', '/2"', 1)), '/2", expected'),
    "schema as number": (text('{"schema": 1}'), "$.schema: found schema 1, expected"),
    "long schema": (text('{"schema": "' + "x" * 10**6 + '"}'), "$.schema: found schema a string"),
    "unknown field": (_document(_last_field), "$.zzz: unknown field; remove it"),
    "field twice": (_document(lambda s: s[:-1] + ', "schema": 1}'), "$.schema: found the field twice in one object"),
    "field twice deep": (text('{"a": [{"b": {"c": 1, "c": 2}}]}'), "$.a[0].b.c: found the field twice in one object"),
    "half a character": (text('{"a": "\\ud800"}'), '$.a: found "\\ud800", expected Unicode text'),
    "odd field": (_document(lambda s: s[:-1] + ', "a\\nplanner: b": 1}'), '$["a\\nplanner: b"]: unknown field'),
    "long field": (_document(lambda s: s[:-1] + f', "{"x" * 10**6}": 1}}'), "…"),
}
"""What is wrong → (makes the file, what the message says of it)."""
