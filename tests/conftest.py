"""For all tests: signals as in a terminal, ranks that start warm, an end of what a failed test has started."""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import warm_ranks

MARK = "PLANNER_TEST"
"""What a test's processes have in their environment, with a value of its own for each test."""
FAILED = pytest.StashKey[bool]()
SHARED = b"multiprocessing.resource_tracker"
"""Of this process, for all tests."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Read also when no folder is named: this file lies at the top of the tests."""
    parser.addoption("--cold", action="store_true", help="ranks import everything themselves, as outside of tests")


def pytest_configure() -> None:
    """`nohup make test &` in a script runs with Ctrl-C ignored, and so would all that tests start and interrupt."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


@pytest.fixture(scope="session", autouse=True)
def ranks_start_warm(pytestconfig: pytest.Config) -> Iterator[None]:
    """Fork the ranks that this process starts; commands that it starts have ranks of their own, which are spawned."""
    with pytest.MonkeyPatch.context() as patch:
        if not pytestconfig.getoption("--cold"):
            patch.setattr("planner.jobs.launch.multiprocessing", warm_ranks.WarmContext)
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[Any]:
    """Notes that a test failed, the time limit included."""
    report = yield
    item.stash[FAILED] = item.stash.get(FAILED, False) or report.failed
    return report


@pytest.fixture(autouse=True)
def ends_with_its_test(request: pytest.FixtureRequest) -> Iterator[None]:
    """Kills what a failed test has started and left."""
    mark = f"{MARK}={uuid.uuid4().hex}"
    os.environ[MARK] = mark.partition("=")[2]
    yield
    del os.environ[MARK]
    if request.node.stash.get(FAILED, False):
        warm_ranks.end_server()
        kill_marked(mark)


def kill_marked(mark: str) -> None:
    """Kills the processes with this in their environment; nothing where there is no /proc."""
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # gone, or not ours
            if mark.encode() in (entry / "environ").read_bytes() and SHARED not in (entry / "cmdline").read_bytes():
                os.kill(int(entry.name), signal.SIGKILL)
