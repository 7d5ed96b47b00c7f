"""Shards of the global weights: together they are the whole, and their owners do what the optimizer does."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from runtime.comm.topology import Topology
from runtime.core.buckets import BucketBuffer, Slot, lay_out
from runtime.delay.server import Server, rates_of
from runtime.plan import NO_COMPRESSION, CompressorSpec

USED = torch.ones(20, dtype=torch.bool)

ALONE = Topology.of_one_rank_each(1)


def parameters_of(shapes: list[tuple[int, ...]]) -> dict[str, nn.Parameter]:
    """Named p0, p1, …; every third one in another dtype, two-dimensional ones in another memory order."""
    found = {}
    for index, shape in enumerate(shapes):
        dtype = torch.float64 if index % 3 == 2 else torch.float32
        values = torch.arange(float(torch.Size(shape).numel())).to(dtype).view(shape) + index
        found[f"p{index}"] = nn.Parameter(values.t().contiguous().t() if len(shape) == 2 else values)
    return found


def servers(parameters: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer, ranks: int) -> list[Server]:
    """Of all ranks, in this process."""
    found = []
    for rank in range(ranks):
        slots = [Slot(name, index, p) for index, (name, p) in enumerate(parameters.items())]
        half = max(1, len(slots) // 2)
        buckets = [
            BucketBuffer(index, part, lay_out(part), "a bucket")
            for index, part in enumerate(filter(None, (slots[:half], slots[half:])))
        ]
        found.append(Server(buckets, optimizer, rank, Topology.of_one_rank_each(ranks)))
    return found


def exchange(everyone: list[Server], gradients: list[dict[str, Tensor]]) -> None:
    """What the collectives do."""
    for server, own in zip(everyone, gradients, strict=True):
        for shards in server.shards:
            for shard in shards:
                for name, view in shard.views(shard.message.flat).items():
                    view.copy_(own[name])
                shard.pack(1.0 / len(everyone), torch.tensor(True))
    for rank, server in enumerate(everyone):
        for b, shards in enumerate(server.shards):
            for m, shard in enumerate(shards):
                for peer, other in enumerate(everyone):
                    shard.push.rows.received[peer] = other.shards[b][m].push.rows.sent[rank]
                shard.push.add_up(shard.total)


SHAPES = st.lists(st.lists(st.integers(0, 4), min_size=0, max_size=3).map(tuple), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(SHAPES, st.integers(1, 5), st.booleans())
def test_owners_do_what_the_optimizer_does(shapes: list[tuple[int, ...]], ranks: int, nesterov: bool) -> None:
    parameters = parameters_of(shapes)
    groups = [{"params": [p], "lr": 0.5 ** (1 + index)} for index, p in enumerate(parameters.values())]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.5, weight_decay=0.25, nesterov=nesterov)
    for p in parameters.values():
        p.grad = torch.ones_like(p)
    optimizer.step()  # there is momentum to take over
    everyone = servers(parameters, optimizer, ranks)
    for step in range(3):
        gradients = [{n: torch.full_like(p, 4.0 * rank + step) for n, p in parameters.items()} for rank in range(ranks)]
        exchange(everyone, gradients)
        for server in everyone:
            server.update(rates_of(optimizer), torch.tensor(True), USED)
        for name, p in parameters.items():
            p.grad = torch.stack([own[name] / ranks for own in gradients]).sum(dim=0)
        optimizer.step()
    states = [server.state() for server in everyone]
    for name, p in parameters.items():
        pieces = sorted((state[name] for state in states if name in state), key=lambda piece: piece["start"])
        expected = {"weights": p.detach(), "momentum": optimizer.state[p]["momentum_buffer"]}
        for what, tensor in expected.items() if pieces else ():  # a parameter without elements has no owner
            found = torch.cat([piece[what] for piece in pieces]).as_strided(p.shape, pieces[0]["stride"])
            torch.testing.assert_close(found, tensor)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_state_continues(ranks: int) -> None:
    parameters = parameters_of([(3,), (2, 4), (5,)])
    optimizer = torch.optim.SGD(parameters.values(), lr=0.1, momentum=0.5)
    everyone = servers(parameters, optimizer, ranks)
    exchange(everyone, [{n: torch.ones_like(p) for n, p in parameters.items()}] * ranks)
    for server in everyone:
        server.update(rates_of(optimizer), torch.tensor(True), USED)
    others = parameters_of([(3,), (2, 4), (5,)])
    again = servers(others, torch.optim.SGD(others.values(), lr=0.1, momentum=0.5), ranks)
    for old, new in zip(everyone, again, strict=True):
        new.load(old.state())
        for one, other in zip(old.state().values(), new.state().values(), strict=True):
            assert one["start"] == other["start"]
            assert torch.equal(one["weights"], other["weights"])
            assert torch.equal(one["momentum"], other["momentum"])


def test_a_step_that_is_not_finite_changes_nothing() -> None:
    parameters = parameters_of([(4,)])
    optimizer = torch.optim.SGD(parameters.values(), lr=0.1, momentum=0.5)
    [server] = servers(parameters, optimizer, 1)
    before = server.shards[0][0].weights.clone()
    exchange([server], [{"p0": torch.full((4,), float("nan"))}])
    server.update(rates_of(optimizer), torch.tensor(False), USED)
    assert torch.equal(server.shards[0][0].weights, before)
    assert server.state()["p0"]["momentum"] is None


def test_a_residual_comes_where_no_rank_uses_the_parameter() -> None:
    """Once nothing is held back, nothing happens to it, and its momentum rests."""
    parameters = parameters_of([(4,)])
    optimizer = torch.optim.SGD(parameters.values(), lr=1.0, momentum=0.5)
    slot = Slot("p0", 0, parameters["p0"])
    half = CompressorSpec(name="topk", selector="exact", density=0.5)
    server = Server([BucketBuffer(0, [slot], lay_out([slot]), "a bucket")], optimizer, 0, ALONE, [half])
    seen = []
    for used, gradient in ((True, [4.0, 3.0, 2.0, 1.0]), (False, [0.0] * 4), (False, [0.0] * 4)):
        exchange([server], [{"p0": torch.tensor(gradient)}])
        server.update(rates_of(optimizer), torch.tensor(True), torch.tensor([used]))
        seen.append(server.shards[0][0].weights.tolist())
    assert seen == [[-4.0, -2.0, 2.0, 3.0], [-6.0, -3.5, 0.0, 2.0], [-6.0, -3.5, 0.0, 2.0]]


def test_a_residual_goes_along_when_a_bucket_is_pushed_otherwise() -> None:
    parameters = parameters_of([(4,)])
    slot = Slot("p0", 0, parameters["p0"])
    narrow, wide = (CompressorSpec(name="wire", dtype=dtype) for dtype in ("float8_e4m3fn", "bfloat16"))
    optimizer = torch.optim.SGD(parameters.values(), lr=1.0)
    server = Server([BucketBuffer(0, [slot], lay_out([slot]), "a bucket")], optimizer, 0, ALONE, [narrow])
    [[shard]], given, seen = server.shards, torch.tensor([100.0, 17.0, 1025.0, 3001.0]), torch.zeros(4)
    for step, compressor in enumerate((narrow, wide, wide, NO_COMPRESSION), 1):
        exchange([server], [{"p0": given}])
        seen += shard.total
        held = shard.residuals().get("p0", torch.zeros(4))
        assert torch.equal(seen + held, step * given)
        assert bool(held.any())
        shard.push_as(compressor)
    exchange([server], [{"p0": given}])
    seen += shard.total
    assert torch.equal(seen, 5 * given)
    assert not shard.residuals()
    shard.push_as(narrow)  # as planned again
    exchange([server], [{"p0": given}])
    assert torch.equal(seen + shard.total + shard.residuals()["p0"], 6 * given)
