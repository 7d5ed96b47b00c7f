"""Random models, loops and plans on two ranks, against DDP bit for bit; a failing case is shrunk and printed."""

from __future__ import annotations

import os

import model_checks
import pytest
from launches import Failure, first_failure, shrunk
from model_shrinking import simpler
from models import RANKS, Case, draw_cases, from_line

from planner.jobs.launch import LocalWorld, run_ranks

MODELS, SEED = 40, 0
"""How many random models, and which, where no option says otherwise."""
BATCH_CASES = 50
"""Cases per start of processes."""

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # DDP's advice, from the ranks

FOUND = (
    # A reentrant checkpoint below outputs in a record that torch does not look into: backward seemed to end too early.
    '{"nodes":[{"kind":"linear","inputs":[0,0],"checkpoint":"reentrant","skip":"rank_0"}],"container":"record"}',
    # A checkpoint that ignores an input: hooks run without a gradient.
    '{"nodes":[{"kind":"linear","inputs":[0,0]},{"kind":"linear","inputs":[0,0]},'
    '{"kind":"linear","inputs":[2,1],"checkpoint":"reentrant"}]}',
    # A backward that raised, then a step in which no rank uses what it had touched.
    '{"nodes":[{"kind":"linear","inputs":[0,0],"skip":"odd_steps"}],"optimizer":"momentum","steps":[{"raises":0},{}]}',
)
"""Cases that failed once."""


def first(cases: list[Case]) -> Failure[Case] | None:
    """The first that fails, in one start of two ranks."""
    return first_failure(model_checks.check_cases, cases, RANKS)


@pytest.mark.parametrize("most", [5, pytest.param(10**6, marks=pytest.mark.long)], ids=["some", "all"])
def test_random_models_train_like_ddp(request: pytest.FixtureRequest, most: int) -> None:
    replay = request.config.getoption("--fuzz-replay", "")
    if replay and not replay.startswith("{"):
        pytest.skip("a script is replayed")
    count, seed = request.config.getoption("--fuzz-models", MODELS), request.config.getoption("--fuzz-seed", SEED)
    cases = [from_line(line) for line in ([replay] if replay else FOUND)]
    if not replay:
        cases += draw_cases(count, seed)[:most]
    for start in range(0, len(cases), BATCH_CASES):
        failure = first(cases[start : start + BATCH_CASES])
        if failure is not None:
            pytest.fail(f"seed {seed}: {failure if replay else shrunk(failure, first, simpler)}", pytrace=False)
    print(f"seed {seed}: {len(cases)} models")


def test_cases_survive_their_line_and_get_simpler() -> None:
    cases = draw_cases(30, 1)
    assert len(set(cases)) > 25
    for case in cases:
        assert from_line(case.line()) == case
        assert all(one.weight < case.weight for one in simpler(case))


@pytest.fixture(scope="module")
def pair() -> tuple[dict[str, int | None], int]:
    """What rank 0 of two says of deliberate faults."""
    lines = [case.line() for case in draw_cases(60, 2)]
    return run_ranks(LocalWorld(ranks=RANKS), model_checks.faults_and_exceptions, lines)[0]


@pytest.mark.long
def test_deliberate_faults_are_found(pair: tuple[dict[str, int | None], int]) -> None:
    found, _ = pair
    assert set(found) == set(model_checks.FAULTS)
    assert None not in found.values(), found


@pytest.mark.long
def test_ranks_outlive_detaching_after_an_exception(pair: tuple[dict[str, int | None], int]) -> None:
    assert pair[1] == 5
