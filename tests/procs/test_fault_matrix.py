"""Every cell of the fault matrix: the others end with exit code 3 within the deadline, and nothing is left behind."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from fault_cells import CELLS, DEADLINE_S, Cell, Outcome, interrupt, run_cell, table

AT_ONCE = 3
"""Cells that run side by side; for a good part of its time a cell waits for its deadline."""
SOME = (
    Cell("backward", "kill", "torchrun"),
    Cell("backward", "stop", ranks=3),
    Cell("backward", "stop", program="ddp"),
    Cell("compute", "raise", program="profile"),
    Cell("attach", "kill"),
    Cell("end", "raise"),
    Cell("links", "stop", "ranks", "profile"),
    Cell("forward", "kill", "ranks", "script", failing=0),
)
"""Cells with each phase, fault, start, program and number of ranks once; the others take long."""
SLACK_S = 20.0
"""For ending processes on a busy machine."""
TORCHRUN_S = 30.0
"""How long torchrun waits for a stopped rank to follow SIGTERM before it kills it."""


def shared_memory() -> set[str]:
    """Names of the shared memory of this machine."""
    return set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()


class Matrix:
    """Runs the chosen cells side by side, in their order."""

    def __init__(self, cells: list[Cell], folder: Path) -> None:
        self._before = shared_memory()
        self._pool = ThreadPoolExecutor(AT_ONCE)
        self._running: dict[Cell, Future[Outcome]] = {}
        for cell in cells:
            self._running[cell] = self._pool.submit(run_cell, cell, folder / str(cell))

    def shared_memory_left(self) -> set[str]:
        """Names that came while the cells ran, all of them."""
        for cell in self._running:
            self.outcome(cell)
        return shared_memory() - self._before

    def outcome(self, cell: Cell) -> Outcome:
        """Waits for one cell."""
        return self._running[cell].result()

    def close(self) -> None:
        """Prints the table (pytest shows it with -rP or -s)."""
        self._pool.shutdown(cancel_futures=True)
        done = {cell: f.result() for cell, f in self._running.items() if f.done() and not f.cancelled()}
        print(f"\n{table(done)}")


@pytest.fixture(scope="module")
def matrix(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Matrix]:
    """The cells of the tests that were asked for."""
    chosen = [getattr(item, "callspec", None) for item in request.session.items if item.fspath == request.fspath]
    running = Matrix([c.params["cell"] for c in chosen if c and "cell" in c.params], tmp_path_factory.mktemp("cells"))
    yield running
    running.close()


def last_error(outcome: Outcome) -> str:
    """What the command said, or the last line of a traceback."""
    lines = [
        line for line in outcome.text.splitlines() if re.match(r"(\[rank\d\]: )?(planner: |runtime\.errors\.)", line)
    ]
    assert lines, outcome.text
    return " ".join(lines)


LOCAL: dict[str, str] = {
    "kill": r"^planner: rank 1 was killed by SIGKILL",
    "stop": r"^planner: rank 1 was stopped \(SIGSTOP\) and did not continue",
}
SEEN: dict[str, str] = {
    "compute": r"rank 0: (starting a step together|the message behind a measured step did not complete)",
    "links": r"rank 0: timing the collectives, after 'warming up all_reduce'",
    "attach": r"rank 0: the broadcast of rank 0's parameters and buffers",
    "forward": r"rank 0: bucket 0 \(all_reduce/library, 4\.bias … 4\.weight\) did not complete",
    "backward": r"rank 0: bucket [01] \(all_reduce/library, \d\.bias … \d\.weight\) did not complete",
    "end": "",
}
"""What rank 0 says of each phase, in which rank 1 left it alone."""
GIVEN_UP = (
    r"bucket \d \(all_reduce/library, \d\.bias … \d\.weight\) did not complete|an exception ended the backward of 1 of "
)
"""What it says where rank 1 raised in backward and ended: whether it still heard of that depends on who is faster."""
BLAMED: dict[str, str] = {
    "compute": r"loss\(model, batch\) raised ArithmeticError: on purpose",
    "links": r"^planner: rank 1 raised ArithmeticError: on purpose$",
    "attach": r"^planner: rank 1 raised ArithmeticError: on purpose$",
    "forward": r"loss\(model, batch\) raised ArithmeticError: on purpose",
    "backward": r"loss\.backward\(\) raised ArithmeticError: on purpose",
    "end": r"optimizer\.step\(\) raised ArithmeticError: on purpose",
}


def expected_codes(cell: Cell) -> list[int]:
    """3, but for an error of the user's own function where the command runs it, and what Python or torchrun make."""
    if cell.start == "torchrun" or cell.program == "script":
        return [1] * (1 if cell.start == "torchrun" else cell.ranks - 1)
    of_user = cell.fault == "raise" and cell.phase not in ("links", "attach")
    return [2 if of_user else 3] if cell.start == "local" else [3] * (cell.ranks - 1)


