"""Ranks that come late, never, die or raise: an error within the deadline, and no process left behind."""

from __future__ import annotations

import multiprocessing
import re

import fault_checks
import pytest

from planner.cli.app import main
from planner.jobs.launch import LocalWorld, run_ranks
from runtime.comm.world import World
from runtime.errors import EnvironmentFailure, InputError

TWO = LocalWorld(ranks=2)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_collective_sums_exactly(ranks: int) -> None:
    for results in run_ranks(LocalWorld(ranks=ranks), fault_checks.sums_are_exact):
        assert len(results) >= 18
        assert all(results.values()), results


def test_a_late_rank_is_named_within_the_deadline() -> None:
    message, waited_s = run_ranks(TWO, fault_checks.late_rank)[0]
    assert "rank 0: bucket 0 (all_reduce/library" in message
    assert "deadline 3 s" in message
    assert 2.0 < waited_s < 9.0


def test_a_rank_that_is_busy_for_long_is_waited_for_and_that_is_said_once() -> None:
    [said], _ = run_ranks(TWO, fault_checks.busy_rank)
    assert re.match(r"rank 0: bucket 0 \(all_reduce/library, .*\) has waited \d+ s for rank 1, busy outside", said)
    assert "it is waited for up to 120 s, the timeout of the process group" in said


@pytest.mark.parametrize("algorithm", ["library", "tree"])
def test_a_stopped_rank_is_not_waited_for_until_the_timeout_of_the_group(algorithm: str) -> None:
    said, _ = run_ranks(TWO, fault_checks.stopped_rank, algorithm)
    assert re.search(r"^rank 0: .* did not complete: rank 1 \(process \d+\) is stopped \(SIGSTOP\), and for", said)


def test_workers_are_forked_from_ranks_whose_sessions_are_gone() -> None:
    assert run_ranks(TWO, fault_checks.forked_behind_a_session) == [True, True]


def test_a_rank_that_never_attaches_is_given_up_within_the_deadline() -> None:
    message, waited_s = run_ranks(TWO, fault_checks.missing_rank)[0]
    assert "within 3 s" in message
    assert waited_s < 9.0


def test_a_killed_rank_ends_the_others() -> None:
    with pytest.raises(EnvironmentFailure, match="rank 1 was killed by SIGKILL"):
        run_ranks(TWO, fault_checks.killed_rank)
    assert not multiprocessing.active_children()


def test_a_rank_that_raises_is_shown_with_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("planner.jobs.launch.GRACE_S", 2.0)  # the other rank waits for it
    with pytest.raises(EnvironmentFailure, match=r"rank 1 raised LookupError: on purpose(.|\n)*fault_checks"):
        run_ranks(TWO, fault_checks.raising_rank)
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("timeout_s", ["0", "-3", "nan", "inf", "1e9", "0.01"])
def test_a_deadline_that_is_none_is_refused_before_anything_starts(
    timeout_s: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments in (["profile", "absent.py:job"], ["run", "absent.py:job"], ["demo"]):
        with pytest.raises(SystemExit) as ended:
            main([*arguments, "--timeout-s", timeout_s])
        assert ended.value.code == 2
        expected = f"planner: --timeout-s: found {float(timeout_s):g}, expected a deadline of 1 to 604800 seconds\n"
        assert capsys.readouterr().err == expected
    with pytest.raises(InputError, match="timeout_s: found"):
        World.join(timeout_s=float(timeout_s))


def test_one_rank_trains_as_without_a_plan() -> None:
    [(steps, iteration_us, equal)] = run_ranks(LocalWorld(ranks=1), fault_checks.alone)
    assert steps == 4
    assert iteration_us > 0
    assert equal
