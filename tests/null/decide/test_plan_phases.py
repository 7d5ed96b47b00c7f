"""`planner optimize` of several profiles: one plan in phases, its prediction, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders import run, run_json, usual_document, write

from planner import optimize
from planner.decide.phases import check_same_gradients, join_phases
from planner.documents.profile import parse_profile
from planner.report.files import explain
from runtime.errors import InputError
from runtime.plan import DelaySpec, LocalAsyncSpec, ModelReference, load_plan, parse_plan
from runtime.plan.executed import executed_part
from runtime.plan.predicted import Prediction


def slower(factor: float) -> dict[str, Any]:
    """The usual profile with larger inputs."""
    document = usual_document()
    for gradient in document["compute"]["gradients"]:
        gradient["backward_us"] *= factor
    document["compute"]["forward_us"] *= factor
    return document


def test_one_plan_of_three_profiles(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [write(tmp_path / f"{number}.json", slower(number)) for number in (1, 2, 4)]
    output = str(tmp_path / "plan.json")
    run("optimize", *paths, "--epochs", "13,11,3", "--steps-per-epoch", "10", "-o", output)
    shown = capsys.readouterr().out
    plan = load_plan(output)
    assert plan.phases is not None
    assert [phase.until_step for phase in plan.phases] == [130, 240, None]
    alone = [optimize(path) for path in paths]
    assert [executed_part(phase.plan) for phase in plan.phases] == [executed_part(each) for each in alone]
    steps_us = [each.predicted.iteration_us if each.predicted else 0.0 for each in alone]
    total_us = 130 * steps_us[0] + 110 * steps_us[1] + 30 * steps_us[2]
    assert plan.predicted is not None
    assert plan.predicted.iteration_us == pytest.approx(total_us / 270)
    assert f"predicted total: {total_us / 1e6:.4g} s for 270 steps" in shown
    assert parse_plan(plan.to_document()) == plan
    document = run_json(capsys, "optimize", *paths, "--epochs", "13,11,3", "--steps-per-epoch", "10", "-o", output)
    assert len(document["phases"]) == 3
    assert [load_plan(f"{output}@{number}") for number in range(3)] == [phase.plan for phase in plan.phases]
    assert run_json(capsys, "explain", f"{output}@1")["buckets"] == plan.phases[1].plan.to_document()["buckets"]
    for wrong, found in ((f"{output}@3", "expected a phase from 0 to 2"), (f"{paths[0]}@0", "found schema")):
        with pytest.raises(InputError, match=found):
            load_plan(wrong)
    alone[0].save(tmp_path / "alone.json")
    with pytest.raises(InputError, match="found a plan in 0 phases, expected one in phases"):
        load_plan(tmp_path / "alone.json@0")
    (tmp_path / "odd@1").write_text((tmp_path / "alone.json").read_text("utf-8"), "utf-8")
    assert load_plan(tmp_path / "odd@1").phases is None  # a file of that name
    with pytest.raises(InputError, match=r"found a plan in 3 phases, expected one with buckets; name one phase"):
        from_phases(output)
    with pytest.raises(InputError, match=r"--trace: found a plan in 3 phases, .*plan\.json@0"):
        explain(output, None, {"--trace": str(tmp_path / "trace.json")})


def test_ratios_are_limited_by_the_steps_of_all_phases(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{number}.json", slower(number)) for number in (1, 2)]
    output = str(tmp_path / "plan.json")
    sparse = ("--accuracy", "bounded", "--compress", "sparse", "-o", output)
    run("optimize", *paths, "--epochs", "3,1", "--steps-per-epoch", "2000", *sparse)
    for phase, path in zip(load_plan(output).phases or (), paths, strict=True):
        alone = optimize(path, accuracy="bounded", compress="sparse", steps=8000)
        assert phase.plan.to_document() == alone.to_document()
        assert phase.plan.frontier is not None
        assert phase.plan.frontier[-1].max_ratio == 20.0
    run("optimize", *paths, "--epochs", "3,1", "--steps-per-epoch", "2000", "--steps", "1000", *sparse)
    limits = [max(point.max_ratio for point in each.plan.frontier or ()) for each in load_plan(output).phases or ()]
    assert limits == [10.0, 10.0]


def from_phases(path: str) -> None:
    from planner.export import export

    export(path, "ddp")


@pytest.mark.parametrize(
    ("epochs", "steps", "message"),
    [
        ([1], [1], "--epochs: found 1 for 2 profiles"),
        ([1, 0], [1], "--epochs"),
        ([1, 1], [1, 2, 3], "--steps-per-epoch"),
    ],
)
def test_numbers_that_do_not_fit(epochs: list[int], steps: list[int], message: str) -> None:
    plan = optimize(parse_profile(usual_document()))
    with pytest.raises(InputError, match=message):
        join_phases([plan, plan], epochs, steps)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"delay": DelaySpec(steps=2)}, "profile 2: found a delay, whose warm-up begins with a run, behind"),
        ({"local_async": LocalAsyncSpec(updaters=2)}, "profile 2: found local updaters"),
        ({"model": ModelReference(name="m", fingerprint="sha256:1")}, "profile 2: found another model"),
    ],
)
def test_plans_that_are_no_later_phase(changes: dict[str, Any], message: str) -> None:
    plan = optimize(parse_profile(usual_document()))
    plan = replace(plan, model=replace(plan.model, fingerprint="sha256:0"))
    with pytest.raises(InputError, match=message):
        join_phases([plan, replace(plan, accuracy="relaxed", **changes)], [1, 1], [1])


def test_exact_first_steps_count_with_their_own_time() -> None:
    exact = replace(optimize(parse_profile(usual_document())), predicted=Prediction(iteration_us=3e6))
    later = replace(exact, accuracy="bounded", from_step=4, predicted=Prediction(iteration_us=1e6), fallback=exact)
    found = join_phases([later, later], [1, 1], [3])
    assert found.predicted == Prediction(iteration_us=(4 * 3e6 + 2 * 1e6) / 6)
    assert "3 steps of 1000 ms (the first 1 of 3000 ms), 5 s" in found.notes[1]
    [note, *_] = join_phases([replace(later, fallback=None)] * 2, [1, 1], [3]).notes
    assert "(the first 3 of unknown time, counted as later ones), 3 s" in note


def test_profiles_of_other_shapes_name_the_gradient() -> None:
    other = usual_document()
    other["compute"]["gradients"][1]["numel"] = 7
    with pytest.raises(InputError, match=r"gradient .g1.: found .7, 'float32'. .* expected .5000, 'float32'. as"):
        check_same_gradients([parse_profile(usual_document()), parse_profile(other)])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d["phases"][1].update(until_step=9), r"phases\[1\].until_step: found 9 in the last phase"),
        (lambda d: d["phases"][0]["plan"]["world"].update(ranks=3), "another model or number of ranks"),
        (lambda d: d.update(buckets=d["phases"][0]["plan"]["buckets"]), "buckets: found it with phases"),
        (lambda d: d.update(outer={"every": 4}), "outer: found it with phases"),
        (lambda d: d.update(phases=d["phases"][:1]), "phases: "),
        (lambda d: d["phases"][0].update(until_step=0), "until_step: "),
    ],
)
def test_what_no_plan_in_phases_has(change: Any, message: str) -> None:
    plan = optimize(parse_profile(usual_document()))
    document = join_phases([plan, replace(plan, notes=())], [1, 2], [5]).to_document()
    change(document)
    with pytest.raises(InputError, match=message):
        parse_plan(document)
