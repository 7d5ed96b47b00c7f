"""When steps count as slower than predicted, why, and that noise is no reason; on marks made up in milliseconds."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from builders import usual_document
from hypothesis import given
from hypothesis import strategies as st

import planner
import runtime
from planner.documents.profile import Contention, parse_profile
from planner.jobs.replanning import compress_of, find_straggler, without_contention
from planner.profile.compute import RankTimes
from runtime.comm.world import World
from runtime.errors import DriftWarning, InputError
from runtime.monitor.clock import WallClock
from runtime.monitor.drift import (
    DriftGuard,
    StepTimes,
    complete,
    find_cause,
    judge,
    measured_times,
    predicted_times,
    warn_of_torch,
)
from runtime.monitor.recorder import Recorder, StepMarks
from runtime.monitor.verdict import Verdict
from runtime.plan import CompressorSpec, ModelReference, Plan, PlanBucket, PlanWorld
from runtime.plan.predicted import PredictedTask, Prediction
from runtime.session.report import make_report

CLOCK = WallClock()
READY_MS = (15.0, 20.0, 30.0)
"""Forward takes 10 ms, backward 20; this is when buckets are ready."""
MESSAGE_MS = 8.0
UPDATE_MS = 2.0
STEPS = 50


def marks(
    compute: float = 1.0, network: float = 1.0, late_ms: float = 0.0, extra_ms: float = 0.0, at_ms: float = 7e6,
    buckets: int = 3, update: bool = True,
) -> StepMarks:  # fmt: skip
    """One step: computation and messages by a factor slower, the first message waiting, a pause in forward."""
    step = StepMarks(buckets, 3)

    def mark(time_ms: float) -> float:
        return (at_ms + time_ms) / 1e3

    step.forward, step.forward_end = mark(0.0), mark(10.0 * compute + extra_ms)
    free_ms = 0.0
    for index, ready_ms in enumerate(READY_MS[-buckets:]):
        start_ms = max(free_ms, ready_ms * compute + extra_ms)
        free_ms = start_ms + MESSAGE_MS * network + (late_ms if index == 0 else 0.0)
        sent = step.sent[index]
        sent.launch, sent.start, sent.end = mark(ready_ms * compute + extra_ms), mark(start_ms), mark(free_ms)
    step.backward_end = mark(30.0 * compute + extra_ms)
    end_ms = max(30.0 * compute + extra_ms, free_ms)
    step.end = mark(end_ms)
    if update:
        step.update, step.update_end = mark(end_ms + 1.0), mark(end_ms + 1.0 + UPDATE_MS)
    return step


def predicted(buckets: int = 3) -> StepTimes:
    """The step that `marks()` makes."""
    return measured_times([marks(buckets=buckets)], CLOCK)


def plan_of(times: StepTimes | None) -> Plan:
    """A plan that predicts these times."""
    prediction = None

    def task(name: str, resource: str, start_us: float, end_us: float) -> PredictedTask:
        return PredictedTask(task=name, resource=resource, start_us=start_us, end_us=end_us)

    if times is not None:
        messages, start_us = [], 0.0
        for index, time_us in enumerate(times.buckets_us):
            messages.append(task(f"bucket {index} all_reduce", "network", start_us, start_us + time_us))
            start_us += time_us
        tasks = (task("backward", "compute", 0.0, times.compute_us), *messages)
        prediction = Prediction(iteration_us=times.step_us, update_us=times.update_us, timeline=tasks)
    return Plan(
        model=ModelReference(name="test"),
        world=PlanWorld(ranks=2),
        accuracy="exact",
        buckets=tuple(PlanBucket(gradients=(f"g{index}",)) for index in range(3)),
        predicted=prediction,
    )


def verdict(steps: list[StepMarks], buckets: int = 3, **options: Any) -> Verdict:
    """Of enough steps."""
    found = judge(steps, predicted(buckets), CLOCK, **options)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("changes", "cause", "words"),
    [
        ({}, "none", ["predicted"]),
        ({"compute": 1.5}, "compute", ["computation is slower on this rank", "+47%"]),
        ({"network": 3.0}, "network", ["network is slower", "another rank is a straggler", "+200%"]),
        ({"late_ms": 40.0}, "rank", ["another rank is a straggler: the first message waits", "+500%"]),
        ({"compute": 0.5, "network": 0.5}, "none", []),
        ({"extra_ms": 20.0}, "compute", ["computation"]),
    ],
)
def test_the_cause_is_told(changes: dict[str, float], cause: str, words: list[str]) -> None:
    found = verdict([marks(**changes)] * STEPS)
    assert found.cause == cause
    assert all(word in found.text for word in words), found.text


@pytest.mark.parametrize("changes", [{"network": 6.0}, {"late_ms": 40.0}])
def test_with_one_bucket_a_slow_network_looks_like_a_late_rank(changes: dict[str, float]) -> None:
    found = verdict([marks(buckets=1, **changes)] * STEPS, buckets=1)
    assert found.cause == "network"
    assert "or another rank is a straggler" in found.text


def test_a_large_first_bucket_on_a_slow_network_is_no_late_rank() -> None:
    planned = StepTimes(exchanged_us=40e3, compute_us=30e3, update_us=0.0, buckets_us=(20e3, 1e3, 1e3))
    slow = StepTimes(exchanged_us=90e3, compute_us=30e3, update_us=0.0, buckets_us=(60e3, 3e3, 3e3))
    assert find_cause(slow, planned) == "network"


def test_too_few_steps_give_no_verdict() -> None:
    assert judge([marks(network=9.0)] * (STEPS - 1), predicted(), CLOCK) is None
    assert judge([], predicted(), CLOCK) is None


def test_only_the_last_steps_count() -> None:
    assert verdict([marks(network=9.0)] * 100 + [marks()] * STEPS).cause == "none"


def test_without_an_optimizer_the_update_is_left_out() -> None:
    assert verdict([marks(update=False)] * STEPS).cause == "none"
    assert verdict([marks(update=False, network=3.0)] * STEPS).cause == "network"


def test_a_step_of_micro_batches_is_told_whole() -> None:
    def accumulated(**changes: float) -> StepMarks:
        step = marks(**changes)
        step.micro_batches = [(start, start + 0.01, start + 0.03 * changes.get("compute", 1.0)) for start in (1.0, 2.0)]
        return step

    planned = replace(predicted(), alone_us=30e3)
    found = judge([*[marks()] * 9, *[accumulated()] * (STEPS - 9)], planned, CLOCK)  # some steps are shorter
    assert found is not None
    assert (found.good, found.step_us) == (True, pytest.approx(planned.step_us + 2 * 30e3))
    assert "steps of 3 micro-batches take" in found.text
    slow = judge([accumulated(compute=1.5)] * STEPS, planned, CLOCK)
    assert slow is not None
    assert slow.cause == "compute"
    assert slow.other_us == pytest.approx(planned.step_us + 2 * 30e3)


@given(st.data())
def test_noise_is_no_drift(data: st.DataObject) -> None:
    """Every step up to a tenth off, and in every window of ten up to four that take any time."""
    steps = []
    for _ in range(5):
        wild = data.draw(st.sets(st.integers(0, 9), max_size=4))
        for index in range(10):
            factor = data.draw(st.floats(0.9, 1.1))
            extra_ms = data.draw(st.floats(0.0, 1e6)) if index in wild else 0.0
            steps.append(marks(compute=factor, network=data.draw(st.floats(0.9, 1.1)), extra_ms=extra_ms))
    assert verdict(steps).cause == "none"


@given(first=st.integers(0, STEPS), count=st.integers(0, 35), slow=st.floats(1.0, 100.0))
def test_a_slow_stretch_is_no_drift(first: int, count: int, slow: float) -> None:
    """Not until it fills the windows; a stretch that ends is over."""
    steps = [marks(network=slow if first <= index < first + count else 1.0) for index in range(STEPS)]
    assert verdict(steps).cause == "none"


@given(
    noise=st.lists(st.floats(0.97, 1.03), min_size=STEPS, max_size=STEPS),
    slow=st.floats(1.4, 50.0),
    kind=st.sampled_from(["compute", "network"]),
)
def test_lasting_slowness_is_found_in_spite_of_noise(noise: list[float], slow: float, kind: str) -> None:
    steps = [marks(**({"compute": factor, "network": factor} | {kind: slow * factor})) for factor in noise]
    planned = predicted()
    found = judge(steps, planned, CLOCK)
    assert found is not None
    if found.step_us > 1.3 * planned.step_us:
        assert found.cause == kind
    else:
        assert found.cause in ("none", kind)


def test_drift_ends_later_than_it_begins() -> None:
    """15 % above the prediction: not enough to begin, too much to end."""
    extra_ms = 0.15 * predicted().step_us / 1e3
    between = [marks(extra_ms=extra_ms)] * STEPS
    assert verdict(between).cause == "none"
    assert verdict(between, drifting=True).cause == "compute"
    assert verdict([marks(extra_ms=extra_ms / 3)] * STEPS, drifting=True).cause == "none"


def run(guard: DriftGuard, step: StepMarks, count: int) -> list[str]:
    """Texts of the warnings that so many equal steps give."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(count):
            guard.step_done([step] * 60)
    assert all(issubclass(warning.category, DriftWarning) for warning in caught)
    return [str(warning.message) for warning in caught]


