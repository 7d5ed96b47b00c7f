"""Products in place of matrices: what the planner says beside what the runtime sends, and by hand."""

from __future__ import annotations

import pytest
import torch
from builders import cluster_document, make, profile_document
from hypothesis import given
from hypothesis import strategies as st

from planner.cost.low_rank import low_rank_lines
from planner.documents.profile import Cluster, parse_cluster, parse_profile
from planner.emit.lower import lower
from planner.ir import Bucket, Schedule
from planner.model.codecs import LowRank
from planner.model.modes import model_of, step_us
from planner.model.problem import Problem
from planner.model.spending import spending
from planner.profile.compute import matrix_of
from runtime.errors import InputError
from runtime.plan import CompressorSpec
from runtime.sparse.compressors.powersgd import LowRankCompressor

PARTS = ("pack", "project", "subtract", "unpack")
LINES = {
    str(rank): {part: {"alpha_us": 1.0 + place, "beta_us_per_byte": 0.001 * rank} for place, part in enumerate(PARTS)}
    for rank in (1, 4)
}


def problem_of(shapes: list[tuple[int, ...]], line: tuple[float, float] = (10.0, 0.01)) -> Problem:
    tensors = [torch.empty(shape) for shape in shapes]
    document = profile_document([(tensor.numel(), 50.0) for tensor in tensors])
    for gradient, tensor in zip(document["compute"]["gradients"], tensors, strict=True):
        if (matrix := matrix_of(tensor)) is not None:
            gradient["matrix"] = list(matrix)
    return make(document, cluster_document(line, low_rank=LINES))


SHAPES = st.lists(
    st.one_of(st.tuples(st.integers(1, 40), st.integers(1, 40)), st.tuples(st.integers(0, 99)),
              st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 3), st.integers(1, 3))),
    min_size=1, max_size=6,
)  # fmt: skip


@given(SHAPES, st.integers(1, 8))
def test_what_is_sent_is_what_the_runtime_sends(shapes: list[tuple[int, ...]], rank: int) -> None:
    factors = LowRankCompressor(rank).factors([torch.empty(shape) for shape in shapes])
    thin = problem_of(shapes).thin(rank)
    assert int(thin.left.sum()) == factors.left.elements
    assert int(thin.right.sum()) == factors.right.elements + sum(run.stop - run.start for run in factors.whole)
    assert [index for index, factored in enumerate(thin.factored) if factored] == factors.members


def test_a_bucket_by_hand() -> None:
    """Matrices of 100 x 30 and 8 x 8 at rank 2, and a vector of 7."""
    problem = problem_of([(100, 30), (8, 8), (7,)])
    schedule = Schedule(buckets=(Bucket((0, 1, 2), codec=LowRank(2)),))
    [spent] = [spending(problem, bucket) for bucket in schedule.buckets]
    count, left, right = 3071, 2 * 108, 2 * 38 + 7
    beta = 0.001 + (4 - 1) * 0.001 / 3  # of rank 2, between 1 and 4
    project_us, subtract_us = 2.0 + 4 * count * beta, 3.0 + 4 * count * beta
    second_us = max(10.0 + 0.04 * right, subtract_us)
    [message] = spent.messages
    assert message.time_us == pytest.approx(10.0 + 0.04 * left + project_us + second_us)
    assert message.sent_bytes == 4 * (left + right)
    assert (spent.before_us, spent.after_us) == pytest.approx((1.0 + 4 * count * beta, 4.0 + 4 * count * beta))
    assert step_us(problem, schedule) == pytest.approx(model_of(schedule).simulate(problem, schedule).iteration_us)
    [bucket] = lower(problem, schedule).buckets
    assert bucket.compressor == CompressorSpec(name="powersgd", rank=2)
    assert "rank 2 of 3,071 elements" in (bucket.reason or "")


def test_beyond_what_was_measured_costs_grow_with_the_rank() -> None:
    cluster = parse_cluster(cluster_document(low_rank=LINES))
    lines, source = low_rank_lines(cluster, 8)
    assert (source, lines.pack.beta_us_per_byte) == ("measured", pytest.approx(0.008))
    assert low_rank_lines(Cluster(nodes=2), 8)[1] == "free"


def test_a_matrix_of_another_size_is_refused() -> None:
    document = profile_document([(12, 1.0)])
    document["compute"]["gradients"][0]["matrix"] = [3, 5]
    with pytest.raises(InputError, match=r"gradients\[0\].matrix: found \[3, 5\], expected rows and columns of 12"):
        parse_profile(document)
