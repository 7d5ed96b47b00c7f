"""Samples as flat bytes: what goes in comes out, and what cannot is named."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from torch import nn

from runtime.datacache.samples import from_bytes, pack, unpack
from runtime.datacache.unstorable import Unstorable


class Pair(NamedTuple):
    """A tuple of a type of its own."""

    x: int
    y: int


TREES = some.recursive(
    some.none()
    | some.booleans()
    | some.integers(-(2**63), 2**63 - 1)
    | some.floats(allow_nan=False)
    | some.text()
    | some.binary(),
    lambda inner: (
        some.lists(inner) | some.tuples(inner, inner) | some.dictionaries(some.text() | some.integers(), inner)
    ),
    max_leaves=12,
)


@given(TREES)
def test_plain_values_come_back_as_they_were(tree: Any) -> None:
    back = from_bytes(pack(tree).numpy().tobytes())
    assert back == tree
    assert repr(back) == repr(tree)  # True is not 1, a tuple no list


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.bool, torch.bfloat16, torch.float64, torch.complex64, torch.int16]
)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (7,), (3, 5, 2)])
def test_tensors_come_back_bit_for_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.rand(shape) * 100).to(dtype)
    back = unpack(pack({"x": tensor, "after": 7}))
    assert back["x"].dtype is dtype
    assert torch.equal(back["x"], tensor)
    assert back["after"] == 7


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6.0).reshape(2, 3).T,
        np.arange(10)[::-2],
        np.array(["ab", "c"]),
        np.array([1, 2], dtype=">i4"),
        np.float32(2.5),
        np.empty((0, 4), dtype=np.int8),
        np.frombuffer(b"read-only", dtype=np.uint8),
    ],
    ids=repr,
)
def test_arrays_come_back_with_their_types(array: Any) -> None:
    back = from_bytes(pack([array, "text"]).numpy().tobytes())
    assert type(back[0]) is type(array)
    assert back[0].dtype == array.dtype
    np.testing.assert_array_equal(back[0], array)
    assert back[1] == "text"


def test_strided_and_conjugated_tensors_come_back_by_value() -> None:
    for tensor in (torch.arange(12).view(3, 4).t()[1:], torch.tensor([1 + 2j]).conj(), torch.ones(1).expand(5)):
        assert torch.equal(unpack(pack(tensor)), tensor)


def test_what_comes_back_can_be_written_to_and_is_nobody_elses() -> None:
    raw = pack((torch.zeros(3), np.zeros(3))).numpy().tobytes()
    first, second = from_bytes(raw), from_bytes(raw)
    first[0].add_(1)
    first[1][:] = 1
    assert second[0].sum() == second[1].sum() == 0


class Odd:
    """Nothing that is known."""


@pytest.mark.parametrize(
    ("sample", "words"),
    [
        ((1, Odd()), r"sample\[1\] is a .*Odd"),
        ({"mask": torch.eye(2).to_sparse()}, r"sample\['mask'\] is a torch.sparse_coo tensor"),
        ([nn.Parameter(torch.ones(1))], r"sample\[0\] is a torch.nn.parameter.Parameter"),
        (torch.ones(1, requires_grad=True), "which requires a gradient"),
        (torch.ones(1, device="meta"), "on meta"),
        (np.array([None]), "sample is a numpy.ndarray of object"),
        (Pair(1, 2), "Pair"),
        (OrderedDict(), "OrderedDict"),
        ({(1, 2): 3}, "sample has a key of type tuple"),
        ({1, 2}, "builtins.set"),
        (2**64, "an int of more than 64 bits"),
    ],
)
def test_what_cannot_be_stored_is_named_with_its_place_and_type(sample: Any, words: str) -> None:
    with pytest.raises(Unstorable, match=words) as caught:
        pack(sample)
    assert caught.value.sample is sample


def test_nesting_without_end_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(Unstorable, match="levels of nesting"):
        pack(endless)
