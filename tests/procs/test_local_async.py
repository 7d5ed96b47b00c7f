"""Local updaters: one rank in this process, two ranks in one start, and what is left when a run ends badly."""

from __future__ import annotations

import json
import math
import os
import pickle
import runpy
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import local_async_checks
import local_async_jobs as jobs
import pytest
import torch
from started import marked, started

import runtime
from planner.jobs.launch import LocalWorld, run_ranks
from planner.jobs.lr_schedule import Course, LrSchedule
from planner.jobs.on_rank import train_rank
from planner.jobs.training import build, weights_sha256
from runtime.errors import EnvironmentFailure, InputError, LostUpdaterWarning, PlanMismatch
from runtime.local_async import LocalRun, run_local_async
from runtime.local_async.races import Races
from runtime.local_async.updaters import Updaters
from runtime.plan import LocalAsyncSpec

LPP = LocalAsyncSpec(updaters=2, blocks=jobs.LAYERS, full_fraction=0.1)


def train(job: Any, spec: LocalAsyncSpec, steps: int, **options: Any) -> LocalRun:
    """On one rank, with one import of torch for all updaters of this file."""
    return run_local_async(job, jobs.plan_of(spec), steps, start_method="forkserver", **options)


def one_thread(test: Any) -> Any:
    """Updaters have at least one thread; plain training is compared with as many."""

    def run(*arguments: Any, **named: Any) -> None:
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            test(*arguments, **named)
        finally:
            torch.set_num_threads(before)

    run.__name__ = test.__name__
    return run


@one_thread
def test_one_updater_is_plain_sgd_bit_for_bit() -> None:
    run = train(jobs.scheduled, LocalAsyncSpec(updaters=1), 40)
    alone = jobs.trained_alone(jobs.scheduled(), 40)
    for (name, found), expected in zip(run.model.state_dict().items(), alone.state_dict().values(), strict=True):
        assert torch.equal(found, expected), name
    assert run.numbers == tuple(range(40))
    assert run.report.rounds == 0
    assert run.report.races == Races(additions=99 * 40, lost=0, worst=0.0)
    assert not any(tensor.is_shared() for tensor in run.model.state_dict().values())


def test_each_updater_alternates_between_the_model_and_its_block() -> None:
    report = train(jobs.plain, LPP, 200).report
    for updater in report.updaters:
        assert updater.minibatches > 0
        full_first = updater.minibatches - 2 * updater.partial
        assert -1 <= full_first <= 20
    assert sum(one.partial for one in report.updaters) == pytest.approx(90, abs=1)
    assert sum(report.staleness) == 200
    assert "staleness" in str(report)
    assert "lost by races" in str(report)
    assert report.races is not None
    places = {"model": 99, 0: 27, 1: 72}  # elements of the probe, as many as of parameters
    exact = sum(
        places["model"] * (one.minibatches - one.partial) + places[one.updater] * one.partial for one in report.updaters
    )
    assert report.races.additions == exact


def test_updaters_read_parts_of_the_data_that_are_drawn_again_in_each_pass(tmp_path: Path) -> None:
    train(partial(jobs.loaded, str(tmp_path)), LocalAsyncSpec(updaters=2), 12)
    seen = [path.read_text().splitlines() for path in tmp_path.iterdir() if path.name != str(os.getpid())]
    assert len(seen) == 2
    assert sum(map(len, seen)) == 12
    found = [[int(word) for line in lines for word in line.split()] for lines in seen]
    expected = [jobs.drawn(updater, updaters=2, passes=4) for updater in range(2)]
    first = next(index for index, numbers in enumerate(expected) if numbers[:4] == found[0][:4])
    for index, numbers in enumerate(found):  # minibatches of four, three of them a pass over twelve samples
        assert numbers == expected[(first + index) % 2][: len(numbers)]
    for begin in (0, 12):  # in one pass no sample is in both parts
        assert not set(expected[0][begin : begin + 12]) & set(expected[1][begin : begin + 12])
    assert set(expected[0][:12]) != set(expected[0][12:24])  # parts are drawn again


