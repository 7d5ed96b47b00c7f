"""Random training scripts with plans of each class, against DDP; a failing one is shrunk and printed."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import pytest
from launches import Failure, first_failure, shrunk
from script_checks import check_scripts
from script_faults import FAULTS, find_faults
from scripts import KINDS, Script, draw_scripts, from_line, simpler

from planner.jobs.launch import LocalWorld, run_ranks

SCRIPTS, SEED = 100, 0
"""How many random scripts, and which, where no option says otherwise."""
ROOT, SOURCES = Path(__file__).parents[2], ("planner", "runtime", "tests/fuzz")
"""What decides whether scripts hold."""
BATCH_SCRIPTS = 100
"""Scripts per start of processes."""
ENOUGH, MOST = 20, 0.7
"""Of so many scripts of a kind only this share may be refused: more, and they would test little."""

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # DDP's advice, from the ranks

FOUND = (
    # Two forwards before a backward: buffers that followed rank 0 in between had changed, as autograd counts.
    "exact model=norm: loop forwards 2; train 1",
    # Gradients that are added up over steps and kept, whose memory the session changed: for hooks, with its buckets.
    "exact: train 1; loop zero skip; keep itself; hook post look 0; train 1; unhook; train 2",
    "exact: train 2; loop zero zeros; keep view; switch 1; train 2",
    "exact: train 2; loop zero zeros; keep itself; reattach 1; train 2",
    # A forward that is traced while its parameters have sharded gradients.
    "sharded dtype=float64: train 1; loop zero skip; compile around aot_eager; train 2",
    # The memory of a gradient that has none of its own.
    "sharded dtype=float64: train 2; keep storage; train 2",
)
"""Scripts that failed once."""


class Held:
    """Lines of scripts that held with the present sources, in a file, so that an interrupted run continues."""

    def __init__(self, path: str) -> None:
        """Begin anew where the file is of other sources; without a path, remember nothing over runs."""
        self._path = Path(path) if path else None
        sources = sorted(one for folder in SOURCES for one in (ROOT / folder).rglob("*.py"))
        digest = hashlib.sha256(b"".join(one.read_bytes() for one in sources)).hexdigest()
        known = self._path.read_text().splitlines() if self._path and self._path.exists() else []
        self.lines = set(known[1:]) if known[:1] == [digest] else set[str]()
        if self._path and not self.lines:
            self._path.write_text(f"{digest}\n")

    def add(self, lines: Iterable[str]) -> None:
        """Remember more."""
        new = set(lines) - self.lines
        self.lines |= new
        if self._path:
            with self._path.open("a") as file:
                file.writelines(f"{line}\n" for line in sorted(new))


def first(kinds_refused: Path, scripts: list[Script]) -> Failure[Script] | None:
    """The first that fails, in a start of ranks for each number of them."""
    check = partial(check_scripts, kinds_refused)
    for ranks in sorted({script.ranks for script in scripts}):
        failure = first_failure(check, [one for one in scripts if one.ranks == ranks], ranks)
        if failure is not None:
            return failure
    return None


@pytest.mark.parametrize("most", [8, pytest.param(10**6, marks=pytest.mark.long)], ids=["some", "all"])
@pytest.mark.timeout(3600)  # also of the many that `make fuzz` asks for
def test_random_scripts_end_as_with_ddp_or_are_refused(
    request: pytest.FixtureRequest, tmp_path: Path, most: int
) -> None:
    replay = request.config.getoption("--fuzz-replay", "")
    if replay.startswith("{"):
        pytest.skip("a model is replayed")
    count, seed = request.config.getoption("--fuzz-scripts", SCRIPTS), request.config.getoption("--fuzz-seed", SEED)
    scripts = [from_line(line) for line in ([replay] if replay else FOUND)]
    if not replay:
        scripts += draw_scripts(count, seed)[:most]
    scripts.sort(key=lambda script: script.ranks)
    find, held = partial(first, tmp_path / "refused"), Held(request.config.getoption("--fuzz-resume", ""))
    scripts = [script for script in scripts if script.line() not in held.lines]
    for start in range(0, len(scripts), BATCH_SCRIPTS):
        failure = find(scripts[start : start + BATCH_SCRIPTS])
        if failure is not None:
            pytest.fail(f"seed {seed}: {failure if replay else shrunk(failure, find, simpler)}", pytrace=False)
        held.add(script.line() for script in scripts[start : start + BATCH_SCRIPTS])
    refused = Counter((tmp_path / "refused").read_text().split())
    print(f"seed {seed}: {len(scripts)} scripts, {len(held.lines)} held in all, refused: {dict(refused)}")
    for kind, drawn in Counter(script.kind for script in scripts).items():
        assert drawn < ENOUGH or refused[kind] <= MOST * drawn, f"{refused[kind]} of {drawn} {kind} scripts are refused"


def test_scripts_survive_their_line_and_get_simpler() -> None:
    scripts = draw_scripts(200, 1)
    assert {script.kind for script in scripts} == set(KINDS)
    assert {script.ranks for script in scripts} == {2, 3}
    for script in scripts:
        assert from_line(script.line()) == script
        assert all(one.weight < script.weight for one in simpler(script))


@pytest.mark.long
def test_deliberate_faults_are_found() -> None:
    found = run_ranks(LocalWorld(ranks=2), find_faults)[0]
    assert found == {name: [False, True] for name in FAULTS}
