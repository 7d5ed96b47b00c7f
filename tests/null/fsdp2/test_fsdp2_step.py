"""FSDP2's step: hand-made timelines, what takes memory when, and what must hold of every wrapping."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from fsdp2_cases import ROWS, chain_of, even, fixed_costs, lines, shapes
from hypothesis import given
from hypothesis import strategies as st

from planner.fsdp2.program import Shape, host_program
from planner.fsdp2.simulator import NETWORK, Costs, Executor, simulate
from runtime.plan import FullyShardPlan

EACH = FullyShardPlan(groups=(("u0",), ("u1",), ("u2",)))


def spans(shape: Shape, plan: FullyShardPlan, costs: Costs, executor: Executor = "accelerator") -> list[str]:
    """Of messages: kind, group and times."""
    step = simulate(shape, plan, costs, executor)
    short = {"all_gather": "AG", "reduce_scatter": "RS", "all_reduce": "AR"}
    return [
        f"{short[bar.kind]} {step.groups[bar.group]} {bar.start_us:g}-{bar.end_us:g}"
        for bar in step.bars
        if bar.lane >= NETWORK
    ]


def test_on_an_accelerator_gathers_go_on_beside_computation() -> None:
    """Gathers take 10, forwards 20, backwards 40, reduce-scatters 15.

    The gather of u2 waits for the copy-out of u0 alone, and the first of backward for that of u2; from then on each
    waits for the copy-out of the group whose backward begins, and queues up behind its predecessor's reduce-scatter.
    """
    assert spans(even(3), EACH, fixed_costs(10.0, 15.0)) == [
        "AG u0 0-10", "AG u1 10-20", "AG u2 20-30", "AG u2 50-60", "AG u1 70-80", "RS u2 110-125", "AG u0 125-135",
        "RS u1 150-165", "RS u0 190-205",
    ]  # fmt: skip
    assert simulate(even(3), EACH, fixed_costs(10.0, 15.0)).iteration_us == 205.0


def test_computation_waits_for_the_reduce_scatter_before_the_last() -> None:
    """Reduce-scatters take 60: that of u1 waits until the input of u2's is free, and so does computation."""
    step = simulate(even(3), EACH, fixed_costs(10.0, 60.0))
    backward = [(bar.start_us, bar.end_us) for bar in step.bars if bar.kind == "backward"]
    assert backward == [(70.0, 110.0), (110.0, 150.0), (180.0, 220.0)]
    assert step.iteration_us == 300.0
    four = FullyShardPlan(
        groups=(*EACH.groups, ("u3",)), reshard_after_forward=dict.fromkeys(["u0", "u1", "u2"], False)
    )
    costs = fixed_costs(0.0, 60.0)
    lengths = {
        buffers: simulate(even(4), replace(four, reduce_scatter_max_input_buffers=buffers), costs).bars[-1].start_us
        for buffers in (1, 4)
    }
    assert lengths[4] <= lengths[1]


def test_on_a_host_forward_waits_for_each_gather_and_stock_fsdp2_for_everything() -> None:
    costs = fixed_costs(10.0, 15.0)
    assert spans(even(3), EACH, costs, "hosts") == [
        "AG u0 0-10", "AG u1 30-40", "AG u2 60-70", "AG u2 90-100", "AG u1 100-110", "RS u2 140-155", "AG u0 155-165",
        "RS u1 180-195", "RS u0 220-235",
    ]  # fmt: skip
    assert simulate(even(3), EACH, costs, "blocking").iteration_us == 6 * 10.0 + 3 * 15.0 + 3 * 60.0
    ahead = replace(EACH, forward_prefetch={"u0": ("u1",), "u1": ("u2",)})
    assert spans(even(3), ahead, costs, "hosts")[:3] == ["AG u0 0-10", "AG u1 10-20", "AG u2 30-40"]


def test_copies_are_all_reduced_beside_the_rest() -> None:
    found = spans(even(3), replace(EACH, shard_ranks=2), fixed_costs(10.0, 15.0))
    assert [one for one in found if one.startswith("AR")] == ["AR u2 125-130", "AR u1 165-170", "AR u0 205-210"]


