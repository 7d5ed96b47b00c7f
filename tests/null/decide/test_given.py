"""`planner optimize --from-schedule`: a printed schedule gives the plan that was decided, an edited one is judged."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders import halves_cluster, run, usual_document, write

from planner.decide.given import given_request
from planner.decide.optimize import decide
from planner.decide.plan_request import Request
from planner.model.schedule_text import parse_schedule, read_schedule
from runtime.errors import InputError


def document() -> dict[str, Any]:
    """SGD on four ranks, with costs of all that plans may send."""
    lines = {name: {"alpha_us": 5.0, "beta_us_per_byte": 1e-5} for name in ("sparsify", "local_update")}
    made = usual_document(forward_us=4000.0, update_us=3000.0, cluster=halves_cluster((20.0, 0.003), **lines))
    made["compute"]["optimizer"] = {"name": "SGD", "adaptive": False, "elementwise": True, "state_bytes": 10**6}
    return made


def printed(stderr: str) -> list[str]:
    """The schedules that `--print-after all` printed."""
    parts = stderr.split("after ")[1:]
    return [f"after {part}" for part in parts]


CASES = (
    [],
    ["--allow", "sharded-step"],
    ["--allow", "late-gather"],
    ["--accuracy", "bounded"],
    ["--accuracy", "bounded", "--compress", "sparse"],
    ["--accuracy", "relaxed"],
)


@pytest.mark.parametrize("options", CASES, ids=" ".join)
def test_a_printed_schedule_gives_the_plan_that_was_decided(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    profile, plan, again = write(tmp_path / "p.json", document()), str(tmp_path / "a"), str(tmp_path / "b")
    run("optimize", profile, "-o", plan, "--print-after", "all", *options)
    decided = json.loads(Path(plan).read_text())
    text = next(
        text for text in reversed(printed(capsys.readouterr().err))
        if parse_schedule(text).accuracy == decided["accuracy"]
    )  # fmt: skip
    (tmp_path / "s").write_text(text)
    kept = [option for option in options if option not in ("--compress", "sparse")]
    run("optimize", profile, "-o", again, "--from-schedule", str(tmp_path / "s"), *kept)
    found = json.loads(Path(again).read_text())
    different = {key for key in decided.keys() | found.keys() if decided.get(key) != found.get(key)}
    # Classes riskier than the schedule's are not looked at, nor interfaces that it does not need.
    assert different <= ({"notes", "alternatives"} if "--compress" in options else set())
    assert decided["accuracy"] == (options[1] if options[:1] == ["--accuracy"] else "exact")


def edited(tmp_path: Path, text: str, *options: str) -> dict[str, Any]:
    """The plan of a schedule."""
    (tmp_path / "s").write_text(text)
    profile = write(tmp_path / "p.json", document())
    run("optimize", profile, "-o", str(tmp_path / "plan"), "--from-schedule", str(tmp_path / "s"), *options)
    made: dict[str, Any] = json.loads((tmp_path / "plan").read_text())
    return made


@pytest.mark.parametrize(
    ("text", "options", "mode"),
    [
        ("[0-2] all_reduce/library none\n\n[3-5] all_reduce/tree none", [], None),
        ("sharded\n[0] all_reduce/library none\n[1-5] all_reduce/library none", ["--allow", "sharded-step"], "updates"),
        ("late_gather 1;0\n[0] all_reduce/library none\n[1-5] all_reduce/library none", ["--allow", "late-gather"],
         "updates"),
        ("[0-5] sparse/flat topk k=1000", ["--accuracy", "bounded"], None),
        ("[0-5] all_reduce/two_shot wire dtype=int8", ["--accuracy", "relaxed"], None),
        ("[0-5] all_reduce/library powersgd rank=2", ["--accuracy", "bounded"], None),
        ("delay k=7\n[0-5] all_reduce/library none", ["--accuracy", "relaxed"], "delay"),
        ("updaters 3 every 2,8 blocks 0-2;3-5\n[0-5] all_reduce/library none", ["--accuracy", "relaxed"],
         "local_async"),
        ("outer every=4 delay=1\n[0-5] all_reduce/library none", ["--accuracy", "relaxed", "--allow", "outer"],
         "outer"),
    ],
)  # fmt: skip
def test_an_edited_schedule_is_planned_however_long_it_takes(
    tmp_path: Path, text: str, options: list[str], mode: str | None
) -> None:
    made = edited(tmp_path, text, *options)
    assert len(made["buckets"]) == text.count("[")
    assert made["predicted"]["iteration_us"] > 0.0
    assert made["baselines"]
    assert made["notes"]
    assert mode is None or made[mode] is not None
    assert (made["accuracy"] == "exact") == ("--accuracy" not in options)
    assert ("fallback" in made) == ("--accuracy" in options)
    assert not any("-" in note.partition("predicted ")[2][:1] for note in made["notes"])  # longer, not −x % shorter


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("[0-2] all_reduce/library none\n[3-5 all_reduce/library none", [], "line 2: found '[3-5 all_reduce"),
        ("[0-5] all_reduce/library", [], "line 1: found '[0-5] all_reduce/library', expected a bucket such as"),
        ("[5-0] all_reduce/library none", [], "line 1: found the run 5-0"),
        ("[0-99999999] all_reduce/library none", [], "line 1: found the run 0-99999999"),
        ("[-] all_reduce/library none", [], "line 1: "),
        ("delay 4\n[0-5] all_reduce/library none", [], "line 1: found 'delay 4'"),
        ("[0-5] all_reduce/library none\nsharded", [], "line 2: found 'sharded'"),
        ("after merge (1.0 ms):\n[0-5] all_reduce/library none\nafter merge (1.0 ms):", [], "line 3: found a second"),
        ("\n[0-1] all_reduce/library none\n\n[1-5] all_reduce/library none", [],
         "line 4: gradient 1 is in bucket 0 and in bucket 1"),
        ("[0-1] all_reduce/library none\n[2-6] all_reduce/library none", [], "line 2: bucket 1"),
        ("[0-1] all_reduce/library none", [], "no bucket holds the gradients 2-5"),
        ("", [], "no bucket holds the gradients 0-5"),
        ("[0-5] all_reduce/star none", [], "line 1: bucket 0"),
        ("[0-5] all_reduce/two_shot wire dtype=int3", ["--accuracy", "bounded"], "line 1: found [0-5]"),
        ("[0-5] all_reduce/library zip", ["--accuracy", "bounded"], "line 1: found '[0-5] all_reduce/library zip"),
        ("[0-5] sparse/flat topk k=1000", [], "that is bounded; add --accuracy bounded"),
        ("delay k=4\n[0-5] all_reduce/library none", ["--accuracy", "bounded"], "that is relaxed"),
        ("sharded\n[0-5] all_reduce/library none", [], "needs sharded-step, expected one that is drop-in; add --allow"),
        ("norms 0,9\n[0-5] all_reduce/library none", [], "norms of 2 layers are shared"),
        ("[0-5] all_reduce/library none", ["--solver", "cpsat"], "--solver: found cpsat, which is about deciding"),
        ("[0-5] all_reduce/library none", ["--accuracy", "wrong"], "--accuracy: found 'wrong'"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_schedule_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, options: list[str], message: str
) -> None:
    (tmp_path / "s").write_text(text)
    profile = write(tmp_path / "p.json", document())
    run("optimize", profile, "-o", str(tmp_path / "x"), "--from-schedule", str(tmp_path / "s"), *options, code=2)
    assert message in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_where_ranks_cannot_share_the_step_a_schedule_cannot_either(tmp_path: Path) -> None:
    (tmp_path / "s").write_text("sharded\n[0-5] all_reduce/library none")
    profile = write(tmp_path / "p.json", usual_document())
    with pytest.raises(InputError, match="found the mode sharded, but the profile does not say what the optimizer is"):
        given_request(Request(profile=profile, allow="sharded-step"), str(tmp_path / "s"))


def test_lines_of_buckets_are_counted_in_the_file() -> None:
    text = "\nafter merge (1.0 ms):\n[0] all_reduce/library none\n\n[1] all_reduce/library none\n"
    assert read_schedule(text).lines == (3, 5)


def test_outer_steps_go_with_any_optimizer_where_they_are_allowed(tmp_path: Path) -> None:
    made = document()
    made["compute"]["optimizer"]["name"] = "AdamW"
    (tmp_path / "s").write_text("outer every=4\n[0-5] all_reduce/library none")
    asked = Request(profile=write(tmp_path / "p.json", made), accuracy="relaxed", allow="outer")
    assert decide(given_request(asked, str(tmp_path / "s"))).interfaces == ("outer",)
    with pytest.raises(InputError, match="needs outer, expected one that is drop-in; add --allow outer"):
        given_request(replace(asked, allow=()), str(tmp_path / "s"))
