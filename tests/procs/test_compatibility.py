"""The pages on compatibility: each sentence names tests that exist, no interplay test is left out, and the table behind
them is as `python -m benchmarks.compatibility` writes it.
"""

from __future__ import annotations

import pytest

from benchmarks.compatibility import DOCUMENT, INTERPLAY, Statement, collect, document, matching, statements
from planner.cli.app import main

WITHOUT_TESTS = {"Not detected", "Arguments, attributes and methods of DDP"}
"""Sections on what no test can show, and on names."""


@pytest.fixture(scope="module")
def collected() -> set[str]:
    return collect()


def test_the_pages_are_read_whole() -> None:
    found = list(statements())
    assert len(found) > 90
    assert len({one.page for one in found}) == 2
    assert not any("<!--" in one.text for one in found)


@pytest.mark.parametrize(
    "one",
    [one for one in statements() if one.section not in WITHOUT_TESTS],
    ids=lambda one: one.text[:60].encode("ascii", "replace").decode(),
)
def test_every_sentence_names_tests_that_exist(one: Statement, collected: set[str]) -> None:
    assert one.names
    assert [name for name in one.names if not matching(name, collected)] == []


def test_every_interplay_test_is_on_a_page(collected: set[str]) -> None:
    checks = {match[1] for test in collected for ranks in INTERPLAY.values() if (match := ranks.fullmatch(test))}
    shown = {test for one in statements() for name in one.names for test in matching(name, collected)}
    assert checks - shown == set()


def test_the_table_is_as_it_is_generated(collected: set[str]) -> None:
    written = DOCUMENT.read_text(encoding="utf-8")
    assert written == document(list(statements()), collected), "run: python -m benchmarks.compatibility"


def test_pages_are_printed_without_the_names_of_tests(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["docs", "compatibility"])
    text = capsys.readouterr().out
    assert text.startswith("# What works")
    assert "<!--" not in text
