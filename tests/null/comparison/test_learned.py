"""What `planner compare --learn` makes of losses: verdicts that hold, rows as promised, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import halves_cluster, usual_document, usual_profile

from planner.comparison.contestants import Learn, make_contestants, named_plans, predicted_on
from planner.comparison.learned import (
    Learned,
    LearnedRow,
    judge,
    steps_to,
    summarize_learned,
    telling_seeds,
    telling_steps,
)
from planner.comparison.learners import batch_digest, load_checkpoint
from planner.comparison.learning import LearnedRank, LearnedRecord, counted_us, free_memory_bytes, memory_reason
from planner.comparison.picture import curves_text
from planner.comparison.variants import DDP, DDP_AGAIN, PLAN, BucketVariant
from planner.decide.optimize import optimize
from planner.decide.strategies import STRATEGIES, make_schedule
from planner.documents.profile import parse_profile
from planner.emit.lower import lower
from planner.emit.read_back import schedule_of
from planner.jobs.job import TrainingJob
from planner.jobs.training import BuiltJob
from planner.model.problem import make_problem
from planner.report.page import page_text
from runtime.errors import InputError
from runtime.plan import DelaySpec, OuterSpec, Plan, parse_plan
from runtime.plan.executed import cost_line

FIELDS = {
    "name", "last_loss", "against_ddp", "ci95", "ddp_spread", "steps_to_ddp_loss", "time_to_ddp_loss", "verdict",
}  # fmt: skip
"""Those that others rely on."""


def falling(steps: int, seed: int, factor: float = 1.0) -> list[float | None]:
    """Losses that fall, with the noise of batches that all contestants have alike."""
    noise = np.random.default_rng(seed).standard_normal(steps) * 0.05
    curve: list[float | None] = (factor * (0.5 + np.exp(-np.arange(steps) / (steps / 4)) + noise)).tolist()
    return curve


def learned(
    factors: Mapping[str, Sequence[float]], steps: int = 40, step_us: float = 100.0, learn: Learn | None = None,
    metrics: Mapping[str, Sequence[float]] | None = None, plans: Mapping[str, Plan] | None = None,
    predicted_us: Mapping[str, float] | None = None,
) -> Learned:  # fmt: skip
    """Two ranks, whose contestants end at DDP's loss times a factor of each seed."""
    seeds = len(next(iter(factors.values())))
    ranks = []
    for rank in range(2):
        records = []
        for name, values in factors.items():
            variant = BucketVariant(name=name, kind="ddp", plan=(plans or {}).get(name))
            record = LearnedRecord(variant, metrics=[*(metrics or {}).get(name, ())])
            for seed, factor in enumerate(values):
                losses = falling(steps, 10 * seed + rank, factor)
                record.losses += [losses[: steps // 2], losses[steps // 2 :]]
                record.step_us += [[step_us] * 3, [step_us] * 3]
            records.append(record)
        ranks.append(LearnedRank(records, estimated_s=1.0, took_s=2.0))
    return summarize_learned(ranks, learn or Learn(steps=steps, seeds=seeds), predicted_us)


def rows(result: Learned) -> dict[str, LearnedRow]:
    return {row.name: row for row in result.rows}


@pytest.mark.parametrize(
    ("differences", "verdict"),
    [
        ([0.001, 0.0012, 0.0008], "as ddp"),
        ([0.05, 0.052, 0.049], "worse"),
        ([-0.05, -0.052, -0.049], "better"),
        ([0.004, 0.006, 0.005], "not known"),
        ([0.1, -0.1, 0.0], "not known"),
        ([0.001], "not known"),
        ([0.001, math.nan], "worse"),
        ([0.001, math.inf], "worse"),
    ],
)
def test_a_verdict_is_by_the_whole_interval(differences: list[float], verdict: str) -> None:
    interval, found = judge(differences, 0.005)
    assert found == verdict
    if interval is not None:
        assert interval[0] <= np.mean(differences) <= interval[1]


@pytest.mark.parametrize("truth", [0.0, 0.02])
def test_verdicts_are_rarely_wrong(truth: float) -> None:
    """Of normal differences around what is as DDP, and around what is worse."""
    rng = np.random.default_rng(3)
    found = [judge((truth + 0.004 * rng.standard_normal(4)).tolist(), 0.005)[1] for _ in range(2000)]
    right = "as ddp" if truth == 0.0 else "worse"
    wrong = sum(one not in (right, "not known") for one in found)
    assert wrong <= 0.05 * sum(one != "not known" for one in found)


def of_moments(mean: float, spread: float, count: int) -> list[float]:
    """Values with this mean and standard deviation."""
    values = np.random.default_rng(count).standard_normal(count)
    found: list[float] = (mean + spread * (values - values.mean()) / values.std(ddof=1)).tolist()
    return found


@pytest.mark.parametrize(("mean", "verdict"), [(0.02, "worse"), (-0.02, "better"), (0.0, "as ddp")])
def test_what_would_tell_tells(mean: float, verdict: str) -> None:
    """The number of seeds that would tell, and not one less, where they have the same mean and standard deviation."""
    few = of_moments(mean, 0.02, 3)
    assert judge(few, 0.005)[1] == "not known"
    count = telling_seeds(few, 0.005)
    assert count is not None
    assert judge(of_moments(mean, 0.02, count), 0.005)[1] == verdict
    assert judge(of_moments(mean, 0.02, count - 1), 0.005)[1] == "not known"
    assert telling_seeds(of_moments(0.005, 0.02, 3), 0.005) is None
    interval, _ = judge(few, 0.005)
    assert interval is not None
    steps = telling_steps(mean, interval, Learn(steps=1000, seeds=3))
    assert steps is not None
    for longer, found in ((steps, verdict), (0.98 * steps, "not known")):
        assert judge(of_moments(mean, 0.02 * (1000 / longer) ** 0.5, 3), 0.005)[1] == found
    assert telling_steps(0.005, interval, Learn(steps=1000, seeds=3)) is None


def test_when_a_loss_is_reached() -> None:
    assert steps_to([4.0, 2.0, 1.0], 3.0, 30) == pytest.approx(15.0)
    assert steps_to([4.0, 2.0, 1.0], 4.0, 30) == pytest.approx(10.0)
    assert steps_to([4.0, 2.0, 1.0], 0.5, 30) is None


def test_rows_have_what_was_promised() -> None:
    same, worse = [1.0001, 0.9999, 1.0], [1.1, 1.11, 1.09]
    result = learned({DDP: [1.0] * 3, DDP_AGAIN: same, PLAN: worse})
    assert all(set(asdict(row)) >= FIELDS for row in result.rows)
    found = rows(result)
    assert (found[DDP_AGAIN].verdict, found[PLAN].verdict) == ("as ddp", "worse")
    assert found[PLAN].against_ddp == pytest.approx(0.1, rel=1e-6)
    assert found[PLAN].ddp_spread == pytest.approx(1e-4, rel=1e-6)
    assert found[DDP].time_to_ddp_loss == 1.0
    assert found[DDP].steps_to_ddp_loss is not None
    assert "plan is worse than DDP: its last loss differs by +10.00%" in str(result)
    assert "learning took 2 s, estimated 1 s" in str(result)
    kept = result.measured(plan(), PLAN, "job.py:job").accuracy_measured
    assert kept is not None
    assert (kept.verdict, kept.seeds, kept.ranks) == ("worse", 3, 2)


def test_exact_first_steps_take_their_time() -> None:
    even, step_us = [1.0, 1.0], {DDP: 100.0, DDP_AGAIN: 100.0, PLAN: 50.0}
    for first, half in ((None, 0), (20, 20), (39, 39)):
        late = {PLAN: replace(plan(), from_step=first)}
        row = rows(learned({DDP: even, DDP_AGAIN: even, PLAN: even}, plans=late, predicted_us=step_us))[PLAN]
        steps = row.steps_to_ddp_loss
        assert steps is not None
        exact = min(half, steps)
        assert row.time_to_ddp_loss == pytest.approx((exact + (steps - exact) / 2) / steps)


def test_a_metric_that_is_not_finite_is_named() -> None:
    even, metrics = [1.0, 1.0], {DDP: [0.9, 0.9], DDP_AGAIN: [0.9, 0.9], PLAN: [0.9, math.nan]}
    result = learned({DDP: even, DDP_AGAIN: [1.02, 0.98], PLAN: even}, metrics=metrics)
    assert rows(result)[PLAN].judged_by == "loss"
    assert "the metric of plan is not finite" in str(result)


def test_one_seed_is_not_enough_and_a_loose_ddp_is_named() -> None:
    result = learned({DDP: [1.0], DDP_AGAIN: [1.02], PLAN: [1.0]})
    assert rows(result)[PLAN].verdict == "not known"
    assert "of one seed, which has no interval; expected --seeds 2 or more" in str(result)
    assert "DDP itself, with sums in another order, ends up to 2.00% apart" in str(result)


@pytest.mark.parametrize(
    ("losses", "metrics", "verdict", "said"),
    [
        ([1.1, 1.1], [0.9, 0.9004], "as ddp", "plan learns as DDP does: its metric differs by +0.0002 (-0.00"),
        ([1.1, 1.1], [0.8, 0.8], "worse", "plan is worse than DDP: its metric differs by -0.1 (-0.1 to -0.1), beyond"),
        ([1.0, 1.0], [0.8, 0.8], "not known", "more than 1000 seeds would tell, or which way is better"),
        ([1.0, 1.0], [0.9, 0.92], "not known", "seeds would tell"),
    ],
)
def test_a_loss_that_is_loose_gives_way_to_the_metric(
    losses: list[float], metrics: list[float], verdict: str, said: str
) -> None:
    """Where DDP itself ends farther apart than the margin; which way a metric is better only the loss tells."""
    found = {DDP: [0.9, 0.9], DDP_AGAIN: [0.9, 0.9], PLAN: metrics}
    result = learned({DDP: [1.0, 1.0], DDP_AGAIN: [1.02, 0.98], PLAN: losses}, metrics=found)
    row = rows(result)[PLAN]
    assert (row.judged_by, row.verdict) == ("metric", verdict)
    assert said in str(result)
    assert "verdicts are by the metric" in str(result)
    tight = learned({DDP: [1.0, 1.0], DDP_AGAIN: [1.0, 1.0], PLAN: losses}, metrics=found)
    assert rows(tight)[PLAN].judged_by == "loss"
    assert row.metric_text in curves_text(tight, "a model", "2026-11-26 10:00 UTC")
    assert "judged by the metric by a margin of 0.5 %" in str(result.measured(plan(), PLAN, "job").accuracy_measured)


def test_a_plan_whose_loss_is_not_finite_is_worse_and_still_a_row() -> None:
    result = learned({DDP: [1.0, 1.0], DDP_AGAIN: [1.0, 1.0], PLAN: [1.0, math.nan]})
    row = rows(result)[PLAN]
    assert (row.last_loss, row.against_ddp, row.ci95, row.verdict) == (None, None, None, "worse")
    assert "its loss is not finite" in str(result)
    assert "curve" not in str(result.measured(plan(), PLAN, "job").accuracy_measured)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 5}, "--learn: found 5 steps, expected at least 10"),
        ({"steps": 10.5}, r"--learn: found 10\.5 steps, expected at least 10"),
        ({"steps": 20, "seeds": 2.5}, r"--seeds: found 2\.5"),
        ({"steps": 20, "margin_percent": "1"}, "--margin: found '1'"),
        ({"steps": 20, "seeds": 0}, "--seeds: found 0, expected at least 1"),
        ({"steps": 20, "seeds": -3}, "--seeds: found -3"),
        ({"steps": 20, "margin_percent": 0.0}, "--margin: found 0"),
        ({"steps": 20, "margin_percent": math.nan}, "--margin: found nan"),
    ],
)
def test_options_that_nothing_can_be_learnt_with(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Learn(**options)


def test_models_that_do_not_fit_train_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """By what the machine, or the control group, can still give to each of its ranks."""
    monkeypatch.setattr("planner.comparison.learning.available_bytes", lambda: 6 << 30)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert memory_reason(1 << 30, 3, 4 << 30) is None
    assert "3 models with their optimizers take about 3.0 GiB on a rank, which has 3.0 GiB free" in str(
        memory_reason(1 << 30, 3, free_memory_bytes(torch.device("cpu"), 8))
    )


def test_batches_are_told_apart() -> None:
    def batch(**changes: Any) -> dict[str, Any]:
        made = {"x": torch.arange(6.0).reshape(2, 3), "y": [torch.tensor([1, 2]), "text"], "n": 3}
        return made | {"z": np.zeros((2, 2)), "objects": np.array([object()])} | changes

    assert batch_digest(batch()) == batch_digest(batch())
    changes: list[dict[str, Any]] = [{"x": torch.arange(6.0)}, {"y": [torch.tensor([1, 3]), "text"]}, {"n": 4}]
    changes += [{"z": np.array([[0.0, 0.0], [0.0, 1.0]])}, {"n": np.float32(3.5)}]
    assert len({batch_digest(batch(**one)) for one in [{}, *changes]}) == 6


def built_job() -> BuiltJob:
    model = torch.nn.Linear(3, 2)
    job = TrainingJob(model=model, loss=lambda *_: torch.zeros(()), batch=lambda *_: None, optimizer=torch.optim.SGD)
    return BuiltJob("job.py:job", job, torch.optim.SGD(model.parameters()), torch.device("cpu"))


def test_checkpoints_as_scripts_write_them(tmp_path: Path) -> None:
    """Of DDP or a compiled model, too; others are refused by what differs."""
    built, path = built_job(), tmp_path / "run.pt"
    own = {name: torch.full_like(tensor, 7.0) for name, tensor in built.model.state_dict().items()}
    wrapped = {f"_orig_mod.module.{name}": tensor for name, tensor in own.items()}
    torch.save({"model_state_dict": wrapped, "step": 100}, path)
    assert load_checkpoint(str(path), built) == 100
    assert all(bool((parameter == 7.0).all()) for parameter in built.model.parameters())
    for changes, message in (
        ({"model": torch.nn.Linear(4, 2).state_dict()}, r"Error\(s\) in .* size mismatch for weight"),
        ({"step": torch.tensor(100)}, r"found step tensor\(100\), expected a whole number; save int"),
        ({"optimizer": "sgd"}, "expected a checkpoint of job.py:job"),
    ):
        torch.save({"model": own, **changes}, path)
        with pytest.raises(InputError, match=message):
            load_checkpoint(str(path), built)


def plan() -> Plan:
    problem = make_problem(usual_profile())
    return lower(problem, make_schedule(problem, "wire:int8"))


def test_contestants_are_ddp_first_and_each_plan_once() -> None:
    one, problem = plan(), make_problem(usual_profile())
    assert [c.name for c in make_contestants({PLAN: one}, None, ())] == [DDP, DDP_AGAIN, PLAN]
    plans = named_plans(["a.json", "b.json"], [one, one])
    names = [c.name for c in make_contestants(plans, problem, ["wfbp"])]
    assert names == [DDP, DDP_AGAIN, "wfbp", "a.json", "b.json"]
    with pytest.raises(InputError, match=r"found a\.json twice"):
        named_plans(["a.json", "a.json"], [one, one])
    other = replace(one, world=replace(one.world, ranks=2 * one.world.ranks, nodes=None))
    with pytest.raises(InputError, match="expected all for one number of ranks"):
        make_contestants({"a.json": one, "b.json": other}, None, ())


@pytest.mark.parametrize(
    ("changes", "least"),
    [
        ({"from_step": 280}, 312),
        ({"accuracy": "relaxed", "delay": DelaySpec(steps=4)}, 556),
        ({"accuracy": "relaxed", "outer": OuterSpec(every=30, warmup_steps=500)}, 590),
        ({"accuracy": "relaxed", "outer": OuterSpec(every=101)}, 303),
    ],
)
def test_exact_first_steps_leave_enough_to_learn_by(changes: dict[str, Any], least: int) -> None:
    """Behind a checkpoint there are none, and so none that training from it would repeat."""
    one = replace(plan(), **changes)
    assert make_contestants({PLAN: one}, None, (), least)[-1].plan == one
    with pytest.raises(InputError, match=f"expected at least {least} for plan, which (begins with|repeats every) "):
        make_contestants({PLAN: one}, None, (), least - 1)
    steady = make_contestants({PLAN: one}, None, (), 303, begun=True)[-1].plan
    assert steady is not None
    assert steady.first_steps == 0


def test_steps_that_repeat_count_by_their_mean() -> None:
    """Behind the exact ones, in whole periods; others singly, but for the first of each block."""
    one = replace(plan(), accuracy="relaxed", outer=OuterSpec(every=10, warmup_steps=20))
    times_us = [5.0] * 20 + [19.0 if number % 10 == 9 else 1.0 for number in range(35)]
    assert counted_us(BucketVariant(name=PLAN, kind="plan", plan=one), times_us, [0]) == pytest.approx([2.8])
    late = BucketVariant(name=PLAN, kind="plan", plan=replace(plan(), from_step=4))
    assert counted_us(late, [*map(float, range(12))], [0, 7]) == [4.0, 5.0, 6.0, 10.0, 11.0]


def test_what_was_measured_is_kept_but_changes_no_hash() -> None:
    one = plan()
    kept = learned({DDP: [1.0] * 2, DDP_AGAIN: [1.0] * 2, PLAN: [1.11, 1.1101]}).measured(one, PLAN, "j:j")
    assert kept.digest() == one.digest()
    assert parse_plan(kept.to_document()) == kept
    assert "not measured on this job" in str(cost_line(one))
    for same in (kept, replace(kept, notes=("read",), fallback=one.uncompressed())):
        assert "accuracy: measured, worse than DDP: last loss +11.0" in str(cost_line(same))
        assert "worse than DDP" in page_text(same)
    assert "measured before the plan was changed, not since" in str(cost_line(replace(kept, from_step=5)))
    assert cost_line(kept.uncompressed()) is None


@pytest.mark.parametrize("name", [name for name in STRATEGIES if name not in ("lap", "lpp")])
def test_a_plan_read_back_is_its_schedule(name: str) -> None:
    """Of all strategies whose steps are synchronous."""
    problem = make_problem(usual_profile())
    try:
        schedule = make_schedule(problem, name)
    except InputError:
        pytest.skip("the usual profile has no cost for it")
    made = lower(problem, schedule)
    if made.accuracy == "relaxed" or made.sharded:
        with pytest.raises(InputError, match="expected synchronous buckets"):
            schedule_of(problem, made)
        return
    assert schedule_of(problem, made) == schedule


def test_owners_of_norms_and_operators_are_read_back() -> None:
    document = usual_document(cluster=halves_cluster())
    layers = [{"name": name, "norm_us": 300.0} for name in ("g1", "g3")]
    shapes = [
        {"shape": shape, "operator_us": 500.0, "result_bytes": 20, "parameters": [name]}
        for name, shape in (("g1", [100, 50]), ("g3", [500, 400]))
    ]
    document["compute"] |= {"update_us": 2000.0, "norms": {"optimizer": "LARS", "layers": layers}}
    document["compute"]["operator"] = {"optimizer": "Muon", "shapes": shapes}
    made = optimize(parse_profile(document))
    found = schedule_of(make_problem(parse_profile(document)), made)
    assert (found.norms, found.operators) != (None, None)
    again = lower(make_problem(parse_profile(document)), found).updates
    assert again is not None
    assert made.updates is not None
    assert (again.norms, again.operator) == (made.updates.norms, made.updates.operator)
    problem = make_problem(parse_profile(document))
    for rule in ("longest_first", "round_robin"):  # none of which are what would be planned
        schedule = make_schedule(problem, f"operators:{rule}")
        assert schedule_of(problem, lower(problem, schedule)) == schedule


def test_steps_of_a_named_cluster() -> None:
    """Those of DDP and of the plan, as `simulate` predicts them there."""
    one, profile = plan(), usual_profile()
    contestants = make_contestants({PLAN: one}, None, ())
    assert predicted_on(None, profile, contestants) is None
    slow = predicted_on("k80-10gbe", profile, contestants)
    assert slow is not None
    assert set(slow) == {DDP, DDP_AGAIN, PLAN}
    assert slow[DDP] == slow[DDP_AGAIN] > 0.0
    with pytest.raises(InputError, match="--on: found no profile"):
        predicted_on("k80-10gbe", None, contestants)


def test_the_page_has_curves_and_the_table() -> None:
    result = learned({DDP: [1.0, 1.0], DDP_AGAIN: [1.0, 1.0], "<plan>": [1.1, 1.101]})
    text = curves_text(result, "a model", "2026-11-26 10:00 UTC")
    assert "&lt;plan&gt;" in text
    assert "<plan>" not in text
    assert "Loss over steps" in text
    assert "worse" in text
