"""Collectives on two kinds of link, on grids of nodes and ranks: sums to the bit, and a reference of Algorithm 2."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from hierarchy_reference import (
    BETWEEN,
    DENSE,
    HITOPK,
    MIXED,
    NARROW,
    SPARSE,
    Algorithm2,
    copy_of,
    everyones,
    on_grid,
    planned,
)
from hierarchy_refusals import refusals
from lossy_checks import carried
from lossy_reference import equal, gradients, loss_of
from session_checks import convnet
from torch import Tensor, nn

import runtime
from runtime.comm.collectives import PHASED
from runtime.comm.collectives.exchange import LEAST_BYTES, all_gather, exchange
from runtime.comm.communicator import CommTiming
from runtime.comm.phased_communicator import LINKS, PhasedHostCommunicator, default_order
from runtime.comm.topology import Topology
from runtime.comm.world import Grid, World
from runtime.core.buckets import BucketBuffer, Message
from runtime.plan import CompressorSpec, Plan
from runtime.session.session import Session
from runtime.sparse import guard

GRIDS = {2: ((1, 1), (1, 2), (2, 1)), 3: ((1, 3), (3, 1)), 4: ((2, 2),)}
"""By number of ranks: (nodes, ranks of each)."""
BASE = 8
"""A rank contributes a power of this: a sum then says, digit by digit, how often each contribution is in it."""


def rows(nodes: int, ranks_per_node: int) -> tuple[tuple[int, ...], ...]:
    """The ranks of each node."""
    return tuple(tuple(range(node * ranks_per_node, (node + 1) * ranks_per_node)) for node in range(nodes))


def sums_are_exact() -> dict[str, bool]:
    """Dense collectives of several phases: every contribution exactly once, for sizes that ranks do not divide."""
    results: dict[str, bool] = {}
    for nodes, ranks_per_node in GRIDS[dist.get_world_size()]:
        with on_grid(nodes, ranks_per_node) as group:
            if group is None or nodes * ranks_per_node == 1:
                continue
            world = World.join(group, 30)
            grid = Grid.make(world, Topology(rows(nodes, ranks_per_node)))
            for name, collective in PHASED.items():
                if name.exact:
                    phases = collective(grid.topology)
                    for case, good in _sums(grid, phases):
                        results[f"{nodes}x{ranks_per_node} {name} {case}"] = good
    return results


def _sums(grid: Grid, phases: Any) -> Iterator[tuple[str, bool]]:
    once = sum(BASE**rank for rank in range(grid.world.ranks))
    # The largest one is of several chunks.
    for numel, dtypes in {1: ALL, 2: ALL, 3: ALL, 7: ALL, 1001: ALL, 300_000: [torch.float32]}.items():
        for dtype in dtypes:
            mine = BASE**grid.world.rank if dtype != torch.bfloat16 else 1
            expected = once if dtype != torch.bfloat16 else grid.world.ranks
            pattern = torch.arange(numel).to(dtype) % 3
            flats = [pattern * mine, torch.full((5,), float(mine), dtype=dtype)]
            messages = [Message(flat, []) for flat in flats]
            bucket = BucketBuffer(0, [], messages, "a bucket of two messages")
            communicator = PhasedHostCommunicator(grid, [phases])
            for _ in range(2):  # what is kept from the first does not matter in the second
                for flat, values in zip(flats, (pattern * mine, float(mine)), strict=True):
                    flat.copy_(torch.as_tensor(values))
                communicator.launch(bucket.payload, CommTiming())
                communicator.wait()
            communicator.close()
            yield f"{dtype} {numel}", torch.equal(flats[0], pattern * expected) and bool((flats[1] == expected).all())


ALL = [torch.float32, torch.float64, torch.bfloat16]


def start(plan: Plan, model: nn.Module, group: dist.ProcessGroup, **options: Any) -> tuple[Any, Session]:
    """A model that trains by a plan on a grid."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return optimizer, runtime.attach(model, optimizer, plan, group, **options)