@pytest.mark.parametrize("on_lost", ["continue", "stop"])
def test_the_others_go_on_without_a_killed_updater(tmp_path: Path, on_lost: str) -> None:
    spec, steps = LocalAsyncSpec(updaters=2), 300
    with pytest.warns(LostUpdaterWarning, match=r"updater \d was killed by SIGKILL.* the other one goes on"):
        run = train(partial(jobs.faulty, "kill", str(tmp_path)), spec, steps, on_lost=on_lost)
    assert 6 not in run.numbers
    lost = [one for one in run.report.updaters if one.lost]
    assert len(lost) == 1
    assert "SIGKILL" in str(lost[0].lost)
    if on_lost == "continue":
        assert run.report.minibatches == steps - 1
        assert run.report.notes == ("1 minibatches were not done",)
    else:
        assert run.report.minibatches < steps - 1


def test_a_hung_updater_is_killed(tmp_path: Path) -> None:
    with pytest.warns(LostUpdaterWarning, match="hung"):
        run = train(partial(jobs.faulty, "hang", str(tmp_path)), LocalAsyncSpec(updaters=2), 60, timeout_s=8.0)
    assert run.report.minibatches == 59


def test_a_run_without_updaters_left_ends(tmp_path: Path) -> None:
    with (
        pytest.warns(LostUpdaterWarning, match="no other is left"),
        pytest.raises(EnvironmentFailure, match="no updater is left: updater 0 was killed by SIGKILL"),
    ):
        train(partial(jobs.faulty, "kill", str(tmp_path)), LocalAsyncSpec(updaters=1), 60)


def test_what_an_updater_raises_is_told(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFailure, match=r"rank 0, updater \d raised ArithmeticError: on purpose"):
        train(partial(jobs.faulty, "raise", str(tmp_path)), LocalAsyncSpec(updaters=2), 60)


REFUSALS = (
    ({"steps": 0}, "steps: found 0, expected a number of minibatches, at least 1"),
    ({"start_method": "fork"}, r"start_method: found 'fork' \(a forked process .* expected spawn or forkserver"),
    ({"start_method": "threads"}, "start_method: found 'threads', expected spawn or forkserver"),
    ({"on_lost": "cry"}, "on_lost: found 'cry', expected continue or stop"),
    ({"plan": jobs.plan_of(LocalAsyncSpec(updaters=1), accuracy="exact")}, 'accuracy exact; expected "relaxed"'),
    ({"plan": jobs.plan_of(LocalAsyncSpec(updaters=2, synchronous=True))}, "synchronous with 2 updaters"),
    ({"plan": jobs.plan_of(LocalAsyncSpec(updaters=1), ranks=3)}, "made for 3 ranks, found 1"),
    ({"plan": jobs.plan_of(LocalAsyncSpec(updaters=-1))}, "local_async has updaters -1, .* expected at least 1"),
    ({"plan": jobs.plan_of(LocalAsyncSpec(updaters=1, blocks=jobs.LAYERS))}, "found 2 blocks for 1 updaters"),
    ({"plan": jobs.plan_of(LocalAsyncSpec(updaters=2, blocks=jobs.LAYERS[:1]))}, "found no block with 'norm.weight'"),
    ({"job": jobs.odd_loss}, "the job raised ArithmeticError: odd"),
    ({"job": jobs.view_of_another}, "other lies in the memory of weight"),
    ({"job": jobs.overlapping}, "weight has elements that share memory"),
    ({"job": jobs.lbfgs}, "the optimizer is LBFGS"),
    ({"job": lambda: jobs.plain()}, "the job cannot be sent to updaters"),
)


