"""`python -m benchmarks.make_profiles REFERENCE_FOLDER`: published traces → `tests/data` and `profiles`.

Copies the small files that tests and the validation report need, then writes the documents of the catalogue from them.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from benchmarks.published.common import DATA
from benchmarks.sources import COPIED, RECORDS
from planner.documents.catalog import FOLDER
from planner.documents.profile import Cluster, Profile
from runtime.plan.files import write_text
from runtime.plan.strict_json import dump


def copy_data(reference: Path) -> None:
    """Copies the files of `sources.COPIED` and the records of `sources.RECORDS`."""
    for name in COPIED:
        target = DATA / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(reference / "traces" / name, target)
        target.chmod(0o644)
    records = json.loads((reference / "paper_tables.json").read_text(encoding="utf-8"))
    kept = [record for record in records if record["id"].startswith(RECORDS)]
    write_text(DATA / "paper_tables.json", _one_per_line(kept))


def _one_per_line(records: list[Any]) -> str:
    return "[\n" + ",\n".join(json.dumps(record, ensure_ascii=False) for record in records) + "\n]\n"


def document_text(document: dict[str, Any]) -> str:
    """JSON for people: one gradient, and one sample, to a line."""
    lines: dict[str, str] = {}

    def short(value: Any) -> Any:
        if isinstance(value, list) and value and isinstance(value[0], dict | list):
            for index, item in enumerate(value):
                lines[f'"@{len(lines)}"'] = json.dumps(item, ensure_ascii=False)
                value[index] = list(lines)[-1].strip('"')
            return value
        return {key: short(item) for key, item in value.items()} if isinstance(value, dict) else value

    text = json.dumps(short(document), indent=1, ensure_ascii=False)
    for mark, line in lines.items():
        text = text.replace(mark, line, 1)
    return text + "\n"


def write_document(name: str, record: Profile | Cluster) -> None:
    """One document of the catalogue, under its name."""
    kind = "models" if isinstance(record, Profile) else "clusters"
    target = FOLDER / kind / f"{name}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    write_text(target, document_text(dump(record)))


def main(arguments: list[str]) -> None:
    """Data, then models, then clusters: fits of clusters need the models."""
    if len(arguments) != 1:
        raise SystemExit("usage: python -m benchmarks.make_profiles REFERENCE_FOLDER")
    copy_data(Path(arguments[0]))
    from benchmarks.make_clusters import clusters
    from benchmarks.make_models import models

    for profile in models():
        write_document(profile.model.name, profile)
    for cluster in clusters():
        write_document(cluster.name or "", cluster)


if __name__ == "__main__":
    main(sys.argv[1:])
