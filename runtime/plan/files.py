"""The files that users name: whole texts in, whole texts out, and one sentence about whatever is wrong with a path."""

from __future__ import annotations

import errno
import os
import select
import stat
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from runtime.errors import InputError

MAX_FILE_BYTES = 64 * 1024 * 1024
"""A document larger than this is a mistake (10,000 gradients take a few MB)."""

PIPE_WAIT_S = 10.0
"""How long the other end of a pipe may be silent."""

_CHUNK_BYTES = 1024 * 1024
_FULL = (errno.ENOSPC, errno.EDQUOT)

_FOREIGN = (
    (b"\xef\xbb\xbf", "a byte order mark", "save the file without it"),
    (b"\xff\xfe", "UTF-16", "save the file as UTF-8"),
    (b"\xfe\xff", "UTF-16", "save the file as UTF-8"),
    (b"\x1f\x8b", "a gzip archive", "unpack it first"),
    (b"PK\x03\x04", "a zip archive", "unpack it first"),
)
"""(first bytes, what they announce, cure)."""


def checked_path(path: object) -> str:
    """The path as text; `os.fspath` with errors that a user understands.

    Raises:
        InputError: not a path, empty, or with a NUL character.
    """
    if not isinstance(path, str | os.PathLike):
        raise InputError(f"found a {type(path).__name__}, expected the path of a file; pass a str or a pathlib.Path")
    name = os.fsdecode(path)
    if not name:
        raise InputError("'': found an empty path, expected the path of a file; check the path")
    if "\0" in name:
        raise InputError(f"{name!r}: found a NUL character, expected the path of a file; check the path")
    return name


def read_text(path: str | Path) -> str:
    """The text of a file or pipe.

    Raises:
        InputError: the file is missing, unreadable, too large, a directory or device, or not UTF-8; a pipe is silent.
    """
    name = checked_path(path)
    try:
        # Without O_NONBLOCK a pipe that nobody writes to would hold us up right here.
        handle = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        try:
            content = _content(handle, name)
        finally:
            os.close(handle)
    except FileNotFoundError:
        raise InputError(f"{name}: no such file; check the path") from None
    except OSError as error:
        raise InputError(
            f"{name}: cannot be read: {error.strerror}; expected a JSON file: check the path and its permissions"
        ) from None
    return _decoded(content, name)


def _content(handle: int, name: str) -> bytes:
    found = os.fstat(handle)
    if stat.S_ISDIR(found.st_mode):
        raise InputError(f"{name}: found a directory, expected a JSON file; check the path")
    if not (stat.S_ISREG(found.st_mode) or stat.S_ISFIFO(found.st_mode)):
        raise InputError(f"{name}: found a device, expected a JSON file; check the path")
    if found.st_size > MAX_FILE_BYTES:
        _refuse_size(name, found.st_size)
    chunks, size_bytes = [], 0
    while chunk := _next_chunk(handle, name, stat.S_ISFIFO(found.st_mode)):
        chunks.append(chunk)
        size_bytes += len(chunk)
        if size_bytes > MAX_FILE_BYTES:
            _refuse_size(name, size_bytes)
    return b"".join(chunks)


def _next_chunk(handle: int, name: str, is_pipe: bool) -> bytes:
    if is_pipe:
        poller = select.poll()
        poller.register(handle, select.POLLIN)
        if not poller.poll(PIPE_WAIT_S * 1000):
            raise InputError(
                f"{name}: found a pipe that was silent for {PIPE_WAIT_S:g} s, expected a JSON file; write the "
                f"document to a file first"
            )
    return os.read(handle, _CHUNK_BYTES)


def _refuse_size(name: str, size_bytes: int) -> None:
    raise InputError(
        f"{name}: found {size_bytes} bytes or more, expected at most {MAX_FILE_BYTES}; check that it is the right file"
    )


def _decoded(content: bytes, name: str) -> str:
    for start, what, cure in _FOREIGN:
        if content.startswith(start):
            raise InputError(f"{name}: found {what}, expected JSON in plain UTF-8; {cure}")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{name}: expected UTF-8 text, found byte {error.start} that is not; save the file as UTF-8"
        ) from None


def write_text(path: str | Path, text: str) -> None:
    """Writes a file so that it is either the old one or the whole new one. A device or pipe is written to.

    A symbolic link stays: the file that it leads to is replaced.

    Raises:
        InputError: the path cannot be written, or the disk is full.
    """
    name = checked_path(path)
    try:
        target = check_output(name)
        if target.exists() and not target.is_file():
            _send(target, text.encode())
        else:
            _replace(target, text.encode())
    except OSError as error:
        if error.errno in _FULL:
            raise InputError(
                f"{name}: not written, the disk is full; nothing was changed: free some space, or choose another "
                f"output path"
            ) from None
        raise InputError(f"{name}: cannot be written: {error.strerror}; choose another output path") from None


def check_output(path: str | Path) -> Path:
    """Where an output path leads once links are followed; makes and changes nothing.

    Raises:
        InputError: it is a directory, its folder is missing or cannot be written to, or the file is read-only.
    """
    name = checked_path(path)
    cure = "choose another output path"
    try:
        mode = os.stat(name).st_mode
    except (FileNotFoundError, NotADirectoryError):
        mode = None
    except OSError as error:
        raise InputError(f"{name}: cannot be written: {error.strerror}; {cure}") from None
    if mode is not None and stat.S_ISDIR(mode):
        raise InputError(f"{name}: found a directory, expected a file name to write to; {cure}")
    if mode is not None and not os.access(name, os.W_OK):
        raise InputError(f"{name}: found a file that may not be written, expected one that may; {cure}")
    if mode is not None and not stat.S_ISREG(mode):
        return Path(name)
    target = Path(os.path.realpath(name))
    shown = target.parent if Path(name).is_symlink() else Path(name).parent
    if not os.path.isdir(shown):  # not by its absolute path, to which the way may be barred
        raise InputError(f"{name}: there is no folder {shown}; make it or {cure}")
    if not os.access(shown, os.W_OK):
        raise InputError(f"{name}: the folder {shown} is not writable; {cure}")
    return target


def _send(target: Path, content: bytes) -> None:
    """Writes to a device or pipe. A pipe that nobody reads from, or stops being read, is given up after a while."""
    deadline = time.monotonic() + PIPE_WAIT_S
    while True:
        try:
            handle = os.open(target, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
            break
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            if time.monotonic() > deadline:
                raise TimeoutError(errno.ETIMEDOUT, f"nobody came to read from it for {PIPE_WAIT_S:g} s") from None
            time.sleep(0.05)
    try:
        left = memoryview(content)
        poller = select.poll()
        poller.register(handle, select.POLLOUT)
        while left:
            if not poller.poll(PIPE_WAIT_S * 1000):
                raise TimeoutError(errno.ETIMEDOUT, f"nobody read from it for {PIPE_WAIT_S:g} s")
            left = left[os.write(handle, left) :]
    finally:
        os.close(handle)


def _replace(target: Path, content: bytes) -> None:
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=".planner-", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, target)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current
