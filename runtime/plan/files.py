"""The files that users name: whole texts in, whole texts out, and one sentence about whatever is wrong with a path."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from runtime.errors import InputError

MAX_FILE_BYTES = 64 * 1024 * 1024
"""A document larger than this is a mistake (10,000 gradients take a few MB)."""

FULL = (errno.ENOSPC, errno.EDQUOT)


def checked_path(path: object) -> str:
    """Return the path as text. Raises InputError where it is no path, empty, or has a NUL character."""
    if not isinstance(path, str | os.PathLike):
        raise InputError(f"found a {type(path).__name__}, expected the path of a file; pass a str or a pathlib.Path")
    name = os.fsdecode(path)
    if not name:
        raise InputError("'': found an empty path, expected the path of a file; check the path")
    if "\0" in name:
        raise InputError(f"{name!r}: found a NUL character, expected the path of a file; check the path")
    return name


def read_text(path: str | Path, expected: str = "a JSON file") -> str:
    """Return the text of a regular file in UTF-8, with or without a byte order mark; `expected` is what messages call
    it. Raises InputError.
    """
    name = checked_path(path)
    try:
        found = os.stat(name)
        if stat.S_ISDIR(found.st_mode):
            raise InputError(f"{name}: found a directory, expected {expected}; check the path")
        if not stat.S_ISREG(found.st_mode):  # a pipe may be silent for ever, a device never end
            raise InputError(f"{name}: found a pipe or device, expected {expected}; write the document to a file first")
        if found.st_size > MAX_FILE_BYTES:
            raise InputError(
                f"{name}: found {found.st_size} bytes, expected at most {MAX_FILE_BYTES}; check that it is the right "
                f"file"
            )
        return Path(name).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise InputError(f"{name}: no such file; check the path") from None
    except OSError as error:
        raise InputError(
            f"{name}: cannot be read: {error.strerror}; expected {expected}: check the path and its permissions"
        ) from None
    except UnicodeDecodeError as error:
        raise InputError(
            f"{name}: expected UTF-8 text, found byte {error.start} that is not; check that it is the right file, and "
            f"save it as UTF-8"
        ) from None


def write_text(path: str | Path, text: str) -> None:
    """Write a text as `write_bytes` does."""
    write_bytes(path, text.encode())


def write_bytes(path: str | Path, data: bytes) -> None:
    """Writes a file so that it is either the old one or the whole new one. A device or pipe is written to.

    A symbolic link stays: the file that it leads to is replaced. Raises InputError: the path cannot be written, or the
    disk is full.
    """
    name = checked_path(path)
    try:
        target = check_output(name)
        if target.exists() and not target.is_file():
            # A pipe without a reader is an error, where opening it to write would wait.
            handle = os.open(target, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
            os.set_blocking(handle, True)
            with os.fdopen(handle, "wb") as file:
                file.write(data)
        else:
            replace_file(target, data)
    except OSError as error:
        if error.errno in FULL:
            raise InputError(
                f"{name}: not written, the disk is full; nothing was changed: free some space, or choose another "
                f"output path"
            ) from None
        raise InputError(f"{name}: cannot be written: {error.strerror}; choose another output path") from None


def check_output(path: str | Path) -> Path:
    """Return where an output path leads, and change nothing. Raises InputError where it cannot be written."""
    name = checked_path(path)
    hint = "choose another output path"
    try:
        mode = os.stat(name).st_mode
    except (FileNotFoundError, NotADirectoryError):
        mode = None
    except OSError as error:
        raise InputError(f"{name}: cannot be written: {error.strerror}; {hint}") from None
    if mode is not None and stat.S_ISDIR(mode):
        raise InputError(f"{name}: found a directory, expected a file name to write to; {hint}")
    if mode is not None and not os.access(name, os.W_OK):
        raise InputError(f"{name}: found a file that may not be written, expected one that may; {hint}")
    if mode is not None and not stat.S_ISREG(mode):
        return Path(name)
    target = Path(os.path.realpath(name))
    shown = target.parent if Path(name).is_symlink() else Path(name).parent
    if not os.path.isdir(shown):  # not by its absolute path, to which the way may be barred
        raise InputError(f"{name}: there is no folder {shown}; make it or {hint}")
    if not os.access(shown, os.W_OK):
        raise InputError(f"{name}: the folder {shown} is not writable; {hint}")
    return target


def replace_file(target: Path, content: bytes) -> None:
    """Write a new file next to `target` and rename it to that: a symbolic link there is replaced, not followed.

    For names that a user did not choose, in folders that others may write to. Raises OSError.
    """
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=".planner-", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            mask = os.umask(0)  # there is no other way to ask for it
            os.umask(mask)
            os.fchmod(file.fileno(), 0o666 & ~mask)  # by its handle: the name may lead elsewhere by now
        os.replace(temporary, target)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
