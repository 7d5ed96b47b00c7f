"""Two shots in fewer bytes: what the planner says beside the runtime's own rows of bytes, and by hand."""

from __future__ import annotations

import pytest
import torch
from builders import cluster_document, line_problem, make, usual_document

from planner.cost.wire import ELEMENT_BYTES
from planner.decide.strategies import make_schedule
from planner.emit.lower import lower
from planner.model.modes import model_of, step_us
from runtime.plan import CompressorSpec
from runtime.sparse.compressors.wire import WIRE_DTYPES, make_wire


def test_the_planner_knows_every_dtype_of_the_runtime() -> None:
    assert ELEMENT_BYTES.keys() == WIRE_DTYPES.keys()


@pytest.mark.parametrize("dtype", ELEMENT_BYTES)
@pytest.mark.parametrize("ranks", [2, 8])
def test_bytes_are_the_runtime_s(dtype: str, ranks: int) -> None:
    """But for what fills the last block of a part, and its last eight bytes."""
    elements = 1_000_003
    cut = make_wire(CompressorSpec(name="wire", dtype=dtype), ranks).cut(elements, ranks, torch.float32)
    assert ranks * cut.row_bytes == pytest.approx(ELEMENT_BYTES[dtype] * elements, rel=0.005)


def test_a_bucket_by_hand() -> None:
    """4 ranks, ring halves of 3 · 10 us and 3/4 · 0.01 us a byte; 1,000 elements as int8 take 1,015.625 bytes."""
    encode = {"int8": {"alpha_us": 2.0, "beta_us_per_byte": 0.001}}
    decode = {"int8": {"alpha_us": 1.0, "beta_us_per_byte": 0.002}}
    cluster = cluster_document((10.0, 0.01), nodes=4, inter={"alpha_us": 10.0, "beta_us_per_byte": 0.01}, encode=encode,
                               decode=decode)  # fmt: skip
    document = usual_document()
    problem = make(document, cluster)
    schedule = make_schedule(problem, "wire:int8")
    elements = sum(problem.elements(bucket) for bucket in schedule.buckets)
    assert elements == int(problem.numel.sum())
    for bucket in schedule.buckets:
        count = problem.elements(bucket)
        [(resource, _, sent_us)] = problem.phase_times(bucket)
        halves_us = problem.reduce_scatter.curve.at(count * (1 + 4 / 256)) + problem.all_gather.curve.at(
            count * (1 + 4 / 256)
        )
        owner_us = (1.0 + 4 * count * 0.002) + (2.0 + 4 * count / problem.ranks * 0.001)
        assert (resource, sent_us) == ("network", pytest.approx(halves_us + owner_us))
        assert problem.selection_us(bucket) == pytest.approx(2.0 + 4 * count * 0.001)
        assert problem.selection_us(bucket, "unpack") == pytest.approx(1.0 + 4 * count * 0.002)
    assert step_us(problem, schedule) == pytest.approx(model_of(schedule).simulate(problem, schedule).iteration_us)


def test_the_plan_is_what_the_runtime_reads() -> None:
    problem = line_problem([(1_000, 50.0), (2_000, 50.0)], 10.0, 0.1)
    plan = lower(problem, make_schedule(problem, "wire:float8_e4m3fn"))
    assert plan.accuracy == "bounded"
    for bucket in plan.buckets:
        assert (bucket.collective, bucket.algorithm) == ("all_reduce", "two_shot")
        assert bucket.compressor == CompressorSpec(name="wire", dtype="float8_e4m3fn")
        assert "float8_e4m3fn of" in (bucket.reason or "")


def test_narrow_pays_where_the_network_is_slow() -> None:
    """A slow link: int8 beats bfloat16 beats whole."""
    layers = [(250_000, 100.0)] * 8
    slow = line_problem(layers, 10.0, 0.01)
    times_us = [step_us(slow, make_schedule(slow, name)) for name in ("wire:int8", "wire:bfloat16", "optimal")]
    assert times_us == sorted(times_us)
    assert times_us[0] < 0.5 * times_us[2]
