"""Profiles and clusters by name: the documents that ship with the package, `profiles/` of the repository.

A name is that of a file without its ending; `MODEL@CLUSTER` is a model on a cluster, `MODEL+muon` one that Muon trains.
A path that exists wins over a name, on either side of the `@`. Never imports torch.
"""

from __future__ import annotations

import difflib
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from planner.documents.newton_schulz import with_newton_schulz
from planner.documents.profile import Cluster, Profile, load_cluster, load_profile
from runtime.errors import InputError
from runtime.plan.files import checked_path

Kind = Literal["model", "cluster"]

_PACKAGE = Path(__file__).resolve().parents[1]
_INSTALLED = _PACKAGE / "profiles"
FOLDER = _INSTALLED if _INSTALLED.is_dir() else _PACKAGE.parent / "profiles"
"""Folder of the documents: inside of the package in a wheel, next to it in a checkout, also installed as editable."""

MAX_SUGGESTIONS = 3
WITH_MUON = "+muon"
"""End of the names of models whose hidden matrices Muon updates."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One document of the catalogue."""

    kind: Kind
    name: str
    summary: str
    source: str
    notes: tuple[str, ...] = ()

    def to_document(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return asdict(self)

    def details(self) -> str:
        """Return all that is known of it, a line each."""
        lines = [f"{self.kind} {self.name}: {self.summary}", f"source: {self.source}"]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def name_of(document: Profile | Cluster | str | Path) -> str:
    """Return how messages name a document: by its path where it has one."""
    return str(document) if isinstance(document, str | Path) else type(document).__name__.lower()


def names(kind: Kind) -> list[str]:
    """Return the names that the catalogue knows, sorted."""
    return sorted(path.stem for path in (FOLDER / f"{kind}s").glob("*.json"))


def entries() -> list[Entry]:
    """Return every document with what it is and where its numbers come from: models, then clusters."""
    found = []
    for kind in get_args(Kind):
        for name in names(kind):
            path = _file(kind, name)
            document = load_profile(path) if kind == "model" else load_cluster(path)
            summary, source, notes = _summary(document), document.source or "", document.notes or ()
            found.append(Entry(kind=kind, name=name, summary=summary, source=source, notes=notes))
    return found


def _summary(document: Profile | Cluster) -> str:
    if isinstance(document, Cluster):
        return f"{document.ranks} ranks: {document.nodes} nodes of {document.ranks_per_node}"
    gradients, world = document.compute.gradients, document.world
    batch = f", batch {world.batch_per_rank}" if world.batch_per_rank else ""
    numel = sum(gradient.numel for gradient in gradients)
    return f"{numel / 1e6:.1f} M parameters in {len(gradients)} gradients; {world.accelerator or world.device}{batch}"


def search(text: str) -> list[Entry]:
    """Return the document of that name, or those whose names contain the text; in any case of letters.

    Raises InputError: there is none (lists the near and the known names).
    """
    known = entries()
    found = [entry for entry in known if entry.name == text] or [e for e in known if text.lower() in e.name.lower()]
    if not found:
        listed = [entry.name for entry in known]
        raise InputError(
            f"{text}: found no model or cluster with that in its name{_hint(text, listed)}; expected one of: "
            f"{', '.join(listed)}"
        )
    return found


def find_profile(given: Profile | str | Path) -> Profile:
    """Return the profile that is meant: a record, the path of profile.json, `MODEL`, or `MODEL@CLUSTER`; `MODEL+muon`
    is a model whose hidden matrices Muon updates, in estimated times.

    Raises InputError: neither a file nor a name (lists the near and the known ones); the document is wrong; Muon is for
    no matrix of it.
    """
    if isinstance(given, Profile):
        return given
    model, at, cluster = checked_path(given).rpartition("@")
    if not at or Path(given).exists():
        return _model(given)
    return replace(_model(model), cluster=load_cluster(_locate("cluster", cluster)))


def _model(given: str | Path) -> Profile:
    name = str(given).removesuffix(WITH_MUON)
    if name == str(given) or Path(given).exists():
        return load_profile(_locate("model", given))
    return with_newton_schulz(load_profile(_locate("model", name)))


def find_cluster(given: Cluster | str | Path) -> Cluster:
    """Return the cluster that is meant: a record, the path of cluster.json or a name. Raises as `find_profile` does."""
    if isinstance(given, Cluster):
        return given
    checked_path(given)
    return load_cluster(_locate("cluster", given))


def _file(kind: Kind, name: str) -> Path:
    return FOLDER / f"{kind}s" / f"{name}.json"


def _locate(kind: Kind, given: str | Path) -> Path:
    """Return the file that is meant. What looks like a path stays one, so that its message names that path."""
    path, text, known = Path(given), str(given), names(kind)
    if path.is_file() or isinstance(given, Path):
        return path
    if text in known:
        return _file(kind, text)
    if text and (path.exists() or path.suffix == ".json" or len(path.parts) > 1):
        return path
    document = "profile.json" if kind == "model" else "cluster.json"
    raise InputError(
        f"{text or 'empty name'}: found neither a file nor a known {kind} of that name{_hint(text, known)}; expected "
        f"the path of a {document}, or one of: {', '.join(known)}"
    )


def _hint(text: str, known: list[str]) -> str:
    near = difflib.get_close_matches(text.lower(), known, n=MAX_SUGGESTIONS, cutoff=0.5)
    return f" (did you mean {' or '.join(near)}?)" if near else ""
