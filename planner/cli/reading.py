"""`planner catalog` and `planner docs`: what comes with planner."""

from __future__ import annotations

import re

import typer

from planner.cli.commands import Catalog, Docs
from planner.cli.options import printed_json
from planner.documents.catalog import search
from runtime.errors import InputError
from runtime.pages import find_pages


def catalog(asked: Catalog) -> None:
    """Print the entries of the catalog, or all that is known of one."""
    found = search(asked.name)
    if printed_json(lambda: [entry.to_document() for entry in found]):
        return
    for entry in found:
        typer.echo(entry.details() if asked.name == entry.name else f"{entry.kind:<8} {entry.name:<28} {entry.summary}")


def docs(asked: Docs) -> None:
    """Print a page, or the names of all."""
    pages = find_pages()
    known = asked.name.removeprefix("docs/").removesuffix(".md")
    if asked.name and known not in pages:
        raise InputError(
            f"NAME: found {asked.name!r}, expected one of: {', '.join(pages) or 'none, for none is installed'}"
        )
    text = pages[known].read_text(encoding="utf-8") if asked.name else "\n".join(pages)
    text = re.sub(r"\s*<!-- .*? -->", "", text, flags=re.DOTALL)  # for tests
    if not printed_json(lambda: {known: text} if asked.name else list(pages)):
        typer.echo(text)
