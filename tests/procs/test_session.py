"""Sessions on real processes, against DDP in the same run."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from typing import Any

import all_checks
import pytest
import step_checks
from started import PATHS

from planner.jobs.launch import LocalWorld, run_ranks
from runtime.plan.measured import MeasuredStep
from runtime.plan.strict_json import validate


@pytest.fixture(scope="module")
def pair() -> list[dict[str, Any]]:
    """Results of both ranks of two."""
    return run_ranks(LocalWorld(ranks=2), all_checks.pair_checks)


@pytest.fixture(scope="module", params=[3, pytest.param(4, marks=pytest.mark.long)])
def many(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """Results of every rank of three and of four."""
    return run_ranks(LocalWorld(ranks=request.param), all_checks.many_checks)


def test_weights_equal_ddp_bit_for_bit(pair: list[dict[str, Any]]) -> None:
    for rank in pair:
        assert len(rank["weights_like_ddp"]) == 11
        assert all(rank["weights_like_ddp"].values()), rank["weights_like_ddp"]


@pytest.mark.parametrize("check", ["gradients_are_final", "accumulation_like_ddp", "mixed_dtypes"])
def test_gradients_equal_ddp(pair: list[dict[str, Any]], check: str) -> None:
    assert [rank[check] for rank in pair] == [True, True]


@pytest.mark.parametrize("check", ["after_an_exception", "two_models"])
def test_unusual_steps_equal_ddp(pair: list[dict[str, Any]], check: str) -> None:
    assert [rank[check] for rank in pair] == [True, True]


def test_activation_checkpointing_equals_ddp(pair: list[dict[str, Any]]) -> None:
    assert [rank["checkpointed"] for rank in pair] == [{False: True, True: True}] * 2


def test_integer_gradients_equal_ddp_with_any_buckets(pair: list[dict[str, Any]]) -> None:
    assert [rank["integers_like_ddp"] for rank in pair] == [[True, True, True]] * 2


def test_ranks_that_start_apart_end_equal(pair: list[dict[str, Any]]) -> None:
    assert [rank["different_starts"] for rank in pair] == [(True, True)] * 2


def test_unused_parameters_as_with_ddp(pair: list[dict[str, Any]]) -> None:
    for rank in pair:
        assert all(rank["unused_like_ddp"].values()), rank["unused_like_ddp"]


def test_detach_leaves_a_plain_model(pair: list[dict[str, Any]]) -> None:
    for rank in pair:
        assert all(rank["detach_and_attach"].values()), rank["detach_and_attach"]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("other model", ["another model", "in the plan but not trainable in the model: 9.bias, 9.weight"]),
        ("other ranks", ["made for 7 ranks, found 2"]),
        ("other plan on rank 1", ["different plans", "rank 0", "rank 1"]),
        ("bad on rank 1 only", ["rank 1: the plan was made for 7 ranks"]),
        ("wrapped", ["DistributedDataParallel", "model.module"]),
        ("sparse embedding", ["sparse=True"]),
        ("unknown collective", ["sparse/gossip", "all_reduce/library", "sparse/flat", "sparse/hitopk"]),
        ("sparse, but everything", ["'none'", "expected one of randomk, topk"]),
        ("lossy, but exact", ["bucket 0", "'topk'", "accuracy is exact", "bounded"]),
        ("more than there are", ["bucket 0", "does not fit", "1000000"]),
        ("bad fallback", ["the plan's fallback: ", "another model"]),
        ("lossy fallback", ["fallback has the accuracy bounded", "expected exact"]),
        ("complex and lossy", ["'topk'", "is complex", "expected none"]),
        ("optimizer that compares", ["LBFGS", "bucket 0", "exact plan"]),
        ("unknown compressor", ["'zip'", "none"]),
        ("delay", ["delay"]),
        ("fingerprint", ["shapes or dtypes"]),
    ],
)
def test_a_plan_that_does_not_fit_is_refused_on_all_ranks_alike(
    pair: list[dict[str, Any]], case: str, words: list[str]
) -> None:
    first, second = (rank["mismatches"][case] for rank in pair)
    assert first == second
    assert first.startswith("PlanMismatch: ")
    for word in words:
        assert word in first


def test_buckets_start_in_plan_order(pair: list[dict[str, Any]]) -> None:
    for rank in pair:
        timeline = rank["measured_timeline"]
        assert timeline["steps"] == 5
        launches = [launch for _, launch, _, _ in timeline["buckets"]]
        assert launches == sorted(launches)
        # The plan's first bucket is ready last: all others have to wait for its launch.
        assert timeline["buckets"][-1][0] < timeline["buckets"][0][0] <= launches[0]
        assert all(start <= end for start, end in timeline["network"])
        assert f"{len(launches) - 1}: 1 gradients" in timeline["text"]


def test_a_measured_step_is_written_as_it_is_read(pair: list[dict[str, Any]]) -> None:
    for number, rank in enumerate(pair):
        document = rank["measured_timeline"]["document"]
        step = validate(MeasuredStep, document, "report")
        assert step.to_document() == document
        assert (step.rank, step.ranks, step.steps) == (number, 2, 5)
        assert [task.bucket for task in step.timeline if task.resource == "network"] == list(
            range(len(rank["measured_timeline"]["buckets"]))
        )
        assert [task.task for task in step.timeline if task.resource == "compute"] == ["forward", "backward", "update"]
        assert step.iteration_us == rank["measured_timeline"]["iteration_us"] > 0.0


@pytest.mark.parametrize(
    ("kind", "micro_batches", "predicted_us"),
    # a step as planned; with forward and backward twice more; twice as planned, with one update
    [("one", 1, 100.0), ("three", 3, 240.0), ("two exchanged", 2, 190.0)],
)
def test_the_parts_of_a_report_add_up(
    pair: list[dict[str, Any]], kind: str, micro_batches: int, predicted_us: float
) -> None:
    """In the text's fields and in the page's, with accumulation too, and on every rank."""
    for rank in pair:
        report, page = rank["reported_steps"][kind]
        assert report.steps == 8
        before = report.accumulated
        assert (before.micro_batches + 1 if before else 1) == micro_batches
        parts = report.forward_us, report.backward_us, report.wait_us, report.update_us
        assert all(part > 0.0 for part in parts)
        assert sum(parts) == pytest.approx(report.iteration_us)
        assert report.script_us >= 2000.0
        assert report.every_us == report.iteration_us + report.script_us
        assert report.predicted_us == pytest.approx(predicted_us)
        for name in ("forward", "backward", "update"):
            drawn_us = sum(task.end_us - task.start_us for task in page.timeline if task.task.startswith(name))
            assert drawn_us == pytest.approx(getattr(report, f"{name}_us")) == getattr(page, f"{name}_us")
        assert max(task.end_us for task in page.timeline) == pytest.approx(page.iteration_us) == report.iteration_us
        assert page.exposed_us == pytest.approx(report.wait_us)
        assert (page.micro_batches or 1) == micro_batches
        begun_us = before.total_us if before else 0.0
        assert all(begun_us <= bucket.ready_us <= bucket.end_us <= report.iteration_us for bucket in report.buckets)
        assert ("of 3 micro-batches" in str(report)) == (micro_batches == 3)


def test_attach_adds_one_copy_of_the_gradients(pair: list[dict[str, Any]]) -> None:
    for rank in pair:
        buffers, gradients = rank["memory_of_attach"]
        assert gradients <= buffers <= gradients + 64


BLOCKS_OF_THEIR_OWN = """
import ctypes, torch, planner
class Heap(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena ordblks smblks hblks hblkhd usmblks".split()] + [
        (name, ctypes.c_size_t) for name in "fsmblks uordblks fordblks keepcost".split()
    ]
model = torch.nn.Linear(2, 2)
planner.attach(model, torch.optim.SGD(model.parameters()))
read = ctypes.CDLL(None).mallinfo2
read.restype = Heap
before = read().hblks
output = torch.empty(30 << 20, dtype=torch.uint8)
print(read().hblks - before)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="another heap")
def test_what_a_step_frees_is_not_faulted_in_again() -> None:
    """Outputs come from the heap, of which glibc keeps twice the largest block that it does not map by itself."""
    environment = {**os.environ, "PYTHONPATH": PATHS, "PLANNER": "off"}
    command = [sys.executable, "-c", BLOCKS_OF_THEIR_OWN]
    assert subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout == "0\n"


def test_more_ranks_agree_with_ddp(many: list[dict[str, Any]]) -> None:
    for rank in many:
        assert rank["integers_like_ddp"] == [True, True, True]
        assert rank["float32"] <= 1e-6
        assert rank["float64"] <= 1e-12
        assert rank["different_starts"] == (True, True)
        assert all(rank["unused_like_ddp"].values()), rank["unused_like_ddp"]


def test_a_subgroup_trains_alone() -> None:
    assert run_ranks(LocalWorld(ranks=3), step_checks.subgroup) == [True, None, True]
