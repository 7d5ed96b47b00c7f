"""Words of the project's old dialect stay out of pages, and become fewer in messages and docstrings.

What to write in their place is in `WORDS`; [contributing](../../CONTRIBUTING.md) has the rules.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import pytest
from pages import PAGES, ROOT

from benchmarks.source_metrics import docstrings_of, sources


class Word(NamedTuple):
    """A word that is to go."""

    pattern: str
    instead: str
    messages: int
    """The most that messages may have of it. Limits only fall: whoever writes one away lowers the limit."""
    docstrings: int


WORDS = (
    Word(r"beside", "alongside, next to, compared with, during", 38, 21),
    Word(r"(by|in) turns", "interleaved, alternating", 0, 0),
    Word(r"(goes|go|going|went|gone) on(?! (top|to \d))", "continues", 15, 4),
    Word(r"told", "reported", 3, 8),
    Word(r"(planner|it|run|session|command|rank|rank \d+) says", "reports, records, sends", 3, 6),
    Word(r"travel(s|led|ling)?", "is sent", 4, 3),
    Word(r"on (its|their) way", "in flight, pending", 1, 3),
    Word(r"so many", "the number of", 3, 29),
    Word(r"kinds? of link", "intra-node and inter-node links", 3, 28),
    Word(r"shares? the (optimizer's )?step", "sharded optimizer step (ZeRO-1)", 23, 3),
    Word(r"(what stays|stays|left) behind", "residual", 0, 2),
    Word(r"comes? late", "straggler", 0, 0),
    Word(r"(no|some)body", "no caller, a caller, no rank", 3, 3),
    Word(r"the word that", "the flag", 0, 0),
    Word(r"likewise", "also, the same for", 0, 3),
    Word(r"whatever it is", "any", 0, 0),
    Word(r"at the (most|least)", "at most, at least", 4, 6),
    Word(r"stands? for itself", "needs no entry", 0, 0),
    Word(r"Of wh(ich|om)", "a sentence with a subject", 0, 0),
)


@lru_cache(maxsize=1)
def texts() -> dict[str, list[tuple[str, str]]]:
    """Return (place, text) of pages, messages and docstrings."""
    found: dict[str, list[tuple[str, str]]] = {"pages": [], "messages": [], "docstrings": []}
    for page in PAGES:
        if page.name != "CHANGELOG.md":  # what was written is history
            text = re.sub(r"^```.*?^```$|`[^`]*`", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
            found["pages"].append((str(page.relative_to(ROOT)), text))
    for path, tree in sources().values():
        docstrings = {id(node.value) for node, _ in docstrings_of(tree)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                kind = "docstrings" if id(node) in docstrings else "messages"
                found[kind].append((f"{path.relative_to(ROOT)}:{node.lineno}", node.value))
    return found


def places(word: Word, kind: str) -> Iterator[str]:
    """Yield each place where a word is written."""
    pattern = re.compile(rf"\b(?:{word.pattern})\b", re.NOFLAG if word.pattern[0].isupper() else re.IGNORECASE)
    for place, text in texts()[kind]:
        for match in pattern.finditer(text):
            yield f"{place}: {text[max(0, match.start() - 50) : match.end() + 30]!r}"


@pytest.mark.parametrize("word", WORDS, ids=lambda word: word.pattern)
def test_pages_have_none(word: Word) -> None:
    assert list(places(word, "pages")) == [], f"write: {word.instead}"


@pytest.mark.parametrize("word", WORDS, ids=lambda word: word.pattern)
def test_messages_and_docstrings_have_fewer(word: Word) -> None:
    for kind, limit in (("messages", word.messages), ("docstrings", word.docstrings)):
        found = list(places(word, kind))
        assert len(found) <= limit, f"{kind}: write: {word.instead}; found {found[:10]}"
