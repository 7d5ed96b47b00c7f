"""Sections of the validation report: what is compared, in tables, and what there is to say about it."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from benchmarks.published.common import Comparison

WIDTH = 120
CLOSE = 0.03
"""Methods that are published less than this apart are called equal: runs of one method differ by as much."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """One publication, or one kind of measurement."""

    title: str
    about: str
    """Where the figures come from, what ours were made of, and what was fitted on what."""
    rows: Sequence[Comparison]
    remarks: str
    """Where it differs and why."""
    more: tuple[str, ...] = ()
    """Further lines of Markdown."""
    in_full: bool = True
    """Whether every row is listed; otherwise `more` sums them up."""
    order: str = ""
    """Cells in the published order, if that is all that is published."""

    @property
    def counted(self) -> list[Comparison]:
        """Figures that count in the summary."""
        return [row for row in self.rows if not row.by_construction]


@dataclass(frozen=True, kw_only=True)
class Swap:
    """Two methods in one cell that we do not put into the published order."""

    first: Comparison
    second: Comparison

    @property
    def published_gap(self) -> float:
        return _gap(self.first.published, self.second.published)

    @property
    def our_gap(self) -> float:
        return _gap(self.first.ours, self.second.ours)

    @property
    def equal(self) -> bool:
        """Whether we predict the same for both."""
        return self.our_gap < 5e-4

    @property
    def close(self) -> bool:
        return self.published_gap < CLOSE

    def __str__(self) -> str:
        ours = "ours equal" if self.equal else f"ours {self.our_gap:.1%} the other way"
        methods = f"{self.first.method} and {self.second.method}"
        return f"{self.first.what}: {methods} published {self.published_gap:.1%} apart, {ours}"


def _gap(one: float, other: float) -> float:
    return abs(math.log(one / other))


def cells(rows: Sequence[Comparison]) -> dict[str, list[Comparison]]:
    """Rows of several methods under equal circumstances."""
    groups: dict[str, list[Comparison]] = {}
    for row in rows:
        if row.method:
            groups.setdefault(row.what, []).append(row)
    return {what: group for what, group in groups.items() if len(group) > 1}


def swaps(rows: Sequence[Comparison]) -> list[Swap]:
    """Pairs of methods that we do not put into the published order."""
    return [
        swap
        for group in cells(rows).values()
        for swap in (Swap(first=one, second=other) for one, other in combinations(group, 2))
        if (swap.first.published - swap.second.published) * (swap.first.ours - swap.second.ours) <= 0.0 or swap.equal
        if not (swap.equal and swap.close)
    ]


def section_lines(section: Section) -> Iterator[str]:
    """The section in Markdown."""
    yield from (f"## {section.title}", "", *paragraphs(section.about))
    if not section.in_full:
        yield from section.more
        yield from paragraphs(section.remarks)
        return
    methods = any(row.method for row in section.rows)
    yield table_line("figure", *(["method"] if methods else []), "unit", "published", "ours", "ratio")
    yield table_line("---", *(["---"] if methods else []), "---", "--:", "--:", "--:")
    for row in section.rows:
        ratio = f"{row.ratio:.3f}" + (", by construction" if row.by_construction else "")
        numbers = (f"{row.published:.4g}", f"{row.ours:.4g}", ratio)
        yield table_line(row.what, *([row.method] if methods else []), row.unit, *numbers)
    yield ""
    if cells(section.rows):
        yield from _order_lines(section)
    yield from paragraphs(section.remarks)
    yield from section.more


def paragraphs(text: str) -> Iterator[str]:
    """Text in lines of at most 120 characters, each paragraph with an empty line behind it."""
    for paragraph in text.split("\n\n"):
        yield from (*textwrap.wrap(" ".join(paragraph.split()), WIDTH, break_on_hyphens=False), "")


def _order_lines(section: Section) -> Iterator[str]:
    groups, found = cells(section.rows), swaps(section.rows)
    wrong = {swap.first.what for swap in found}
    yield f"Order of methods: as published in {len(groups) - len(wrong)} of {len(groups)} cells."
    yield ""
    for swap in found:
        yield f"- {swap}"
    if found:
        yield ""


def table_line(*columns: str) -> str:
    return "| " + " | ".join(columns) + " |"


def summary_lines(sections: Sequence[Section]) -> Iterator[str]:
    """One line for each section."""
    yield table_line("section", "figures", "mean error", "largest error", "cells in the published order")
    yield table_line("---", "--:", "--:", "--:", "--:")
    for section in sections:
        errors = [row.error for row in section.counted]
        groups = cells(section.rows)
        right = len(groups) - len({swap.first.what for swap in swaps(section.rows)})
        order = f"{right} of {len(groups)}" if groups else section.order
        mean, worst = (f"{sum(errors) / len(errors):.1%}", f"{max(errors):.1%}") if errors else ("", "")
        constructed = sum(row.by_construction for row in section.rows)
        figures = f"{len(section.rows) - constructed}" + (f" + {constructed}" if constructed else "")
        yield table_line(section.title, figures, mean, worst, order)
