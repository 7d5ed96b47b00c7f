"""Tables fit the width of the output, rows that are equal are one, and a plan is first a sentence."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
from builders import usual_profile
from rich.console import Console

from planner import optimize
from planner.report.listing import PIPE_COLUMNS, Listing, print_tables
from planner.report.tables import plan_line

WHY = "each rank updates and stores the state of its part of the weights; +10.0% in speed against the first row here"
WAYS = Listing(
    "ways",
    ("way", "step (ms)", "between (ms)", "exposed (ms)", "memory", "asks for", "why"),
    [
        ("ddp", "535.2", "466.2 to 614.6", "8.872", "139,940.1 MiB", "drop-in", "PyTorch's buckets"),
        ("int8 on the wire", "569.6", "501 to 648.6", "43.27", "139,940.1 MiB", "bounded", WHY),
        ("float8 on the wire", "569.6", "501 to 648.6", "43.27", "139,940.1 MiB", "bounded", WHY),
        ("sharded step", "486.7", "427.1 to 555.1", "4.888", "58,303.2 MiB", "planner.fully_shard(a, b)", WHY),
    ],
    left=("way", "asks for", "why"),
    details="why",
)


def printed(listing: Listing, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, markup=False, color_system=None)
    print_tables(listing, console=console)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text.splitlines()


@pytest.mark.parametrize("width", [400, 140, PIPE_COLUMNS, 60, 30])
def test_a_table_fits_and_keeps_every_number(width: int) -> None:
    lines = printed(WAYS, width)
    assert max(map(len, lines)) <= width
    words = " ".join(lines).replace("│", " ").split()
    for row in WAYS.rows:
        assert set(row[1].split()) <= {word.strip(",") for word in words}
    assert any("┃" in line for line in lines) == (width >= PIPE_COLUMNS)
    assert WHY in " ".join(" ".join(lines).split())


def test_rows_that_differ_in_their_name_alone_are_one() -> None:
    names = [row[0] for row in WAYS.joined().rows]
    assert names == ["ddp", "int8 on the wire / float8 on the wire", "sharded step"]
    by_ranks = Listing(
        "", ("ranks", "strategy", "step"), [("2", "a", "1"), ("2", "b", "1"), ("4", "b", "1")], label="strategy"
    )
    assert by_ranks.joined().rows == [("2", "a / b", "1"), ("4", "b", "1")]


def test_reasons_below_a_table_name_spans_of_rows() -> None:
    rows = [(str(at), f"layer{at}." * 6, WHY if at != 4 else "the last one") for at in range(7)]
    lines = printed(Listing("", ("#", "gradients", "why"), rows, left=("gradients", "why"), details="why"), 120)
    assert f"0–3, 5, 6: {WHY}" in lines
    assert "4: the last one" in lines


@pytest.mark.parametrize(
    ("share", "words"),
    [(0.8, "planned {} buckets (predicted step {}): 20.0% less than DDP "), (0.999, "nothing to gain over DDP: ")],
)
def test_a_plan_is_first_a_sentence(share: float, words: str) -> None:
    plan = optimize(usual_profile())
    assert plan.predicted is not None
    ddp = replace((plan.baselines or {})["ddp"], iteration_us=plan.predicted.iteration_us / share)
    changed: Any = replace(plan, baselines={"ddp": ddp})
    step = f"{plan.predicted.iteration_us / 1e3:,.4g} ms"
    assert plan_line(changed).startswith(words.format(len(plan.buckets), step))
