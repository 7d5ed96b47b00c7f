"""Steps, gradients and messages of traces that were made from known steps."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import pytest
from made_traces import Job, make_traces, write_trace

from planner.fsdp2.decide import WrappingRequest, optimize_wrapping
from planner.traces.events import Run
from planner.traces.gradients import Parameter
from planner.traces.of_ranks import read_run
from planner.traces.replayed import replay
from planner.traces.to_profile import profile_of
from runtime.errors import InputError
from runtime.plan import ModelReference

MODEL = ModelReference(name="m")


def run_of(tmp_path: Path, job: Job, ranks: int = 1) -> Run:
    """Return the run that the traces of the first ranks tell."""
    documents = make_traces(job)
    return read_run([write_trace(tmp_path / f"rank{at}.json.gz", documents[at]) for at in range(ranks)])


@pytest.mark.parametrize("job", [Job(), Job(shapes=False), Job(steps=1), Job(host_us=500.0), Job(world=8, late_us=())])
def test_gradients_and_messages_are_exact(tmp_path: Path, job: Job) -> None:
    run = run_of(tmp_path, job)
    assert (run.world, run.rank, run.backend, run.optimizer, len(run.steps)) == (job.world, 0, "nccl", "SGD", job.steps)
    assert run.group == "0 default_pg"
    for step in run.steps:
        assert step.numel == job.sizes
        assert [message.gradients for message in step.buckets] == list(job.buckets)
        sent = [sum(job.sizes[a:b]) * 4 for a, b in zip([0, *job.buckets], job.buckets, strict=False)]
        assert [message.size_bytes for message in step.buckets] == sent
        end = 0.0
        for message in step.buckets:
            end = max(end, message.ready_us) + message.duration_us
        assert end == pytest.approx(step.buckets[-1].end_us, rel=0.005)
        assert step.compute_us + step.exposed_us + step.idle_us == pytest.approx(step.span_us)


def test_readiness_is_the_end_of_kernels(tmp_path: Path) -> None:
    job = Job(launch_us=5.0)
    step = run_of(tmp_path, job).steps[0]
    assert np.diff(step.ready_us) == pytest.approx(job.layer_us, abs=40.0)
    assert step.ready_us[0] - step.forward_us == pytest.approx(job.layer_us + 40.0, abs=40.0)
    assert step.forward_us == pytest.approx(len(job.sizes) * job.layer_us / 2, abs=1.0)


def test_the_curve_and_the_replay(tmp_path: Path) -> None:
    job = Job(late_us=(0.0, 900.0))
    run = run_of(tmp_path, job, ranks=2)
    profile = profile_of(run, MODEL)
    assert profile.cluster is not None
    assert profile.cluster.samples is not None
    for size_bytes, time_us in profile.cluster.samples["all_reduce"]:
        assert time_us == pytest.approx(job.cost_us(int(size_bytes) // 4), rel=0.01)
    found = replay(run, profile)
    assert found is not None
    assert found.error < 0.03
    assert all(abs(bucket.error) < 0.03 for bucket in found.buckets)


def test_the_last_rank_is_found_without_common_clocks(tmp_path: Path) -> None:
    documents = make_traces(Job(late_us=(0.0, 900.0)))
    for event in documents[1]["traceEvents"]:
        event["ts"] += 12_345_678.0
    run = read_run([write_trace(tmp_path / f"{at}.json", document) for at, document in enumerate(documents)])
    assert run.traced_ranks == (0, 1)
    first = run.steps[0].buckets[0]
    assert first.last_rank == 1
    assert max(first.arrivals_us) == pytest.approx(900.0, abs=50.0)
    assert not any("upper bound" in note for note in profile_of(run, MODEL).notes or ())


def test_one_rank_gives_an_upper_bound(tmp_path: Path) -> None:
    job = Job(late_us=(0.0, 900.0))
    profile = profile_of(run_of(tmp_path, job), MODEL)
    assert profile.cluster is not None
    assert profile.cluster.samples is not None
    samples = profile.cluster.samples["all_reduce"]
    assert all(time_us >= job.cost_us(int(size) // 4) * 0.99 for size, time_us in samples)
    assert any("upper bounds" in note for note in profile.notes or ())


def test_traces_of_some_ranks_give_upper_bounds(tmp_path: Path) -> None:
    run = run_of(tmp_path, Job(world=4, late_us=(0.0, 500.0)), ranks=2)
    assert any("upper bounds: traces of 2 of 4 ranks" in note for note in profile_of(run, MODEL).notes or ())


def test_ranks_that_nothing_records(tmp_path: Path) -> None:
    document = make_traces(Job())[0]
    del document["distributedInfo"]
    for event in document["traceEvents"]:
        event["args"].pop("Group size", None)
    profile = profile_of(read_run([write_trace(tmp_path / "t.json", document)]), MODEL)
    assert profile.world.ranks == 2
    assert any("taken as 2" in note for note in profile.notes or ())


def test_a_first_step_with_other_buckets_is_left_out(tmp_path: Path) -> None:
    first, document = make_traces(Job(steps=1, buckets=(1, 8)))[0], make_traces(Job(steps=2))[0]
    for event in first["traceEvents"]:
        event["ts"] -= 1e6
        if "correlation" in event["args"]:
            event["args"]["correlation"] += 10_000
        event["name"] = event["name"].replace("ProfilerStep#10", "ProfilerStep#9")
    document["traceEvents"] += first["traceEvents"]
    run = read_run([write_trace(tmp_path / "t.json", document)])
    assert [step.number for step in run.steps] == [10, 11]
    assert run.notes == ("left out: 1 step with buckets of other sizes, as DDP's first step has",)


def test_the_synchronizing_micro_batch_is_the_step(tmp_path: Path) -> None:
    job = Job(micro_batches=3)
    run = run_of(tmp_path, job)
    assert {step.micro_batches for step in run.steps} == {3}
    assert run.steps[0].numel == job.sizes
    assert run.steps[0].last_gradient_us < 2 * len(job.sizes) * job.layer_us


def test_a_compiled_backward_is_said(tmp_path: Path) -> None:
    profile = profile_of(run_of(tmp_path, Job(compiled=True)), MODEL)
    assert any("as of a compiled model" in note for note in profile.notes or ())


def test_a_compiled_backward_may_send_gradients_itself(tmp_path: Path) -> None:
    job = Job(compiled=True, inside=True, shapes=False, copies=False, metadata=False)
    run = run_of(tmp_path, job)
    assert run.steps[0].numel == job.sizes
    assert [message.gradients for message in run.steps[0].buckets] == list(range(1, 9))
    profile = profile_of(run, MODEL)
    assert profile.cluster is not None
    assert dict((profile.cluster.samples or {})["all_reduce"])[8e6] == pytest.approx(job.cost_us(2_000_000), rel=0.01)
    assert any("as of a compiled model" in note for note in profile.notes or ())


def test_other_collectives_are_named_and_not_planned(tmp_path: Path) -> None:
    run = run_of(tmp_path, Job(extra=("all_to_all",)))
    assert [len(step.buckets) for step in run.steps] == [3, 3, 3]
    assert run.unplanned == ("all-to-all of group 1 default_pg, 3 a step: not planned, left as it is",)


def test_steps_are_found_without_marks(tmp_path: Path) -> None:
    document = make_traces(Job())[0]
    document["traceEvents"] = [e for e in document["traceEvents"] if not e["name"].startswith("ProfilerStep")]
    run = read_run([write_trace(tmp_path / "t.json", document)])
    assert [len(step.buckets) for step in run.steps] == [3, 3, 3]


def test_sizes_are_shared_out_where_nothing_records_them(tmp_path: Path) -> None:
    job = Job(shapes=False, copies=False)
    run = run_of(tmp_path, job)
    profile = profile_of(run, MODEL)
    assert sum(gradient.numel for gradient in profile.compute.gradients) == sum(job.sizes)
    assert any("shared out evenly" in note for note in profile.notes or ())
    named = profile_of(run, MODEL, parameters(job))
    assert [gradient.numel for gradient in named.compute.gradients] == list(job.sizes)


def parameters(job: Job) -> list[Parameter]:
    return [Parameter(f"layer{at}.weight", (numel,)) for at, numel in reversed(list(enumerate(job.sizes)))]


def test_names_of_the_job(tmp_path: Path) -> None:
    job = Job()
    run = run_of(tmp_path, job)
    profile = profile_of(run, MODEL, parameters(job))
    assert [gradient.name for gradient in profile.compute.gradients] == [f"layer{at}.weight" for at in range(8)]
    other = [*parameters(job)[:-1], Parameter("head.bias", (999,))]
    with pytest.raises(InputError, match=r"found 1000 elements in gradient 0, expected 999, those of head.bias"):
        profile_of(run, MODEL, other)
    with pytest.raises(InputError, match="8 gradients, and 7 trainable parameters"):
        profile_of(run, MODEL, parameters(job)[1:])


def test_groups_of_fsdp2_are_units(tmp_path: Path) -> None:
    job = Job(modules=("layers.1", "layers.0", ""), copies=False)
    run = run_of(tmp_path, job)
    profile = profile_of(run, MODEL)
    names = [gradient.name for gradient in profile.compute.gradients]
    assert names[1:3] == ["layers.1.gradient_1", "layers.0.gradient_2"]
    assert names[-1] == "gradient_7"
    assert profile.units is not None
    assert [unit.module for unit in profile.units.units] == ["layers.0", "layers.1"]
    # Forward of the root is the last unit's, its backward that of the group before.
    forwards = [unit.forward_us for unit in profile.units.units]
    assert forwards[0] == pytest.approx(3 * job.layer_us / 2)
    assert sum(forwards) == pytest.approx(len(job.sizes) * job.layer_us / 2)
    assert sum(unit.backward_us for unit in profile.units.units) == pytest.approx(profile.compute.backward_us, abs=1.0)
    sizes = {weight.modules: weight.numel for weight in profile.units.weights}
    assert sizes == {("layers.0",): sum(job.sizes[2:5]), ("layers.1",): sum(job.sizes[:2]), ("",): sum(job.sizes[5:])}
    plan = optimize_wrapping(WrappingRequest(profile=profile))
    assert plan.fsdp2 is not None
    assert replay(run, profile) is not None


def test_a_step_without_the_profiler(tmp_path: Path) -> None:
    slow, fast = (run_of(tmp_path, Job(host_us=host_us)) for host_us in (600.0, 0.0))
    alone = profile_of(fast, MODEL).compute
    steps = [step.span_us + (step.gap_us or 0.0) for step in fast.steps]
    profile = profile_of(slow, MODEL, step_ms=float(np.median(steps)) / 1e3)
    assert profile.compute.step_us == pytest.approx(alone.step_us, rel=0.05)
    assert any("taken out" in note for note in profile.notes or ())
    with pytest.raises(InputError, match="--step-ms: found"):
        profile_of(slow, MODEL, step_ms=0.1)


def test_archives(tmp_path: Path) -> None:
    plain = write_trace(tmp_path / "t.json", make_traces(Job())[0])
    with zipfile.ZipFile(tmp_path / "t.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(plain, "t.json")
    assert len(read_run([str(tmp_path / "t.zip")]).steps) == 3


def test_clocks_in_nanoseconds(tmp_path: Path) -> None:
    document = make_traces(Job())[0]
    for event in document["traceEvents"]:
        event["ts"] = round((event["ts"] + 1.7e15) * 1000)
        event["dur"] = round(event["dur"] * 1000)
    run = read_run([write_trace(tmp_path / "t.json", document)])
    assert run.steps[0].span_us == pytest.approx(run_of(tmp_path, Job()).steps[0].span_us, rel=1e-3)
