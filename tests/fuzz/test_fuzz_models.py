"""Random models, loops and plans on two ranks, against DDP bit for bit; a failing case is shrunk and printed."""

from __future__ import annotations

import json
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import model_checks
import pytest
from model_shrinking import simpler
from models import RANKS, Case, draw_cases, from_line

from planner.launch import LocalWorld, run_ranks
from runtime.errors import PlannerError

MODELS, SEED = 40, 0
"""How many random models, and which, where no option says otherwise."""
BATCH_CASES = 50
"""Cases per start of processes."""
SHRINKING_S = 300.0
"""How long a failing case is made smaller."""

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


@dataclass(frozen=True)
class Failure:
    """A case that failed."""

    case: Case
    said: str

    def __str__(self) -> str:
        again = f"python -m pytest tests/fuzz/{Path(__file__).name} --fuzz-replay '{self.case.line()}'"
        return f"{self.said}\n{again}"


def first_failure(cases: list[Case]) -> Failure | None:
    """Runs the cases in one start of two ranks, up to the first that fails."""
    with tempfile.TemporaryDirectory() as folder:
        died = ""
        try:
            run_ranks(LocalWorld(ranks=RANKS), model_checks.check_cases, [case.line() for case in cases], folder)
        except PlannerError as error:
            died = f"{type(error).__name__}: {error}"
        told = [_verdicts(Path(folder, f"rank-{rank}")) for rank in range(RANKS)]
    for index, case in enumerate(cases):
        said = [_said(rank, verdicts, index) for rank, verdicts in enumerate(told)]
        if any(said):
            return Failure(case, "\n".join([*filter(None, said), *filter(None, [died])]))
    assert not died, died  # after the last case
    return None


def _said(rank: int, verdicts: list[str | None], index: int) -> str | None:
    if index >= len(verdicts):
        return f"rank {rank}: hung or died"
    return verdicts[index] and f"rank {rank}: {verdicts[index]}"


def _verdicts(path: Path) -> list[str | None]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def shrunk(failure: Failure) -> Failure:
    """The smallest case on the way down that still fails; each start of ranks tries all smaller ones in turn."""
    deadline = time.monotonic() + SHRINKING_S
    while time.monotonic() < deadline:
        smaller = first_failure(simpler(failure.case))
        if smaller is None:
            break
        failure = smaller
    return failure


def test_random_models_train_like_ddp(request: pytest.FixtureRequest) -> None:
    replay = request.config.getoption("--fuzz-replay", "")
    count, seed = request.config.getoption("--fuzz-models", MODELS), request.config.getoption("--fuzz-seed", SEED)
    cases = [from_line(line) for line in ([replay] if replay else FOUND)]
    if not replay:
        cases += draw_cases(count, seed)
    for start in range(0, len(cases), BATCH_CASES):
        failure = first_failure(cases[start : start + BATCH_CASES])
        if failure is not None:
            pytest.fail(f"seed {seed}: {failure if replay else shrunk(failure)}", pytrace=False)
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


def test_deliberate_faults_are_found(pair: tuple[dict[str, int | None], int]) -> None:
    found, _ = pair
    assert set(found) == set(model_checks.FAULTS)
    assert None not in found.values(), found


def test_ranks_outlive_detaching_after_an_exception(pair: tuple[dict[str, int | None], int]) -> None:
    assert pair[1] == 5
