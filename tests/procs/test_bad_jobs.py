"""Jobs that fail are named, with what was found and expected; every rank is told, and none waits for another."""

from __future__ import annotations

from pathlib import Path

import bad_jobs
import commands
import pytest

from planner.jobs.launch import LocalWorld, run_ranks

JOBS = str(Path(__file__).with_name("bad_jobs.py"))

FAILING = {
    "batch_raises": ["batch(0, ", "raised FileNotFoundError: ", "/absent/data"],
    "batch_leaves": ["batch(0, ", "raised SystemExit: no more data"],
    "batch_raises_later": ["batch(2, ", "raised IndexError: two only (bad_jobs.py, line "],
    "loss_raises": [
        "loss(model, batch) raised RuntimeError: ",
        "shapes cannot be multiplied",
        "(bad_jobs.py, line 23); expected it not to: correct it",
    ],
    "loss_is_a_vector": ["loss returned a tensor of shape (2, 1), expected a scalar tensor that requires a gradient"],
    "loss_is_a_number": ["loss returned float, expected a scalar tensor"],
    "loss_is_detached": ["loss returned ", "expected a scalar tensor that requires a gradient"],
    "optimizer_is_none": ["optimizer returned NoneType, expected a torch.optim.Optimizer"],
    "optimizer_raises": ["optimizer(parameters) raised ValueError: Invalid learning rate"],
    "muon_of_all": ["optimizer(parameters): found bias, of shape (1,), under torch.optim.Muon, which takes matrices"],
    "update_raises": ["raised TypeError: ", "closure"],
    "meta": ["found parameters on the meta device, expected ones with values"],
}
"""Job → what both commands say of it on every rank."""


@pytest.fixture(scope="module")
def pair() -> list[dict[str, dict[str, str]]]:
    """Results of both ranks of two."""
    names = [*FAILING, "loss_ignores_the_model", "differ", "not_a_number"]
    return run_ranks(LocalWorld(ranks=2), bad_jobs.told, JOBS, names)


@pytest.mark.parametrize("name", FAILING)
@pytest.mark.parametrize("command", ["profile", "run"])
def test_jobs_that_fail(pair: list[dict[str, dict[str, str]]], name: str, command: str) -> None:
    for rank in pair:
        message = rank[name][command]
        assert message.startswith(f"InputError: {JOBS}:{name}: ")
        for words in FAILING[name]:
            assert words in message


def test_a_step_without_gradients(pair: list[dict[str, dict[str, str]]]) -> None:
    for rank in pair:
        said = rank["loss_ignores_the_model"]["profile"]
        assert "the step gave no trainable parameter a gradient; expected one forward and backward" in said


def test_ranks_that_build_different_models(pair: list[dict[str, dict[str, str]]]) -> None:
    for command in ("profile", "run"):
        assert all(rank["differ"][command].startswith("InputError: ") for rank in pair)
    assert pair[0]["differ"]["profile"] == pair[1]["differ"]["profile"]
    assert "ranks hold different models" in pair[0]["differ"]["profile"]


def test_a_loss_that_is_no_number_is_no_fault(pair: list[dict[str, dict[str, str]]]) -> None:
    assert [rank["not_a_number"] for rank in pair] == [{"profile": "", "run": ""}] * 2


def test_the_command_line_tells_one_of_them(tmp_path: Path) -> None:
    """Exit code 2, and the profile of before stays."""
    output = tmp_path / "profile.json"
    output.write_text("old")
    code, out, err = commands.ended("profile", f"{JOBS}:batch_raises", "-o", str(output), "--json", "--device", "cpu")
    assert (code, out, output.read_text()) == (2, "", "old")
    assert err.startswith(f"planner: {JOBS}:batch_raises: batch(0, ")
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == [output]


def test_a_run_with_a_loss_that_is_no_number_gives_json() -> None:
    record = commands.result("run", f"{JOBS}:not_a_number", "--steps", "2", "--device", "cpu")
    assert (record["loss_first"], record["loss_last"]) == (None, None)
