"""The page of `planner compare --html` in a real browser."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from chromium import Page, chromium_page

from planner.comparison.contestants import Learn
from planner.comparison.learned import Curve, Learned, LearnedRow
from planner.comparison.picture import curves_text, picture_text
from planner.comparison.report import Comparison, Row

POINTS = "[...document.querySelectorAll('.scatterlayer .trace')].map(t => t.querySelectorAll('path.point').length)"

ROWS_INSIDE = """(() => {
  const place = document.getElementById("steps").getBoundingClientRect();
  const legend = document.querySelector(".legend").getBoundingClientRect();
  const points = [...document.querySelectorAll(".scatterlayer path.point")].map(p => p.getBoundingClientRect());
  return points.every(p => p.top > legend.bottom && p.bottom < place.bottom && p.left > place.left);
})()"""
"""No point lies under the legend or outside of the figure."""


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


@contextmanager
def shown(text: str, folder: Path, width: int) -> Iterator[Page]:
    """Yield a browser that shows a page, which needs no other file and has no errors."""
    page = folder / "page.html"
    page.write_text(text, encoding="utf-8")
    (folder / "browser").mkdir()
    with chromium_page(folder / "browser") as browser:
        browser.look(width, "light")
        browser.open(page)
        assert browser.complaints == []
        assert browser.requests == [page.as_uri()]
        yield browser


@pytest.mark.parametrize("width", [1280, 400])
def test_every_variant_is_drawn(tmp_path: Path, width: int) -> None:
    rows = (
        row("none", 8e3, 8.2e3),
        row("ddp", 12e3, 11e3),
        row("ddp:fp16", 11e3, None),
        row("ddp:powersgd", None, None),
    )
    comparison = Comparison(rows=rows, verdicts=("no difference",), rounds=5, steps=25, ranks=4)
    with shown(picture_text(comparison, "a model", "2026-11-22 10:00 UTC"), tmp_path, width) as browser:
        assert browser.evaluate(POINTS) == [3, 2]
        # Nothing is drawn outside of the figure, where text could lie over it, and the table is as wide as the page.
        assert browser.evaluate(ROWS_INSIDE)
        assert browser.evaluate("document.querySelectorAll('tbody tr').length") == 4


@pytest.mark.parametrize("width", [1280, 400])
def test_every_contestant_has_a_curve(tmp_path: Path, width: int) -> None:
    names, losses = ("ddp", "ddp:order", "plan"), (1.0, 0.8, 0.6, 0.5)
    rows = tuple(
        LearnedRow(
            name=name, last_loss=0.5, against_ddp=0.0, ci95=(-0.001, 0.001), ddp_spread=0.001, steps_to_ddp_loss=36.0,
            time_to_ddp_loss=1.0, verdict="as ddp", end_loss=0.5, step_us=1e4,
        )
        for name in names
    )  # fmt: skip
    curve = Curve(steps=(5.5, 15.5, 25.5, 35.5), mean=losses, low=losses, high=losses)
    learned = Learned(
        rows=rows, verdicts=("plan learns as DDP does",), rounds=3, steps=40, ranks=2, learn=Learn(steps=40),
        curves=dict.fromkeys(names, curve), estimated_s=10.0, took_s=11.0,
    )  # fmt: skip
    with shown(curves_text(learned, "a model", "2026-11-26 10:00 UTC"), tmp_path, width) as browser:
        assert browser.evaluate("document.querySelectorAll('.scatterlayer path.js-line').length") == 3
        assert browser.evaluate("document.querySelectorAll('tbody tr').length") == 3
