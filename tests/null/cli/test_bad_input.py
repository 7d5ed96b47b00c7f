"""Bad input on every way in: exit code 2, one message with file, place, what was found and expected, and a cure."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from bad_files import FILES, KINDS, full, places, with_value
from builders import Outcome, cluster_document, outcome_of, usual_document, write

import runtime
from planner import load_cluster, load_profile, optimize, simulate
from planner.documents.profile import parse_cluster, parse_profile
from runtime.errors import InputError
from runtime.plan import parse_plan

COMMANDS: dict[str, list[list[str]]] = {
    "profile": [["optimize", "FILE", "-o", "out.json"], ["simulate", "FILE"]],
    "cluster": [
        ["optimize", "p.json", "--cluster", "FILE", "-o", "out.json"],
        ["simulate", "p.json", "--cluster", "FILE"],
    ],
    "plan": [["explain", "FILE"], ["run", "job.py:job", "--plan", "FILE"]],
}
FUNCTIONS: dict[str, list[Callable[[Any], Any]]] = {
    "profile": [load_profile, optimize, lambda path: simulate(path, strategies=["ddp"])],
    "cluster": [load_cluster, lambda path: optimize("p.json", path), lambda path: simulate("p.json", path)],
    "plan": [runtime.load_plan],
}
PARSERS: dict[str, Callable[[Any], Any]] = {"profile": parse_profile, "cluster": parse_cluster, "plan": parse_plan}


Command = Callable[..., Outcome]


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs `planner …` in a folder with p.json (a profile), c.json (a cluster), job.py and out.json (a file of old)."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "p.json", usual_document())
    write(tmp_path / "c.json", cluster_document())
    (tmp_path / "out.json").write_text("old")
    (tmp_path / "job.py").write_text("def job(): return None\n")

    return partial(outcome_of, capsys)


def snapshot(folder: Path) -> dict[str, bytes]:
    """Names and contents of the regular files in a folder; links by what they lead to."""
    return {
        entry.name: os.readlink(entry).encode() if entry.is_symlink() else entry.read_bytes()
        for entry in folder.iterdir()
        if (entry.is_symlink() or entry.is_file()) and entry.lstat().st_size < 10**8
    }


def check_message(message: str, name: str, words: str) -> None:
    """One message: every line begins with the file; it says what was expected, or to do, after what was found."""
    assert words in message
    for line in message.splitlines():
        assert line.startswith(f"{name}: ")
        assert re.search(r"expected .*[;:] \w+|[;:] (check|add|remove|did you|make|choose|free) |and \d+ more", line), (
            line
        )
    assert len(message) < 2000


def check_refused(outcome: Outcome, name: str, words: str) -> None:
    """Exit code 2, the message, nothing on standard output, no traceback."""
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith("planner: ")
    assert outcome.err.endswith("\n")
    assert "Traceback" not in outcome.err
    assert not re.search(r"^planner: ", outcome.err[1:], re.MULTILINE)
    check_message(outcome.err.removeprefix("planner: ").removesuffix("\n"), name, words)


AS_TRACE = {"gzip": "found no list traceEvents", "directory": "found no file that ends in"}
"""What `explain` says, which takes such files for traces."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fault", FILES)
def test_wrong_files(command: Command, tmp_path: Path, kind: str, fault: str) -> None:
    """The same message in every command and function that reads the file, and nothing is written."""
    make, words = FILES[fault]
    path = tmp_path / "in.json"
    make(path, kind)
    before = snapshot(tmp_path)
    for arguments in COMMANDS[kind]:
        given = [str(path) if argument == "FILE" else argument for argument in arguments]
        said = AS_TRACE.get(fault, words) if arguments[0] == "explain" else words
        check_refused(command("--json", *given), str(path), said)
    for function in FUNCTIONS[kind]:
        with pytest.raises(InputError) as caught:
            function(path)
        check_message(str(caught.value), str(path), words)
    assert snapshot(tmp_path) == before


NOBODY = 65534


@pytest.fixture
def not_root(command: Command, tmp_path: Path) -> Iterator[None]:
    """Root may read and write everything: there the test goes on as somebody else, who owns the folder."""
    if os.geteuid() != 0:
        yield
        return
    command("optimize", "p.json", "-o", "warm.json")  # somebody else may not be allowed to import what it needs
    for path in (tmp_path, *tmp_path.iterdir()):
        os.chown(path, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)


