"""Emulated clusters: what is written, what is refused, and what results say. Nothing is started here."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from builders import run, usual_document

from planner import optimize
from planner.cli import doctor
from planner.cost.model import communication_cost
from planner.documents.profile import parse_cluster, parse_profile
from planner.testbed import namespaces, wiring
from planner.testbed.hosts import VARIABLE, emulated_hosts, emulation_here, parse_emulation, place_on
from planner.testbed.namespaces import Namespace, NoNamespaces
from runtime.errors import EnvironmentFailure, InputError


@pytest.mark.parametrize(
    ("text", "hosts", "ranks_per_host", "bits_per_s", "spec"),
    [
        ("4x1@1gbit", 4, 1, 1e9, "4x1@1gbit"),
        ("2x2@200mbit", 2, 2, 200e6, "2x2@200mbit"),
        (" 2X3@0.5Gbit ", 2, 3, 500e6, "2x3@0.5gbit"),
        ("1x1@100kbit", 1, 1, 100e3, "1x1@100kbit"),
        ("08x2@10gbit", 8, 2, 10e9, "8x2@10gbit"),
        ("namespaces:2x1@2.5gbit", 2, 1, 2.5e9, "2x1@2.5gbit"),
    ],
)
def test_shapes_and_rates(text: str, hosts: int, ranks_per_host: int, bits_per_s: float, spec: str) -> None:
    found = parse_emulation(text)
    assert (found.hosts, found.ranks_per_host, found.bits_per_s) == (hosts, ranks_per_host, bits_per_s)
    assert (found.spec, found.ranks) == (spec, hosts * ranks_per_host)
    namespaces = [Namespace(-2)] * hosts
    assert [place_on(found, namespaces, rank).host for rank in range(found.ranks)] == sorted(
        [*range(hosts)] * ranks_per_host
    )


WRONG = [
    ("", "found '', expected HOSTSxRANKS@RATE"),
    ("4", "found '4', expected HOSTSxRANKS@RATE"),
    ("4x1", "for example 4x1@1gbit"),
    ("4@1gbit", "expected HOSTSxRANKS@RATE"),
    ("4x1@", "expected HOSTSxRANKS@RATE"),
    ("4x1@1", "in kbit, mbit or gbit"),
    ("4x1@1gb", "in kbit, mbit or gbit"),
    ("4x1@1gigs", "in kbit, mbit or gbit"),
    ("4x1@-1gbit", "expected HOSTSxRANKS@RATE"),
    ("4x1@1e3gbit", "expected HOSTSxRANKS@RATE"),
    ("4x1@infgbit", "expected HOSTSxRANKS@RATE"),
    ("４x1@1gbit", "expected HOSTSxRANKS@RATE"),
    ("docker:4x1@1gbit", "expected HOSTSxRANKS@RATE"),
    ("sleep:2x2@1gbit", "expected HOSTSxRANKS@RATE"),
    ("x" * 5000, "expected HOSTSxRANKS@RATE"),
    ("9" * 5000 + "x1@1gbit", "expected HOSTSxRANKS@RATE"),
    ("0x1@1gbit", "found 0 hosts of 1 ranks"),
    ("1x0@1gbit", "found 1 hosts of 0 ranks"),
    ("20x20@1gbit", "at most 256 ranks in all on one machine"),
    ("2x1@0gbit", "found a rate of 0gbit, expected 100kbit to 100gbit"),
    ("2x1@99kbit", "found a rate of 99kbit"),
    ("2x1@101gbit", "found a rate of 101gbit"),
]


@pytest.mark.parametrize(("text", "message"), WRONG, ids=[text[:20] or "empty" for text, _ in WRONG])
def test_wrong_shapes_and_rates(text: str, message: str) -> None:
    with pytest.raises(InputError, match="--emulate: ") as caught:
        parse_emulation(text)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("command", ["profile", "run", "demo"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--emulate", "4x1@fast"], "planner: --emulate: found '4x1@fast', expected HOSTSxRANKS@RATE"),
        (["--emulate", "4x1@1gbit", "--ranks", "2"], "planner: --ranks: found 2, expected 4 as in --emulate 4x1@1gbit"),
        (["--emulate", "2x1@1gbit", "--backend", "nccl"], "planner: --backend: found 'nccl', expected gloo"),
    ],
)
def test_commands_refuse_them_before_anything_else(
    command: str, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    job = [] if command == "demo" else ["absent.py:job"]
    run(command, *job, *options, code=2)
    captured = capsys.readouterr()
    assert captured.err.startswith(message)
    assert captured.out == ""


def test_a_process_learns_from_its_environment_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert emulation_here() is None
    emulation = parse_emulation("2x2@200mbit")
    monkeypatch.setenv(VARIABLE, emulation.spec)
    assert emulation_here() == emulation


def test_the_bucket_lets_any_packet_through_and_holds_the_rate() -> None:
    for bits_per_s in (100e3, 1e8, 1e9, 100e9):
        words = wiring.shaping(bits_per_s).split()
        options = dict(zip(words[6::2], words[7::2], strict=True))
        assert options["rate"] == f"{bits_per_s:.0f}bit"
        assert int(options["burst"]) >= int(options["mtu"]) > 9000
        # A message of 64 KiB sees the rate wherever it is worth a timer.
        assert int(options["mtu"]) <= max(9100, bits_per_s / 8 * 1e-4)


def test_addresses_differ() -> None:
    addresses = [wiring.host_address(host) for host in range(256)]
    assert len({*addresses, wiring.SWITCH_ADDRESS}) == 257


def refuse() -> Namespace:
    raise NoNamespaces("a network namespace cannot be made (on purpose)")


@pytest.mark.parametrize("spec", ["2x2@1gbit", "namespaces:2x2@1gbit"])
def test_without_privileges_it_is_refused_with_the_cure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], spec: str
) -> None:
    monkeypatch.setattr(Namespace, "make", refuse)
    told = r"--emulate: a network namespace cannot be made \(on purpose\)"
    with pytest.raises(NoNamespaces, match=told), emulated_hosts(parse_emulation(spec)):
        pass
    monkeypatch.setattr("planner.jobs.launch.run_ranks", None)  # nothing is started
    run("demo", "--emulate", spec, code=3)
    assert "cannot be made (on purpose)" in capsys.readouterr().err


def test_doctor_says_what_emulation_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Namespace, "make", refuse)
    monkeypatch.setattr("shutil.which", lambda tool: None)
    found = {finding.what: finding for finding in doctor._emulation()}
    assert set(found) == {"ip", "tc", "root", "network namespaces"}
    assert not any(found[what].ok for what in ("ip", "tc", "network namespaces"))
    assert "apt-get install iproute2" in found["tc"].cure
    assert "on purpose" in found["network namespaces"].cure


@pytest.mark.parametrize("options", [["--ranks", "0"], ["--emulate", "4x"], ["--ranks", "3", "--emulate", "2x1@1gbit"]])
@pytest.mark.parametrize(
    "command", ["profile job.py:job", "run job.py:job", "compare job.py:job --plan p.json", "demo"]
)
def test_wrong_ranks_and_shapes_are_refused_before_torch_is_imported(command: str, options: list[str]) -> None:
    script = (
        "import sys\nfrom planner.cli.app import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit as ended:\n    print(ended.code, 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *command.split(), *options], capture_output=True, text=True, check=True
    )
    assert done.stdout == "2 False\n", done.stderr


def test_too_few_privileges_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing:
        """A C library that may not unshare anything."""

        def unshare(self, _flags: int) -> int:
            return -1

    monkeypatch.setattr(namespaces, "_libc", Refusing)
    with pytest.raises(NoNamespaces, match="expected root with CAP_SYS_ADMIN and CAP_NET_ADMIN, found user"):
        Namespace.make()


class HereNamespace(Namespace):
    """Calls where it is."""

    def call(self, function: Any) -> Any:
        """See `Namespace.call`."""
        return function()


def test_missing_tools_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(NoNamespaces, match="ip: not found; expected iproute2"):
        wiring.wire(HereNamespace(0), [], 1e9)


@pytest.mark.parametrize(
    ("outcome", "error", "message"),
    [
        (subprocess.TimeoutExpired("ip", 15), EnvironmentFailure, "`ip` did not end within 15 s; the emulated cluster"),
        (subprocess.CompletedProcess([], 2, "", "Error: no\nCommand failed -:2\n"), NoNamespaces, "Error: no; Command"),
    ],
)
def test_failing_tools_are_named(
    monkeypatch: pytest.MonkeyPatch, outcome: Any, error: type[EnvironmentFailure], message: str
) -> None:
    def run(*_: Any, **__: Any) -> Any:
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    monkeypatch.setattr(wiring.shutil, "which", lambda tool: tool)
    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(error) as caught:
        wiring.wire(HereNamespace(0), [], 1e9)
    assert message in str(caught.value)


def test_a_failure_while_wiring_lets_go_of_every_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    made, closed = [], []

    def make() -> Namespace:
        made.append(Namespace(-1 - len(made)))
        return made[-1]

    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Namespace, "make", make)
    monkeypatch.setattr(Namespace, "close", lambda namespace: closed.append(namespace))
    monkeypatch.setattr("planner.testbed.hosts.wire", fail)
    with pytest.raises(KeyboardInterrupt), emulated_hosts(parse_emulation("3x1@1gbit")):
        pass
    assert len(made) == 4
    assert closed[::-1] == made


def emulated_document(kind: str) -> dict[str, Any]:
    document = usual_document()
    document["world"] |= {"emulated": kind, "emulation": "4x1@1gbit"}
    document["cluster"] |= {"emulated": kind, "name": "4x1@1gbit"}
    return document


def test_documents_and_plans_say_that_it_was_emulated() -> None:
    profile, words = parse_profile(emulated_document("namespaces")), "emulated 4x1@1gbit"
    assert parse_profile(profile.to_document()) == profile
    assert profile.cluster is not None
    assert words in optimize(profile).notes[0]
    assert words in communication_cost(profile.cluster, 2 * profile.cluster.ranks).source


def test_documents_refuse_other_ways_to_emulate() -> None:
    document = emulated_document("docker")
    with pytest.raises(InputError, match=r"\$\.world\.emulated"):
        parse_profile(document)
    with pytest.raises(InputError, match=r"\$\.emulated"):
        parse_cluster({"schema": "planner.cluster/1", "nodes": 1, "emulated": "docker"})
