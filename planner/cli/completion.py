"""Completion of parameters in a shell, and the names that it knows."""

from __future__ import annotations

from planner.decide.strategies import STRATEGIES
from planner.documents.catalog import names


def models_beginning(incomplete: str) -> list[str]:
    """Return names of the catalog's profiles."""
    model, at, _ = incomplete.partition("@")
    known = [f"{model}@{cluster}" for cluster in names("cluster")] if at else names("model")
    return [name for name in known if name.startswith(incomplete)]


def clusters_beginning(incomplete: str) -> list[str]:
    """Return names of the catalog's clusters."""
    return [name for name in names("cluster") if name.startswith(incomplete)]


def entries_beginning(incomplete: str) -> list[str]:
    """Return names of the catalog's profiles and clusters."""
    return [*models_beginning(incomplete), *clusters_beginning(incomplete)]


def strategies_beginning(incomplete: str) -> list[str]:
    """Return names of strategies for the last one of a list."""
    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in STRATEGIES if name.startswith(last)]


def strategies_text() -> str:
    """Return all strategies, each with its accuracy and what it is."""
    lines = []
    for one in STRATEGIES.values():
        about = " ".join((one.make.__doc__ or "").split("\n\n")[0].split()).removeprefix("Return ")
        lines.append(f"{'  '.join(one.usages)}  ({one.accuracy})\n    {about}")
    return "\n".join(lines)
