"""Pushes to owners: what is sent and what is held back are what there was, and owners get the sums."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from runtime.delay.pushes import Push, SelectedPush, WholePush, copy_into_rows, make_push
from runtime.plan import NO_COMPRESSION, CompressorSpec

SPECS = {
    "none": NO_COMPRESSION,
    "topk": CompressorSpec(name="topk", density=0.3),
    "randomk": CompressorSpec(name="randomk", density=0.5),
    "bfloat16": CompressorSpec(name="wire", dtype="bfloat16"),
    "float16": CompressorSpec(name="wire", dtype="float16"),
    "int8": CompressorSpec(name="wire", dtype="int8"),
    "int8 by chance": CompressorSpec(name="wire", dtype="int8", block=64, rounding="stochastic"),
    "float8": CompressorSpec(name="wire", dtype="float8_e4m3fn"),
}
FINITE = torch.tensor(True)


def pushes(name: str, elements: int, peers: int, dtype: torch.dtype, metadata_bytes: int = 0) -> list[Push]:
    """Of all workers."""
    share = -(-elements // peers)
    device = torch.device("cpu")
    return [make_push(SPECS[name], elements, share, peers, dtype, device, metadata_bytes) for _ in range(peers)]


def exchanged(everyone: list[Push], share: int, dtype: torch.dtype) -> Tensor:
    """What all owners come to, one after the other."""
    totals = []
    for owner, own in enumerate(everyone):
        for peer, other in enumerate(everyone):
            own.rows.received[peer] = other.rows.sent[owner]
        totals.append(torch.full((share,), 7.0, dtype=dtype))
        own.add_up(totals[-1])
    return torch.cat(totals)


def held_back(push: Push, elements: int, dtype: torch.dtype) -> Tensor:
    """A copy."""
    residual = push.residual()
    return torch.zeros(elements, dtype=dtype) if residual is None else residual.clone()


@pytest.mark.parametrize("name", SPECS)
@settings(max_examples=25, deadline=None)
@given(st.integers(0, 23), st.integers(1, 5), st.sampled_from([torch.float32, torch.float64]), st.integers(0, 99))
def test_nothing_is_lost(name: str, elements: int, peers: int, dtype: torch.dtype, seed: int) -> None:
    """Bit for bit, for whole numbers, in any number of parts; but for int8, whose scales are no powers of two."""
    everyone, share = pushes(name, elements, peers, dtype), -(-elements // peers)
    generator = torch.Generator().manual_seed(seed)
    held = [torch.zeros(elements, dtype=dtype) for _ in range(peers)]
    for step in range(6):
        own = [torch.randint(-900, 900, (elements,), generator=generator).to(dtype) for _ in range(peers)]
        for one, vector in zip(everyone, own, strict=True):
            one.pack(vector, 0.5, FINITE, step)
        total = exchanged(everyone, share, dtype)[:elements]
        after = [held_back(one, elements, dtype) for one in everyone]
        before = torch.stack([rest + vector * 0.5 for rest, vector in zip(held, own, strict=True)]).sum(dim=0)
        found = total + torch.stack(after).sum(dim=0)
        assert torch.equal(found, before) or ("int8" in name and torch.allclose(found, before, rtol=1e-6, atol=1e-3))
        held = after
    if name == "none":
        assert not any(rest.any() for rest in held)


def test_every_owner_gets_the_largest_of_its_part() -> None:
    push = make_push(CompressorSpec(name="topk", density=0.5), 10, 4, 3, torch.float32, torch.device("cpu"))
    push.pack(torch.tensor([1.0, -9, 2, 3, 0, 0, 5, -6, 8, 7]), 1.0, FINITE, 0)
    rest = push.residual()
    assert rest is not None
    assert rest.tolist() == [1, 0, 2, 0, 0, 0, 0, 0, 0, 7]  # two of each part of four, one of the last one's two


def test_what_was_sent_and_what_follows_when_everything_is() -> None:
    """Three parts of four, four and two; the rest goes with the first whole vector that is finite."""
    push = make_push(CompressorSpec(name="topk", density=0.5), 10, 4, 3, torch.float32, torch.device("cpu"))
    assert isinstance(push, SelectedPush)
    vector = torch.tensor([1.0, -9, 2, 3, 0, 0, 5, -6, 8, 7])
    push.pack(vector, 1.0, FINITE, 0)
    assert push.selected == 5
    assert torch.equal(push.sent() + push.residual(), vector)
    whole = WholePush(4, 3, torch.float32, torch.device("cpu"), 0)
    whole.pending = push.residual()
    whole.pack(vector, 1.0, torch.tensor(False), 1)
    assert whole.residual() is not None
    whole.pack(vector, 1.0, FINITE, 2)
    assert whole.residual() is None
    sent = whole.rows.body(whole.rows.sent, torch.float32, 4).flatten()[:10]
    assert torch.equal(sent, vector + push.residual())


def test_what_is_not_finite_counts_as_not_sent() -> None:
    for name in ("topk", "bfloat16"):
        [push] = pushes(name, 4, 1, torch.float32)
        push.pack(torch.tensor([1.0, 2.001, 3, 4]), 1.0, FINITE, 0)
        rest = push.residual()
        assert rest is not None
        before = rest.clone()
        push.pack(torch.tensor([1.0, float("nan"), 3, 4]), 1.0, torch.tensor(False), 1)
        after = push.residual()
        assert after is not None
        assert torch.equal(after, before)


@pytest.mark.parametrize("name", SPECS)
def test_words_travel_behind(name: str) -> None:
    """Whatever lies before them, and whatever its size."""
    everyone = pushes(name, 7, 2, torch.float64, metadata_bytes=11)
    for rank, one in enumerate(everyone):
        one.pack(torch.ones(7, dtype=torch.float64), 1.0, FINITE, 9)
        words = one.rows.metadata(one.rows.sent)
        assert words.shape == (2, 16)
        words[:, :11] = torch.arange(11, dtype=torch.uint8) + 100 * rank
    before = exchanged(everyone, 4, torch.float64)[:7]
    for one in everyone:
        assert one.rows.metadata(one.rows.received)[:, :11].tolist() == [list(range(11)), list(range(100, 111))]
    assert bool(before.any())


@pytest.mark.parametrize(("elements", "width"), [(0, 3), (5, 3), (6, 3), (9, 3), (0, 0), (2, 4)])
def test_rows_are_filled_in_order(elements: int, width: int) -> None:
    rows = torch.full((3, width + 2), -1.0)[:, :width]
    copy_into_rows(rows, torch.arange(float(elements)), 2.0)
    flat = rows.flatten().tolist()
    assert flat[:elements] == [2.0 * value for value in range(elements)]
    assert set(flat[elements:]) <= {-1.0}
