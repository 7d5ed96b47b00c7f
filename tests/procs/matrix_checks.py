"""What ranks do for the contract of collectives and compressors: every cell against a plain reference, or refused."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from hierarchy_checks import rows
from hierarchy_reference import on_grid
from interplay_harness import same
from matrix_cells import KINDS, REAL, STEPS, Cell, Given, cells, gradients_of
from matrix_reference import Everyone
from torch import Tensor, nn

import runtime
from runtime.comm.collectives import PHASED
from runtime.errors import PlanMismatch
from runtime.plan.transports import NATIVE
from runtime.session.session import Session
from runtime.sharded.exchange import ReduceScatter

GRIDS = {2: ((1, 2), (2, 1)), 3: ((1, 3), (3, 1)), 4: ((2, 2),)}
"""By number of ranks: (nodes, ranks of each)."""


def synchronous() -> dict[str, str]:
    """By grid and cell: nothing, in what it differs, or what was said of it before the first step."""
    torch.set_num_threads(1)
    results = {}
    for place, (nodes, ranks_per_node) in enumerate(GRIDS[dist.get_world_size()]):
        with on_grid(nodes, ranks_per_node) as group:
            assert group is not None
            for number, kind in enumerate(KINDS):
                for cell in cells(kind, number + place):
                    if (cell.transport == NATIVE or cell.spec.name == "powersgd") and nodes * ranks_per_node > 2:
                        continue  # sums depend on the backend's order of ranks
                    if nodes == 1 or ranks_per_node > 1 or cell.transport in PHASED:  # else the same as on one node
                        results[f"{nodes}x{ranks_per_node} {cell.name}"] = trained(cell, group, nodes, ranks_per_node)
    return results


@contextmanager
def default_dtype(cell: Cell) -> Iterator[None]:
    """As a script sets it for such a model: nothing of ours may depend on it."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(REAL.get(cell.dtypes[0], torch.float32))
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def trained(cell: Cell, group: dist.ProcessGroup, nodes: int, ranks_per_node: int) -> str:
    """Some steps of one cell."""
    ranks, rank = nodes * ranks_per_node, dist.get_rank(group)
    model = Given(cell.dtypes)
    with default_dtype(cell), warnings.catch_warnings():
        warnings.simplefilter("ignore", runtime.AdaptedWarning)
        try:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0) if cell.shared else None
            session = runtime.attach(model, optimizer, cell.plan(ranks), group, timeout_s=60.0, guard=False)
        except PlanMismatch as error:
            return f"refused: {error}"
        different = []
        try:
            reference = Everyone(model, session.plan, rows(nodes, ranks_per_node))
            for step in range(STEPS):
                everyone = [gradients_of(cell.dtypes, one, ranks, step) for one in range(ranks)]
                model.zero_grad()
                model.backward(everyone[rank])
                expected = reference.step(everyone, step)
                found = averages(model, session)
                different += [f"step {step}: {n}" for n in _unequal(found, expected)]
                held = session.state_dict().get("carried", {}).get("residuals", {})
                different += [f"step {step}: residual of {n}" for n in _unequal(held, reference.residuals[rank])]
        finally:
            session.detach()
    return ", ".join(different)


def averages(model: nn.Module, session: Session) -> dict[str, Tensor]:
    """Every `.grad`, whole."""
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    launcher = session._exchange.launcher
    for part in launcher.parts if isinstance(launcher, ReduceScatter) else ():
        whole = part.views(session._world.gather_parts(part.total, "gathering gradients"))
        found |= {name: whole[name].clone() for name in whole if name in found}
    return found


def _unequal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    names = found.keys() | expected.keys()
    return sorted(name for name in names if not same(found.get(name), expected.get(name)))