@pytest.mark.parametrize(("changes", "words"), REFUSALS, ids=[words[:24] for _, words in REFUSALS])
def test_bad_input_is_refused_before_updaters_start(changes: dict[str, Any], words: str) -> None:
    usual: dict[str, Any] = {"job": jobs.plain, "plan": jobs.plan_of(LocalAsyncSpec(updaters=1)), "steps": 3}
    with pytest.raises(InputError, match=words):
        run_local_async(**(usual | changes))


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who starts updaters is refused."""

    def start(_: Updaters) -> None:
        raise InputError("would be started")

    monkeypatch.setattr(Updaters, "start", start)


@pytest.mark.usefixtures("nothing_starts")
def test_checkpoints_that_know_whole_backwards_only_are_found_before_updaters_start() -> None:
    """Where the plan has blocks; else they are as good as others."""
    with pytest.raises(InputError, match=r"reentrant activation checkpoints.* checkpoint\(.*use_reentrant=False\)"):
        train(partial(jobs.checkpointed, True), LPP, 3)
    for reentrant, spec in ((False, LPP), (True, LocalAsyncSpec(updaters=2))):
        with pytest.raises(InputError, match="would be started"):
            train(partial(jobs.checkpointed, reentrant), spec, 3)


def test_a_plan_with_updaters_is_not_attached() -> None:
    model = jobs.Net()
    with pytest.raises(PlanMismatch, match=r"updaters, which are processes of their own, .* with `planner run`"):
        runtime.attach(model, jobs.sgd(model.parameters()), jobs.plan_of(LPP))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What both ranks of two found; rank 1 is killed at the end."""
    folder = tmp_path_factory.mktemp("pair")
    with pytest.raises(EnvironmentFailure) as failure:
        run_ranks(LocalWorld(ranks=2), local_async_checks.pair_checks, str(folder))
    found: list[dict[str, Any]] = [pickle.loads((folder / f"rank{rank}").read_bytes()) for rank in range(2)]
    return [one | {"failure": str(failure.value)} for one in found]


@pytest.mark.parametrize(
    "check", ["in_forced_order", "strategies", "post_local_is_minibatch_sgd", "stress", "slow_network"]
)
def test_two_ranks(pair: list[dict[str, Any]], check: str) -> None:
    for rank in pair:
        assert all(rank[check].values()), rank[check]


SOME = "ranks hold different local_async in their plans: rank 0: null, rank 1: 2 updaters"
NO_MEMORY = "this system gives no shared memory of 1228 bytes (No space left on device); use fewer ranks"


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("steps", "InputError: ranks were asked for different (steps, seed): rank 0: (5, 0), rank 1: (6, 0)"),
        ("some plans", f"PlanMismatch: {SOME}; give every rank the same plan.json"),
        ("one attaches", f"PlanMismatch: {SOME}; give every rank the same plan.json"),
        ("loss", "InputError: rank 0: the job raised ArithmeticError: odd"),
        ("memory", "InputError: updaters: found 3 on each of 2 ranks of this machine"),
        ("shared memory", f"EnvironmentFailure: rank 1: {NO_MEMORY}"),
        ("synchronous", f"EnvironmentFailure: rank 1: {NO_MEMORY}"),
    ],
)
def test_one_rank_s_trouble_is_told_to_all(pair: list[dict[str, Any]], case: str, words: str) -> None:
    first, second = (rank["refusals"][case] for rank in pair)
    assert first == second
    assert first.startswith(words)


def test_an_updater_that_cannot_start_is_told_to_all(pair: list[dict[str, Any]]) -> None:
    first, second = (rank["refusals"]["updater"] for rank in pair)
    assert first.startswith("CommunicationError: rank 0: the updaters of rank 1 did not start")
    assert second.startswith("InputError: the job's function made another model in an updater than in its rank")


def test_a_rank_whose_updater_raised_is_named_by_the_others(pair: list[dict[str, Any]]) -> None:
    first, second = (rank["raising"] for rank in pair)
    assert first.startswith("CommunicationError: rank 0: the updaters of rank 1 failed")
    assert "raised ArithmeticError: on purpose" in second


