"""The page of `planner compare --html` in a real browser."""

from __future__ import annotations

from pathlib import Path

import pytest
from chromium import chromium_page

from planner.comparison.picture import picture_text
from planner.comparison.report import Comparison, Row

POINTS = "[...document.querySelectorAll('.scatterlayer .trace')].map(t => t.querySelectorAll('path.point').length)"


def row(name: str, median_us: float | None, predicted_us: float | None) -> Row:
    """Without what is not drawn."""
    return Row(
        name=name,
        median_us=median_us,
        ci95_us=None if median_us is None else (0.9 * median_us, 1.2 * median_us),
        exposed_us=None,
        hidden_share=None,
        predicted_us=predicted_us,
        error=None,
        alone_us=None,
        buckets=None,
        failure=None if median_us is not None else "no such message",
    )


@pytest.mark.parametrize("width", [1280, 400])
def test_every_contestant_is_drawn(tmp_path: Path, width: int) -> None:
    rows = (
        row("none", 8e3, 8.2e3),
        row("ddp", 12e3, 11e3),
        row("ddp:fp16", 11e3, None),
        row("ddp:powersgd", None, None),
    )
    comparison = Comparison(rows=rows, verdicts=("no difference",), rounds=5, steps=25, ranks=4)
    page = tmp_path / "page.html"
    page.write_text(picture_text(comparison, "a model"), encoding="utf-8")
    (tmp_path / "browser").mkdir()
    with chromium_page(tmp_path / "browser") as browser:
        browser.look(width, "light")
        browser.open(page)
        assert browser.complaints == []
        assert browser.requests == [page.as_uri()]
        assert browser.evaluate(POINTS) == [3, 2]
