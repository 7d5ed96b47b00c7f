"""The page of `planner explain --html` in Chromium: it loads silently, draws what the plan says, and reads well."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from chromium import Page, chromium_page

from planner.cli.app import main
from runtime.plan import Plan, load_plan

HOSTILE = "</script><script>document.title = 'broken'</script><b>"
"""In names; harmless where texts are texts."""

LOOKS = [(1280, "light"), (1280, "dark"), (400, "light"), (400, "dark")]

BARS = "[...document.querySelectorAll('#timeline .barlayer .point path')]"
BOXES = f"{BARS}.map(e => e.getBoundingClientRect()).map(b => [b.x + scrollX, b.y + scrollY, b.width, b.height])"


def profile_document() -> dict[str, Any]:
    """Twelve gradients on a measured cluster on which merging pays."""
    sizes = [10, 5000, 200, 200_000, 64, 30_000, 64, 90_000, 128, 400_000, 256, 700]
    gradients = [
        {
            "name": f"{HOSTILE}layer{index}",
            "layer": f"l{index}",
            "numel": numel,
            "dtype": "float32",
            "backward_us": 90.0,
        }
        for index, numel in enumerate(sizes)
    ]
    cluster = {
        "schema": "planner.cluster/1",
        "name": f"lab {HOSTILE}",
        "nodes": 4,
        "samples": {"all_reduce": [[0, 200.0], [1_000_000, 1200.0]]},
    }
    return {
        "schema": "planner.profile/1",
        "model": {"name": f"net {HOSTILE}"},
        "world": {"ranks": 4},
        "compute": {"forward_us": 500.0, "update_us": 60.0, "gradients": gradients},
        "cluster": cluster,
    }


def measured_document(plan: Plan) -> dict[str, Any]:
    """The plan's own timeline a tenth slower, in the form that a session writes."""
    assert plan.predicted is not None
    tasks = [
        {"task": task.task, "resource": task.resource, "start_us": task.start_us * 1.1, "end_us": task.end_us * 1.1}
        for task in plan.predicted.timeline or ()
    ]
    return {
        "schema": "planner.timeline/1",
        "model": {"name": plan.model.name},
        **{"rank": 0, "ranks": 4, "steps": 5, "iteration_us": plan.predicted.iteration_us * 1.1},
        **{"forward_us": 550.0, "backward_us": 1188.0, "update_us": 66.0, "timeline": tasks},
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds plan.json, page.html of it with a measured step, and bare.html of a plan without times."""
    folder = tmp_path_factory.mktemp("pages")

    def planner(*arguments: str) -> None:
        with pytest.raises(SystemExit) as exit_:
            main(arguments)
        assert not exit_.value.code

    plan, measured, bare = (str(folder / name) for name in ("plan.json", "measured.json", "bare.json"))
    (folder / "profile.json").write_text(json.dumps(profile_document()))
    planner("optimize", str(folder / "profile.json"), "-o", plan)
    Path(measured).write_text(json.dumps(measured_document(load_plan(plan))))
    planner("explain", plan, "--measured", measured, "--html", str(folder / "page.html"))
    document = {"schema": "planner.plan/1", "model": {"name": "mine"}, "world": {"ranks": 2}, "accuracy": "exact"}
    Path(bare).write_text(json.dumps(document | {"buckets": [{"gradients": ["a"]}]}))
    planner("explain", bare, "--html", str(folder / "bare.html"))
    return folder


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """One browser for all tests."""
    with chromium_page(tmp_path_factory.mktemp("chromium")) as page:
        yield page


def spans(plan: Plan) -> list[tuple[float, float]]:
    """(start, length) of every task that takes time: of the plan, of the step measured with it, of the baselines."""
    assert plan.predicted is not None
    own = plan.predicted.timeline or ()
    tasks = [(task.start_us, task.end_us) for task in own] + [(task.start_us * 1.1, task.end_us * 1.1) for task in own]
    for prediction in (plan.baselines or {}).values():
        tasks += [(task.start_us, task.end_us) for task in prediction.timeline or ()]
    return [(start, end - start) for start, end in tasks if end > start]


@pytest.mark.parametrize(("width", "scheme"), LOOKS, ids=[f"{width}-{scheme}" for width, scheme in LOOKS])
def test_page_loads_and_shows_every_span(browser: Page, folder: Path, width: int, scheme: str) -> None:
    plan = load_plan(folder / "plan.json")
    browser.look(width, scheme)
    browser.open(folder / "page.html")
    assert browser.complaints == []
    assert browser.requests == [(folder / "page.html").as_uri()]
    assert browser.evaluate("performance.getEntriesByType('resource').length") == 0

    # Bars lie where their times say, on one scale for all schedules.
    boxes = browser.evaluate(BOXES)
    expected = sorted(spans(plan))
    assert len(boxes) == len(expected) >= 30
    left, right = min(x for x, *_ in boxes), max(x + w for x, _, w, _ in boxes)
    last_us = max(start + length for start, length in expected)
    scale = (right - left) / last_us
    found = sorted((x - left, w) for x, _, w, _ in boxes)
    wanted = sorted((start * scale, length * scale) for start, length in expected)
    for (x, w), (start, length) in zip(found, wanted, strict=True):
        assert x == pytest.approx(start, abs=1.5)
        assert w == pytest.approx(length, abs=2.0)
        assert w > 0.0
    assert sum(w for _, w in found) == pytest.approx(sum(length for _, length in wanted), rel=0.02)
    rows = {round(y) for _, y, _, _ in boxes}
    assert len(rows) == 2 * (2 + len(plan.baselines or {}))

    # Neighbours differ in shade, and each row starts with the same one.
    fills = browser.evaluate(f"{BARS}.map(e => getComputedStyle(e).fill)")
    for row in rows:
        shades = [
            fill for _, fill in sorted((x, f) for (x, y, *_), f in zip(boxes, fills, strict=True) if round(y) == row)
        ]
        assert all(one != next_ for one, next_ in pairwise(shades))
    assert len({fills[boxes.index(min(box for box in boxes if round(box[1]) == row))] for row in rows}) == 2

    # Nothing is cut off, and the page itself does not scroll sideways.
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert left >= 0
    assert right <= width
    assert browser.evaluate("document.querySelectorAll('#scaling .scatterlayer .point').length") == 5 * len(
        plan.scaling or ()
    )
    for text in browser.evaluate(
        "[...document.querySelectorAll('.annotation-text, .xtick text, .ytick text, .legendtext, .xtitle, .ytitle')]"
        ".map(e => [e.textContent, e.getBoundingClientRect().left, e.getBoundingClientRect().right])"
    ):
        assert 0 <= text[1] <= text[2] <= width, text


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_stand_out(browser: Page, folder: Path, scheme: str) -> None:
    """Texts on the page and in the figures have at least the contrast that WCAG asks for (4.5); bars stand out too."""
    browser.look(1280, scheme)
    browser.open(folder / "page.html")
    background = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    light = luminance(background) > 0.5
    assert light == (scheme == "light")
    for selector, property_ in (
        ("p", "color"),
        ("td", "color"),
        ("footer dd", "color"),
        ("#timeline .ytick text", "fill"),
        ("#timeline .annotation-text", "fill"),
        ("#scaling .legendtext", "fill"),
    ):
        colour = browser.evaluate(f"getComputedStyle(document.querySelector('{selector}')).{property_}")
        assert contrast(colour, background) >= 4.5, (selector, colour, background)
    for colour in set(browser.evaluate(f"{BARS}.map(e => getComputedStyle(e).fill)")):
        assert contrast(colour, background) >= 2.0, colour


def luminance(colour: str) -> float:
    """Relative luminance of `rgb(r, g, b)`, as WCAG defines it."""
    parts = [int(part) / 255 for part in colour.partition("(")[2].rstrip(")").split(",")[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(first: str, second: str) -> float:
    """Contrast ratio of two colours, 1 to 21."""
    high, low = sorted((luminance(first), luminance(second)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_the_scheme_may_change_while_the_page_is_open(browser: Page, folder: Path) -> None:
    fill = "getComputedStyle(document.querySelector('#timeline .ytick text')).fill"
    browser.look(1280, "light")
    browser.open(folder / "page.html")
    before = browser.evaluate(fill)
    browser.look(1280, "dark")
    browser.wait_for(f"{fill} !== '{before}'")
    assert luminance(browser.evaluate(fill)) > 0.5 > luminance(before)
    assert browser.complaints == []


def test_hover_tells_what_a_bar_is(browser: Page, folder: Path) -> None:
    browser.look(1280, "light")
    browser.open(folder / "page.html")
    browser.evaluate("document.getElementById('timeline').scrollIntoView({block: 'center'})")
    x, y, width, height = browser.evaluate(
        f"{BARS}.map(e => e.getBoundingClientRect()).filter(b => b.width > 20).map(b => [b.x, b.y, b.width, b.height])"
    )[-1]
    browser.move(x + width / 2 - 2, y + height / 2)
    browser.move(x + width / 2, y + height / 2)
    browser.wait_for("document.querySelector('#timeline .hovertext') !== null")
    text = browser.evaluate("document.querySelector('#timeline .hovertext').textContent")
    for words in ("bucket ", "all_reduce", "gradient", "</script><script>", " ms: ", "ready at "):
        assert words in text


def test_dragging_zooms_the_time_axis(browser: Page, folder: Path) -> None:
    browser.look(1280, "light")
    browser.open(folder / "page.html")
    browser.evaluate("document.getElementById('timeline').scrollIntoView({block: 'center'})")
    x, y, width, height = browser.evaluate(
        "(b => [b.x, b.y, b.width, b.height])(document.querySelector('#timeline .nsewdrag').getBoundingClientRect())"
    )
    span = "(r => r[1] - r[0])(document.getElementById('timeline').layout.xaxis.range)"
    before = browser.evaluate(span)
    browser.drag((x + width * 0.25, y + height / 2), (x + width * 0.5, y + height / 2))
    browser.wait_for(f"{span} < {before * 0.3}")
    assert browser.evaluate(span) == pytest.approx(before * 0.25, rel=0.05)
    assert browser.complaints == []


def test_names_are_texts(browser: Page, folder: Path) -> None:
    """A name that holds a script does not run it."""
    browser.look(1280, "light")
    browser.open(folder / "page.html")
    assert browser.evaluate("document.title") == f"net {HOSTILE} on 4 ranks (4 nodes): the plan explained"
    assert browser.evaluate("document.querySelectorAll('main script, main b').length") == 0
    assert HOSTILE in browser.evaluate("document.querySelector('td code').textContent")


def test_a_plan_without_times_has_a_page_too(browser: Page, folder: Path) -> None:
    browser.look(400, "light")
    browser.open(folder / "bare.html")
    assert browser.complaints == []
    assert browser.evaluate("document.querySelectorAll('.figure').length") == 0
    assert "The plan holds no time line" in browser.evaluate("document.body.innerText")


def test_what_a_page_complains_about_is_seen(browser: Page, tmp_path: Path) -> None:
    """So that the silence above means something."""
    page = tmp_path / "loud.html"
    page.write_text(
        "<!DOCTYPE html><html data-drawn='yes'><link rel='icon' href='data:,'><img src='absent.png'>"
        "<script>console.error('one'); setTimeout(() => { throw new Error('two'); })</script>"
    )
    browser.open(page)
    browser.evaluate("new Promise(done => setTimeout(done, 200))")
    text = " ".join(browser.complaints)
    assert "one" in text
    assert "two" in text
    assert any(url.endswith("absent.png") for url in browser.requests)
