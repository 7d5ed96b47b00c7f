"""Emulated clusters: real traffic at the rate that was asked for, and nothing left behind, however a command ends."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import testbed_checks
from started import marked

import planner
from planner.jobs.launch import LocalWorld, run_ranks
from planner.testbed import wiring
from planner.testbed.hosts import emulated_hosts, parse_emulation
from planner.testbed.namespaces import NoNamespaces
from runtime.errors import EnvironmentFailure

ROOT = Path(planner.__file__).parents[1]
LEAVING_S = 20.0
"""For processes to be gone on a busy machine."""
STARTING_S = 90.0


def missing() -> str:
    """Why namespaces cannot be had here; empty where they can."""
    try:
        with emulated_hosts(parse_emulation("1x1@1gbit")):
            return ""
    except NoNamespaces as error:
        return str(error)


MISSING = missing()
needs_namespaces = pytest.mark.skipif(bool(MISSING), reason=f"no emulated cluster here: {MISSING}")


def machine() -> dict[str, str]:
    """Interfaces and named namespaces of this machine."""
    commands = {"interfaces": ["ip", "-o", "link"], "namespaces": ["ip", "netns"], "shaping": ["tc", "qdisc"]}
    return {name: subprocess.run(c, capture_output=True, text=True, check=True).stdout for name, c in commands.items()}


def holders(namespace: str) -> list[str]:
    """Processes in a network namespace, or with a descriptor of it. A namespace without holders is no more."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        for link in (process / "ns/net", *_entries(process / "fd")):
            try:
                if os.readlink(link) == namespace:
                    found.append(f"{link} of {(process / 'cmdline').read_bytes()[:100]!r}")
            except OSError:
                continue
    return found


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


class Command:
    """A program of its own, what it says, and what it leaves."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        folder.mkdir()
        self.mark = str(folder)
        self._folder = folder
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests/procs"))),
            "OMP_NUM_THREADS": "1",
            "TESTBED_MOMENT": str(folder / "moment"),
            "TESTBED_HOLD_S": "0" if "3" in arguments else "300",
        }
        with (folder / "out").open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, *arguments], cwd=folder, env=environment, stdout=out, stderr=subprocess.STDOUT
            )

    def namespaces(self, *names: str) -> list[str]:
        """The network namespaces that its processes wrote down, once they have."""
        until = time.monotonic() + STARTING_S
        files = [self._folder / name for name in names]
        while not all(file.exists() and file.read_text().strip() for file in files):
            assert self.process.poll() is None, self.text
            assert time.monotonic() < until, self.text
            time.sleep(0.05)
        return [file.read_text().strip() for file in files]

    def end(self, number: int) -> int:
        """Sends a signal (0: none) and waits."""
        self.process.send_signal(number)
        return self.process.wait(STARTING_S)

    @property
    def text(self) -> str:
        return (self._folder / "out").read_text(errors="replace")

    def left(self, namespaces: list[str]) -> list[str]:
        """Processes of it, and holders of its namespaces, once they had time to go."""
        until = time.monotonic() + LEAVING_S
        while (found := marked(self.mark) + [h for name in namespaces for h in holders(name)]) and (
            time.monotonic() < until
        ):
            time.sleep(0.1)
        return found


@pytest.fixture
def untouched() -> Iterator[None]:
    """The machine's interfaces, queues and named namespaces are after the test what they were before."""
    before = machine()
    yield
    assert machine() == before


@pytest.fixture(scope="module")
def four() -> list[dict[str, Any]]:
    """What the ranks of 2x2@100mbit saw."""
    before = machine()
    world = LocalWorld(ranks=4, emulation=parse_emulation("2x2@100mbit"))
    found: list[dict[str, Any]] = run_ranks(world, testbed_checks.ranks_of_a_host_and_of_two)
    assert machine() == before
    return found