@pytest.mark.usefixtures("not_root")
def test_forbidden_files(command: Command, tmp_path: Path) -> None:
    Path("p.json").chmod(0)
    check_refused(command("optimize", "p.json", "-o", "new.json"), "p.json", "cannot be read: Permission denied")
    Path("p.json").chmod(0o600)
    Path("out.json").chmod(0o400)
    check_refused(command("optimize", "p.json", "-o", "out.json"), "out.json", "found a file that may not be written")
    Path().chmod(0o500)
    check_refused(command("optimize", "p.json", "-o", "new.json"), "new.json", "the folder . is not writable")
    Path().chmod(0o700)


@pytest.mark.parametrize("kind", KINDS)
def test_full_documents_are_sound(kind: str) -> None:
    """Otherwise the next tests would be none."""
    PARSERS[kind](full(kind))


NUMBERS = [
    (kind, path) for kind in KINDS for path, owner, key in places(full(kind)) if type(owner[key]) in (int, float)
]
ANY_SIGN = ("r_squared", "alpha", "beta", "local_lr_scale", "warmup")
ANY_SIZE = (
    "flops",
    "activation",
    "iteration_us",
    "$.predicted",
    "fallback",
    "lower_bound",
    "gap",
    "mean_error",
    "updates.norms",
)
NEVER = [float("nan"), float("inf"), float("-inf"), "5", True, [], {}, [1.0], 10**400]


@pytest.mark.parametrize(("kind", "place"), NUMBERS, ids=[" ".join(number) for number in NUMBERS])
def test_wrong_numbers(kind: str, place: str) -> None:
    """In every place that holds a number; the message names the place."""
    field = place.rpartition(".")[2]
    bad: list[Any] = [*NEVER]
    if not (field in ANY_SIGN and "delay" in place) and field != "r_squared":
        bad += [-1, -1e-300]
    if not any(name in place for name in ANY_SIZE) and not (field in ANY_SIGN and "delay" in place):
        bad += [1e300, 10**30]
    for value in bad:
        with pytest.raises(InputError) as caught:
            PARSERS[kind](with_value(kind, place, value))
        message = str(caught.value)
        assert message.startswith(f"{kind}: {place}"), (value, message)
        check_message(message, kind, "found ")


@pytest.mark.parametrize("kind", KINDS)
def test_fields_that_are_missing_or_unknown(kind: str) -> None:
    """In every object: without any one of its fields it is whole or refused; with one more it is refused."""
    maps = {"collectives", "samples", "back_to_back", "k", "baselines"}
    refused = 0
    for path, owner, key in places(full(kind)):
        if isinstance(owner, dict):
            try:
                PARSERS[kind](with_value(kind, path, ...))
            except InputError as error:
                refused += 1
                check_message(str(error), kind, path)
        if isinstance(owner[key], dict) and key not in maps:
            with pytest.raises(InputError) as caught:
                PARSERS[kind](with_value(kind, path, {**owner[key], "zzz": 1}))
            check_message(str(caught.value), kind, f"{path}.zzz: ")
    assert refused >= 5


@pytest.mark.parametrize("name", ["", "a" * 4097, 3, None, ["a"]])
def test_wrong_names_of_gradients(name: Any) -> None:
    for kind, place in (("profile", "$.compute.gradients[0].name"), ("plan", "$.buckets[0].gradients[1]")):
        with pytest.raises(InputError) as caught:
            PARSERS[kind](with_value(kind, place, name))
        check_message(str(caught.value), kind, f"{place}: found ")


@pytest.mark.parametrize(
    "value", [{1, 2}, object(), {"a": {1: b"x"}}, {(1, 2): 3}, float("nan"), {"a": [float("inf")]}]
)
def test_documents_that_no_file_could_hold(value: Any) -> None:
    """A program may hand over anything."""
    with pytest.raises(InputError) as caught:
        parse_plan({**full("plan"), "updates": {"a": value}})
    check_message(str(caught.value), "plan", "$")
    loop: dict[str, Any] = {}
    loop["a"] = loop
    for document in (loop, {**full("plan"), "updates": loop}):
        with pytest.raises(InputError):
            parse_plan(document)


