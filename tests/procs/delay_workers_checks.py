"""What the ranks of the tests of plans with delay do: nodes as workers, and compressed pushes."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from delay_checks import FEW, Net, Whole, attach, batch, close, expected_of, net_loss, plan_of, train, whole_loss
from delay_reference import Lossy, Sgd
from step_checks import raised
from torch import Tensor, nn

from runtime.delay.delayed import Delayed
from runtime.plan import CompressorSpec, DelaySpec, PlanBucket, PlanWorld
from runtime.session.session import Session
from runtime.sparse import guard, samples

SGD = Sgd(lambda _: 0.02, 0.9, 1e-3)
WHOLE_SGD = Sgd(lambda _: 2**-6, 0.5)
TOPK, WIRE = CompressorSpec(name="topk", density=0.3), CompressorSpec(name="wire", dtype="bfloat16")


@contextmanager
def nodes_of(ranks_per_node: int) -> Iterator[dict[str, Any]]:
    """Ranks as on nodes of so many, as a launcher says; gives what a plan says of them."""
    before = dict(os.environ)
    os.environ |= {"GROUP_RANK": str(dist.get_rank() // ranks_per_node), "LOCAL_WORLD_SIZE": str(ranks_per_node)}
    try:
        yield {"world": PlanWorld(ranks=dist.get_world_size(), nodes=-(-dist.get_world_size() // ranks_per_node))}
    finally:
        os.environ.clear()
        os.environ.update(before)


def compressed(model: nn.Module, group: int, spec: CompressorSpec) -> dict[str, Any]:
    """What a plan says of buckets that are all compressed."""
    collective, algorithm = ("all_reduce", "library") if spec.name == "wire" else ("sparse", "flat")
    buckets = plan_of(model, None, group).buckets
    changed = [replace(b, collective=collective, algorithm=algorithm, compressor=spec) for b in buckets]
    return {"buckets": tuple(changed)}


def lossy_of(model: nn.Module, group: int, spec: CompressorSpec) -> Lossy:
    """What the reference is told of them."""
    names = [name for name, _ in model.named_parameters()]
    buckets = [[names.index(name) for name in bucket.gradients] for bucket in plan_of(model, None, group).buckets]
    return Lossy(density=spec.density, buckets=buckets)


def run_like_the_reference(
    make: Callable[[], nn.Module], loss: Any, spec: DelaySpec, sgd: Sgd, steps: int, tolerance: float, *,
    group: int = 1, ranks_per_node: int = 1, push: CompressorSpec | None = None,
) -> dict[str, bool]:  # fmt: skip
    """Own and global weights, and what is held back, against the reference."""
    model = make()
    optimizer = torch.optim.SGD(
        model.parameters(), lr=sgd.lr(0), momentum=sgd.momentum, weight_decay=sgd.weight_decay, nesterov=sgd.nesterov
    )
    with nodes_of(ranks_per_node) as changes:
        changes |= {} if push is None else compressed(model, group, push)
        session = attach(model, optimizer, spec, group, **changes)
    train(model, optimizer, loss, range(steps), sgd.lr)
    lossy = None if push is None else lossy_of(make(), group, push)
    reference = expected_of(make, loss, spec, sgd, steps, ranks_per_node, lossy)
    results = {"own": close(model.parameters(), reference.local[dist.get_rank()], tolerance)}
    with session.global_weights():
        results["global"] = close(model.parameters(), reference.weights, tolerance)
    held = gathered(session)
    if lossy is not None:
        results["held back"] = held_as_expected(model, held, reference.residuals, lossy, ranks_per_node, tolerance)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, [p.detach() for p in model.parameters()])
    first = everyone[dist.get_rank() // ranks_per_node * ranks_per_node]
    results["ranks of a node are equal"] = close(model.parameters(), first, 0.0)
    session.detach()
    return results


def gathered(session: Session) -> list[dict[str, Tensor]]:
    """What every rank has yet to push."""
    assert isinstance(session._mode, Delayed)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, session.state_dict()["delay"]["residuals"])
    return everyone


def held_as_expected(
    model: nn.Module, held: list[dict[str, Tensor]], expected: dict[tuple[int, int], Tensor], lossy: Lossy,
    ranks_per_node: int, tolerance: float,
) -> bool:  # fmt: skip
    """The ranks of a worker hold back together what the reference's worker does."""
    names, good = [name for name, _ in model.named_parameters()], True
    for (worker, bucket), residual in expected.items():
        mine = held[worker * ranks_per_node : (worker + 1) * ranks_per_node]
        flats = [torch.cat([one[names[index]].flatten() for index in lossy.buckets[bucket]]) for one in mine]
        total = torch.stack(flats).sum(dim=0)
        apart = float((total - residual).abs().max())
        good &= apart <= tolerance * max(1.0, float(residual.abs().max()))
    return good and bool(expected)