def test_all_ranks_stop_on_request(pair: list[dict[str, Any]]) -> None:
    for rank in pair:
        assert rank["stopping"]["equal"]
        assert rank["stopping"]["minibatches"] < 4000, rank["stopping"]["report"]


def test_a_killed_rank_is_named_by_the_others(pair: list[dict[str, Any]]) -> None:
    assert pair[0]["killed"].startswith("CommunicationError: rank 0: averaging 3 of models")
    assert "rank 1 died" in pair[0]["killed"]
    assert "rank 1 was killed by SIGKILL" in pair[0]["failure"]


SCRIPT = """
import os, signal, sys, time
sys.path.insert(0, os.environ["JOBS"])
import local_async_jobs as jobs
from runtime.local_async import run_local_async
from runtime.plan import LocalAsyncSpec

def main():
    os.setpgid(0, 0)
    plan = jobs.plan_of(LocalAsyncSpec(updaters=2))
    run_local_async(jobs.plain, plan, 10**8, start_method=os.environ["START_METHOD"])

if __name__ == "__main__":
    children = []
    for _ in range(3):
        child = os.fork()  # nothing of torch runs yet
        if not child:
            try:
                main()
            except KeyboardInterrupt:
                os._exit(130)
            os._exit(1)
        children.append(child)
    print(*children, flush=True)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    print(*codes, flush=True)
"""


UNGUARDED = """
import sys
import local_async_jobs as jobs
from runtime.local_async import run_local_async
from runtime.plan import LocalAsyncSpec

if {condition}:
    run_local_async(jobs.plain, jobs.plan_of(LocalAsyncSpec(updaters=1)), 3, start_method="forkserver")
"""


@pytest.mark.usefixtures("nothing_starts")
def test_a_script_that_updaters_would_run_again_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(UNGUARDED.format(condition="True"))
    with pytest.raises(InputError, match=r'script\.py: found .* has to stand under `if __name__ == "__main__":`'):
        runpy.run_path(str(script), run_name="__main__")
    for condition in ('__name__ == "__main__"', 'sys.argv[0] != "__main__"'):  # the second cannot be known
        script.write_text(UNGUARDED.format(condition=condition))
        with pytest.raises(InputError, match="would be started"):
            runpy.run_path(str(script), run_name="__main__")


def test_updaters_that_run_the_script_again_say_so(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(UNGUARDED.format(condition='sys.argv[0] != "__main__"'))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(jobs.__file__).parent), *sys.path])}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=200, env=environment)
    assert done.returncode == 1
    cure = 'each updater imports the script: what trains has to stand under `if __name__ == "__main__":`'
    assert f"found a call by a process that imports the script of its parent, and {cure}" in done.stderr
    failure = done.stderr.strip().splitlines()[-1]
    assert failure.startswith("runtime.errors.EnvironmentFailure: rank 0: updater 0 ended without a word (exit code 1)")
    assert failure.endswith(cure)


def shared_memory() -> set[str]:
    """What torch and multiprocessing name in this machine's shared memory."""
    return {name for name in os.listdir("/dev/shm") if name.startswith(("torch_", "sem.mp-", "psm_"))}