def against_algorithm_2() -> dict[str, Any]:
    """Gradients and residuals of six steps, bit for bit, for buckets of one form and of all forms together."""
    results: dict[str, Any] = {}
    for nodes, ranks_per_node in GRIDS[dist.get_world_size()]:
        with on_grid(nodes, ranks_per_node) as group:
            if group is None:
                continue
            for what, forms, size in (("hitopk", HITOPK, 5), ("mixed", MIXED, 1)):
                model = convnet()
                plan = planned(model, nodes * ranks_per_node, forms, size)
                optimizer, session = start(plan, model, group)
                good, kept = True, True
                reference = Algorithm2(model, session.plan, rows(nodes, ranks_per_node))
                for step in range(6):
                    expected = reference.step(everyones(model, step, group))
                    optimizer.zero_grad()
                    loss_of(model, step).backward()
                    good &= _same(gradients(model), expected, reference.lossy)
                    optimizer.step()
                held = reference.residuals[dist.get_rank(group)]
                mine = carried(session)
                kept &= equal(mine, {name: held[name] for name in mine})
                session.detach()
                results[f"{nodes}x{ranks_per_node} {what}"] = (good, kept)
    return results


def _same(found: dict[str, Tensor], expected: dict[str, Tensor], lossy: set[str]) -> bool:
    """Of what is selected bit for bit; of dense sums over more ranks the order is the backend's."""
    bits = equal({n: found[n] for n in lossy}, {n: expected[n] for n in lossy})
    return bits and all(torch.allclose(found[n], expected[n], rtol=1e-5, atol=1e-7) for n in found)


def weights_stay_equal() -> dict[str, Any]:
    """After training by all forms together every rank has the same weights, and a torus trains like the library."""
    results: dict[str, Any] = {}
    with on_grid(2, 2) as group:
        assert group is not None
        trained = {}
        for what, forms in {
            "torus": [("all_reduce", "torus_2d", None)],
            "library": [("all_reduce", "library", None)],
            "all": [*NARROW, *MIXED],
        }.items():
            model = convnet()
            optimizer, session = start(planned(model, 4, forms, 2), model, group)
            for step in range(5):
                optimizer.zero_grad()
                loss_of(model, step).backward()
                optimizer.step()
            trained[what] = nn.utils.parameters_to_vector(model.parameters()).detach()
            session.detach()
            everyone: list[Any] = [None] * 4
            dist.all_gather_object(everyone, trained[what])
            results[f"{what}: equal on all ranks"] = all(torch.equal(one, everyone[0]) for one in everyone)
        results["torus as library"] = torch.allclose(trained["torus"], trained["library"], rtol=1e-4, atol=1e-6)
    return results


def conserved() -> dict[str, Any]:
    """Sent and held back are all there was: through changes of plan, grid and ranks, checkpoints and bad steps."""
    results: dict[str, Any] = {}
    with on_grid(2, 2) as group:
        assert group is not None
        model = convnet()
        forms: list[list[tuple[str, str, CompressorSpec | None]]] = [
            HITOPK, [("sparse", "flat", SPARSE)], [("sparse", "hitopk", DENSE)], NARROW, HITOPK,
            [("all_reduce", "library", replace(BETWEEN, links=None))], NARROW, [("all_reduce", "torus_2d", None)],
        ]  # fmt: skip
        _, session = start(planned(model, 4, forms[0], 4), model, group)
        due = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in model.named_parameters()}
        for step, (form, size) in enumerate(zip(forms, (4, 3, 5, 3, 2, 4, 5, 4), strict=True)):
            session.switch(planned(model, 4, form, size))
            own = everyones(model, step, group)
            model.zero_grad()
            loss_of(model, step).backward()
            for name, found in gradients(model).items():
                due[name] += sum(one[name].double() for one in own) / 4 - found.double()
            results[f"step {step}"] = _held_is(due, session, group)
        results["nothing is left"] = session.state_dict().keys() == {"plan", "ranks"}
        session.detach()
    return results


def _held_is(due: dict[str, Tensor], session: Session, group: dist.ProcessGroup) -> bool:
    held: list[Any] = [None] * 4
    dist.all_gather_object(held, carried(session), group=group)
    close = []
    for name, expected in due.items():
        total = sum((one[name].double() for one in held if name in one), torch.zeros_like(expected))
        close.append(torch.allclose(total, expected, rtol=1e-4, atol=1e-6))
    return all(close)


