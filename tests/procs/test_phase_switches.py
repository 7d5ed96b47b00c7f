"""Plans in phases on ranks: weights equal those of one run for each phase."""

from __future__ import annotations

import phase_checks

from planner.jobs.launch import LocalWorld, run_ranks


def test_weights_equal_a_run_for_each_phase_bit_for_bit() -> None:
    by_step, by_call = [0, 0, 1, 1, 2, 2, 2, 2], [0, 0, 0, 1, 1, 2, 2, 2]
    for rank in run_ranks(LocalWorld(ranks=2), phase_checks.check):
        for resumes in (False, True):
            assert rank["by step", resumes] == (True, by_step, 3)
            assert rank["by call", resumes] == (True, by_call, 3)
        assert "found a plan without phases" in rank["without phases"]
        assert "phase 1 of the plan: the plan has a delay" in rank["a later delay"]
        in_backward, apart, *after = rank["failed"]
        assert "while a backward runs" in in_backward
        assert apart.startswith("PlanMismatch")
        assert after == [1, True]
        assert not rank["trial of the phase before"]