def test_the_guard_warns_once_for_a_plan_after_its_warm_up() -> None:
    guard, other = DriftGuard(0, CLOCK), DriftGuard(3, CLOCK)
    other.begin(plan_of(predicted()))
    assert run(other, marks(network=3.0), 200) == []  # rank 0 warns for all
    assert other.verdict is not None
    assert other.verdict.cause != "none"
    guard.begin(plan_of(predicted()))
    slow = marks(network=3.0)
    assert run(guard, slow, 59) == []
    [text] = run(guard, slow, 1)
    for words in ("rank 0, last 50 steps", "predicted", "planner.replan(session)", "`planner optimize`"):
        assert words in text
    assert run(guard, slow, 200) == []
    assert run(guard, marks(), 20) == []
    assert guard.verdict is not None
    assert guard.verdict.cause == "none"
    assert run(guard, slow, 200) == []
    guard.begin(plan_of(predicted()))
    assert guard.verdict is None
    assert len(run(guard, slow, 200)) == 1


def test_without_a_prediction_the_guard_says_nothing() -> None:
    guard = DriftGuard(0, CLOCK)
    guard.begin(plan_of(None))
    assert run(guard, marks(network=9.0), 200) == []
    assert predicted_times(plan_of(None)) is None


def test_the_prediction_is_read_from_the_plan() -> None:
    planned = predicted()
    assert predicted_times(plan_of(planned)) == replace(planned, alone_us=planned.compute_us)


