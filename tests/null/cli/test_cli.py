"""The command line: exit codes, what is on standard output, and what is left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from builders import Outcome, cluster_document, outcome_of, usual_document, write

from planner import optimize, simulate
from planner.decide.strategies import STRATEGIES
from planner.documents.text import pluralize
from planner.report.listing import Listing, make_console, print_tables
from runtime.plan import load_plan
from runtime.version import __version__

Command = Callable[..., Outcome]


@pytest.fixture
def command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Outcome]:
    """Runs `planner …` in an empty folder that holds p.json (a profile), c.json (a cluster) and bare.json."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    write(tmp_path / "p.json", usual_document())
    write(tmp_path / "bare.json", usual_document(cluster={}))
    write(tmp_path / "c.json", cluster_document((500.0, 0.002), nodes=8))

    return partial(outcome_of, capsys)


def files(folder: Path) -> list[str]:
    """What a command left behind."""
    return sorted(set(os.listdir(folder)) - {"p.json", "bare.json", "c.json"})


def test_version_and_help(command: Command) -> None:
    assert command("--version") == Outcome(0, f"planner {__version__}\n", "")
    overview = command("--help")
    assert overview.code == 0
    for name in ("profile", "optimize", "simulate", "explain", "run", "demo", "doctor"):
        assert f"  {name}" in overview.out
        assert command(name, "--help").code == 0


