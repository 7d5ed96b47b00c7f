"""Read the events of a trace file one by one, in bounded memory: JSON, gzip or zip."""

from __future__ import annotations

import codecs
import gzip
import json
import os
import re
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, Self

from runtime.errors import InputError
from runtime.plan.files import checked_path

CHUNK_BYTES = 1 << 20
MAX_VALUE_CHARACTERS = 1 << 24
"""Longest event, or other value of the file, that is read."""

Progress = Callable[[int], None]
"""Gets the bytes of the file that have been read."""

ENDINGS = (".json", ".json.gz", ".zip")
"""Ends of the names of trace files."""
_SPACE = re.compile(r"[ \t\r\n]*")
_NEXT = re.compile(r"[ \t\r\n]*([,\]}])[ \t\r\n]*")
_MARGIN = 64
"""Characters before the end of the text within which a parser's complaint may be about text that is not read yet."""

AGAIN = "record it again, and let `export_chrome_trace` return before the process ends"
A_TRACE = "expected a trace that torch.profiler's export_chrome_trace wrote"


class EventFile:
    """A trace file. Iterating gives its events; `header` then holds the other fields of the document."""

    def __init__(self, path: str | Path, progress: Progress | None = None) -> None:
        """Raise InputError where there is no such file, or it is empty."""
        self.path = checked_path(path)
        self.header: dict[str, Any] = {}
        self.events = 0
        self._progress = progress
        self._text, self._at, self._ended = "", 0, False
        try:
            if os.path.exists(self.path) and not os.path.isfile(self.path):
                raise InputError(f"{path}: found a directory, pipe or device, {A_TRACE}; name the file")
            self._raw: IO[bytes] = open(self.path, "rb")  # noqa: SIM115
        except OSError as error:
            raise InputError(f"{path}: cannot be read: {error.strerror}; {A_TRACE}: check the path") from None
        try:
            self._bytes = self._opened()
        except InputError:
            self._raw.close()
            raise
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")(errors="replace")

    def _opened(self) -> IO[bytes] | gzip.GzipFile:
        magic = self._raw.read(4)
        self._raw.seek(0)
        if not magic:
            raise InputError(f"{self.path}: found an empty file, {A_TRACE}; {AGAIN}")
        if magic[:2] == b"\x1f\x8b":
            return gzip.GzipFile(fileobj=self._raw)
        if magic[:2] != b"PK":
            return self._raw
        try:
            archive = zipfile.ZipFile(self._raw)
            members = [member for member in archive.infolist() if member.filename.endswith((".json", ".json.gz"))]
            if len(members) != 1:
                raise InputError(f"{self.path}: found {len(members)} JSON files in it, expected one; name the files")
            if members[0].compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) or members[0].flag_bits & 1:
                raise RuntimeError("encrypted, or not deflated")
            member = archive.open(members[0])
        except (zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
            raise InputError(f"{self.path}: found an unreadable archive ({error}), {A_TRACE}; unpack it") from None
        return gzip.GzipFile(fileobj=member) if members[0].filename.endswith(".gz") else member

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._raw.close()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield every event. Raises InputError: the file is truncated, or is no trace."""
        opening = self._character()
        if opening == "[":
            yield from self._list()
        elif opening == "{":
            yield from self._fields()
        else:
            raise InputError(f"{self.path}: found {self._here()} at its start, {A_TRACE}; name another file")
        if self._skip():
            raise InputError(f"{self.path}: found {self._here()} after the trace, expected its end; split the file")

    def _fields(self) -> Iterator[dict[str, Any]]:
        found = False
        self._at += 1
        while self._character() != "}":
            name = self._value()
            if self._character() != ":":
                self._fail("a colon behind the name of a field")
            self._at += 1
            if name == "traceEvents" and self._character() == "[":
                found = True
                yield from self._list()
            else:
                self.header[str(name)] = self._value()
            if self._character() == ",":
                self._at += 1
            elif self._character() != "}":
                self._fail("a comma or the end of the document")
        if not found:
            raise InputError(f"{self.path}: found no list traceEvents in it, {A_TRACE}; name another file")
        self._at += 1

    def _list(self) -> Iterator[dict[str, Any]]:
        self._at += 1
        if self._character() == "]":
            self._at += 1
            return
        decode, following = json.JSONDecoder().raw_decode, _NEXT.match
        while True:
            try:
                event, end = decode(self._text, self._at)
                match = following(self._text, end)
            except (ValueError, RecursionError):
                match = None
            if match is None or match.end() == len(self._text):
                event = self._value()
                separator = self._character()
                self._at += 1
                if separator == ",":
                    self._character()
            else:
                separator, self._at = match[1], match.end()
            if isinstance(event, dict):
                self.events += 1
                yield event
            if separator == "]":
                return
            if separator != ",":
                self._at -= 1
                self._fail("a comma or the end of the list")

    def _value(self) -> Any:
        """Decode the value that begins here, reading on until it is whole."""
        self._character()
        while True:
            try:
                value, end = json.JSONDecoder().raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                cut = error.pos + _MARGIN > len(self._text) or error.msg.startswith("Unterminated")
                if not cut or len(self._text) - self._at > MAX_VALUE_CHARACTERS or not self._more():
                    self._fail(f"valid JSON ({error.msg})")
            except RecursionError:
                self._fail("few levels of nesting")
            except ValueError:
                self._fail("numbers of a few digits")
            else:
                if end < len(self._text) or not self._more():
                    self._at = end
                    return value

    def _character(self) -> str:
        """Return the next character that is not white space, without passing it."""
        if not self._skip():
            self._fail("the rest of it")
        return self._text[self._at]

    def _skip(self) -> bool:
        """Pass white space; False at the end of the file."""
        while True:
            match = _SPACE.match(self._text, self._at)
            assert match is not None
            self._at = match.end()
            if self._at < len(self._text):
                return True
            if not self._more():
                return False

    def _more(self) -> bool:
        """Read on; False at the end of the file."""
        if self._ended:
            return False
        kept = self._text[self._at :]
        try:
            data = self._bytes.read(max(CHUNK_BYTES, len(kept)))
        except (EOFError, zlib.error, zipfile.BadZipFile, gzip.BadGzipFile) as error:
            found = f"found a truncated or damaged archive after event {self.events} ({error})"
            raise InputError(f"{self.path}: {found}, expected the whole file; {AGAIN}, or copy it again") from None
        except OSError as error:
            raise InputError(f"{self.path}: cannot be read: {error.strerror}; check the disk") from None
        self._ended = not data
        self._text, self._at = kept + self._decoder.decode(data, final=self._ended), 0
        if self._progress is not None:
            self._progress(self._raw.tell())
        return bool(data)

    def _fail(self, expected: str) -> Any:
        where = f"after event {self.events}" if self.events else "before its first event"
        if self._at >= len(self._text) or self._ended:
            raise InputError(f"{self.path}: found the end of the file {where}, expected {expected}; {AGAIN}")
        raise InputError(f"{self.path}: found {self._here()} {where}, expected {expected}; name another file")

    def _here(self) -> str:
        """Return the next characters, quoted."""
        return json.dumps(self._text[self._at :][:20])


def text_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a text file. Raises InputError where it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            yield from file
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}; check the path") from None


_MARKS = re.compile(r'"(?:traceEvents|schemaVersion|deviceProperties|distributedInfo|ph)"')


def head_of(path: str) -> bytes:
    """Return the beginning of a regular file; nothing of anything else: a pipe may be silent for ever."""
    try:
        if not os.path.isfile(path):
            return b""
        with open(path, "rb") as file:
            return file.read(4096)
    except (OSError, ValueError):
        return b""


def is_trace(path: str) -> bool:
    """Return whether a path is a directory, an archive, or a file that begins as traces do."""
    head = head_of(path)
    text = head.decode("utf-8", errors="replace")
    marked = "planner." not in text and _MARKS.search(text) is not None
    return marked or head[:2] in (b"\x1f\x8b", b"PK") or os.path.isdir(path)
