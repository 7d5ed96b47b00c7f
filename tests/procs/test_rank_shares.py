"""Shares of the batch on real ranks, of which one is slow: from a profile to training."""

from __future__ import annotations

import pytest
import share_checks

from planner.comparison.contestants import Learn
from planner.comparison.learned import summarize_learned
from planner.comparison.report import summarize
from planner.jobs.launch import LocalWorld, run_ranks

REFUSED = (
    "session.sampler: found a plan without shares, expected global_batch",
    "session.sampler: found global_batch=1, fewer samples than the 2 ranks",
    "session.sampler: found global_batch=13, and shares of 12 samples in the plan",
    "ShareSampler: found 1 samples for 2 ranks, expected at least one for each",
)


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_profile_gives_shares_that_train_as_one_process(whole: bool) -> None:
    found, other = run_ranks(LocalWorld(ranks=2), share_checks.profiled_and_trained, whole)
    profile, plan = found["profile"], found["plan"]
    assert profile == other["profile"]
    assert profile.world.batch_per_rank == 16
    for rank, expected_s in zip(profile.compute.by_rank, share_checks.SAMPLE_S, strict=True):
        assert rank.sample_us == pytest.approx(1e6 * expected_s, rel=0.2)
        assert rank.fixed_us == pytest.approx(1e6 * share_checks.FIXED_S, rel=0.6)
        assert 16 <= rank.sample_bytes <= 64  # differences from targets, of float64, and what is made of them
    assert sum(plan.shares.values()) == share_checks.GLOBAL_BATCH
    assert plan.shares["0"] == pytest.approx(2 * plan.shares["1"], abs=3)
    assert max(found["apart"], other["apart"]) < 1e-12


@pytest.mark.parametrize("shares", [(11, 5), (6, 18)])
def test_batches_of_jobs_follow_the_shares_of_a_plan(shares: tuple[int, int]) -> None:
    """In `planner run` and `planner compare`, with and without --learn; of as many samples as without, or of more."""
    ranks = run_ranks(LocalWorld(ranks=2), share_checks.jobs_batches_follow, shares)
    assert max(one["apart"] for one in ranks) < 1e-12
    assert len({one["same weights"] for one in ranks}) == 1
    for run in ("losses", "in phases"):
        (first, expected), (second, _) = (one[run] for one in ranks)
        assert [(a + b) / 2 for a, b in zip(first, second, strict=True)] == pytest.approx(expected, rel=1e-12)
    found = {row.name: row for row in summarize([one["measured"] for one in ranks]).rows}
    assert (found["plan:equal"].same_training, found["plan"].same_training) == (True, None)
    assert all(row.failure is None for row in found.values())
    learnt = summarize_learned([one["learnt"] for one in ranks], Learn(steps=10, seeds=1))
    assert learnt.rows[-1].against_ddp == pytest.approx(0.0, abs=1e-9)


def test_a_comparison_shows_who_waits_and_why() -> None:
    comparison = summarize(run_ranks(LocalWorld(ranks=2), share_checks.compared, f"{share_checks.__file__}:job"))
    plan = next(row for row in comparison.rows if row.name == "plan")
    longer_us = 16 * 1e6 * (share_checks.SAMPLE_S[1] - share_checks.SAMPLE_S[0])
    assert [(row.last, row.cause) for row in plan.arrivals] == [(0, None), (1, "compute")]
    assert [one.last_rank for one in plan.messages] == [1]
    assert plan.messages[0].waited_us == pytest.approx(longer_us, rel=0.5)
    assert "plan: arrival of each rank at each message" in str(comparison)
    assert all(not row.arrivals for row in comparison.rows if row is not plan)


def test_shares_follow_measured_times_from_pass_to_pass() -> None:
    ranks = run_ranks(LocalWorld(ranks=2), share_checks.following)
    first, second = ranks
    assert first["shares"] == second["shares"]
    assert first["shares"] == [(6, 6)] * 2 + [(8, 4)]
    assert [one["share"] for one in ranks] == [8, 4]
    for drawn in zip(first["drawn"], second["drawn"], strict=True):
        assert sorted([*drawn[0], *drawn[1]]) == list(range(48))
    for one in ranks:  # what is left of a pass is drawn again, with its shares
        assert one["continued shares"] == (8, 4)
        assert one["continued"] == one["drawn"][-1][2 * one["share"] :]
        assert one["last"] == [(1, 1.0) if one is second else (2, 0.0)]  # in place of a batch that it has not
        assert [problem.startswith(said) for problem, said in zip(one["problems"], REFUSED, strict=True)] == [True] * 4


def test_shares_stay_where_the_run_may_only_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLANNER", "report")
    ranks = run_ranks(LocalWorld(ranks=2), share_checks.following)
    assert all(one["shares"] == [(6, 6)] * 3 for one in ranks)
