"""Random training scripts with plans of each class, against DDP; a failing one is shrunk and printed."""

from __future__ import annotations

import os

import pytest
import script_checks
from launches import Failure, first_failure, shrunk
from script_faults import FAULTS, find_faults
from scripts import KINDS, Script, draw_scripts, from_line, simpler

from planner.launch import LocalWorld, run_ranks

SCRIPTS, SEED = 60, 0
"""How many random scripts, and which, where no option says otherwise."""
BATCH_SCRIPTS = 100
"""Scripts per start of processes."""

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # DDP's advice, from the ranks

FOUND = (
    # Two forwards before a backward: buffers that followed rank 0 in between had changed, as autograd counts.
    "exact model=norm: loop forwards 2; train 1",
)
"""Scripts that failed once."""


def first(scripts: list[Script]) -> Failure[Script] | None:
    """The first that fails, in a start of ranks for each number of them."""
    for ranks in sorted({script.ranks for script in scripts}):
        failure = first_failure(script_checks.check_scripts, [one for one in scripts if one.ranks == ranks], ranks)
        if failure is not None:
            return failure
    return None


@pytest.mark.timeout(900)
def test_random_scripts_end_as_with_ddp_or_are_refused(request: pytest.FixtureRequest) -> None:
    replay = request.config.getoption("--fuzz-replay", "")
    if replay.startswith("{"):
        pytest.skip("a model is replayed")
    count, seed = request.config.getoption("--fuzz-scripts", SCRIPTS), request.config.getoption("--fuzz-seed", SEED)
    scripts = [from_line(line) for line in ([replay] if replay else FOUND)]
    if not replay:
        scripts += draw_scripts(count, seed)
    scripts.sort(key=lambda script: script.ranks)
    for start in range(0, len(scripts), BATCH_SCRIPTS):
        failure = first(scripts[start : start + BATCH_SCRIPTS])
        if failure is not None:
            pytest.fail(f"seed {seed}: {failure if replay else shrunk(failure, first, simpler)}", pytrace=False)
    print(f"seed {seed}: {len(scripts)} scripts")


def test_scripts_survive_their_line_and_get_simpler() -> None:
    scripts = draw_scripts(200, 1)
    assert {script.kind for script in scripts} == set(KINDS)
    assert {script.ranks for script in scripts} == {2, 3}
    for script in scripts:
        assert from_line(script.line()) == script
        assert all(one.weight < script.weight for one in simpler(script))


def test_deliberate_faults_are_found() -> None:
    found = run_ranks(LocalWorld(ranks=2), find_faults)[0]
    assert found == {name: [False, True] for name in FAULTS}
