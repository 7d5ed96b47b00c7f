"""`planner import` and `planner explain` of traces, and what follows them."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from builders import Outcome, outcome_of
from made_traces import Job, make_traces, write_trace

from planner.documents.profile import load_profile


@pytest.fixture
def command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Outcome]:
    """Run `planner …` in a folder that holds the traces of two ranks in `ranks/`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ranks").mkdir()
    (tmp_path / "empty").mkdir()
    for rank, document in enumerate(make_traces(Job(late_us=(0.0, 900.0)))):
        write_trace(tmp_path / "ranks" / f"rank{rank}.json.gz", document)

    return partial(outcome_of, capsys)


def test_import_optimize_and_export(command: Callable[..., Outcome]) -> None:
    code, out, _ = command("import", "ranks", "-o", "p.json")
    assert code == 0
    assert "wrote p.json; continue with: planner optimize p.json -o plan.json" in out
    assert command("optimize", "p.json", "-o", "plan.json")[0] == 0
    code, out, _ = command("export", "plan.json", "--to", "ddp", "--profile", "p.json")
    assert code == 0
    assert json.loads(out)["bucket_cap_mb_list"]


def test_import_as_json(command: Callable[..., Outcome]) -> None:
    code, out, _ = command("import", "ranks/rank0.json.gz", "ranks/rank1.json.gz", "-o", "p.json", "--json")
    assert code == 0
    found = json.loads(out)
    assert set(found) >= {"world", "steps", "gradients", "messages", "replay_error"}
    assert found["world"]["traced_ranks"] == [0, 1]
    assert set(found["steps"][0]) >= {"forward_us", "backward_us", "update_us", "idle_us", "exposed_us", "step_us"}
    assert [gradient["numel"] for gradient in found["gradients"]] == list(Job().sizes)
    assert {message["last_rank"] for message in found["messages"]} >= {1}
    assert abs(found["replay_error"]) < 0.03


JOB = f"""
import torch
import planner
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        for at, numel in reversed(list(enumerate({Job().sizes}))):
            self.register_parameter(f"p{{at}}", torch.nn.Parameter(torch.zeros(numel)))
def job():
    return planner.TrainingJob(model=Model(), loss=len, batch=len, optimizer=len)
def other():
    return planner.TrainingJob(model=torch.nn.Linear(3, 3), loss=len, batch=len, optimizer=len)
"""


def test_names_of_a_job(command: Callable[..., Outcome], tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB)
    assert command("import", "ranks", "--job", "job.py:job", "-o", "p.json")[0] == 0
    profile = load_profile(tmp_path / "p.json")
    assert [gradient.name for gradient in profile.compute.gradients] == [f"p{at}" for at in range(len(Job().sizes))]
    assert (profile.model.name, (profile.model.fingerprint or "")[:7]) == ("job.py:job", "sha256:")
    code, _, err = command("import", "ranks", "--job", "job.py:other")
    assert (code, err.count("\n")) == (2, 1)
    assert "found 8 gradients, and 2 trainable parameters in the job" in err


def test_explain_a_directory(command: Callable[..., Outcome], tmp_path: Path) -> None:
    code, out, _ = command("explain", "ranks", "--html", "page.html")
    assert code == 0
    assert "rank 1 arrives last at" in out
    assert "what would change the step" in out
    page = (tmp_path / "page.html").read_text()
    assert "Traced steps" in page
    for text in (out, page):
        assert "traced: arrival of each rank at each message behind the first one" in text
    code, out, _ = command("explain", "ranks", "--json")
    found = json.loads(out)
    assert {change["strategy"] for change in found["changes"]} >= {"optimal", "ddp", "wire:bfloat16"}
    assert found["parts_us"]["exposed"] > 0.0


def test_markup_in_names_stays_text(command: Callable[..., Outcome], tmp_path: Path) -> None:
    document = make_traces(Job())[0]
    for event in document["traceEvents"]:
        if "Process Group Name" in event["args"]:
            event["args"]["Process Group Name"] = "<script>alert(1)</script>"
    write_trace(tmp_path / "<b>t.json", document)
    assert command("explain", "<b>t.json", "--html", "page.html")[0] == 0
    page = (tmp_path / "page.html").read_text()
    assert "<script>alert(1)" not in page
    assert "<b>t" not in page


def test_a_doubtful_replay_comes_before_advice(command: Callable[..., Outcome], tmp_path: Path) -> None:
    document = make_traces(Job(steps=2, beta_us_per_byte=0.01))[0]
    # In the second step messages take twice as long.
    half = sorted(event["ts"] for event in document["traceEvents"])[len(document["traceEvents"]) // 2]
    for event in document["traceEvents"]:
        if "ncclDevKernel" in event["name"] and event["ts"] > half:
            event["dur"] *= 2.0
    write_trace(tmp_path / "t.json", document)
    code, out, _ = command("explain", "t.json")
    assert code == 0
    assert out.index("do not rely on") < out.index("what would change the step")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["import", "absent.json"], "absent.json: cannot be read"),
        (["import", "ranks", "-o", "absent/p.json"], "absent/p.json: there is no folder absent"),
        (["import", "ranks", "--step-ms", "-1"], "--step-ms: found -1"),
        (["import", "ranks", "--parallel", "tp"], "--parallel: found 'tp'"),
        (["import", "ranks", "--parallel", "fsdp2"], "--parallel: found fsdp2, and no annotation FSDP::pre_forward in"),
        (["import", "ranks/rank0.json.gz", "-o", "ranks/rank0.json.gz"], "found the input file"),
        (["explain", "empty"], "empty: found no file that ends in .json"),
        (["explain", "ranks", "--measured", "m.json"], "--measured: found it with the trace ranks"),
    ],
)
def test_wrong_arguments(command: Callable[..., Outcome], arguments: list[str], message: str) -> None:
    code, _, err = command(*arguments)
    assert code == 2
    assert message in err
    assert err.count("\n") == 1


def test_what_cuts_would_win_is_said_in_every_form(command: Callable[..., Outcome], tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    for rank, document in enumerate(make_traces(Job(compiled=True))):
        write_trace(tmp_path / "one" / f"rank{rank}.json.gz", document)
    for asked in (("import", "one", "-o", "p.json"), ("explain", "one"), ("optimize", "p.json", "-o", "plan.json")):
        for form in ((), ("--json",)):
            assert "with one graph" in "".join(command(*asked, *form)[1:])
