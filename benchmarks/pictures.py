"""The pictures of the documents: the page of `planner explain` as PNG, its figures as SVG, and bars of steps.

    python -m benchmarks.pictures             # all, into docs/pictures
    python -m benchmarks.pictures timeline    # some
    python -m benchmarks.pictures traced-a100 --traces FOLDER    # of public traces, which are not in the project

Pages and figures need Chromium (`make chromium`).
"""

from __future__ import annotations

import argparse
import base64
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar
from urllib.parse import unquote

import planner
from benchmarks.bars import PREDICTED, measured, stacked_bars
from planner.report.page import page_text
from planner.traces.explain import explain_run
from planner.traces.of_ranks import read_run
from planner.traces.to_profile import profile_of
from planner.traces.trace_page import trace_page
from runtime.plan import ModelReference

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "pictures"
SCREEN_PX, TOP_PX = 1000, 1120
"""Width of all pictures, and how much of a page is shown."""
MARGIN = 1.05
"""The time axis ends so much later than the last track that is to be seen whole."""


@dataclass(frozen=True, kw_only=True)
class Picture:
    """One figure of one plan's page."""

    profile: str
    """A name of the catalogue."""
    figure: str | None = "timeline"
    """None: the page itself."""
    whole: str | None = None
    """The baseline whose step is the longest to be seen whole; default: all."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of `planner.optimize`."""

    def page(self) -> tuple[str, float | None]:
        """The page, and where the time axis ends (ms)."""
        plan = planner.optimize(self.profile, **self.options)
        shown = (plan.baselines or {}).get(self.whole or "")
        return page_text(plan), None if shown is None else MARGIN * shown.iteration_us / 1e3


@dataclass(frozen=True, kw_only=True)
class TracedPicture:
    """The time line of a traced run's page."""

    file: str
    figure: str = "timeline"

    def page(self) -> tuple[str, float | None]:
        """The page; its time axis ends with the steps."""
        run = read_run([str(TracedPicture.folder / self.file)])
        profile = profile_of(run, ModelReference(name=self.file.partition(".")[0]))
        return trace_page(explain_run(run, profile)), None

    folder: ClassVar[Path] = Path()
    """Where the traces are."""


PICTURES: dict[str, Picture | TracedPicture] = {
    "timeline": Picture(profile="resnet50@v100-16x8-25gbe", whole="single"),
    "page": Picture(profile="resnet50@v100-16x8-25gbe", figure=None),
    "ranks": Picture(profile="resnet50@v100-16x8-25gbe", figure="scaling"),
    "sparse": Picture(
        profile="resnet50@v100-4x4-10gbe", whole="single", options={"accuracy": "bounded", "compress": "sparse"}
    ),
    "delay": Picture(
        profile="resnet50-k80-b32@k80-10gbe", options={"accuracy": "relaxed", "protect": "*", "max_delay": 2}
    ),
    "traced-a100": TracedPicture(file="resnet50_ddp_2xA100.json.gz"),
    "traced-v100": TracedPicture(file="resnet50_1xV100.json.gz"),
    "traced-mi300x": TracedPicture(file="resnet18_ddp_8xMI300X.json.gz"),
}


BARS, REHEARSALS = "bars", ROOT / "benchmarks" / "results" / "rehearsal.jsonl"
"""The picture of DDP and a plan, and the measurements that it shows one of."""
CELL, TITLE = "googlenet@8x1@10gbit", "One training step of GoogLeNet on 8 machines, 10 Gbit/s Ethernet"


def png(page: Any) -> bytes:
    """The top of the open page."""
    clip = {"x": 0, "y": 0, "width": SCREEN_PX, "height": TOP_PX, "scale": 1}
    answer = page.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
    return base64.b64decode(answer["data"])


def svg(page: Any, picture: Picture | TracedPicture, end_ms: float | None) -> bytes:
    """The figure on the open page."""
    name = json.dumps(picture.figure)
    if end_ms is not None:
        page.evaluate(f"Plotly.relayout({name}, {{'xaxis.range': [0, {end_ms}]}}).then(() => 1)")
    uri = page.evaluate(
        f"Plotly.toImage({name}, {{format: 'svg', width: {SCREEN_PX},"
        f" height: document.getElementById({name}).offsetHeight}})"
    )
    text = unquote(uri.partition(",")[2])
    numbers: dict[str, str] = {}  # plotly's ids are random: numbered, the same figure is the same file
    text = re.sub(
        r"\b(clip|defs-|topdefs-|legend|trace)([0-9a-f]{6})",
        lambda id_: f"{id_[1]}{numbers.setdefault(id_[2], str(len(numbers)))}_",
        text,
    )
    return f"{text}\n".encode()


def draw(name: str, text: str) -> None:
    """Write a picture, and say so."""
    (FOLDER / f"{name}.svg").write_text(text, encoding="utf-8")
    print(f"wrote {(FOLDER / name).relative_to(ROOT)}.svg")


def main() -> int:
    """Draws, and says what was written."""
    parser = argparse.ArgumentParser(description="The pictures of the documents.")
    known = [BARS, *PREDICTED, *PICTURES]
    parser.add_argument("names", nargs="*", choices=[[], *known], metavar="NAME", help=", ".join(known))
    parser.add_argument("--traces", type=Path, help="folder of the public traces; default: those pictures are left out")
    asked = parser.parse_args()
    TracedPicture.folder = asked.traces or Path()
    shown = [name for name in PICTURES if asked.traces or isinstance(PICTURES[name], Picture)]
    names = asked.names or [BARS, *PREDICTED, *shown]
    if BARS in names:
        records = map(json.loads, REHEARSALS.read_text(encoding="utf-8").splitlines())
        rows = next(record["rows"] for record in records if record["cell"] == CELL)
        draw(BARS, stacked_bars(TITLE, measured(rows)))
    for name in PREDICTED.keys() & set(names):
        draw(name, PREDICTED[name]())
    if not (names := [name for name in names if name in PICTURES]):
        return 0
    sys.path.insert(0, str(ROOT / "tests" / "browser"))
    from chromium import chromium_page

    with TemporaryDirectory() as folder, chromium_page(Path(folder)) as page:
        for name in names:
            text, end_ms = PICTURES[name].page()
            (Path(folder) / "page.html").write_text(text, encoding="utf-8")
            page.look(SCREEN_PX, "light")
            page.open(Path(folder) / "page.html")
            whole = PICTURES[name].figure is None
            target = FOLDER / f"{name}.{'png' if whole else 'svg'}"
            target.write_bytes(png(page) if whole else svg(page, PICTURES[name], end_ms))
            print(f"wrote {target.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
