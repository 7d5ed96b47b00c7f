"""What the benchmark of predictions makes of its measurements."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from builders import usual_profile

from benchmarks.marked import marks
from benchmarks.truth.cells import USER, Cell, Result, Seen, schedules
from benchmarks.truth.report import (
    cell_lines,
    errors,
    group_lines,
    hidden,
    lost,
    plan_lines,
    summary,
    tau,
    write_into,
)  # fmt: skip
from planner.comparison.variants import NO_COMMUNICATION
from planner.model.modes.delayed import Delayed
from planner.model.problem import make_problem


def seen(name: str, predicted_us: float, measured_us: float, alone_us: float | None = 40.0) -> Seen:
    """Without noise."""
    return Seen(name, 3, predicted_us, measured_us, (measured_us, measured_us), alone_us)


def result(*plans: Seen, slower: float = 0.98, pairs: tuple[tuple[str, str], ...] = ()) -> Result:
    """A cell whose step without communication takes 100 µs, 60 of them in backward."""
    return Result(
        cell=Cell("gpt", 2, "1gbit"),
        seen=(seen(NO_COMMUNICATION, 101.0, 100.0, None), *plans),
        repeat_error=0.01,
        profiles_apart=0.005,
        backward_us=60.0,
        chosen_against_best_ddp=(slower, slower - 0.01, slower + 0.01),
        distinct_pairs=pairs,
    )


GOOD = result(seen("optimal", 110.0, 109.0), seen("single", 144.0, 145.0), pairs=(("optimal", "single"),))
BAD = result(seen("optimal", 110.0, 140.0), seen("single", 130.0, 120.0), slower=1.2, pairs=(("single", "optimal"),))


def test_figures_of_a_cell() -> None:
    assert errors(GOOD) == pytest.approx([110.0 / 109.0 - 1.0, 144.0 / 145.0 - 1.0])
    assert tau(GOOD) == 1.0
    assert tau(BAD) == -1.0
    assert tau(result(seen("a", 1.0, 1.0))) is None
    assert lost(GOOD) == 0.0
    assert lost(BAD) == pytest.approx(140.0 / 120.0 - 1.0)
    assert hidden(GOOD) == pytest.approx((145.0 - 109.0) / 40.0)
    assert hidden(BAD) == pytest.approx((120.0 - 140.0) / 40.0)
    assert hidden(result(seen("optimal", 1.0, 1.0))) is None
    assert hidden(result(seen("optimal", 390.0, 400.0), seen("single", 399.0, 399.0))) is not None
    assert hidden(result(seen("optimal", 390.0, 400.0), seen("single", 399.0, 411.0))) is None


def test_targets_are_told_met_or_not() -> None:
    good, bad = list(summary([GOOD])), list(summary([GOOD, BAD]))
    assert all("**no**" not in line for line in good)
    for what in ("mean absolute error", "95th percentile", "τ", "slower than tuned DDP", "hidden share"):
        assert any(what in line and "**no**" in line for line in bad), what


def test_tables_hold_every_cell_and_plan() -> None:
    assert len(list(cell_lines([GOOD, BAD]))) == 2 + 2
    assert len(list(plan_lines([GOOD, BAD]))) == 2 + 6
    columns = {line.count("|") for line in cell_lines([GOOD])}
    assert len(columns) == 1
    assert len({line.count("|") for line in plan_lines([GOOD])}) == 1


def test_results_survive_a_file() -> None:
    assert Result.parse(json.loads(json.dumps(GOOD.to_document()))) == GOOD


KINDS = {
    "measured": GOOD.cell,
    "foreign": replace(GOOD.cell, model="some/job.py:job"),
    "lossy": replace(GOOD.cell, lossy=True),
    "delayed": replace(GOOD.cell, delayed=True),
}


@pytest.mark.parametrize("part", KINDS)
def test_only_the_part_of_these_cells_changes(part: str) -> None:
    begin, end = marks(part)
    others = "".join(f"{one}old{two}" for one, two in map(marks, KINDS) if one != begin)
    written = write_into(f"before\n{begin}\nnew\n{end}\nafter\n{others}", [replace(GOOD, cell=KINDS[part])])
    assert written.startswith(f"before\n{begin}\n")
    assert written.endswith(f"{end}\nafter\n{others}")
    assert "new" not in written
    assert write_into(written, [replace(GOOD, cell=KINDS[part])]) == written


def test_lossy_cells_have_targets_of_their_own_and_hide_nothing() -> None:
    told = "\n".join(summary([replace(GOOD, cell=KINDS["lossy"])]))
    assert "≤ 8%" in told
    assert "the best exact plan" in told
    assert "hidden" not in told


def test_plans_of_a_cell_differ_and_are_the_same_for_everyone() -> None:
    profile = usual_profile()
    problem = make_problem(profile)
    for cell in (Cell("gpt", 2, "1gbit"), Cell("gpt", 2, "1gbit", delayed=True)):
        made = schedules(problem, cell, profile)
        assert list(made) == list(schedules(problem, cell, profile))
        assert USER not in made  # the same profile gives the same plan, which is measured once
        assert len(set(map(str, made.values()))) == len(made) >= 4
    assert {name for name, schedule in made.items() if isinstance(schedule.mode, Delayed)} == {
        "ssd:1",
        "ssd:2",
        "ssd:3",
        "ssd:4",
    }


def test_errors_as_users_have_them_are_judged_apart() -> None:
    assert not any("users" in line for line in summary([GOOD]))
    seen = tuple(replace(one, user_us=1.06 * one.measured_us) for one in GOOD.seen)
    told = list(summary([replace(GOOD, seen=seen, user_against_best_ddp=(1.02, 0.99, 1.05))]))
    assert "| as users have it: mean absolute error | 6.0% | ≤ 5% | **no** |" in told
    assert "| as users have it: 95th percentile | 6.0% | ≤ 12% | yes |" in told
    assert "| as users have it: the bare loop | +6.0% to +6.0% |  | yes |" in told
    assert "| a user's plan / tuned DDP, median | 1.020 | ≤ 1.00 | **no** |" in told


def test_groups_of_cells() -> None:
    lines = list(group_lines([GOOD, BAD]))
    assert len(lines) == 2 + 1
    assert lines[2].startswith("| 2 × 1gbit | 2 |")
    assert len({line.count("|") for line in lines}) == 1