class Device:
    """A clock of a device that has reached the marks before a moment; asking for a later one would wait for it."""

    cheap = False

    def __init__(self, now: float) -> None:
        self.now = now

    def mark(self) -> float:
        return self.now

    def reached(self, mark: float) -> bool:
        return mark <= self.now

    def between_us(self, start: float, end: float) -> float:
        assert end <= self.now
        assert start <= self.now
        return (end - start) * 1e6


def test_steps_that_a_device_is_not_through_with_are_left_out() -> None:
    steps = [marks(at_ms=1000.0 * number) for number in range(60)]
    device = Device(now=56.5)
    seen = complete(steps, device)
    assert seen == steps[:57]
    found = judge(seen, predicted(), device)
    assert found is not None
    assert found.cause == "none"
    last_message = marks(at_ms=1000.0)
    last_message.sent[-1].end = 99.0  # on a stream of its own
    assert complete([last_message], Device(now=50.0)) == []


def test_steps_without_a_forward_are_left_out() -> None:
    """Where parts of the model are called, never the model."""
    step = marks()
    step.forward = None
    assert complete([step, marks()], CLOCK) != []
    assert step not in complete([step, marks()], CLOCK)


def test_buckets_that_queue_on_a_device_do_not_count_twice() -> None:
    """There a message's start is its launch."""
    step = marks()
    for sent in step.sent:
        sent.start = step.sent[0].launch
    # Ends at 23, 31 and 39 ms after a launch at 15.
    assert measured_times([step], CLOCK).buckets_us == pytest.approx((8000.0, 8000.0, 8000.0))


