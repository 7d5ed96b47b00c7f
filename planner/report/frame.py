"""Frame of all pages: style and script, tables, figures, and sources of the numbers; nothing is fetched."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from html import escape
from importlib import resources
from string import Template
from typing import Any

from planner.report.listing import Listing
from runtime.errors import EnvironmentFailure
from runtime.version import __version__

_CODE, _AS_CODE = re.compile(r"`([^`]+)`"), r"<code>\1</code>"


def frame_text(title: str, body: str, sources: Mapping[str, str], figures: Mapping[str, Any]) -> str:
    """Return a page of markup between a heading and its sources; `figures` are plotly's, by the name that `figure`
    placed them under.

    Raises EnvironmentFailure where there are figures, and plotly is not installed.
    """
    # A page without figures needs nothing to draw them.
    library, script = plotly_library() if figures else "", _asset("page.js")
    items = "\n".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in sources.items())
    return Template(_asset("page.html")).substitute(
        policy=_policy(library, script),
        title=escape(title),
        style=_asset("page.css"),
        body=body,
        sources=f"<dl>\n{items}\n</dl>",
        figures=_embedded(figures),
        library=library,
        script=script,
        version=escape(__version__),
    )


def _asset(name: str) -> str:
    return (resources.files("planner.report") / name).read_text(encoding="utf-8")


def plotly_library() -> str:
    """Return the script of plotly.js. Raises EnvironmentFailure where plotly is not installed."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise EnvironmentFailure("the page is drawn by plotly, which is missing: pip install plotly") from None
    library: str = get_plotlyjs()
    return library


def _policy(*scripts: str) -> str:
    """Return the policy by which the page runs its own scripts and loads nothing, whatever names hold."""
    hashes = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts)
    allowed = " ".join(f"'sha256-{value}'" for value in hashes)
    return f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:"


def _embedded(value: Any) -> str:
    """Return JSON for a script element, which none of its characters can end."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def paragraphs(lines: Iterable[str]) -> str:
    """Return paragraphs of text; what stands between backticks is code."""
    return "\n".join(f"<p>{_CODE.sub(_AS_CODE, escape(line))}</p>" for line in lines)


def figure(name: str, figures: Mapping[str, Any], label: str, words: Sequence[str], caption: str) -> str:
    """Return words and, where there is one, the figure of this name; `label` is for those who cannot see it."""
    text = paragraphs(words)
    if name not in figures:
        return text
    height = figures[name]["layout"]["height"]
    place = f'<div class="figure" id="{name}" role="img" aria-label="{label}" style="height:{height}px"></div>'
    return f"{text}\n<figure>{place}\n<figcaption>{escape(caption)}</figcaption></figure>"


def table(listing: Listing, markup: Collection[str] = (), *, cards: bool = False) -> str:
    """Return a table as markup.

    Args:
        listing: the table; its title is for those who cannot see it.
        markup: columns whose cells are markup already.
        cards: whether narrow screens show each row as a card of labelled lines.
    """
    columns = [(escape(name), "text" if name in listing.left else "number", name in markup) for name in listing.columns]
    head = "".join(f'<th scope="col" class="{kind}">{name}</th>' for name, kind, _ in columns)
    rows = (
        "".join(
            f'<td class="{kind}" data-label="{name}">{cell if is_markup else escape(cell)}</td>'
            for cell, (name, kind, is_markup) in zip(row, columns, strict=True)
        )
        for row in listing.rows
    )
    body = "\n".join(f"<tr>{cells}</tr>" for cells in rows)
    kind = "wide cards" if cards else "wide"
    return (
        f'<div class="{kind}" role="region" tabindex="0" aria-label="{escape(listing.title)}"><table>\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>"
    )
