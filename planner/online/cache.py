"""The cache of plans: for each model on each cluster the plan that was measured to be the fastest.

One file for each, in one folder, which anyone may delete at any time. Torch-free.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from planner.documents.profile import Profile
from runtime.errors import InputError
from runtime.plan import Accuracy, Plan
from runtime.plan.files import replace_file
from runtime.plan.strict_json import Count, Document, Name, Ranks, Record, TimeUs, dump, read_json

SCHEMA: Literal["planner.cache/1"] = "planner.cache/1"
MOST_FILES, MOST_BYTES = 200, 64 * 1024 * 1024
"""Limits of the folder; the files that were not used for longest are deleted first."""
STALE_S = 3600.0
"""Age of a temporary file beyond which its writer must have been killed."""

NAME, TEMPORARY = re.compile(r"[0-9a-f]{40}\.json"), re.compile(r"\.planner-.*\.tmp")
HINT = "delete the file: it is made again"


@dataclass(frozen=True, kw_only=True)
class Key(Record):
    """Conditions under which a plan can be used again."""

    model: Name
    """Fingerprint of the trainable parameters."""
    ranks: Ranks
    nodes: Ranks
    backend: Name
    device: Name
    cores: Count
    """Cores of each node, which compete with the exchange."""
    torch: Name
    planner: Name
    optimizer: Name
    """Class of the optimizer, and of its wrapper: not every plan can update by every optimizer."""
    accuracy: Accuracy
    allow: tuple[Name, ...] = ()
    compile: Name | None = None
    """Backend that compiles the model in regions, and its arguments."""

    @property
    def alike(self) -> dict[str, Any]:
        """Return what runs have in common that can use one another's measurements, scaled to their number of ranks: all
        but that number, with the link of messages, which is intra-node or inter-node.
        """
        fields: dict[str, Any] = dump(self)
        ranks, nodes = fields.pop("ranks"), fields.pop("nodes")
        return {**fields, "ranks_per_node": None if nodes == 1 else ranks // nodes}

    @property
    def file_names(self) -> str:
        """Return the beginning of the names of the files of all runs that are alike."""
        return _digest(self.alike)

    @property
    def file_name(self) -> str:
        return f"{self.file_names}{_digest(dump(self))}.json"


def _digest(fields: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:20]


@dataclass(frozen=True, kw_only=True)
class Remembered(Document):
    """The contents of one file."""

    hint: ClassVar[str] = HINT
    schema: Literal["planner.cache/1"] = SCHEMA
    key: Key
    plan: Plan
    profile: Profile | None = None
    """Profile that the plan was decided on."""
    step_us: TimeUs
    """Time of a step with the plan, on the slowest rank."""
    story: tuple[str, ...] = ()
    """Events that led to the plan."""
    settled: bool = True
    """Whether the run has tried all that it would."""


def parse_remembered(document: Any, key: Key, where: str, *, any_ranks: bool = False) -> Remembered:
    """Check a parsed file; `any_ranks`: of this run's number of ranks or another.

    Raises InputError: it is none of this schema, or of another model, torch, cluster or class; its plan or profile is
        wrong.
    """
    entry = Remembered.parse(document, where)
    if any_ranks and entry.key.alike == key.alike:
        key = entry.key
    if entry.key != key:
        differ = [name for name, value in vars(key).items() if getattr(entry.key, name) != value]
        raise InputError(
            f"{where}: $.key: found another {', '.join(differ)} than this run's, expected equal ones; {HINT}"
        )
    if entry.plan.model.fingerprint != key.model or entry.plan.world.ranks != key.ranks:
        raise InputError(f"{where}: $.plan: found a plan of another model or number of ranks than $.key says; {HINT}")
    return entry


def _read(path: str | Path) -> Any:
    """Parse one file of the folder. Raises InputError; also for a link, which no run leaves and another user may."""
    if os.path.islink(path):
        raise InputError(f"{path}: found a symbolic link, expected a file; {HINT}")
    return read_json(path)


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Return PLANNER_CACHE, or `planner` in the user's folder for caches. Raises InputError where there is none."""
    if given := environment.get("PLANNER_CACHE"):
        return Path(given)
    base = environment.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "planner"
    except RuntimeError:
        raise InputError("found no home folder to remember plans in; expected PLANNER_CACHE=FOLDER") from None


class Cache:
    """The folder. Every method raises InputError where it cannot be used; a run continues without."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, key: Key) -> Path:
        return self.folder / key.file_name

    def read(self, key: Key) -> Remembered | None:
        """Return what is remembered of this model here, or None."""
        path = self.path(key)
        if not os.path.lexists(path):
            return None
        found = parse_remembered(_read(path), key, str(path))
        with suppress(OSError):  # of a folder that may only be read
            os.utime(path, follow_symlinks=False)
        return found

    def read_other_ranks(self, key: Key) -> Remembered | None:
        """Return what was used last of runs that differ from this one in their number of ranks, if it has measurements.

        The last one, not the nearest: where ranks were lost or added, the run before this one is it.
        """
        found = []
        with suppress(OSError):
            for entry in os.scandir(self.folder):
                if entry.name.startswith(key.file_names) and NAME.fullmatch(entry.name):
                    found.append((entry.stat(follow_symlinks=False).st_mtime, entry.path))
        for _, path in sorted(found, reverse=True):
            other = parse_remembered(_read(path), key, path, any_ranks=True)
            if other.profile is not None and other.key.ranks != key.ranks:
                return other
        return None

    def write(self, remembered: Remembered) -> Path:
        """Write a new file whole or not at all, whatever has its name in a folder that others may write to; then make
        room.
        """
        path, what = self.path(remembered.key), "made"
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            what = "written to"
            replace_file(path, json.dumps(remembered.to_document()).encode())
        except OSError as error:
            raise InputError(
                f"{self.folder}: cannot be {what}: {error.strerror}; set PLANNER_CACHE to a folder that may be written"
            ) from None
        self.make_room()
        return path

    def make_room(self) -> None:
        """Delete what is over the bounds, and what killed writers left; nothing that this package did not write."""
        found = []
        now = time.time()
        with suppress(OSError):
            for entry in os.scandir(self.folder):
                with suppress(OSError):  # gone meanwhile
                    status = entry.stat(follow_symlinks=False)
                    size_bytes, used_s = status.st_size, status.st_mtime
                    if NAME.fullmatch(entry.name):
                        found.append((used_s, size_bytes, entry.path))
                    elif TEMPORARY.fullmatch(entry.name) and now - used_s > STALE_S:
                        os.unlink(entry.path)
        kept_bytes = 0
        for place, (_, size_bytes, path) in enumerate(sorted(found, reverse=True)):
            kept_bytes += size_bytes
            if place >= MOST_FILES or (place and kept_bytes > MOST_BYTES):
                with suppress(OSError):
                    os.unlink(path)
