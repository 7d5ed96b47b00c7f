"""The table of tested versions: what a cell's report says, and which cells can be run here."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks import versions

REPORT = """<testsuites><testsuite>
<testcase classname="tests.a" name="good"/>
<testcase classname="tests.a" name="left out"><skipped/></testcase>
<testcase classname="tests.b" name="bad"><failure/></testcase>
<testcase classname="tests.b" name="bad[twice]"><failure/><error/></testcase>
</testsuite></testsuites>"""


def test_a_report_is_counted_by_outcome(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(REPORT, encoding="utf-8")
    names = ["tests.b::bad", "tests.b::bad[twice]"]
    assert versions.outcome(report) == {"passed": 1, "skipped": 1, "failed": 2, "names": names}


def test_every_cell_has_a_row_and_failures_are_named() -> None:
    record = {"cell": "python3.12-torch2.12", "python": "3.12.1", "torch": "2.12.1+cpu", "minutes": 11.5}
    record |= {"passed": 2100, "skipped": 3, "failed": 1, "names": ["tests.b::bad"]}
    lines = versions.page([record], ["tests"]).splitlines()
    assert sum(line.startswith("| 3.") for line in lines) == len(versions.CELLS) == 9
    assert "| 3.12.1 | 2.12.1+cpu | 2,100 | 3 | 1 | 11.5 |" in lines
    assert "- failed on python3.12-torch2.12: `tests.b::bad`" in lines


def test_a_python_that_is_missing_is_not_found() -> None:
    found = versions.find_python(f"{sys.version_info.major}.{sys.version_info.minor}")
    assert found is not None
    assert versions.find_python("3.99") is None


def test_results_are_of_sources_and_tests() -> None:
    assert versions.digest(["tests"]) == versions.digest(["tests"])
    assert versions.digest(["tests"]) != versions.digest(["tests/null"])