def nodes_as_workers() -> dict[str, bool]:
    """Two nodes of two ranks: bit for bit with whole numbers, else within 1e-6."""
    results = {}
    for k in (1, 2, 4) if dist.get_world_size() == 4 else ():
        spec = DelaySpec(steps=k, warmup_steps=12)
        whole = replace(spec, warmup_steps=0)
        for what, found in {
            f"k={k}": run_like_the_reference(Net, net_loss, spec, SGD, 40, 1e-6, group=1 + k % 3, ranks_per_node=2),
            f"k={k}, whole": run_like_the_reference(Whole, whole_loss, whole, WHOLE_SGD, 30, 0.0, ranks_per_node=2),
        }.items():
            results |= {f"{what}: {one}": good for one, good in found.items()}
    return results or {"no nodes": True}


def compressed_pushes() -> dict[str, bool]:
    """Selected and narrowed, of ranks and of nodes; of whole numbers nothing is lost, bit for bit."""
    results = {}
    for ranks_per_node in (1, 2) if dist.get_world_size() == 4 else (1,):
        for push in (TOPK, WIRE):
            spec = DelaySpec(steps=2, warmup_steps=4)
            kind = {"group": 2, "ranks_per_node": ranks_per_node, "push": push}
            # Of narrowed values one that is rounded the other way is as much as their last place.
            tolerance = 1e-6 if push is TOPK else 1e-2
            for what, found in {
                "": run_like_the_reference(Net, net_loss, spec, SGD, 24, tolerance, **kind),
                ", whole": run_like_the_reference(
                    Whole, whole_loss, replace(spec, steps=1, warmup_steps=0), WHOLE_SGD, 12, _exact(), **kind
                ),
            }.items():
                results |= {f"{push.name}, {ranks_per_node} a node{what}: {one}": good for one, good in found.items()}
    return results


def _exact() -> float:
    """A third is no binary fraction: what three ranks push is rounded."""
    return 0.0 if dist.get_world_size() != 3 else 1e-5


def _started(
    ranks_per_node: int, make: Callable[[], nn.Module] = Net, group: int = 2, **changes: Any
) -> tuple[nn.Module, torch.optim.Optimizer, Session]:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-3)
    with nodes_of(ranks_per_node) as world:
        return model, optimizer, attach(model, optimizer, FEW, group, **(world | changes))


def workers_resumed() -> dict[str, bool]:
    """A checkpoint of nodes with compressed pushes changes nothing."""
    return {
        f"{push.name}: bit for bit": resumed_with(push)
        for push in (TOPK, WIRE, replace(WIRE, rounding="stochastic"), replace(WIRE, dtype="float16"))
    }


