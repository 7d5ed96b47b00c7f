"""What a plan says of loading: is the step input-bound, and do the samples fit into memory."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from builders import run, usual_document, write
from cache_datasets import Raw
from torch import nn

from planner import TrainingJob, optimize
from planner.documents.profile import load_profile
from planner.jobs.job import load_job
from planner.jobs.on_rank import profile_rank
from planner.profile.loading import batch_samples, measure_loading
from planner.report.loading import loading_lines, node_memory_bytes, workers_needed
from planner.report.tables import profile_lines
from runtime.comm.world import World
from runtime.errors import InputError
from runtime.plan import load_plan
from runtime.plan.predicted import Loading, Prediction

LOADING = Loading(
    samples=1000, batch_samples=32, cold_us=4000.0, disk_us=1500.0, memory_us=20.0, raw_bytes=30_000,
    decoded_bytes=200_000, nodes=3, memory_available_bytes=10**9,
)  # fmt: skip


def lines(loading: Loading, step_us: float) -> str:
    """What `planner explain` says of a step so long."""
    document = usual_document()
    document["loading"] = {name: getattr(loading, name) for name in loading.__dataclass_fields__}
    from planner.documents.profile import parse_profile

    plan = optimize(parse_profile(document))
    assert plan.loading == loading
    return "\n".join(loading_lines(replace(plan, predicted=Prediction(iteration_us=step_us))))


def test_an_input_bound_step_is_told_with_its_cure() -> None:
    told = lines(LOADING, 60_000.0)
    assert "a batch of 32 takes one worker 128 ms from storage, 48 ms from local disk, 0.64 ms from memory" in told
    assert "input-bound with fewer than 3 workers a rank from storage; one is enough from local disk or memory" in told
    assert workers_needed(LOADING, 4000.0, 60_000.0) == 3  # 128 ms of loading in 60
    assert "3 workers a rank from storage, 2 workers a rank from local disk; one is enough from memory" in lines(
        LOADING, 45_000.0
    )


def test_a_step_that_is_not_is_told_so() -> None:
    assert "the step is not input-bound: one worker a rank keeps up" in lines(LOADING, 128_000.0)


def test_memory_per_node_and_whether_it_fits() -> None:
    need = node_memory_bytes(LOADING)
    assert need == 334 * (200_000 + 16)  # the largest of three parts; 200,000 is a multiple of 64
    assert f"needs memory_bytes={need} (0.0622 GiB) on each node for all 1,000 decoded samples over 3 nodes" in lines(
        LOADING, 1e5
    )
    assert lines(LOADING, 1e5).endswith("it fits")
    scarce = replace(LOADING, memory_available_bytes=need // 2)
    assert "it does not fit; memory_bytes=" in lines(scarce, 1e5)
    assert "would hold 40% of the samples" in lines(scarce, 1e5)


def test_without_a_dataset_nothing_is_said(tmp_path: Path) -> None:
    write(tmp_path / "profile.json", usual_document())
    assert loading_lines(optimize(tmp_path / "profile.json")) == []


def test_loading_is_measured_at_three_levels(tmp_path: Path) -> None:
    class Slow(Raw):
        def read(self, index: int) -> bytes:
            import time

            time.sleep(0.01)
            return super().read(index)

    found = measure_loading(Slow(samples=30, size=1000), 16, World())
    assert (found.samples, found.batch_samples, found.nodes) == (30, 16, 1)
    assert found.cold_us > 10_000 > found.disk_us > 0.0 < found.memory_us < 10_000
    assert found.raw_bytes == 4000
    assert 4000 < found.decoded_bytes < 4500
    assert found.memory_available_bytes > 0


def test_batches_are_counted() -> None:
    assert batch_samples({"mask": None, "images": (torch.zeros(7, 3), torch.zeros(2))}) == 7
    with pytest.raises(InputError, match=r"expected samples; say how many there are: TrainingJob\(batch_samples=…\)"):
        batch_samples([torch.tensor(1.0), "text"])


def job() -> TrainingJob:
    """With a dataset."""
    return TrainingJob(
        model=nn.Linear(100, 1),
        loss=lambda model, batch: model(batch).sum(),
        batch=lambda step, rank: torch.ones(8, 100),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        dataset=Raw(samples=40),
    )


def no_count() -> TrainingJob:
    """With a wrong number."""
    return replace(job(), batch_samples=0)


def test_profile_optimize_and_explain_carry_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile, plan = str(tmp_path / "profile.json"), str(tmp_path / "plan.json")
    profile_rank(f"{__file__}:job", "cpu", False).save(profile)  # what `planner profile` has its ranks do
    run("optimize", profile, "--cluster", "a100-1x8", "-o", plan)
    found = load_profile(profile).loading
    assert found is not None
    assert (found.samples, found.batch_samples) == (40, 8)
    assert load_plan(plan).loading == found
    assert "one of 40 samples takes " in "\n".join(profile_lines(load_profile(profile)))
    assert json.loads(Path(plan).read_text())["loading"]["samples"] == 40
    capsys.readouterr()
    run("explain", plan)
    assert "input: a batch of 8 takes one worker" in capsys.readouterr().out


def test_a_wrong_number_of_samples_is_refused() -> None:
    with pytest.raises(InputError, match="batch_samples is 0, expected a number of samples, at least 1"):
        load_job(f"{__file__}:no_count")