def test_what_is_no_model_or_optimizer() -> None:
    from torch import nn
    from torch.optim import SGD

    model = nn.Linear(2, 1)
    optimizer: Any = SGD(model.parameters(), lr=0.1)
    with pytest.raises(InputError, match=r"model: found a SGD, expected a torch.nn.Module; call planner.attach"):
        runtime.attach(optimizer, model, "plan.json")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"optimizer: found a str, expected a torch.optim.Optimizer; call planner"):
        runtime.attach(model, "plan.json", optimizer)  # type: ignore[arg-type]


@pytest.mark.parametrize("path", [None, 3, {"schema": "planner.plan/1"}, "", "a\0b"])
def test_what_is_no_path(path: Any) -> None:
    for function in (load_profile, load_cluster, runtime.load_plan, optimize, simulate):
        with pytest.raises(InputError, match=r"expected the path of a file; (pass|check)"):
            function(path)


OUTPUTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "absent/x.json": (lambda _: None, "there is no folder absent; make it or choose another output path"),
    "p.json/x.json": (lambda _: None, "there is no folder p.json"),
    "folder": (lambda folder: (folder / "folder").mkdir(), "found a directory, expected a file name to write to"),
    "p.json": (lambda _: None, "found the input file p.json, expected another one"),
    "c.json": (lambda _: None, "found the input file c.json, expected another one"),
    "link.json": (lambda folder: (folder / "link.json").symlink_to("p.json"), "found the input file p.json"),
    "hard.json": (lambda folder: os.link(folder / "p.json", folder / "hard.json"), "found the input file p.json"),
    "loop": (lambda folder: (folder / "loop").symlink_to("loop"), "cannot be written: Too many levels"),
    "lost": (lambda folder: (folder / "lost").symlink_to("absent/x.json"), "there is no folder"),
    "pipe": (lambda folder: os.mkfifo(folder / "pipe"), "cannot be written: No such device"),
    "full": (lambda folder: (folder / "full").symlink_to("/dev/full"), "the disk is full"),
    "a" * 300: (lambda _: None, "cannot be written: File name too long"),
}


@pytest.mark.parametrize("output", OUTPUTS)
def test_outputs_that_cannot_be_written(command: Command, tmp_path: Path, output: str) -> None:
    make, words = OUTPUTS[output]
    make(tmp_path)
    before = snapshot(tmp_path)
    check_refused(command("optimize", "p.json", "--cluster", "c.json", "-o", output, "--json"), output, words)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("output", ["", "a\0b"])
def test_outputs_that_are_no_path(command: Command, output: str) -> None:
    check_refused(command("optimize", "p.json", "-o", output), repr(output), "expected the path of a file; check")


