"""An error inside of one rank is that rank's own: neither another rank nor the network is blamed for it."""

from __future__ import annotations

import blame_checks
import pytest

from planner.jobs.launch import LocalWorld, run_ranks


@pytest.fixture(scope="module")
def everyone() -> list[dict[str, tuple[str, str]]]:
    """What every rank of four said."""
    return run_ranks(LocalWorld(ranks=4), blame_checks.blamed)


@pytest.mark.parametrize("fault", blame_checks.FAULTS)
def test_what_a_rank_does_wrong_itself_is_raised_as_it_is(
    everyone: list[dict[str, tuple[str, str]]], fault: str
) -> None:
    expected = blame_checks.FAULTS[fault].error
    error, note = everyone[blame_checks.FAULTY][fault]
    assert error == f"{type(expected).__name__}: {expected}"
    if fault != "before a forward":  # on this thread, where the traceback tells
        assert note.startswith(f"rank {blame_checks.FAULTY}: ")
        assert "bucket 0 (" in note
        assert "this error came up in this process itself" in note


def test_what_a_hook_of_the_users_raises_is_the_users(everyone: list[dict[str, tuple[str, str]]]) -> None:
    assert everyone[blame_checks.FAULTY]["in the user's hook"] == ("RuntimeError: the user's own", "")


@pytest.mark.parametrize("fault", [*blame_checks.FAULTS, "in the user's hook"])
def test_the_other_ranks_say_that_one_is_missing(everyone: list[dict[str, tuple[str, str]]], fault: str) -> None:
    for rank, results in enumerate(everyone):
        if rank != blame_checks.FAULTY:
            error, note = results[fault]
            if fault == "in the user's hook":  # that rank gives the step up in an orderly way, and says so
                assert "an exception ended the backward of 1 of 4 ranks" in error
            else:
                assert error.startswith(f"CommunicationError: rank {rank}: "), error
                assert "another rank died" in error
            assert note == ""
