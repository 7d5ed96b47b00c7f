"""Two shots in fewer bytes: what the planner says beside the runtime's own rows of bytes, and by hand."""

from __future__ import annotations

import pytest
import torch
from builders import cluster_document, line_problem, make, profile_document, usual_document
from scipy.optimize import brentq

from planner.cost.wire import DTYPES
from planner.decide.strategies import make_schedule
from planner.emit.lower import lower
from planner.model.modes import model_of, step_us
from planner.model.problem import Problem
from planner.model.spending import spending
from runtime.plan import CompressorSpec
from runtime.sparse.compressors.wire import WIRE_DTYPES, make_wire


def test_the_planner_knows_every_dtype_of_the_runtime() -> None:
    assert DTYPES.keys() == WIRE_DTYPES.keys()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", [2, 8])
def test_bytes_are_the_runtime_s(dtype: str, ranks: int) -> None:
    """But for what fills the last block of a part, and its last eight bytes."""
    elements = 1_000_003
    cut = make_wire(CompressorSpec(name="wire", dtype=dtype), ranks).cut(elements, ranks, torch.float32)
    assert ranks * cut.row_bytes == pytest.approx(DTYPES[dtype].element_bytes * elements, rel=0.005)


def test_a_bucket_by_hand() -> None:
    """4 ranks, an all-reduce of 10 us and 0.01 us a byte; 1,000 elements as int8 take 1,015.625 bytes."""
    encode = {"int8": {"alpha_us": 2.0, "beta_us_per_byte": 0.001}}
    decode = {"int8": {"alpha_us": 1.0, "beta_us_per_byte": 0.002}}
    halves = {name: {"alpha_us": 7.0, "beta_us_per_byte": 0.006} for name in ("reduce_scatter", "all_gather")}
    for known in ({}, halves):
        cluster = cluster_document((10.0, 0.01), nodes=4, encode=encode, decode=decode)
        cluster["collectives"] |= known
        problem = make(usual_document(), cluster)
        schedule = make_schedule(problem, "wire:int8")
        assert sum(problem.elements(bucket) for bucket in schedule.buckets) == int(problem.numel.sum())
        for bucket in schedule.buckets:
            count = problem.elements(bucket)
            spent = spending(problem, bucket)
            [message] = spent.messages
            sent_bytes = count * (1 + 4 / 256)
            sent_us = 2 * (7.0 + 0.006 * sent_bytes) if known else 10.0 + 0.01 * sent_bytes
            owner_us = (1.0 + 4 * count * 0.002) + (2.0 + 4 * count / problem.ranks * 0.001)
            assert (message.resource, message.time_us) == ("network", pytest.approx(sent_us + owner_us))
            assert spent.before_us == pytest.approx(2.0 + 4 * count * 0.001)
            assert spent.after_us == pytest.approx(1.0 + 4 * count * 0.002)
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


def test_a_published_case_from_its_stated_figures() -> None:
    """1.2 B parameters on 8 A40 without NVLink: 1.4 s alone, 6.4 s a step with DDP, 3.6 s with bfloat16 all-reduces."""
    layers = [(25_000_000, 0.93e6 / 48)] * 48

    def on(us_per_byte: float) -> Problem:
        document = profile_document(layers)
        document["compute"]["forward_us"] = 0.47e6
        document["compute"]["update_us"] = 0.0
        link = {"alpha_us": 20.0, "beta_us_per_byte": us_per_byte}
        return make(document, {"schema": "planner.cluster/1", "nodes": 1, "ranks_per_node": 8, "intra": link})

    def ddp_us(us_per_byte: float) -> float:
        problem = on(us_per_byte)
        return step_us(problem, make_schedule(problem, "ddp"))

    rate = brentq(lambda us_per_byte: ddp_us(us_per_byte) - 6.4e6, 1e-5, 1e-2)
    problem = on(rate)
    assert step_us(problem, make_schedule(problem, "wire:native")) == pytest.approx(3.6e6, rel=0.10)