def test_profile_looks_at_its_output_before_it_measures(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("planner.cli.profiling.on_ranks", lambda *_: pytest.fail("measured"))
    before = snapshot(tmp_path)
    for output, words in (("absent/x.json", "there is no folder"), ("job.py", "found the input file job.py")):
        check_refused(command("profile", "job.py:job", "-o", output), output, words)
    check_refused(command("profile", "absent.py:job"), "absent.py", "no such file; expected path/to/file.py:name")
    check_refused(command("run", "absent.py:job"), "absent.py", "no such file; expected path/to/file.py:name")
    assert snapshot(tmp_path) == before


def test_a_file_system_that_takes_only_part_of_a_plan(command: Command, tmp_path: Path) -> None:
    """A real limit, met in the middle of the file: the old one stays, and no half one beside it."""
    before = snapshot(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        outcome = command("optimize", "p.json", "-o", "out.json")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    check_refused(outcome, "out.json", "cannot be written: File too large; choose another output path")
    assert snapshot(tmp_path) == before


def test_links_are_followed(command: Command, tmp_path: Path) -> None:
    """The link stays a link, and the file it leads to is written whole; also where there is none yet."""
    (tmp_path / "deep").mkdir()
    for link, target in (("old", "out.json"), ("new", "deep/new.json")):
        (tmp_path / link).symlink_to(target)
        assert command("optimize", "p.json", "-o", link).code == 0
        assert os.readlink(tmp_path / link) == target
        assert runtime.load_plan(tmp_path / target) == optimize("p.json")
    assert os.listdir(tmp_path / "deep") == ["new.json"]


def test_a_document_may_go_to_a_pipe_and_begin_with_a_byte_order_mark(command: Command, tmp_path: Path) -> None:
    end, start = os.pipe()
    assert command("optimize", "p.json", "-o", f"/dev/fd/{start}").code == 0
    os.close(start)
    with os.fdopen(end, "rb") as pipe:
        (tmp_path / "plan.json").write_bytes(b"\xef\xbb\xbf" + pipe.read())
    assert runtime.load_plan("plan.json") == optimize("p.json")


OPTIONS = [
    (["simulate", "p.json", "--ranks", "1000000000"], "expected positive integers"),
    (["simulate", "p.json", "--ranks", "4,,8"], "expected items separated by commas"),
    (["simulate", "p.json", "--ranks", "４.5"], "expected positive integers"),
    (["simulate", "p.json", "--strategy", "ddp:1e308"], "found the strategy ddp:1e308, expected a positive number"),
    (["simulate", "p.json", "--strategy", "ddp:nan"], "found the strategy ddp:nan, expected a positive number"),
    (["simulate", "p.json", "--strategy", "ddp:-1"], "expected a positive number of MiB"),
    (["simulate", "p.json", "--strategy", "wfbp:\0"], "expected wfbp or wfbp:layer"),
    (["optimize", "p.json", "--passes", "merge{labels=" + "9" * 5000 + "}"], "expected an integer of at least 1"),
    (["optimize", "p.json", "--passes", "merge{labels=nan}"], "expected an integer of at least 1"),
    (["optimize", "p.json", "--passes", "merge{"], "cannot read 'merge{', expected for example"),
    (["optimize", "p.json", "--passes", ",,"], "cannot read ',,', expected for example"),
    (["optimize", "p.json", "--passes", "merge}{"], "cannot read"),
    (["run", "job.py:job", "--steps", "1000000000000000000000000000000"], "--steps: found 10000"),
    (["run", "job.py:job", "--ranks", "1000000000"], "--ranks: found 1000000000, expected at least 1 and at most 256"),
    (["run", "job.py:job", "--ranks", "-1"], "--ranks: found -1, expected at least 1"),
    (["profile", "job.py:job", "--ranks", "0"], "--ranks: found 0, expected at least 1"),
    (["profile", "job.py:job", "--device", "tpu"], "--device: found 'tpu', expected auto, cpu or cuda"),
    (["profile", "job.py:job", "--backend", "undefined"], "--backend: found 'undefined', expected one of: "),
    (["profile", "job.py:job", "--backend", "mpi"], "found 'mpi', which this build of torch lacks, expected one of: "),
    (["profile", "job.py:job", "--backend", "carrier pigeon"], "--backend: found 'carrier pigeon', expected one of"),
    (["run", "job.py:job", "--plan", "many.json"], "many.json: $.world.ranks: found a plan for 10000000 ranks"),
]


@pytest.mark.parametrize(("arguments", "words"), OPTIONS, ids=[" ".join(option[0])[:60] for option in OPTIONS])
def test_absurd_options(command: Command, tmp_path: Path, arguments: list[str], words: str) -> None:
    """Refused before any process is started."""
    write(tmp_path / "many.json", {**full("plan"), "world": {"ranks": 10**7}})
    before = snapshot(tmp_path)
    outcome = command(*arguments)
    assert (outcome.code, outcome.out) == (2, "")
    assert words in outcome.err
    assert "Traceback" not in outcome.err
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("ranks", [4, "48", [2.5], ["4"], [None]])
def test_ranks_of_a_program(ranks: Any) -> None:
    with pytest.raises(InputError, match="expected a list of integers"):
        simulate(parse_profile(usual_document()), ranks=ranks)


def test_totals_that_no_model_has() -> None:
    """Each gradient is in its range; together they are not."""
    document = usual_document()
    document["compute"]["gradients"] = [
        {"name": f"g{i}", "layer": "l", "numel": 2**40, "dtype": "complex128", "backward_us": 1.0} for i in range(600)
    ]
    with pytest.raises(InputError, match=r"profile: \$\.compute\.gradients: found \d+ bytes in all, expected at most"):
        parse_profile(document)
    document["compute"]["gradients"] *= 40
    with pytest.raises(InputError, match=r"profile: \$\.compute\.gradients: found .*, expected at most 20000 items; "):
        parse_profile(document)