def test_contention_slows_what_overlaps() -> None:
    costs = fixed_costs(10.0, 15.0)
    slow = simulate(even(3), EACH, replace(costs, compute_factor=1.5, network_factor=2.0))
    assert slow.iteration_us > simulate(even(3), EACH, costs).iteration_us


def test_memory_by_hand() -> None:
    """One group of 100 elements on 4 ranks, in bytes: 400 whole, 100 a part, and 200 of the optimizer's state.

    Forward: the buffer and the parameters; then parameters and activations. Backward: parameters, gradients and
    activations; then gradients, the reduce-scatter's input and this rank's part of its result.
    """
    program = host_program(even(1), FullyShardPlan(groups=(("u0",),)))
    assert program.fixed_bytes == 300
    kinds = [action.kind for action in program.actions]
    assert kinds == ["all_gather", "wait", "forward", "all_gather", "wait", "backward", "reduce_scatter"]
    more = [most - 300 for most in program.memory_bytes]
    assert more == [400, 800, 800 + 1000, 800 + 1000, 800 + 1000, 800 + 1000, 800 + 1000]
    # The buffer of a gather is kept beyond its forward until the next one is copied out, unless hosts wait.
    assert host_program(even(1), FullyShardPlan(groups=(("u0",),)), waits=True).memory_bytes[2] - 300 == 1400


def test_rows_that_ranks_cannot_share_evenly_are_padded() -> None:
    shape = chain_of([10], [1.0], [1.0], [0], ranks=4)
    sizes = {kind: size for kind, _, size in host_program(shape, FullyShardPlan(groups=(("u0",),))).messages()}
    assert sizes == {"all_gather": 48, "reduce_scatter": 48}


@given(shapes(), lines(), st.sampled_from(["accelerator", "hosts", "blocking"]), st.data())
def test_keeping_more_takes_no_time_and_memory_that_is_bounded(
    shape: Shape, costs: Costs, executor: Executor, data: st.DataObject
) -> None:
    names = [leaf.module for leaf in shape.leaves]
    kept = data.draw(st.sets(st.sampled_from(names)))
    one = data.draw(st.sampled_from(names))
    groups = tuple((name,) for name in names)
    plans = [
        FullyShardPlan(groups=groups, reshard_after_forward={name: name not in stay for name in names})
        for stay in (kept - {one}, kept | {one})
    ]
    steps = [simulate(shape, plan, costs, executor) for plan in plans]
    assert steps[1].iteration_us <= steps[0].iteration_us + 1e-6
    bound = host_program(shape, plans[0], waits=executor == "hosts", unbuffered=frozenset({one})).peak_bytes
    assert bound <= min(step.peak_bytes for step in steps)


@given(shapes(), lines(), st.sampled_from(["accelerator", "hosts"]))
def test_no_resource_does_two_things_at_once_and_all_is_done(shape: Shape, costs: Costs, executor: Executor) -> None:
    plan = FullyShardPlan(groups=tuple((leaf.module,) for leaf in shape.leaves))
    slow = replace(costs, compute_factor=1.0, network_factor=1.0 + 1e-9)  # by the other simulator
    for of in (costs, slow):
        step = simulate(shape, plan, of, executor)
        for lane in range(4):
            bars = [bar for bar in step.bars if bar.lane == lane]
            assert all(a.end_us <= b.start_us + 1e-6 for a, b in pairwise(bars))
        assert step.iteration_us >= max(step.compute_us, step.network_us) + costs.update_us - 1e-6
        assert len(step.bars) == len(list(host_program(shape, plan).messages())) + 2 * len(shape.leaves)
    lengths = [simulate(shape, plan, of, executor).iteration_us for of in (costs, slow)]
    assert lengths[0] == pytest.approx(lengths[1], rel=1e-6, abs=1e-3)


def test_what_no_model_has_is_refused() -> None:
    shape = even(3)
    weights = shape.units.weights
    tied = replace(shape, units=replace(shape.units, weights=(*weights, replace(weights[0], modules=("u0", "u2")))))
    with pytest.raises(ValueError, match="tied parameter of u0 and u2 in two groups"):
        host_program(tied, EACH)
    with pytest.raises(ValueError, match="found 'u9' in a group, which computes nothing"):
        host_program(shape, FullyShardPlan(groups=(("u9",),)))
    assert weights[0].shape[0] == ROWS