def resumed_with(push: CompressorSpec) -> bool:
    """`workers_resumed`, of one compressor."""
    ranks_per_node = 2 if dist.get_world_size() == 4 else 1
    changes = compressed(Net(), 2, push)
    straight, optimizer, session = _started(ranks_per_node, **changes)
    train(straight, optimizer, net_loss, range(11))
    saved = copy.deepcopy((straight.state_dict(), optimizer.state_dict(), session.state_dict()))
    train(straight, optimizer, net_loss, range(11, 20))
    session.detach()
    model, optimizer, session = _started(ranks_per_node, **changes)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    session.load_state_dict(saved[2])
    train(model, optimizer, net_loss, range(11, 20))
    session.detach()
    return close(model.parameters(), list(straight.parameters()), 0.0)


def end_of_compressed() -> dict[str, bool]:
    """What is held back when a delay ends travels with the first synchronous step."""
    ended = {push.name: ended_with(push) for push in (TOPK, WIRE)}
    return {f"{name}: {what}": good for name, results in ended.items() for what, good in results.items()}


def ended_with(push: CompressorSpec) -> dict[str, bool]:
    """`end_of_compressed`, of one compressor."""
    ranks_per_node = 2 if dist.get_world_size() == 4 else 1
    model, optimizer, session = _started(ranks_per_node, **compressed(Net(), 2, push))
    train(model, optimizer, net_loss, range(10))
    held, names = gathered(session), [name for name, _ in model.named_parameters()]
    session.switch(plan_of(model, None, 4))
    own = torch.autograd.grad(net_loss(model, dist.get_rank(), 10), list(model.parameters()))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, [g.detach() for g in own])
    optimizer.zero_grad()
    net_loss(model, dist.get_rank(), 10).backward()
    found = [p.grad for p in model.parameters()]
    late = [sum(one[name] for one in held) for name in names]
    means = [torch.stack(parts).mean(dim=0) for parts in zip(*everyone, strict=True)]
    results = {"it travels": close(found, [m + rest for m, rest in zip(means, late, strict=True)], 1e-9)}
    results["there was some"] = any(bool(rest.any()) for rest in late)
    session.detach()
    return results


def harmful_pushes() -> dict[str, bool]:
    """A push that leaves too much behind, or is too narrow, sends more soon, and at last everything; what it held back
    is not lost.
    """
    narrow = CompressorSpec(name="wire", dtype="int8")
    harmed = harmful_with(Net, net_loss, TOPK, "leaves more behind", changes=1)
    harmed_narrow = harmful_with(Whole, whole_loss, narrow, "rounds too coarsely", changes=2)
    return harmed | {f"narrow: {what}": good for what, good in harmed_narrow.items()}


def harmful_with(
    make: Callable[[], nn.Module], loss: Any, push: CompressorSpec, words: str, *, changes: int
) -> dict[str, bool]:
    """`harmful_pushes`, of one compressor, each of whose buckets is changed so often."""
    ranks_per_node = 2 if dist.get_world_size() == 4 else 1
    with (
        warnings.catch_warnings(record=True) as caught,
        patch.multiple(guard, FIRST_STEP=1, FEWEST_STEPS=1, COST=1e9),
        patch.multiple(samples, MAX_DELTA=-1.0, MOST_STEPS_LATE=-1.0),
    ):
        warnings.simplefilter("always")
        model = make()
        group = len(list(model.parameters())) // 2
        model, optimizer, session = _started(ranks_per_node, make, group, **compressed(model, group, push))
        train(model, optimizer, loss, range(FEW.warmup_steps + 1))
        first = session.samples
        train(model, optimizer, loss, range(FEW.warmup_steps + 1, 30))
        held = gathered(session)
    said = [str(one.message) for one in caught if words in str(one.message)]
    results = {"sampled": any(first.values()) and all(s.figure >= 0.0 for of in first.values() for s in of)}
    warned = 2 * changes if dist.get_rank() == 0 else 0
    results["all go dense"] = len(said) == warned and {b.compressor.name for b in session.plan.buckets} == {"none"}
    results["nothing stays behind"] = not any(bool(part.any()) for one in held for part in one.values())
    results["still delayed"] = isinstance(session._mode, Delayed) and session._mode.stage == "delayed"
    with session.global_weights():
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, [p.detach() for p in model.parameters()])
    results["global weights are the same"] = all(close(one, everyone[0], 0.0) for one in everyone)
    session.detach()
    return results