@needs_namespaces
def test_ranks_see_each_other_from_two_hosts(four: list[dict[str, Any]]) -> None:
    assert [rank["sum"] for rank in four] == [6.0] * 4
    here = os.readlink("/proc/self/ns/net")
    names = [rank["namespace"] for rank in four]
    assert names[0] == names[1] != names[2] == names[3]
    assert here not in names
    assert [rank["environment"] for rank in four] == [[str(r), str(r % 2), str(r // 2), "2"] for r in range(4)]
    assert {(rank["emulation"].kind, rank["emulation"].spec) for rank in four} == {("namespaces", "2x2@100mbit")}
    assert [holder for name in set(names) for holder in holders(name)] == []


@needs_namespaces
def test_traffic_inside_a_host_does_not_pass_its_link(four: list[dict[str, Any]]) -> None:
    for rank in four:
        _, sent = rank["inside"]
        assert sent["lo"] > testbed_checks.REPEATS * testbed_checks.MESSAGE_BYTES
        assert sent["eth0"] < 200_000


@needs_namespaces
def test_traffic_between_hosts_passes_at_the_rate(four: list[dict[str, Any]]) -> None:
    """Two ranks send each the whole message once: 0.34 s at 100 Mbit/s."""
    expected_s = testbed_checks.MESSAGE_BYTES * 8 / 100e6
    for rank in (four[0], four[2]):
        (slow_s, slow_sent), (fast_s, fast_sent) = rank["slow"], rank["fast"]
        for sent in (slow_sent, fast_sent):
            assert sent["eth0"] > testbed_checks.REPEATS * testbed_checks.MESSAGE_BYTES
        assert 0.7 * expected_s < slow_s < 10 * expected_s + 2.0
        assert slow_s > 2.0 * fast_s  # the rates are 1 : 4


@needs_namespaces
def test_both_kinds_of_link_are_measured_apart(four: list[dict[str, Any]]) -> None:
    apart = four[0]["apart"]
    assert set(apart.samples) == {
        "intra/all_reduce", "intra/reduce_scatter", "intra/all_gather", "inter/all_reduce", "inter/all_gather",
        "inter/reduce_scatter",
    }  # fmt: skip
    assert set(apart.lines) == set(apart.samples)
    # 100 Mbit/s are 0.08 µs per byte, which the two ranks of a host share.
    assert 0.03 < apart.links["inter"].beta_us_per_byte < 0.4
    assert apart.links["inter"].beta_us_per_byte > 4 * apart.links["intra"].beta_us_per_byte
    assert apart.samples["inter/all_reduce"][-1][0] == 2**17  # what is left of the message inside a host
    assert [rank["apart"] == apart for rank in four] == [True] * 4


@needs_namespaces
def test_a_rank_that_dies_on_an_emulated_host_is_named(untouched: None) -> None:
    world = LocalWorld(ranks=2, emulation=parse_emulation("2x1@1gbit"))
    with pytest.raises(EnvironmentFailure, match="rank 1 was killed by SIGKILL"):
        run_ranks(world, testbed_checks.stop_a_host)


@needs_namespaces
@pytest.mark.parametrize(
    "signals",
    [
        pytest.param({signal.SIGTERM: 143}, id="SIGTERM"),
        pytest.param({signal.SIGINT: 130, signal.SIGKILL: -9}, id="others", marks=pytest.mark.long),
    ],
)
def test_commands_of_planner_leave_nothing_however_they_end(
    signals: dict[int, int], tmp_path: Path, untouched: None
) -> None:
    """`planner run` to its end, and with signals while its ranks train; all at once, to save time."""
    job = ["-m", "planner", "run", f"{testbed_checks.__file__}:job", "--emulate", "2x1@100mbit", "--json"]
    done = Command(tmp_path / "done", *job, "--steps", "3")
    ended = {(number, code): Command(tmp_path / f"signal{number}", *job) for number, code in signals.items()}
    for (number, code), command in ended.items():
        namespaces = command.namespaces("moment")
        assert holders(namespaces[0]), "the ranks are in it"
        assert command.end(number) == code, command.text
        assert command.left(namespaces) == []
    assert done.end(0) == 0, done.text
    document = json.loads(done.text)
    assert (document["emulated"], document["emulation"], document["ranks"]) == ("namespaces", "2x1@100mbit", 2)
    assert done.left([]) == []


@needs_namespaces
def test_a_host_that_does_not_come_up_ends_it_in_time(monkeypatch: pytest.MonkeyPatch, untouched: None) -> None:
    """An `ip` that leaves one host unconnected."""
    batch = wiring._batch

    def unplugged(place: Any, tool: str, lines: list[str], what: str, named: Any = ()) -> None:
        batch(place, tool, [line for line in lines if line != "link set port1 master switch up"], what, named)

    monkeypatch.setattr(wiring, "HOST_DEADLINE_S", 1.0)
    monkeypatch.setattr(wiring, "_batch", unplugged)
    late = pytest.raises(EnvironmentFailure, match="host 1 of the emulated cluster did not reach the others within 1 s")
    with late, emulated_hosts(parse_emulation("2x1@1gbit")):
        pass


@needs_namespaces
def test_a_tool_that_hangs_ends_it_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, untouched: None) -> None:
    (tmp_path / "ip").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "ip").chmod(0o755)
    with monkeypatch.context() as patch:
        patch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
        patch.setattr(wiring, "COMMAND_DEADLINE_S", 1.0)
        hangs = pytest.raises(
            EnvironmentFailure, match=r"`ip` did not end within 1 s; the emulated cluster is given up"
        )
        with hangs, emulated_hosts(parse_emulation("2x1@1gbit")):
            pass
    assert shutil.which("ip") != str(tmp_path / "ip")
