"""A rank's part of weights and of the optimizer's state, cut and put together without a process group."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from runtime.core.buckets import make_plain_buckets
from runtime.errors import InputError
from runtime.plan import ModelReference, Plan, PlanBucket, PlanWorld
from runtime.sharded.exchange import padded_length
from runtime.sharded.part import OwnPart
from runtime.sharded.state import cut_value, gathered_state, load_masters, master_state
from runtime.sharded.step import find_shared_memory

BUCKET = PlanBucket(gradients=("weight", "bias"))
PLAN = Plan(model=ModelReference(name="test"), world=PlanWorld(ranks=3), accuracy="bounded", buckets=(BUCKET,))


def parts(ranks: int, *, rounded: bool = False) -> list[OwnPart]:
    """The parts of each rank of a message of 4 · 2 + 3 elements, whose weights are 0, 1, 2, …"""
    weight = torch.arange(8.0).view(2, 4).t()  # 4 by 2, in columns
    held = {"weight": nn.Parameter(weight), "bias": nn.Parameter(torch.arange(8.0, 11.0))}
    [bucket] = make_plain_buckets(PLAN, held, length_of=lambda one, numel: padded_length(ranks, one, numel))
    found = [OwnPart(bucket.messages[0], rank, ranks, rounded=rounded) for rank in range(ranks)]
    for part in found:
        part.whole[:11] = torch.arange(11.0) + 1 / 3
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3, 16])
def test_states_are_cut_and_put_together_bit_for_bit(ranks: int) -> None:
    whole: dict[str, Any] = {"exp_avg": torch.arange(8.0).view(4, 2), "step": torch.tensor(7.0), "name": "adam"}
    pieces = []
    for part in parts(ranks):
        slot = part.message.slots[0]
        if slot.index in part.places:
            pieces.append({key: cut_value(value, slot, part) for key, value in whole.items()})
    joined = torch.cat([piece["exp_avg"] for piece in pieces])
    assert joined.tolist() == whole["exp_avg"].t().reshape(-1).tolist()  # memory order
    assert all(piece["step"] == 7.0 and piece["name"] == "adam" for piece in pieces)


def test_one_rank_gathers_its_own_state() -> None:
    [part] = parts(1)
    state = {0: {"exp_avg": torch.arange(8.0), "step": torch.tensor(3.0), "amsgrad": False}}
    world: Any = SimpleNamespace(gather=lambda value, _: [value], gather_parts=lambda own, *_: own)
    found = gathered_state([part], state, world, torch.device("cpu"), torch.device("cpu"))
    assert found[0]["exp_avg"].tolist() == torch.arange(8.0).view(2, 4).t().tolist()
    assert (float(found[0]["step"]), found[0]["amsgrad"]) == (3.0, False)


def test_masters_keep_what_rounding_takes() -> None:
    for part in parts(2, rounded=True):
        part.begin_master()
        assert part.master is not None
        assert part.master.tolist() != part.whole[part.own].tolist()
        before = part.master.clone()
        part.collect_changes()
        assert part.master.tolist() == before.tolist()
        part.whole[part.own][0] = 100.0  # by a script
        part.collect_changes()
        assert part.master[0] == 100.0
        assert part.master[1:].tolist() == before[1:].tolist()


def test_masters_are_read_by_other_numbers_of_ranks() -> None:
    saved = []
    for part in parts(2, rounded=True):
        part.begin_master()
        saved.append(master_state([part]))
    for part in parts(3, rounded=True):
        part.begin_master()
        assert part.master is not None
        expected = part.master.clone()
        part.master.zero_()
        load_masters([part], saved)
        numel = max(0, min(part.own.stop, 11) - part.own.start)
        assert part.master[:numel].tolist() == expected[:numel].tolist()
    with pytest.raises(InputError, match="weights in float32 that this rank has"):
        load_masters(parts(1, rounded=True), saved[:1])


def test_parameters_in_the_same_memory_are_found() -> None:
    one = nn.Parameter(torch.zeros(4))
    assert find_shared_memory({"a": one, "b": nn.Parameter(torch.zeros(4))}) is None
    assert "found a and b in the same memory" in str(find_shared_memory({"a": one, "b": nn.Parameter(one.data[1:])}))
