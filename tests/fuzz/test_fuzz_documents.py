"""Whatever the files hold: a plan that keeps every promise, or one message with the file's name. Nothing else."""

from __future__ import annotations

import io
import json
import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, TypeVar

import pytest
from documents import Case, cases
from hypothesis import HealthCheck, given, settings

from planner import load_profile, optimize, simulate
from planner.cli.app import main
from planner.decide.simulate import Simulation
from planner.documents.profile import Profile
from planner.ir import Bucket, Schedule
from planner.report.page import page_text
from planner.report.trace import trace_text
from planner.verify import verify
from runtime.errors import InputError
from runtime.plan import Plan, load_plan, parse_plan

T = TypeVar("T")

CPU_S = 5.0
"""What one case may take of one core, in every command together."""
HANG_S = 60

LONG = 1000
"""A run of fewer documents makes up the same ones each time."""


class Hang(BaseException):
    """Not an Exception, so that nothing catches it on its way."""


@contextmanager
def no_hang() -> Iterator[None]:
    """Ends a case that has gone on for a minute of processor time."""

    def stop(*_: object) -> None:
        raise Hang(f"more than {HANG_S} s")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, HANG_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def attempt(function: Callable[..., T], files: list[str], **options: Any) -> T | None:
    """The result, or None where the files were refused; every line of the message begins with one of them."""
    message = ""
    try:
        return function(*files, **options)
    except InputError as error:
        message = str(error)
    names = tuple(f"{name}: " for name in files)
    assert all(line.startswith(names) for line in message.splitlines()), message
    assert len(message) < 20_000
    return None


def command(*arguments: str) -> tuple[int, str, str]:
    """(exit code, standard output, standard error) of a command."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as ended:
        main(arguments)
    code = ended.value.code
    return (0 if code is None else int(code)), out.getvalue(), err.getvalue()


def check_refused(outcome: tuple[int, str, str], files: list[str]) -> None:
    """Exit code 2, one message, nothing on standard output."""
    code, out, err = outcome
    assert (code, out) == (2, "")
    assert err.startswith(tuple(f"planner: {name}: " for name in files))
    assert err.count("planner: ") == 1 or err.count("\nplanner: ") == 0
    assert "Traceback" not in err


def check_plan(plan: Plan, profile: Profile) -> None:
    """The promises of a plan."""
    document = json.loads(json.dumps(plan.to_document(), allow_nan=False))
    assert parse_plan(document) == plan
    gradients = profile.compute.gradients
    index = {gradient.name: position for position, gradient in enumerate(gradients)}
    buckets = tuple(Bucket(gradients=tuple(index[name] for name in bucket.gradients)) for bucket in plan.buckets)
    verify(Schedule(buckets=buckets), [hash(gradient.dtype) for gradient in gradients])
    assert sum(bucket.size_bytes or 0 for bucket in plan.buckets) == sum(gradient.size_bytes for gradient in gradients)
    assert plan.predicted is not None
    assert plan.predicted.timeline is not None
    assert plan.certificate is not None
    assert plan.baselines is not None
    step_us = plan.predicted.iteration_us
    ends = [task.end_us for task in plan.predicted.timeline]
    assert all(math.isfinite(end_us) and end_us >= 0.0 for end_us in [step_us, *ends])
    assert all(task.end_us >= task.start_us for task in plan.predicted.timeline)
    assert plan.certificate.lower_bound_us <= step_us
    interleaves = len({gradient.dtype for gradient in gradients}) > 1
    for name, baseline in plan.baselines.items():
        assert step_us <= baseline.iteration_us * (1.0 + 1e-9) or (name == "ddp" and interleaves), name


def check_simulation(results: list[Simulation], plan: Plan) -> None:
    """Finite times; the strategy `optimal` is what was decided."""
    for result in results:
        assert all(math.isfinite(x) and x >= 0.0 for x in (result.iteration_us, result.forward_us, result.backward_us))
        assert math.isfinite(result.exposed_us)
    [best] = [result for result in results if result.strategy == "optimal"]
    assert plan.predicted is not None
    assert best.iteration_us == plan.predicted.iteration_us


def check_profile(files: list[str], output: Path) -> bool:
    """Decides, simulates and explains; whether the files were accepted."""
    output.write_text("old")
    options = ["--cluster", files[1]] if len(files) > 1 else []
    plan = attempt(optimize, files)
    results = attempt(simulate, files)
    assert (plan is None) == (results is None)
    outcome = command("optimize", files[0], *options, "-o", str(output), "--json")
    if plan is None or results is None:
        check_refused(outcome, files)
        check_refused(command("--json", "simulate", files[0], *options), files)
        assert output.read_text() == "old"
        return False
    check_plan(plan, load_profile(files[0]))
    check_simulation(results, plan)
    assert outcome[0] == 0, outcome[2]
    assert json.loads(outcome[1]) == json.loads(output.read_text()) == plan.to_document()
    assert command("explain", str(output))[0] == 0
    assert command("simulate", files[0], *options)[0] == 0
    return True


def check_plan_file(files: list[str]) -> bool:
    """Reads and explains; whether the file was accepted."""
    plan = attempt(load_plan, files)
    outcome = command("explain", *files)
    if plan is None:
        check_refused(outcome, files)
        return False
    assert outcome[0] == 0, outcome[2]
    assert not any(character < " " and character != "\n" for character in outcome[1])
    assert parse_plan(json.loads(json.dumps(plan.to_document(), allow_nan=False))) == plan
    assert json.loads(command("explain", *files, "--json")[1]) == plan.to_document()
    json.loads(trace_text(plan))
    assert "<title>" in page_text(plan)
    return True


@pytest.mark.parametrize("most", [250, pytest.param(10**6, marks=pytest.mark.long)], ids=["some", "all"])
def test_made_up_documents(fuzz_documents: int, tmp_path: Path, most: int) -> None:
    """Both outcomes have to be common, or the documents were no test."""
    fuzz_documents = min(fuzz_documents, most)
    accepted = {"profile": [0, 0], "plan": [0, 0]}

    @settings(
        max_examples=fuzz_documents,
        derandomize=fuzz_documents < LONG,
        deadline=None,
        database=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(cases())
    def check(case: Case) -> None:
        files = [str(tmp_path / f"{case.kind}.json")]
        Path(files[0]).write_bytes(case.content)
        if case.cluster is not None and case.kind == "profile":
            files.append(str(tmp_path / "cluster.json"))
            Path(files[1]).write_bytes(case.cluster)
        started = time.process_time()
        with no_hang():
            sound = check_profile(files, tmp_path / "out.json") if case.kind == "profile" else check_plan_file(files)
        accepted[case.kind][sound] += 1
        assert time.process_time() - started < CPU_S
        assert len(list(tmp_path.iterdir())) <= 4

    check()
    for refused_and_accepted in accepted.values():
        assert min(refused_and_accepted) >= fuzz_documents // 40, accepted
