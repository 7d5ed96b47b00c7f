"""Every function of torch that is given a parameter whose weights are still to come: it waits, or the docs name it."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save
from torch import Tensor, nn
from torch.overrides import get_ignored_functions, get_testing_overrides, resolve_name

from runtime.sharded.awaited import _asks_nothing, make_plain, wait_from_now

UNSEEN = {
    "torch.tensor", "torch.as_tensor", "torch.asarray", "torch.sparse_coo_tensor", "torch.Tensor.new",
    "torch.Tensor.new_tensor", "torch.Tensor.set_", "torch.vmap",
}  # fmt: skip
"""Which the page of the sharded step names; what `torch.func`, scripts and other C++ do is there, too."""
INSIDE = {"torch.Tensor._make_subclass", "torch.Tensor._reduce_ex_internal", "torch.Tensor.__torch_dispatch__"}
"""Private ones, whose callers wait."""
SETTINGS = (
    "seed",
    "rng",
    "set_",
    "default",
    "deterministic",
    "compile",
    "fork",
    "wait",
    "hub",
    "save",
    "load",
    "flush",
)
"""In names of what is given no tensor, and changes the process."""


class Coming:
    """A parameter whose weights come when they are waited for."""

    def __init__(self, *shape: int) -> None:
        self.parameter = nn.Parameter(torch.ones(shape))
        self.waits = 0
        wait_from_now(self.parameter, weakref.ref(self), 0)

    def wait_for(self, _gather: int) -> None:
        """Let them come."""
        self.waits += 1
        make_plain(self.parameter)


def _tries(count: int) -> Iterator[list[Any]]:
    """Arguments, `...` where the parameter goes."""
    for fill in (..., 1, (1,), None):
        yield [..., *[fill] * (count - 1)]
        yield [[...], *[fill] * (count - 1)]
    yield [*[torch.ones(2)] * count, ...]
    yield [..., torch.float64]


def _with(parameter: Any, argument: Any) -> Any:
    if argument is ...:
        return parameter
    return [parameter for _ in argument] if isinstance(argument, list) else argument


def _waits(function: Callable[..., Any], count: int) -> bool | None:
    """Whether the first call that says something waits; None: none does."""
    for arguments in _tries(count):
        coming = Coming(2, 2)
        returned = False
        with suppress(Exception), warnings.catch_warnings(action="ignore"):
            found = function(*(_with(coming.parameter, one) for one in arguments))
            returned = isinstance(found, Tensor | np.ndarray | float | list | tuple) and found is not coming.parameter
        if returned or coming.waits:
            return bool(coming.waits)
    return None


def test_all_functions_that_ask_a_class_wait() -> None:
    found = {}
    for function, form in get_testing_overrides().items():
        needed = [one for one in inspect.signature(form).parameters.values() if one.default is one.empty]
        if not _asks_nothing(function):
            found[resolve_name(function) or str(function)] = _waits(function, max(1, len(needed)))
    assert len([name for name, waits in found.items() if waits is None]) < 0.1 * len(found)  # they take other arguments
    assert {name for name, waits in found.items() if waits is False} <= UNSEEN


def test_functions_that_ask_no_class_are_named() -> None:
    found = set()
    for function in get_ignored_functions():
        name = resolve_name(function) or str(function)
        if (
            not callable(function)
            or any(word in name.rsplit(".", 1)[-1] for word in SETTINGS)
            or _asks_nothing(function)
        ):
            continue
        if any(_waits(function, count) is False for count in (1, 2)):
            found.add(name)
    assert "torch.tensor" in found
    assert found <= UNSEEN | INSIDE
    page = (Path(__file__).parents[3] / "docs/concepts/sharded-step.md").read_text()
    assert not [name for name in UNSEEN if f"`{name.removeprefix('torch.Tensor.')}`" not in page]


class Doubled(torch.autograd.Function):
    """What users derive."""

    @staticmethod
    def forward(_context: Any, x: Tensor) -> Tensor:
        """Twice the tensor."""
        return x * 2


WAYS: dict[str, Callable[[Any], Any]] = {
    "float": float, "bool": bool, "number": lambda p: p.item(), "in": lambda p: 1.0 in p, "str": str,
    "numpy": lambda p: p.numpy(force=True), "as numpy's": lambda p: np.asarray(p.detach()),
    "numpy by DLPack": lambda p: np.from_dlpack(p.detach()), "DLPack": lambda p: torch.from_dlpack(p.detach()),
    "copy": copy.copy, "deepcopy": copy.deepcopy, "pickle": pickle.dumps, "another process": ForkingPickler.dumps,
    "torch.save": lambda p: torch.save(p, io.BytesIO()), "safetensors": lambda p: save({"p": p}),
    "address": lambda p: p.data_ptr(), "storage": lambda p: p.untyped_storage(), "old storage": lambda p: p.storage(),
    "a parameter of it": nn.Parameter, "a buffer of it": nn.Buffer, "its class": lambda p: type(p)(p.data),
    "an operator": lambda p: torch.ops.aten.mul.Tensor(p, 1), "a function of C": lambda p: torch._VF.mul(p, 1),
    "a user's": Doubled.apply, "subclass": lambda p: p.as_subclass(Tensor), "data": lambda p: p.data,
    "written to": lambda p: torch.zeros(()).copy_(p), "a row": lambda p: torch.zeros(2).__setitem__(0, p),
    "shared": lambda p: p.share_memory_(), "foreach": lambda p: torch._foreach_copy_([torch.zeros(())], [p]),
    "vector": lambda p: nn.utils.parameters_to_vector([p]), "as a module's": lambda p: nn.ParameterList([p]).double(),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_other_ways_to_numbers_wait_and_give_what_is_expected(way: str) -> None:
    coming, plain = Coming(), nn.Parameter(torch.ones(()))
    with warnings.catch_warnings(action="ignore"):
        found, expected = (type(WAYS[way](one)) for one in (coming.parameter, plain))
    assert coming.waits
    assert found is expected


def test_another_object_that_took_its_place_is_plain_when_it_has_waited() -> None:
    coming, other = Coming(), nn.Parameter(torch.zeros(()))
    torch.utils.swap_tensors(coming.parameter, other)  # type: ignore[no-untyped-call]
    assert other.item() == 1.0
    assert type(other) is nn.Parameter