def test_no_summary_is_cut_at_the_width_of_a_terminal(command: Command) -> None:
    assert "..." not in command("--help").out.partition("Commands:")[2]


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("planner doc", ["doctor"]),
        ("planner --inst", ["--install-completion"]),
        ("planner simulate resnet1", ["resnet101", "resnet152"]),
        ("planner optimize gpt2@k80-10", ["gpt2@k80-10gbe"]),
        ("planner simulate gpt2 --cluster k80-10", ["k80-10gbe"]),
        ("planner simulate gpt2 --strategy ddp,mg", ["ddp,mg_wfbp"]),
        ("planner catalog k80-10", ["k80-10gbe"]),
    ],
)
def test_tab_completes_commands_strategies_and_names(typed: str, completed: list[str]) -> None:
    words = {"COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split()) - 1), "_PLANNER_COMPLETE": "complete_bash"}
    done = subprocess.run(
        [sys.executable, "-m", "planner"], env=os.environ | words, capture_output=True, text=True, check=True
    )
    assert set(completed) <= set(done.stdout.split()), done.stderr


def test_all_strategies_are_listed(command: Command) -> None:
    """By the registry, so that a new one needs no further list."""
    done = command("simulate", "--list-strategies")
    listed = done.out.split()
    assert done.code == 0
    assert all(usage in listed for strategy in STRATEGIES.values() for usage in strategy.usages)


def test_what_goes_into_a_pipe_is_not_wrapped(capsys: pytest.CaptureFixture[str]) -> None:
    print_tables(Listing("title " * 60, ["a"], [], caption="caption " * 60))
    make_console().print("word " * 100)
    lines = capsys.readouterr().out.splitlines()
    assert ("title " * 60).strip() in lines[0]
    assert ("caption " * 60).strip() in lines[-2]
    assert ("word " * 100).strip() in lines[-1]


WRONG_CALLS: list[tuple[list[str], str]] = [
    ([], ""),
    (["--bogus"], "--bogus"),
    (["optimise"], "optimise"),
    (["optimize"], "Missing argument"),
    (["optimize", "p.json", "extra"], "found 2 profiles with no option, expected several with --epochs"),
    (["optimize", "p.json", "--bogus"], "--bogus"),
    (["optimize", "p.json", "-o"], "requires an argument"),
    (["optimize", "absent.json"], "planner: absent.json: no such file; check the path"),
    (["optimize", "."], "planner: .: found a directory, expected a JSON file"),
    (["optimize", "bare.json"], "expected `--cluster FILE`"),
    (["optimize", "p.json", "--cluster", "absent.json"], "absent.json: no such file"),
    (["optimize", "p.json", "--cluster", "p.json"], 'p.json: $.schema: found schema "planner.profile/1", expected'),
    (["optimize", "p.json", "--accuracy", "lossy"], "--accuracy: found 'lossy', expected one of: exact, bounded"),
    (["optimize", "p.json", "--passes", "mrege"], "--passes: found 'mrege', expected one of: delay, joint"),
    (["optimize", "p.json", "--passes", "merge{labels=0}"], "expected an integer of at least 1"),
    (["optimize", "p.json", "--solver", "cplex"], "--solver: found 'cplex', expected one of: dp, cpsat"),
    (["optimize", "p.json", "--solver", "cpsat", "--solver-limit", "nan"], "--solver-limit: found nan, expected more"),
    (["optimize", "p.json", "--solver-limit", "3"], "--solver-limit: found it with the solver dp, expected --solver"),
    (["simulate", "p.json", "--solver", ""], "--solver: found '', expected one of: dp, cpsat"),
    (["simulate", "p.json", "--solver", "cpsat", "--strategy", "ddp"], "found the strategies ddp, which follow fixed"),
    (["optimize", "p.json", "--print-after", "mrege"], "--print-after: found 'mrege', expected all or one of: delay"),
    (
        ["optimize", "p.json", "--passes", "joint"],
        "--accuracy exact: found the pass joint, expected none, for exact",
    ),
    (["optimize", "p.json", "--protect", "fc.*"], "--accuracy exact: found --protect, expected none"),
    (
        ["optimize", "p.json", "--accuracy", "bounded", "--max-ratio", "0.5"],
        "--max-ratio: found 0.5, expected a number",
    ),
    (
        ["optimize", "p.json", "--accuracy", "bounded", "--max-ratio", "nan"],
        "--max-ratio: found nan, expected a number",
    ),
    (
        ["optimize", "p.json", "--accuracy", "bounded", "--protect", "fc.*"],
        "found 'fc.*', which is the name of no grad",
    ),
    (
        ["optimize", "p.json", "--accuracy", "bounded", "--passes", "joint{densities=0.1|2}"],
        "--passes: joint{densities=0.1|2}: expected 1 to 32 shares of elements above 0 and up to 1",
    ),
    (["optimize", "p.json", "--max-delay", "2"], "--accuracy exact: found --max-delay, expected none, for exact"),
    (
        ["optimize", "p.json", "--accuracy", "bounded", "--max-delay", "2"],
        "--accuracy bounded: found --max-delay, expected none, for bounded plans synchronize in every step",
    ),
    (
        ["optimize", "p.json", "--accuracy", "relaxed", "--max-delay", "0"],
        "--max-delay: found 0, expected a whole number of steps from 1 to 32, such as 4; correct it",
    ),
    (["profile", "job.py:job", "--updaters", "0"], "--updaters: found 0, expected a whole number of updaters from 1"),
    (["simulate", "p.json", "--strategy", "ssd:0"], "found the strategy ssd:0, expected a whole number of steps"),
    (["simulate", "p.json", "--strategy", "joint:0.5"], "found the strategy joint:0.5, expected a positive number"),
    (["optimize", "p.json", "-o", "absent/plan.json"], "absent/plan.json: there is no folder absent"),
    (["optimize", "p.json", "-o", "."], ".: found a directory, expected a file name to write to"),
    (["optimize", "p.json", "-o", "p.json/plan.json"], "there is no folder p.json"),
    (["simulate", "bare.json"], "expected `--cluster FILE`"),
    (
        ["simulate", "p.json", "--strategy", "best"],
        "found the strategy 'best', expected one of: ddp, dear, diloco, hitopk, joint, l_sgd, lags, lap",
    ),
    (["simulate", "p.json", "--strategy", "ddp,"], "--strategy: found 'ddp,', expected items separated by commas"),
    (["simulate", "p.json", "--ranks", "0"], "--ranks: found '0', expected positive integers such as 4,8,16"),
    (["simulate", "p.json", "--ranks", "4,x"], "--ranks: found '4,x', expected positive integers"),
    (["simulate", "p.json", "--ranks", "-4"], "--ranks: found '-4', expected positive integers"),
    (["simulate", "p.json", "--ranks", "9" * 5000], "expected positive integers"),
    (["simulate", "p.json", "--ranks", "99999999"], "found more than 10000000 ranks"),
    (["explain", "absent.json"], "absent.json: no such file"),
    (["explain", "p.json"], 'p.json: $.schema: found schema "planner.profile/1", expected "planner.plan/1"'),
    (["explain", "p.json", "--html", "absent/p.html"], "absent/p.html: there is no folder absent"),
    (["explain", "p.json", "--trace", "."], ".: found a directory, expected a file name to write to"),
    (["explain", "p.json", "--html", "./p.json"], "--html: found ./p.json, which is another file of this command"),
    (["explain", "p.json", "--html", "x", "--trace", "x"], "--html: found x, which is another file of this command"),
    (["explain", "p.json", "--measured", "m.json"], "--measured: found neither --trace nor --html; expected one"),
    (["run", "job.py:job", "--lr-schedule", "warm:3"], "--lr-schedule: found 'warm:3', expected scale:BATCH, warmup"),
    (["run", "absent.py:job", "--steps", "0"], "--steps: found 0, expected at least 1"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG_CALLS, ids=[" ".join(w[0])[:60] for w in WRONG_CALLS])
def test_wrong_calls(command: Command, tmp_path: Path, arguments: list[str], message: str) -> None:
    """Exit code 2, a message on standard error, no traceback, nothing on standard output, nothing left behind."""
    outcome = command(*arguments)
    assert outcome.code == 2
    assert message in outcome.err + (outcome.out if not arguments else "")
    assert "Traceback" not in outcome.err
    assert outcome.out == "" or not arguments
    assert files(tmp_path) == []


def test_wrong_calls_with_json_print_nothing(command: Command) -> None:
    for arguments in (["--json", "optimize", "absent.json"], ["simulate", "bare.json", "--json"], ["--json", "x"]):
        outcome = command(*arguments)
        assert (outcome.code, outcome.out) == (2, "")


@pytest.mark.parametrize("flag", ["-v", "--verbose"])
def test_verbose_shows_the_traceback(command: Command, flag: str) -> None:
    for arguments in ([flag, "explain", "absent.json"], ["explain", "absent.json", flag]):
        outcome = command(*arguments)
        assert outcome.code == 2
        assert "Traceback (most recent call last)" in outcome.err
        assert outcome.err.endswith("planner: absent.json: no such file; check the path\n")
    assert "Traceback" not in command("explain", "absent.json").err


def test_optimize_writes_the_plan(command: Command, tmp_path: Path) -> None:
    outcome = command("optimize", "p.json")
    assert outcome.code == 0
    assert files(tmp_path) == ["plan.json"]
    assert load_plan("plan.json") == optimize("p.json")
    assert "wrote plan.json; see `planner explain plan.json`" in outcome.out
    for line in ("plan (exact)", "mg_wfbp", "ddp", "wfbp", "single", "exact  ", "bounded  ", "relaxed  ", "optimal: "):
        assert line in outcome.out
    other = command("optimize", "p.json", "--cluster", "c.json", "-o", "other.json")
    assert other.code == 0
    assert load_plan("other.json") == optimize("p.json", "c.json")


@pytest.mark.parametrize("first", [True, False])
def test_json_of_optimize(command: Command, first: bool) -> None:
    """`--json` before or after the command: one document, the same as in the file."""
    arguments = ["optimize", "bare.json", "--cluster", "c.json", "-o", "x.json", "--print-after", "all"]
    outcome = command(*(["--json", *arguments] if first else [*arguments, "--json"]))
    assert outcome.code == 0
    assert json.loads(outcome.out) == json.loads(Path("x.json").read_text())
    assert outcome.err.startswith("after merge (")


@pytest.mark.parametrize("first", [True, False])
def test_json_of_simulate(command: Command, first: bool) -> None:
    """One array with a record per ranks and strategy."""
    arguments = ["simulate", "p.json", "--strategy", "wfbp, ddp:1", "--ranks", "4,8"]
    outcome = command(*(["--json", *arguments] if first else [*arguments, "--json"]))
    assert (outcome.code, outcome.err) == (0, "")
    records = json.loads(outcome.out)
    assert [(r["ranks"], r["strategy"]) for r in records] == [(4, "wfbp"), (4, "ddp:1"), (8, "wfbp"), (8, "ddp:1")]
    assert records == [r.to_document() for r in simulate("p.json", strategies=["wfbp", "ddp:1"], ranks=[4, 8])]
    assert all({"strategy", "ranks", "iteration_us", "exposed_us", "buckets"} <= set(record) for record in records)
    single = json.loads(command("--json", "simulate", "p.json", "--strategy", "single").out)
    assert isinstance(single, list)
    assert len(single) == 1


def test_simulate_prints_a_table(command: Command) -> None:
    outcome = command("simulate", "p.json", "--cluster", "c.json", "--ranks", "8,16")
    assert outcome.code == 0
    assert outcome.out.startswith("fastest: ")
    rows: list[list[str]] = []
    for line in (line for line in outcome.out.splitlines() if line.startswith("│")):
        cells = [cell.strip() for cell in line.split("│")[1:-1]]
        if cells[0]:
            rows.append(cells)
        else:  # a row that is wrapped
            rows[-1] = [f"{first} {more}" for first, more in zip(rows[-1], cells, strict=True)]
    named = [len(row[1].split(" / ")) for row in rows]  # strategies with equal results are one row
    assert sum(named) == 12
    assert sum(count for count, row in zip(named, rows, strict=True) if "extrapolated" in row[-1]) == 6


def test_same_input_same_bytes(command: Command) -> None:
    outs = [command("optimize", "p.json", "-o", name, "--json").out for name in ("a.json", "b.json")]
    assert outs[0] == outs[1]
    assert Path("a.json").read_bytes() == Path("b.json").read_bytes()


def test_lossy_plans_where_they_pay_and_exact_ones_that_say_so_where_not(command: Command) -> None:
    outcome = command("optimize", "p.json", "--accuracy", "bounded", "--compress", "all", "--print-after", "joint")
    assert outcome.code == 0
    assert outcome.err.startswith("after joint (")
    plan = load_plan("plan.json")
    assert plan.accuracy == "bounded"
    for line in ("plan (bounded)", "speed over compression", "the best exact plan, which is the fallback", "sparse"):
        assert line in outcome.out
    explained = command("explain", "plan.json")
    assert "sparse/flat topk" in explained.out
    assert "elements: " in explained.out
    outcome = command("optimize", "p.json", "--accuracy", "bounded", "--compress", "none")
    assert "bounded was allowed, but no compression was looked at (--compress none" in outcome.out
    assert load_plan("plan.json").accuracy == "exact"
    assert all(bucket.compressor.name == "none" for bucket in load_plan("plan.json").buckets)


def test_delay_where_it_pays(command: Command) -> None:
    """Without compression all that is exposed can hide behind the next step."""
    arguments = ["optimize", "p.json", "--accuracy", "relaxed", "--compress", "none", "--max-delay", "3"]
    outcome = command(*arguments, "--print-after", "delay")
    assert outcome.code == 0
    assert outcome.err.startswith("after delay (")
    assert "\ndelay k=" in outcome.err
    plan = load_plan("plan.json")
    assert plan.accuracy == "relaxed"
    assert plan.delay is not None
    assert len(plan.delays or ()) == 3
    for line in (
        "plan (relaxed)",
        "speed over delay",
        f"relaxed  {pluralize(len(plan.buckets), 'bucket')}, no compression, delay k",
    ):
        assert line in outcome.out
    explained = command("explain", "plan.json", "--trace", "trace.json", "--html", "page.html")
    assert explained.code == 0
    assert f"accuracy relaxed; delay k = {plan.delay.steps}: new weights after every" in explained.out
    names = [event["name"] for event in json.loads(Path("trace.json").read_text())["traceEvents"]]
    assert "bucket 0 all_gather" in names
    assert "With delay: gradients are pushed in every step" in Path("page.html").read_text()
    [record] = json.loads(command("--json", "simulate", "p.json", "--strategy", "ssd:2").out)
    assert (record["strategy"], record["ranks"]) == ("ssd:2", 4)
    assert record["iteration_us"] <= json.loads(command("--json", "simulate", "p.json", "--strategy", "ssd:1").out)[0][
        "iteration_us"
    ] * (1 + 1e-9)


def test_print_after(command: Command) -> None:
    """The schedule in its text form, on standard error, once for each pass that was asked for."""
    for choice in ("all", "merge"):
        outcome = command("optimize", "p.json", "--passes", "merge,merge", "--print-after", choice)
        assert outcome.code == 0
        assert outcome.err.count("after merge (") == 2
        assert outcome.err.count("all_reduce/library none") == 2 * len(load_plan("plan.json").buckets)
    assert command("optimize", "p.json").err == ""


def test_failing_commands_keep_the_old_plan(command: Command) -> None:
    Path("plan.json").write_text("old")
    for arguments in (["bare.json"], ["p.json", "--passes", "x"], ["p.json", "--cluster", "p.json"]):
        assert command("optimize", *arguments).code == 2
        assert Path("plan.json").read_text() == "old"
    assert command("optimize", "p.json").code == 0
    assert load_plan("plan.json").accuracy == "exact"


def test_unwritable_folder_is_refused_before_any_work(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`os.access` says no, as it does for a user without rights; the profile is not even looked at."""
    monkeypatch.setattr(os, "access", lambda *_, **__: False)
    outcome = command("optimize", "absent.json", "-o", "plan.json")
    assert outcome.code == 2
    assert "plan.json: the folder . is not writable; choose another output path" in outcome.err
    assert files(tmp_path) == []


def test_a_full_disk_leaves_nothing(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    outcome = command("optimize", "p.json")
    assert (outcome.code, outcome.out) == (2, "")
    assert "plan.json: not written, the disk is full; nothing was changed: free some space" in outcome.err
    assert files(tmp_path) == []


def hand_written(**fields: Any) -> dict[str, Any]:
    """The least that a plan may hold."""
    return {
        "schema": "planner.plan/1",
        "model": {"name": "mine"},
        "world": {"ranks": 2},
        "accuracy": "exact",
        "buckets": [{"gradients": ["fc.bias", "fc.weight"]}, {"gradients": ["conv.weight"]}],
        **fields,
    }


def test_explain_a_hand_written_plan(command: Command, tmp_path: Path) -> None:
    write(tmp_path / "mine.json", hand_written())
    outcome = command("explain", "mine.json")
    assert (outcome.code, outcome.err) == (0, "")
    for text in ("mine, 2 ranks", "fc.bias … fc.weight (2)", "conv.weight", "all_reduce/library", "no certificate"):
        assert text in outcome.out
    assert json.loads(command("explain", "mine.json", "--json").out) == load_plan("mine.json").to_document()


def test_explain_our_own_plan(command: Command) -> None:
    assert command("optimize", "p.json").code == 0
    outcome = command("explain", "plan.json")
    assert outcome.code == 0
    plan = load_plan("plan.json")
    for bucket in plan.buckets:
        assert bucket.gradients[0] in outcome.out
        assert (bucket.reason or "").split(";")[0] in outcome.out
    assert json.loads(command("--json", "explain", "plan.json").out) == plan.to_document()


def test_explain_in_pictures(command: Command, tmp_path: Path) -> None:
    """Both files are written, in words and as JSON, and equal inputs give equal bytes."""
    assert command("optimize", "p.json").code == 0
    outcome = command("explain", "plan.json", "--trace", "trace.json", "--html", "page.html")
    assert (outcome.code, outcome.err) == (0, "")
    assert "wrote trace.json\nwrote page.html\n" in outcome.out
    assert json.loads(Path("trace.json").read_text())["displayTimeUnit"] == "ms"
    page = Path("page.html").read_bytes()
    assert page.startswith(b"<!DOCTYPE html>")
    document = json.loads(command("explain", "plan.json", "--json", "--html", "page.html").out)
    assert document == load_plan("plan.json").to_document()
    assert Path("page.html").read_bytes() == page
    assert files(tmp_path) == ["page.html", "plan.json", "trace.json"]


def test_pictures_that_cannot_be_drawn(command: Command, tmp_path: Path) -> None:
    """A plan without times has no trace; a step of something else is no measurement of this plan."""
    write(tmp_path / "mine.json", hand_written())
    outcome = command("explain", "mine.json", "--trace", "trace.json")
    assert outcome.code == 2
    assert "mine.json: $.predicted.timeline: found none, expected tasks to draw" in outcome.err
    outcome = command("explain", "mine.json", "--html", "page.html", "--measured", "p.json")
    assert outcome.code == 2
    assert 'p.json: $.schema: found schema "planner.profile/1", expected "planner.timeline/1"' in outcome.err
    assert files(tmp_path) == ["mine.json"]


def test_names_are_printed_as_they_are(command: Command, tmp_path: Path) -> None:
    """Brackets and colons in names are no markup."""
    names = ["blocks[0].weight", "x[/b]", "[bold]y", "a:key:b"]
    document = hand_written(buckets=[{"gradients": [name]} for name in names], notes=["see [/i] :key:"])
    document["model"]["name"] = "[red]net[/]"
    write(tmp_path / "odd.json", document)
    outcome = command("explain", "odd.json")
    assert outcome.code == 0
    assert all(text in outcome.out for text in [*names, "see [/i] :key:", "[red]net[/]"])