def resumed() -> dict[str, bool]:
    """A checkpoint in the middle changes nothing, bit for bit; on another grid the sum of what is held back is kept."""
    results: dict[str, bool] = {}
    with on_grid(2, 2) as group:
        assert group is not None
        plan = planned(convnet(), 4, [*HITOPK, *NARROW], 3)
        straight = convnet()
        optimizer, session = start(plan, straight, group)
        for step in range(6):
            if step == 3:
                saved = session.state_dict()
                twin = copy_of(straight)
            optimizer.zero_grad()
            loss_of(straight, step).backward()
            optimizer.step()
        session.detach()
        everyone: list[Any] = [None] * 4
        dist.all_gather_object(everyone, saved, group=group)
        again, optimizer = twin, torch.optim.SGD(twin.parameters(), lr=0.05)
        session = runtime.attach(again, optimizer, plan, group)
        session.load_state_dict(saved)
        for step in range(3, 6):
            optimizer.zero_grad()
            loss_of(again, step).backward()
            optimizer.step()
        session.detach()
        results["resumed"] = equal(dict(again.named_parameters()), dict(straight.named_parameters()))
    with on_grid(1, 2) as group:
        if group is not None:
            model = convnet()
            _, session = start(planned(model, 2, [("sparse", "flat", SPARSE)], 4), model, group)
            session.load_state_dict(everyone)
            held: list[Any] = [None] * 2
            dist.all_gather_object(held, carried(session), group=group)
            total = {name: sum(one[name] for one in held) for name in held[0]}
            before = {name: sum(one["carried"]["residuals"][name] for one in everyone) for name in held[0]}
            results["other ranks"] = all(torch.allclose(total[n], before[n], rtol=1e-5, atol=1e-8) for n in total)
            session.detach()
    return results


def not_finite() -> dict[str, bool]:
    """A gradient that is not finite on one rank is seen by all, and no rank's residual changes."""
    results: dict[str, bool] = {}
    with on_grid(2, 2) as group:
        assert group is not None
        for what, forms in (("hitopk", HITOPK), ("narrow", NARROW)):
            model = convnet()
            _, session = start(planned(model, 4, forms, 4), model, group)
            loss_of(model, 0).backward()
            before = {name: part.clone() for name, part in carried(session).items()}
            weight = next(iter(model.parameters()))
            hook = weight.register_hook(lambda g: torch.full_like(g, float("nan")) if dist.get_rank() == 3 else None)
            model.zero_grad()
            loss_of(model, 1).backward()
            hook.remove()
            results[f"{what}: seen"] = weight.grad is not None and not bool(torch.isfinite(weight.grad).all())
            results[f"{what}: kept"] = equal(carried(session), before)
            model.zero_grad()
            loss_of(model, 2).backward()
            results[f"{what}: goes on"] = not equal(carried(session), before)
            session.detach()
    return results


def widened() -> dict[str, bool]:
    """Where nodes' sums cancel, what is narrow between them goes wider step by step; what it held back comes."""
    sign = 1.0 if dist.get_rank() < 2 else -1.0
    gradient = sign * torch.randint(1, 50_000, (515,), generator=torch.Generator().manual_seed(dist.get_rank() % 2))
    gradient[::64] *= 1.0 + 0.5 * sign
    gradient += 1.0
    total = torch.zeros(515)
    with on_grid(2, 2) as group, patch.multiple(guard, FIRST_STEP=1, FEWEST_STEPS=1, COST=1e9):
        assert group is not None
        model = nn.ParameterDict({"none": torch.zeros(0), "weight": torch.zeros(515)})
        plan = planned(
            model, 4, [("all_reduce", "torus_2d", CompressorSpec(name="wire", dtype="int8", links="inter"))], 1
        )
        ways = []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            _, session = start(plan, model, group)
            for _ in range(40):
                model.zero_grad()
                ((model["weight"] * gradient).sum() + model["none"].sum()).backward()
                assert model["weight"].grad is not None
                total += model["weight"].grad
                (bucket,) = (one for one in session.plan.buckets if one.gradients == ("weight",))
                ways.append((bucket.algorithm, bucket.compressor.name, bucket.compressor.dtype))
        said = [one for one in caught if one.category is runtime.AccuracyWarning]
        held = carried(session).get("weight", torch.zeros(515)).clone()
        session.detach()
        dist.all_reduce(held, group=group)
        dist.all_reduce(gradient, group=group)
    return {
        "wider": list(dict.fromkeys(ways))
        == [("torus_2d", "wire", "int8"), ("torus_2d", "wire", "bfloat16"), ("torus_2d", "none", None)],
        "said on rank 0": len(said) == (2 if dist.get_rank(group) == 0 else 0),
        "nothing is lost": bool((total + held - 10.0 * gradient).abs().max() < 0.05),
    }


