"""`planner demo`: what it asks for, and what it says of a gain, of noise, and of a link that is not held."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.comparison.measure import Measured, Record
from planner.comparison.variants import DDP, NO_COMMUNICATION, PLAN, BucketVariant, make_lineup
from planner.decide.optimize import optimize
from planner.jobs.rank_options import RankOptions
from planner.model.problem import make_problem
from planner.rehearse.demo import DemoResult, demo_lines, make_request, summarize_demo
from planner.rehearse.ranks import Rehearsed
from planner.rehearse.scale import Scale
from planner.strategies.baselines import ddp_buckets
from runtime.errors import InputError

TUNED = {"ddp:best(2 MiB)": 65_000.0, "ddp:best(5 MiB)": 70_000.0}


def made_up(ddp_ms: list[float], plan_ms: list[float], other_cores: float = 0.0) -> DemoResult:
    """Return the result of two ranks that measured one step a round of DDP and of the plan."""
    asked = make_request(RankOptions(), 1.2)
    problem = make_problem(asked.profile, asked.cluster)
    plan = optimize(asked.profile, asked.cluster)
    variants: list[BucketVariant] = list(make_lineup(plan, problem, (), ()).variants)
    times_ms = {NO_COMMUNICATION: [62.0] * len(ddp_ms), DDP: ddp_ms, PLAN: plan_ms}
    records = [
        Record(one, [[1e3 * step_ms] for step_ms in times_ms[one.name]], [[1.0]] * len(ddp_ms)) for one in variants
    ]
    figures = {"from_constants_us": {DDP: 80_000.0, **TUNED}, "late_us": {}}
    rank = Rehearsed(scale=Scale(dilate=10.0, shrink=1.0), measured=Measured(records), figures=figures, bounds={})
    return summarize_demo(asked, [rank, rank], other_cores)


def test_ddp_is_torch_s_default_and_its_last_bucket_waits_for_all_of_backward() -> None:
    asked = make_request(RankOptions(ranks=3), 1.2)
    assert (asked.shrink, asked.cluster.ranks, asked.only_default) == (1.0, 3, True)
    gradients = asked.profile.compute.gradients
    buckets = ddp_buckets([one.size_bytes for one in gradients], [0] * len(gradients))
    last = sum(one.size_bytes for one in gradients[-len(buckets[-1]) :])
    assert last > 10 * 2**20


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (RankOptions(ranks=1), "--ranks: found 1, expected 2 or more"),
        (RankOptions(device="cuda"), "--device: found cuda, expected cpu: the demo's accelerator is emulated"),
        (RankOptions(backend="mpi"), "--backend: found mpi, expected gloo"),
    ],
)
def test_options_that_an_acted_machine_has_no_use_for(options: RankOptions, message: str) -> None:
    with pytest.raises(InputError) as caught:
        make_request(options, 1.2)
    assert str(caught.value).startswith(message)


def test_a_gain_ends_with_what_to_type_next() -> None:
    result = made_up([80.0, 80.2, 80.1], [64.0, 64.1, 64.2])
    text, lines = "\n".join(demo_lines(result)), demo_lines(result)
    assert "planner's step is 1.25 times as fast as DDP's (95 % interval 1.2" in text
    assert "predicted to take 65 ms" in text
    assert "note:" not in text
    assert lines[-1].startswith("Next, type: ")
    bars = {line.split()[0]: (line.count("█"), line.count("░")) for line in lines if "ms a step" in line}
    assert bars["DDP"][0] == bars["planner"][0]
    assert bars["DDP"][1] > 4 * bars["planner"][1] > 0
    document = result.to_document()
    assert document["ratio"] == pytest.approx(0.8, abs=0.01)
    assert document["ratio_ci95"][1] < 1.0


def test_noise_is_named_and_no_gain_is_claimed() -> None:
    text = "\n".join(demo_lines(made_up([60.0, 100.0, 80.0], [90.0, 64.0, 70.0], other_cores=1.24)))
    assert "no difference beyond the noise between planner and ddp" in text
    assert "times as fast" not in text
    assert "note: other programs used 1.2 of the" in text


def test_a_link_that_is_not_held_is_named() -> None:
    assert "does not hold connections to a rate" in "\n".join(demo_lines(made_up([65.0, 65.0], [63.0, 63.0])))


def test_what_trains_otherwise_is_said() -> None:
    result = made_up([80.0, 80.2, 80.1], [64.0, 64.1, 64.2])
    comparison = replace(result.rehearsal.comparison, differences=("NOT THE SAME TRAINING: plan: on purpose",))
    result = replace(result, rehearsal=replace(result.rehearsal, comparison=comparison))
    assert "note: NOT THE SAME TRAINING: plan: on purpose" in "\n".join(demo_lines(result))