def averaged_in_nodes() -> dict[str, bool]:
    """`.grad` is the node's, also of a parameter that only one of its ranks uses; what is not finite on one rank is no
    step for anybody."""
    if dist.get_world_size() != 4:
        return {"no nodes": True}
    model, optimizer, session = _started(2)
    train(model, optimizer, net_loss, range(8))
    rank = dist.get_rank()
    model.two.weight.grad = None
    own = torch.autograd.grad(net_loss(model, rank, 8), list(model.parameters()))
    everyone: list[Any] = [None] * 4
    dist.all_gather_object(everyone, [g.detach() for g in own])
    optimizer.zero_grad()
    net_loss(model, rank, 8).backward()
    pair = everyone[rank // 2 * 2 : rank // 2 * 2 + 2]
    means = [torch.stack(parts).mean(dim=0) for parts in zip(*pair, strict=True)]
    results = {"the node's average": close([p.grad for p in model.parameters()], means, 1e-12)}
    optimizer.step()
    optimizer.zero_grad()
    x, _ = batch(rank, 9)
    hidden = torch.tanh(model.one(x))
    (model.two(hidden) if rank == 0 else hidden).square().mean().backward()
    results["used by one of a node"] = (model.two.weight.grad is not None) == (rank < 2)
    optimizer.step()
    with session.global_weights():
        before = [p.detach().clone() for p in model.parameters()]
    optimizer.zero_grad()
    (net_loss(model, rank, 10) * (float("nan") if rank == 3 else 1.0)).backward()
    optimizer.step()
    with session.global_weights():
        results["not finite: no step"] = close(model.parameters(), before, 0.0)
    results["own are finite"] = all(bool(p.isfinite().all()) for p in model.parameters())
    session.detach()
    return results


def workers_refused() -> dict[str, bool]:
    """Nodes and compressors that a delay cannot have, in words."""
    ranks, model = dist.get_world_size(), Net()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    results = {}

    def told(ranks_per_node: int, words: str, **changes: Any) -> None:
        with nodes_of(ranks_per_node) as world:
            said = raised(lambda: attach(model, sgd, FEW, 2, **(world | changes)))
        results[words] = said.startswith("PlanMismatch") and words in said

    told(ranks, "on one node, which is one worker")
    if ranks == 3:
        told(2, "found 3 ranks on 2 nodes, expected as many ranks on each node")
    if ranks == 4:
        told(3, "the nodes are uneven: node 0 has 3, node 1 has 1")
        told(1, "between 2 nodes, but found 4 nodes of 1 ranks", world=PlanWorld(ranks=4, nodes=2))
    by_layer = CompressorSpec(name="topk", k={"one": 2, "two": 3})
    told(1, "bucket 0 selects by layer", **compressed(model, 4, by_layer))
    told(1, "bucket 0 selects by layer", **compressed(model, 4, replace(TOPK, scope="layer")))
    torus = tuple(replace(b, algorithm="torus_2d") for b in plan_of(model, None).buckets)
    told(1, "is sent by all_reduce/torus_2d with the compressor 'none', but with delay", buckets=torus)
    model.two.float()
    names = tuple(name for name, _ in model.named_parameters())
    mixed = PlanBucket(gradients=names, collective="sparse", algorithm="flat", compressor=TOPK)
    told(1, "and several dtypes, but is pushed", buckets=(mixed,))
    return results


CHECKS: dict[str, Callable[[], dict[str, bool]]] = {
    check.__name__: check
    for check in (
        nodes_as_workers, compressed_pushes, workers_resumed, end_of_compressed, harmful_pushes, averaged_in_nodes,
        workers_refused,
    )
}  # fmt: skip