def expected_words(cell: Cell) -> list[str]:
    """Patterns of the last error."""
    if cell.program == "ddp":
        return [LOCAL[cell.fault], r"rank 0: \S+: loss\.backward\(\), all_reduce of a bucket of DDP: lost another rank"]
    if cell.start == "local":
        if cell.fault == "raise":
            return [BLAMED[cell.phase]]
        # Of three ranks, one not next to the lost one may be the first to notice.
        seen = SEEN[cell.phase] if cell.ranks == 2 else SEEN[cell.phase].replace("rank 0", "rank [02]")
        return [LOCAL[cell.fault], seen]
    if cell.phase == "end":
        return [r"rank 0: making a process group, .*: rank 1 died or did not answer within 4 s"]
    if cell.phase == "backward" and cell.fault == "raise":
        return [GIVEN_UP]
    return [SEEN[cell.phase].replace("rank 0:", f"rank {1 - cell.failing}:")]


@pytest.mark.parametrize(
    "cell", [pytest.param(cell, marks=() if cell in SOME else pytest.mark.long) for cell in CELLS], ids=str
)
def test_the_others_end_in_time_name_the_failure_and_leave_nothing(cell: Cell, matrix: Matrix) -> None:
    outcome = matrix.outcome(cell)
    assert outcome.codes == expected_codes(cell), outcome.text
    said = last_error(outcome)
    assert all(re.search(pattern, said) for pattern in expected_words(cell)), said
    assert cell.program == "script" or cell.start == "torchrun" or "Traceback" not in outcome.text, outcome.text
    assert "terminate called" not in outcome.text
    by_torchrun_s = TORCHRUN_S if cell.start == "torchrun" else 0.0
    assert outcome.recovery_s < (DEADLINE_S + by_torchrun_s if cell.fault == "stop" else 0.0) + SLACK_S
    assert outcome.left == []
    if cell.start == "torchrun":  # which lists its ranks at the end
        survivor = 3 if cell.program == "run" else 1
        assert re.search(rf"rank +: 0 .*\n +exitcode +: {survivor} ", outcome.text), outcome.text


def test_some_cells_have_everything_once() -> None:
    assert set(SOME) <= set(CELLS)
    for field in ("phase", "fault", "start", "program", "ranks", "failing"):
        assert {getattr(cell, field) for cell in SOME} == {getattr(cell, field) for cell in CELLS}, field


def test_the_matrix_leaves_no_shared_memory(matrix: Matrix) -> None:
    assert matrix.shared_memory_left() == set()


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGINT, 130),
        pytest.param(signal.SIGTERM, 143, marks=pytest.mark.long),
        pytest.param(signal.SIGKILL, -9, marks=pytest.mark.long),
    ],
)
def test_ranks_end_with_their_command_even_a_stopped_one(number: int, code: int, tmp_path: Path) -> None:
    outcome = interrupt(number, tmp_path)
    assert outcome.codes == [code], outcome.text
    assert outcome.text == ""
    assert outcome.left == []
