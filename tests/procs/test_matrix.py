"""The contract of all collectives and compressors, driven by their registries: every way that a plan may say, with
every dtype, parameters of one element and of none, on one node and on several, against a plain reference.
"""

from __future__ import annotations

from itertools import product

import matrix_checks
import pytest
import torch
from matrix_cells import KINDS, LAYOUTS, SENT_BY, SPECS, UNKNOWN, Cell, carried

from planner.jobs.launch import LocalWorld, run_ranks
from runtime.plan.transports import FLAT, HITOPK, LIBRARY, NAIVE_ALL_GATHER, NATIVE, TORUS_2D, TREE, TWO_SHOT
from runtime.sparse.compressors.wire import EIGHT_BITS

DENSE = {LIBRARY: {"none", "wire", "powersgd"}, TORUS_2D: {"none", "wire"},
         TREE: {"none"}, TWO_SHOT: {"wire"}, NATIVE: {"wire"}}  # fmt: skip
SPARSE = {FLAT: {"topk", "randomk"}, NAIVE_ALL_GATHER: {"topk", "randomk"},
          HITOPK: {"topk"}}  # fmt: skip


SHARED = {LIBRARY: {"none", "wire"}, TWO_SHOT: {"wire"}}
"""While ranks share the optimizer's step."""


def refused(cell: Cell) -> bool:
    """What cannot be done, and has to be said before the first step."""
    complex_numbers = cell.spec.name != "none" and any(dtype.is_complex for dtype in cell.dtypes)
    nothing_to_select = cell.transport == HITOPK and cell.layout == "no element last"
    divided = cell.shared and cell.spec.name != "none" and cell.mixed
    too_wide = cell.spec.dtype in EIGHT_BITS and torch.float64 in cell.dtypes
    return divided or too_wide or complex_numbers or nothing_to_select or not set(UNKNOWN).isdisjoint(cell.dtypes)


def test_what_each_collective_carries() -> None:
    for form in SENT_BY:
        found = {spec.name for spec in SPECS if carried(form, spec)}
        assert found, f"{form}: every compressor is refused"
        assert found == (DENSE | SPARSE).get(form, found), form
        assert {spec.name for spec in SPECS if carried(form, spec, shared=True)} == SHARED.get(form, set()), form


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.long), pytest.param(4, marks=pytest.mark.long)])
def test_every_way_comes_to_what_it_should_or_is_refused_on_all_ranks_alike(ranks: int) -> None:
    everyone = run_ranks(LocalWorld(ranks=ranks), matrix_checks.synchronous)
    expected = {cell.name: refused(cell) for cell in _all_cells()}
    for name, said in everyone[0].items():
        assert [rank[name] for rank in everyone] == [said] * ranks, name
        if expected[name.split(" ", 1)[1]]:
            assert said.startswith("refused: "), f"{name}: {said}"
            assert "; expected " in said, f"{name}: {said}"
        else:
            assert said == "", f"{name}: {said}"


def _all_cells() -> list[Cell]:
    return [Cell(*way) for way in product(SENT_BY, SPECS, KINDS, LAYOUTS, (False, True))]
