"""When a bucket that did harm is compressed as planned again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from runtime.plan import NO_COMPRESSION, CompressorSpec, ModelReference, Plan, PlanBucket, PlanWorld
from runtime.sparse.guard import FIRST_WAIT_STEPS, RelaxedBuckets, with_bucket

INT8, BFLOAT16 = (CompressorSpec(name="wire", dtype=dtype) for dtype in ("int8", "bfloat16"))
FOUND_AFTER = 60
"""Steps of compression until harm is found."""


def plan_of(*compressors: CompressorSpec) -> Plan:
    """One bucket for each compressor."""
    buckets = tuple(PlanBucket(gradients=(f"g{i}",), compressor=spec) for i, spec in enumerate(compressors))
    return Plan(model=ModelReference(name="m"), world=PlanWorld(ranks=2), accuracy="bounded", buckets=buckets)


def changes(harms: Callable[[int], bool], steps: int) -> list[tuple[int, str]]:
    """Steps at which one bucket changes, and its dtype or name since: it is sent whole after harm, and what does harm
    is found after some steps of compression.
    """
    plan, relaxed, found = plan_of(INT8), RelaxedBuckets(), []
    since = 0
    for step in range(steps):
        bucket, before = plan.buckets[0], plan
        if bucket.compressor == INT8 and step - since >= FOUND_AFTER and harms(step):
            relaxed.relax(0, bucket, step)
            plan = with_bucket(plan, 0, replace(bucket, compressor=NO_COMPRESSION))
        elif (change := relaxed.restore(plan, step)) is not None:
            plan = change[1]
        if plan != before:
            since = step
            found.append((step, plan.buckets[0].compressor.dtype or plan.buckets[0].compressor.name))
    return found


def test_waits_double_while_a_bucket_does_harm_each_time() -> None:
    found = changes(lambda _: True, 20 * FIRST_WAIT_STEPS)
    waits = [restored[0] - harmed[0] for harmed, restored in zip(found[::2], found[1::2], strict=False)]
    assert waits == [FIRST_WAIT_STEPS * 2**index for index in range(4)]
    assert {kind for _, kind in found[::2]} == {"none"}
    assert {kind for _, kind in found[1::2]} == {"int8"}


def test_harm_long_after_the_last_is_a_first_one() -> None:
    """Two episodes of harm with 5,000 harmless steps between them: both begin with the first wait."""
    found = changes(lambda step: step < 100 or 6200 <= step < 6300, 9000)
    assert [step for step, _ in found] == [60, 60 + FIRST_WAIT_STEPS, 6200, 6200 + FIRST_WAIT_STEPS]


def test_what_was_planned_comes_back_from_two_steps_wider() -> None:
    plan, relaxed = plan_of(NO_COMPRESSION, INT8), RelaxedBuckets()
    assert relaxed.restore(plan, 10**6) is None
    first = relaxed.relax(1, plan.buckets[1], 0)
    wider = with_bucket(plan, 1, replace(plan.buckets[1], compressor=BFLOAT16))
    assert relaxed.relax(1, wider.buckets[1], 100) == first
    whole = with_bucket(plan, 1, replace(plan.buckets[1], compressor=NO_COMPRESSION))
    assert relaxed.restore(whole, 100 + first - 1) is None
    assert relaxed.restore(whole, 100 + first) == (1, plan)
    assert relaxed.restore(plan, 100 + first + 1) is None


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_buckets_that_are_due_at_once_come_back_one_by_one(order: tuple[int, int]) -> None:
    plan, relaxed = plan_of(INT8, BFLOAT16), RelaxedBuckets()
    whole = plan.uncompressed()
    for index in order:
        relaxed.relax(index, plan.buckets[index], 5)
    for step in (5 + FIRST_WAIT_STEPS, 6 + FIRST_WAIT_STEPS):
        change = relaxed.restore(whole, step)
        assert change is not None
        whole = change[1]
    assert whole.buckets == plan.buckets
