"""docs/results/validation.md is what `python -m benchmarks.validate` writes, and the report's arithmetic is right."""

from __future__ import annotations

import re

from benchmarks import validate
from benchmarks.published.common import Comparison
from benchmarks.published.report import CLOSE, Section, section_lines, summary_lines, swaps

NUMBER = re.compile(r"\d+(?:\.\d+)?")


def test_the_report_in_the_repository_is_the_one_that_the_command_writes() -> None:
    """A last digit may be another: fits converge to where another processor's order of sums lets them."""
    written, now = (text.splitlines() for text in (validate.REPORT.read_text(encoding="utf-8"), validate.report()))
    hint = "run `python -m benchmarks.validate`"
    assert [NUMBER.sub("0", line) for line in written] == [NUMBER.sub("0", line) for line in now], hint
    for before, after in zip(written, now, strict=True):
        for mine, other in zip(NUMBER.findall(before), NUMBER.findall(after), strict=True):
            last_digit = 10.0 ** -len(mine.partition(".")[2])
            assert abs(float(mine) - float(other)) <= 1.01 * last_digit, f"{before}\n{after}\n{hint}"


def rows(**methods: tuple[float, float]) -> list[Comparison]:
    return [Comparison(what="cell", published=p, ours=o, method=name) for name, (p, o) in methods.items()]


def test_an_order_that_differs_is_listed_with_its_gaps() -> None:
    [swap] = swaps(rows(a=(1.0, 2.0), b=(1.2, 1.5), c=(3.0, 3.0)))
    assert "a and b published 18.2% apart, ours 28.8% the other way" in str(swap)
    assert swaps(rows(a=(1.0, 2.0), b=(1.2, 2.5), c=(3.0, 3.0))) == []


def test_equal_predictions_are_in_order_only_where_the_published_ones_are_close() -> None:
    assert swaps(rows(a=(1.0, 2.0), b=(1.02, 2.0))) == []
    [swap] = swaps(rows(a=(1.0, 2.0), b=(1.1, 2.0)))
    assert str(swap).endswith("ours equal")


def test_sections_show_every_figure_and_the_summary_counts_them() -> None:
    section = Section(title="Title", about="About.", rows=rows(a=(1.0, 1.1), b=(2.0, 1.0)), remarks="Words.")
    text = "\n".join(section_lines(section))
    assert "| cell | a | s | 1 | 1.1 | 1.100 |" in text
    assert "as published in 0 of 1 cells" in text
    assert list(summary_lines([section]))[-1] == "| Title | 2 | 30.0% | 50.0% | 0 of 1 |"


def test_rows_by_construction_are_in_no_mean() -> None:
    known = Comparison(what="read back", published=2.0, ours=2.0, by_construction=True)
    section = Section(title="Title", about="About.", rows=[*rows(a=(1.0, 1.1)), known], remarks="Words.")
    assert "| read back |  | s | 2 | 2 | 1.000, by construction |" in list(section_lines(section))
    assert list(summary_lines([section]))[-1] == "| Title | 1 + 1 | 10.0% | 10.0% |  |"


def test_methods_that_are_published_well_apart_are_never_put_the_other_way_round() -> None:
    """Equal predictions, and methods that are close in the publication, are listed in the report."""
    found = [swap for section in validate.sections() for swap in swaps(section.rows)]
    wrong = [swap for swap in found if not swap.equal and swap.published_gap > CLOSE]
    assert not wrong, [str(swap) for swap in wrong]