def test_the_late_rank_is_the_one_that_waits_for_nobody() -> None:
    waits = [30e3, 31e3, 29e3, 30e3]
    assert find_straggler([waits, [1e3] * 4, [20e3] * 4], 100e3) == (1, pytest.approx(29e3))
    assert find_straggler([[1e3, 30e3, 1e3, 30e3], [30e3, 1e3, 30e3, 1e3]], 100e3) is None  # in turn
    assert find_straggler([[1e3] * 4, [2e3] * 4], 100e3) is None  # not long
    assert find_straggler([[], []], 100e3) is None


def test_what_messages_cost_computation_is_taken_off() -> None:
    """Messages from 10 to 20 and 30 to 40 µs; beside them computation takes twice as long."""
    times = RankTimes([8.0], [1.0], {"a": [5.0], "b": [16.0], "c": [50.0], "d": [float("nan")]}, [50.0])
    found = without_contention(times, [[(10.0, 20.0), (30.0, 40.0)]], Contention(compute=2.0, network=1.5))
    assert found.ready_us["a"] == [5.0]
    assert found.ready_us["b"] == [13.0]
    assert found.ready_us["c"] == [40.0]
    assert math.isnan(found.ready_us["d"][0])
    assert found.backward_end_us == [40.0]
    assert found.forward_us == [8.0]


def test_with_one_rank_the_plan_stays() -> None:
    """A script that is started alone for a look may call everything."""
    model = torch.nn.Linear(2, 1)
    plan = Plan(
        model=ModelReference(name="test"),
        world=PlanWorld(ranks=1),
        accuracy="exact",
        buckets=(PlanBucket(gradients=("bias", "weight")),),
    )
    session = runtime.attach(model, None, plan)
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()
    assert planner.replan(session) is session.plan
    parts = replace(plan, buckets=(PlanBucket(gradients=("bias",)), PlanBucket(gradients=("weight",))))
    session.switch(parts, at_step=4)
    assert session.plan == plan
    model(torch.ones(1, 2)).sum().backward()
    assert (session.plan, session.step) == (parts, 4)
    session.detach()
    with pytest.raises(InputError, match="detached"):
        planner.replan(session)


def test_another_torch_than_the_profiles_is_told() -> None:
    """At once, and only where versions differ; builds of one version do not."""
    here = torch.__version__
    for version, told in (("1.0.0", True), (here, False), (f"{here.partition('+')[0]}+other", False), (None, False)):
        document = usual_document()
        if version is not None:
            document["world"]["torch"] = version
        plan = planner.optimize(parse_profile(document))
        assert plan.world.torch == version
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            warn_of_torch(plan)
        words = [str(one.message) for one in caught]
        assert [text.startswith("the plan was profiled with torch 1.0.0, and this is torch") for text in words] == (
            [True] * told
        )


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        ({}, None),
        ({"compute": 0.5}, "compute is 1.9 times as fast as in the profile (17.0 ms a step, predicted 32.0 ms)"),
        ({"compute": 2.0}, "compute takes 1.9 times as long as in the profile"),
        ({"network": 3.0}, "communication holds steps up more than predicted"),
    ],
)
def test_a_report_names_the_cause_of_a_wrong_prediction_after_its_first_line(
    seen: dict[str, float], words: str | None
) -> None:
    recorder = Recorder(CLOCK, 3, 3)
    recorder.steps.extend(marks(**seen, at_ms=100.0 * step) for step in range(10))
    report = make_report(plan_of(predicted()), recorder, World())
    first, second, *_ = str(report).splitlines()
    assert first.startswith("rank 0 of 1, 10 steps")
    assert second.startswith("  forward" if words is None else f"  {words}")
    assert "profile again" in second or words is None


def test_a_plan_is_followed_by_one_of_the_same_compression() -> None:
    for names, compress in (((), None), (("wire", "powersgd"), "lowrank,wire"), (("topk", "randomk"), "sparse")):
        buckets = [PlanBucket(gradients=(name,), compressor=CompressorSpec(name=name)) for name in ("none", *names)]
        assert compress_of(replace(plan_of(predicted()), buckets=tuple(buckets))) == compress
