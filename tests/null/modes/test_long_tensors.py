"""Long tensors in short parts: all of them, in one order, and the tensors themselves."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from runtime.modes.chunks import CHUNK, chunks
from runtime.modes.distance_guard import norm

SHAPES = {"short": (7,), "one block": (CHUNK,), "longer": (3, CHUNK // 2 + 1), "image": (2, 3, 80, 90), "scalar": ()}


def numbered(shape: tuple[int, ...], *, channels_last: bool = False) -> Tensor:
    tensor = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)
    return tensor.to(memory_format=torch.channels_last) if channels_last else tensor


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("orders", [(False, False), (True, True), (False, True)])
def test_parts_belong_together_and_are_the_tensors(name: str, orders: tuple[bool, bool]) -> None:
    """Also where two tensors lie in memory in different orders: then there are no parts."""
    one, other = (numbered(SHAPES[name], channels_last=order and len(SHAPES[name]) == 4) for order in orders)
    wanted, before = one + 10.0 * other, one.clone()
    sizes = []
    for ours, theirs in chunks([one], [other]):
        torch._foreach_add_(ours, theirs, alpha=10.0)
        sizes += [part.numel() for part in ours]
    assert torch.equal(one, wanted)
    assert torch.equal(other, before)
    assert sum(sizes) == one.numel()
    if orders[0] == orders[1]:
        assert max(sizes) <= CHUNK


def test_parts_follow_each_other_tensor_by_tensor() -> None:
    first, second = numbered((2 * CHUNK + 5,)), numbered((3,))
    assert [part.numel() for (parts,) in chunks([first, second]) for part in parts] == [CHUNK, CHUNK, 5, 3]
    assert list(chunks([], [])) == []


def test_norms_are_those_of_the_whole() -> None:
    generator = torch.Generator().manual_seed(3)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    others = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    whole = torch.cat([(tensors[name] - others[name]).double().reshape(-1) for name in SHAPES])
    assert norm(tensors, others) == pytest.approx(whole.norm().item(), rel=1e-6)
    assert norm(tensors) == pytest.approx(
        torch.cat([t.double().reshape(-1) for t in tensors.values()]).norm().item(), rel=1e-6
    )
    assert norm({}) == 0.0
    assert norm({"z": torch.tensor([3.0 + 4.0j, 0.0])}) == pytest.approx(5.0)
    assert norm({"h": torch.full((5,), 200.0, dtype=torch.float16)}) == pytest.approx(200.0 * 5**0.5)
