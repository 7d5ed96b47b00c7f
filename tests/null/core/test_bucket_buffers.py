"""Buckets and usage flags as one rank lays them out, without a process group."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import nn

from runtime.core.buckets import Part, SavedGrad, make_plain_buckets
from runtime.core.usage import UsageFlags
from runtime.errors import InputError
from runtime.plan import ModelReference, Plan, PlanBucket, PlanWorld


def parameters() -> dict[str, nn.Parameter]:
    return {
        "conv": nn.Parameter(torch.zeros(2, 3, 2, 2).to(memory_format=torch.channels_last)),
        "half": nn.Parameter(torch.zeros(5, dtype=torch.float16)),
        "bias": nn.Parameter(torch.zeros(3)),
    }


def plan(*buckets: tuple[str, ...]) -> Plan:
    made = tuple(PlanBucket(gradients=names) for names in buckets)
    return Plan(model=ModelReference(name="test"), world=PlanWorld(ranks=2), accuracy="exact", buckets=made)


def test_a_bucket_has_one_message_for_each_dtype() -> None:
    held = parameters()
    [bucket] = make_plain_buckets(plan(("conv", "half", "bias")), held, tail_elements=2)
    assert [message.flat.dtype for message in bucket.messages] == [torch.float32, torch.float16]
    assert [message.flat.numel() for message in bucket.messages] == [24 + 3 + 2, 5]
    assert [slot.index for slot in bucket.slots] == [0, 1, 2]
    assert bucket.slots[0].view.stride() == held["conv"].stride()


def test_gradients_are_scaled_into_the_bucket_and_become_its_views() -> None:
    held = parameters()
    buckets = make_plain_buckets(plan(("bias",), ("conv", "half")), held)
    for parameter in held.values():
        parameter.grad = torch.full_like(parameter, 6.0)
    for bucket in buckets:
        bucket.take_small(0.5)
    for bucket in buckets:
        for slot in bucket.slots:
            assert slot.parameter.grad is slot.view
            assert slot.view.eq(3.0).all()
    buckets[0].take_small(0.5)  # in place now
    assert held["bias"].grad is not None
    assert held["bias"].grad.tolist() == [1.5, 1.5, 1.5]


def test_a_kept_gradient_keeps_its_values() -> None:
    held = parameters()
    [bucket] = make_plain_buckets(plan(("bias",)), held)
    held["bias"].grad = torch.ones(3)
    bucket.take_small(1.0)
    kept, held["bias"].grad = held["bias"].grad, torch.full((3,), 5.0)
    bucket.take_small(1.0)
    assert kept.tolist() == [1.0, 1.0, 1.0]
    assert bucket.messages[0].flat.tolist() == [5.0, 5.0, 5.0]


def test_a_gradient_that_is_to_be_differentiated_is_refused() -> None:
    held = parameters()
    [bucket] = make_plain_buckets(plan(("bias",)), held)
    held["bias"].grad = torch.ones(3, requires_grad=True)
    with pytest.raises(InputError, match=r"the gradient of bias requires a gradient itself"):
        bucket.take_small(1.0)


def test_what_no_backward_produced_is_given_back() -> None:
    held = parameters()
    [bucket] = make_plain_buckets(plan(("bias",)), held)
    [slot] = bucket.slots
    before = held["bias"].grad = torch.ones(3)
    saved = SavedGrad.of(slot)
    slot.take(0.5)
    saved.give_back()
    assert held["bias"].grad is before
    slot.take(0.5)
    saved = SavedGrad.of(slot)  # a view now, whose values are kept
    slot.take(0.5)
    saved.give_back()
    assert slot.view.tolist() == [0.5, 0.5, 0.5]


@pytest.mark.parametrize("ranks", [1, 2, 3, 40])
def test_parts_of_all_ranks_are_the_whole(ranks: int) -> None:
    [bucket] = make_plain_buckets(plan(("conv", "bias")), parameters())
    cut = [Part(bucket.messages[0], rank, ranks) for rank in range(ranks)]
    elements = [(slot.name, start + at) for part in cut for slot, start, place in part.cuts()
                for at in range(place.stop - place.start)]  # fmt: skip
    assert elements == [("conv", at) for at in range(24)] + [("bias", at) for at in range(3)]
    assert all(part.share == -(-27 // ranks) for part in cut)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("unused", [[], [0], [1, 6], list(range(7))])
def test_usage_flags_of_ranks_add_up(dtype: torch.dtype, unused: list[int]) -> None:
    sums = []
    flags = UsageFlags(7, 3, dtype)
    for rank in range(3):
        held = {"weight": nn.Parameter(torch.zeros(2, dtype=dtype))}
        [bucket] = make_plain_buckets(plan(("weight",)), held, tail_elements=flags.elements)
        flags.lie_in(bucket.messages[0])
        flags.write(unused if rank else list(range(7)))
        sums.append(bucket.messages[0].flat.clone())
    bucket.messages[0].flat.copy_(torch.stack(sums).sum(dim=0))
    assert flags.used_somewhere() == set(range(7)) - set(unused)
    assert flags.given_up() == 0
    flags.write_given_up()
    assert flags.given_up() == 1
    assert flags.used_somewhere() == set()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_marks_of_ranks_add_up(dtype: torch.dtype) -> None:
    flags = UsageFlags(7, 3, dtype)
    held = {"weight": nn.Parameter(torch.zeros(2, dtype=dtype))}
    [bucket] = make_plain_buckets(plan(("weight",)), held, tail_elements=flags.elements)
    flags.lie_in(bucket.messages[0])
    bucket.move(bucket.messages[0])  # which a script looks at
    assert flags.can_mark
    assert not UsageFlags(7, 16, torch.bfloat16)._marks
    for acts in product(("write", "mark", "give up"), repeat=3):
        sums = []
        for act in acts:
            flags.write([])
            if act == "mark":
                flags.mark()
            elif act == "give up":
                flags.write_given_up()
            sums.append(bucket.messages[0].flat.clone())
        bucket.messages[0].flat.copy_(torch.stack(sums).sum(dim=0))
        given_up = acts.count("give up")
        assert (flags.marked(), flags.given_up()) == ("mark" in acts and not given_up, given_up)
