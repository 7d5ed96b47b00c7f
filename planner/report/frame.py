"""What every page has: its style and script, tables, figures, and where numbers came from; nothing is fetched."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib import resources
from string import Template
from typing import Any

from runtime.errors import EnvironmentFailure
from runtime.version import __version__

_CODE, _AS_CODE = re.compile(r"`([^`]+)`"), r"<code>\1</code>"


def frame_text(title: str, body: str, sources: Mapping[str, str], figures: Mapping[str, Any]) -> str:
    """A page of markup between a heading and its sources; `figures` are plotly's, by the name that `figure` placed them
    under.

    Raises EnvironmentFailure where there are figures, and plotly is not installed.
    """
    # A page without figures needs nothing to draw them.
    library, script = _plotly() if figures else "", _asset("page.js")
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


def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise EnvironmentFailure(
            "the page is drawn by plotly, which is missing: pip install 'commplanner[pages]'"
        ) from None
    library: str = get_plotlyjs()
    return library


def _policy(*scripts: str) -> str:
    """The page may run its own scripts and load nothing: neither from the network nor what a name smuggles in."""
    hashes = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts)
    allowed = " ".join(f"'sha256-{value}'" for value in hashes)
    return f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:"


def _embedded(value: Any) -> str:
    """JSON inside a script element: no character there can end the element."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def paragraphs(lines: Iterable[str]) -> str:
    """Paragraphs of text; what stands between backticks is code."""
    return "\n".join(f"<p>{_CODE.sub(_AS_CODE, escape(line))}</p>" for line in lines)


def figure(name: str, figures: Mapping[str, Any], label: str, words: Sequence[str], caption: str) -> str:
    """Words and, where there is one, the figure of this name; `label` is for those who cannot see it."""
    text = paragraphs(words)
    if name not in figures:
        return text
    height = figures[name]["layout"]["height"]
    place = f'<div class="figure" id="{name}" role="img" aria-label="{label}" style="height:{height}px"></div>'
    return f"{text}\n<figure>{place}\n<figcaption>{escape(caption)}</figcaption></figure>"


def table(
    label: str, columns: Sequence[str], rows: Iterable[Sequence[str]], texts: Sequence[int], *, cards: bool = False
) -> str:
    """A table of cells that are markup already; `texts` are the columns that are not numbers.

    With `cards`, narrow screens show each row as a card of labelled lines.
    """
    kinds = ["text" if place in texts else "number" for place in range(len(columns))]
    head = "".join(
        f'<th scope="col" class="{kind}">{escape(name)}</th>' for name, kind in zip(columns, kinds, strict=True)
    )
    body = "\n".join(
        "<tr>"
        + "".join(
            f'<td class="{kind}" data-label="{escape(name)}">{cell}</td>'
            for cell, name, kind in zip(row, columns, kinds, strict=True)
        )
        + "</tr>"
        for row in rows
    )
    kind = "wide cards" if cards else "wide"
    return (
        f'<div class="{kind}" role="region" tabindex="0" aria-label="{escape(label)}"><table>\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>"
    )