def overlap() -> dict[str, Any]:
    """While one bucket is between nodes, another one is inside them; each link takes the plan's order."""
    with on_grid(2, 2) as group:
        assert group is not None
        model = nn.Sequential(*[nn.Linear(700, 700, bias=False) for _ in range(6)])
        _, session = start(planned(model, 4, [("all_reduce", "torus_2d", None)], 1), model, group)
        seen = []
        for _ in range(5):
            model(torch.ones(2, 700)).sum().backward()
            sent = session._recorder.steps[-1].sent
            seen.append([(b, *phase) for b, one in enumerate(sent) for phase in one.phases])
        report = session.report()
        session.detach()
    both = [
        any(_meet(a, b) for a in step for b in step if a[0] != b[0] and (a[2], b[2]) == ("intra", "inter"))
        for step in seen
    ]
    expected = {link: [e for e in default_order([3] * 6) if (e[1] == 1) == (link == "inter")] for link in LINKS}
    numbers = {"reduce_scatter": 0, "all_reduce": 1, "all_gather": 2}
    taken = [
        {
            link: [(b, numbers[n]) for b, n, of, start, _ in sorted(step, key=lambda p: p[3]) if of == link]
            for link in LINKS
        }
        for step in seen
    ]
    spans = [span for span in report.timeline.spans if span.bucket is not None]
    return {
        "two links at once": any(both),
        "in the plan's order": all(one == expected for one in taken),
        "in the timeline": len(spans) == 18 and {span.resource for span in spans} == {"intra", "inter"},
        "as a document": len(report.to_document()["timeline"]) == 21,
    }


def exchanged() -> dict[str, Any]:
    """All-to-all of small and of large parts, of equal and of uneven ones, some of them empty; waited for as by a
    communicator, which is called back, or plainly. And what is gathered.
    """
    group, found = dist.group.WORLD, {}
    assert group is not None
    ranks, rank = dist.get_world_size(), dist.get_rank()
    for case, lengths in {
        "small": [100] * ranks, "large": [LEAST_BYTES] * ranks, "uneven": [2 * LEAST_BYTES, *[99] * (ranks - 1)],
        "empty": [2 * LEAST_BYTES, *[0] * (ranks - 1)],
    }.items():  # fmt: skip
        for called_back in (False, True):
            given = torch.cat([torch.full((length,), 10 * rank + peer) for peer, length in enumerate(lengths)]).byte()
            received = torch.full((ranks * lengths[rank],), 255, dtype=torch.uint8)
            work = exchange(received, given, [lengths[rank]] * ranks, lengths, group)
            if called_back:
                work.get_future().wait()
            work.wait()
            expected = torch.arange(ranks).mul(10).add(rank).repeat_interleave(lengths[rank])
            found[f"{case}, {called_back}"] = torch.equal(received, expected.byte())
    for length in (100, LEAST_BYTES):
        whole = torch.full((ranks, length), 255, dtype=torch.uint8)
        whole[rank] = rank
        all_gather(whole.view(-1), whole[rank], group).wait()
        found[f"gathered, {length}"] = torch.equal(whole, torch.arange(ranks).byte()[:, None].expand(-1, length))
    return found


def _meet(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    return max(a[3], b[3]) < min(a[4], b[4])


CHECKS: dict[str, Callable[[], dict[str, Any]]] = {
    check.__name__: check
    for check in (
        sums_are_exact,
        against_algorithm_2,
        weights_stay_equal,
        conserved,
        resumed,
        not_finite,
        widened,
        overlap,
        exchanged,
        refusals,
    )
}


def contract() -> dict[str, dict[str, Any]]:
    """What every number of nodes and ranks has to show."""
    return {name: CHECKS[name]() for name in ("sums_are_exact", "against_algorithm_2", "exchanged")}


def everything() -> dict[str, dict[str, Any]]:
    """All checks, in one start of four processes."""
    return {name: check() for name, check in CHECKS.items()} | {"refusals": refusals()}