def wait_for(condition: Any, seconds: float) -> bool:
    """Whether it came to hold in time."""
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.1)
    return bool(condition())


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("start_method", [pytest.param("spawn", marks=pytest.mark.long), "forkserver"])
def test_nothing_is_left_after_ctrl_c_sigterm_and_a_kill(tmp_path: Path, start_method: str) -> None:
    """Ctrl-C reaches all processes of a run at once; the others its first one only."""
    before = shared_memory()
    script, mark = tmp_path / "script.py", f"LOCAL_ASYNC_MARK={tmp_path}"
    script.write_text(SCRIPT)
    environment = {**os.environ, "JOBS": str(Path(jobs.__file__).parent), "LOCAL_ASYNC_MARK": str(tmp_path)}
    environment["START_METHOD"] = start_method
    # the script, its three runs, for each a tracker, perhaps a fork server, and two updaters
    all_of_them = 16 if start_method == "forkserver" else 13
    with started([sys.executable, str(script)], env=environment, stdout=subprocess.PIPE) as program:
        assert program.stdout is not None
        interrupted, terminated, killed = map(int, program.stdout.readline().split())
        assert wait_for(lambda: len(marked(mark)) >= all_of_them, 120.0), marked(mark)
        time.sleep(1.0)  # into the minibatches
        os.killpg(interrupted, signal.SIGINT)
        os.kill(terminated, signal.SIGTERM)
        os.kill(killed, signal.SIGKILL)
        assert program.stdout.readline().split() == ["130", "-15", "-9"]
    # An updater that still imports torch finds out when it has.
    assert wait_for(lambda: not marked(mark), 90.0), marked(mark)
    assert shared_memory() <= before


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_nothing_is_left_where_a_launcher_in_the_background_is_ended(tmp_path: Path) -> None:
    """As `nohup torchrun … &` in a script, where Ctrl-C is ignored by all, and the launcher gets SIGTERM."""
    plan, mark = tmp_path / "plan.json", f"LOCAL_ASYNC_MARK={tmp_path}"
    jobs.plan_of(LPP, ranks=2).save(plan)
    job = f"{Path(jobs.__file__).with_name('local_async_job.py')}:job"
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "planner"]
    command = [sys.executable, *torchrun, "run", job, "--plan", str(plan), "--steps", str(10**8)]
    paths = os.pathsep.join([str(Path(jobs.__file__).parent), *sys.path])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "LOCAL_ASYNC_MARK": str(tmp_path)}
    with started(
        ["nohup", "sh", "-c", 'trap "" INT; exec "$@"', "sh", *command],
        env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    ) as program:  # fmt: skip
        everything = 1 + 2 * (1 + 1 + LPP.updaters)  # the launcher, and for each rank itself, a tracker and updaters
        assert wait_for(lambda: len(marked(mark)) >= everything, 120.0), marked(mark)
        program.terminate()
        assert wait_for(lambda: not marked(mark), 60.0), marked(mark)


@one_thread
def test_a_recipe_of_rates_is_the_same_with_updaters_as_without() -> None:
    """Of `planner run`: as a loop that sets the rates by hand."""
    spec = f"{Path(jobs.__file__).with_name('local_async_job.py')}:job"
    recipe = LrSchedule.parse("scale:2,warmup:4,cosine")
    plan = jobs.plan_of(LocalAsyncSpec(updaters=1))
    plain, one = (train_rank(spec, which, Course(10, recipe), "cpu", False) for which in (None, plan))
    built = build(spec, "cpu")
    for step in range(10):
        (group,) = built.optimizer.param_groups  # type: ignore[union-attr]
        warm, decay = 1.0 + 1.5 * step / 4, 2.5 * (1.0 + math.cos(math.pi * (step - 4) / 6)) / 2.0
        group["lr"] = 0.05 * (warm if step < 4 else decay)  # minibatches of 5 on one rank, for a batch of 2
        built.train(built.batch(step))
    assert plain.weights_sha256 == one.weights_sha256 == weights_sha256(built.model)


def test_planner_run_trains_with_local_updaters(tmp_path: Path) -> None:
    """As users start it: updaters are spawned."""
    plan = tmp_path / "plan.json"
    jobs.plan_of(LPP).save(plan)
    file = Path(jobs.__file__).with_name("local_async_job.py")
    command = ["-m", "planner", "run", f"{file}:job", "--plan", str(plan), "--steps", "40"]
    command += ["--lr-schedule", "scale:5,warmup:10,cosine"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(jobs.__file__).parent), *sys.path])}
    done = subprocess.run(
        [sys.executable, *command, "--json"], capture_output=True, text=True, timeout=200, env=environment
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert (document["steps"], document["ranks"]) == (40, 1)
    assert document["median_us"] > 0.0
    assert document["loss_last"] < document["loss_first"]
