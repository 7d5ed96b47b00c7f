"""The sweep that says where compression pays."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.when_to_compress import LINKS, SELECTORS, Judged, Setting, harmed, judge, settings, summary, table
from planner.documents.catalog import find_profile
from planner.documents.profile import Profile

GRADIENTS = 12
"""Of a catalogue's model, that the sweep looks at here."""


@pytest.fixture(scope="module")
def few() -> Profile:
    """The last layers of VGG-16, in which most of its elements are."""
    whole = find_profile("vgg16")
    compute = replace(whole.compute, gradients=whole.compute.gradients[:GRADIENTS])
    return replace(whole, compute=compute)


@pytest.fixture(scope="module")
def rows(few: Profile) -> list[Judged]:
    return [judge(setting, few) for setting in settings(["vgg16"], [4], list(SELECTORS))]


def test_slow_links_compress_and_fast_ones_do_not(rows: list[Judged]) -> None:
    taken = {(row.setting.gbit, row.setting.selector): row.taken for row in rows}
    assert taken["1", "one pass"]
    assert not taken["400", "torch.topk"]
    assert not harmed(rows)
    assert all(row.sent < 0.5 for row in rows if row.setting == Setting("vgg16", "1", 4, "one pass"))


def test_what_is_taken_is_most_of_what_could_be_gained(rows: list[Judged]) -> None:
    shares = [row.gain_taken for row in rows if row.taken and row.gain_taken is not None]
    assert np.mean(shares) >= 0.95


def test_tables_tell_what_was_judged(rows: list[Judged]) -> None:
    told = "\n".join(summary(rows))
    assert f"{len(rows)} settings; compression is taken in {sum(row.taken for row in rows)} of them" in told
    lines = list(table(rows))
    assert len(lines) == 2 + len(SELECTORS)
    assert lines[0].count("Gbit/s") == len(LINKS)
    assert sum(line.count("**") // 2 for line in lines) == sum(row.taken for row in rows)
    slower = replace(next(row for row in rows if row.taken), worst_against_exact=1.03)
    assert harmed([*rows, slower]) == [slower]
