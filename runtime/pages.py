"""Pages of the documentation: how messages name them, and where an installation has them. Torch-free."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

_SHARED = "share/commplanner/docs/"
"""In a wheel; a checkout has them in docs/."""


def page(name: str) -> str:
    """Return how a message refers to a page, such as `concepts/merging`."""
    return f"`planner docs {name}`"


def find_pages() -> dict[str, Path]:
    """Return the file of each page by its name; none where an installation lacks them."""
    folder = Path(__file__).parents[1] / "docs"
    if (folder / "index.md").is_file():
        found = {path.relative_to(folder).with_suffix("").as_posix(): path for path in sorted(folder.rglob("*.md"))}
        return {name: path for name, path in found.items() if not name.startswith("api/")}  # `make docs` fills these
    try:
        files = distribution("commplanner").files or []
    except PackageNotFoundError:
        return {}
    shared = {file.as_posix().partition(_SHARED)[2]: Path(str(file.locate())) for file in files}
    return {name.removesuffix(".md"): path for name, path in sorted(shared.items()) if name.endswith(".md")}
