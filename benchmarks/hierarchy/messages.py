"""One message of every collective, on emulated hosts: how long it takes, and what each host sends."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from planner.testbed.wiring import INTERFACE
from runtime.comm.by_device import make_communicator
from runtime.comm.collectives import collective_of, has_phases
from runtime.comm.communicator import CommTiming, Communicator
from runtime.comm.phased_communicator import make_phased_communicator
from runtime.comm.topology import Topology, find_topology, node_info
from runtime.comm.world import Grid, World
from runtime.core.buckets import BucketBuffer, Slot, lay_out
from runtime.plan import NO_COMPRESSION, CompressorSpec, ModelReference, Plan, PlanBucket, PlanWorld
from runtime.sparse.compressed import CompressedBucket
from runtime.sparse.layout import make_lossy, make_lossy_between

DENSE = (("all_reduce", "library"), ("all_reduce", "tree"), ("all_reduce", "torus_2d"))
SPARSE = (("sparse", "naive_all_gather"), ("sparse", "flat"), ("sparse", "hitopk"))
TIMEOUT_S = 300.0
SELECTED_BYTES = 8


@dataclass(frozen=True)
class Timed:
    """One collective at one size."""

    form: tuple[str, str]
    size_bytes: int
    density: float | None
    time_us: float
    """Until the gradients are there, selection and adding up included; from the last arrival, median."""
    sent_us: float
    """Of that from the launch of the message to its end."""
    host_bytes: float
    """What a host sends to others, headers and acknowledgements included."""
    formula_bytes: float | None
    """The payload by formula; None where a backend chooses the algorithm."""


@dataclass(frozen=True)
class Runs:
    """What one rank saw of a collective."""

    times_us: list[float]
    sent_us: list[float]
    host_bytes: float
    k: int


def formula_bytes(form: tuple[str, str], size_bytes: int, k: int, nodes: int, ranks_per_node: int) -> float | None:
    """Payload that a node sends to others: what its ranks send there together. `k`: of a rank, or of a shard."""
    if form == ("all_reduce", "torus_2d"):
        return 2.0 * (nodes - 1) / nodes * size_bytes
    if form == ("sparse", "hitopk"):
        return float(ranks_per_node * (nodes - 1) * SELECTED_BYTES * k)
    return None


def run_rank(sizes: Sequence[int], densities: Sequence[float], passes: int) -> list[Timed]:
    """Every rank calls it; all get the same figures."""
    world = World.join(timeout_s=TIMEOUT_S)
    topology = find_topology(world.gather(node_info(world.group), "counting nodes"))
    assert isinstance(topology, Topology)
    grid = Grid.make(world, topology)
    found = []
    for size_bytes in sizes:
        for form in DENSE:
            found.append(_measure(grid, form, size_bytes, None, passes))
        for density in densities:
            for form in SPARSE:
                found.append(_measure(grid, form, size_bytes, density, passes))
    return found


def _measure(grid: Grid, form: tuple[str, str], size_bytes: int, density: float | None, passes: int) -> Timed:
    mine = _runs(grid, form, size_bytes, density, passes)
    everyone: list[Runs] = grid.world.gather(mine, "comparing times")
    firsts = [everyone[ranks[0]] for ranks in grid.topology.nodes]
    return Timed(
        form=form,
        size_bytes=size_bytes,
        density=density,
        # Who comes last waits for nobody.
        time_us=statistics.median(min(times) for times in zip(*(one.times_us for one in everyone), strict=True)),
        sent_us=statistics.median(min(times) for times in zip(*(one.sent_us for one in everyone), strict=True)),
        host_bytes=max(one.host_bytes for one in firsts),
        formula_bytes=formula_bytes(form, size_bytes, mine.k, grid.topology.num_nodes, grid.topology.ranks_per_node),
    )


def _runs(grid: Grid, form: tuple[str, str], size_bytes: int, density: float | None, passes: int) -> Runs:
    bucket, lossy, communicator = _bucket(grid, form, size_bytes, density)
    times_us, sent_us, sent_bytes = [], [], []
    generator = torch.Generator().manual_seed(grid.world.rank)
    for number in range(passes + 1):
        bucket.messages[0].flat.normal_(generator=generator)
        dist.barrier(group=grid.world.group)
        before, begun, sent = _host_bytes(), time.perf_counter(), CommTiming()
        if lossy is not None:
            lossy.pack(number)
        communicator.launch(bucket.payload, sent)
        communicator.wait()
        if lossy is not None:
            lossy.feedback.commit(lossy.unpack())
        times_us.append((time.perf_counter() - begun) * 1e6)
        sent_us.append((sent.end - sent.launch) * 1e6)
        dist.barrier(group=grid.world.group)  # whose few bytes count, too
        sent_bytes.append(_host_bytes() - before)
    communicator.close()
    k = 0 if lossy is None else lossy.k
    if form == ("sparse", "hitopk"):
        k //= grid.topology.ranks_per_node
    return Runs(times_us[1:], sent_us[1:], statistics.median(sent_bytes[1:]), k)


def _bucket(
    grid: Grid, form: tuple[str, str], size_bytes: int, density: float | None
) -> tuple[BucketBuffer, CompressedBucket | None, Communicator]:
    slots = [Slot("layer.weight", 0, nn.Parameter(torch.zeros(size_bytes // 4)))]
    spec = NO_COMPRESSION if density is None else CompressorSpec(name="topk", selector="exact", density=density)
    planned = PlanBucket(gradients=("layer.weight",), collective=form[0], algorithm=form[1], compressor=spec)
    bucket = BucketBuffer(0, slots, lay_out(slots), "/".join(form))
    lossy: CompressedBucket | None = None
    if form == ("sparse", "hitopk"):
        lossy = make_lossy_between(bucket, spec, grid.topology, grid.world.rank)
    elif density is not None:
        lossy = make_lossy(bucket, spec, grid.world.ranks)
    plan = Plan(
        model=ModelReference(name="message"),
        world=PlanWorld(ranks=grid.world.ranks),
        accuracy="exact" if density is None else "bounded",
        buckets=(planned,),
    )
    device = torch.device("cpu")
    if has_phases(plan):
        return bucket, lossy, make_phased_communicator(grid, plan, device)
    return bucket, lossy, make_communicator(grid.world, [collective_of(planned)], device)


def _host_bytes() -> int:
    """What this host's interface has sent so far; 0 where it has none of its own."""
    for line in Path("/proc/self/net/dev").read_text(encoding="ascii").splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == INTERFACE:
            return int(counters.split()[8])
    return 0


def lines(found: Sequence[Timed]) -> Iterator[str]:
    """One row for each collective at each size and density."""
    yield "| message | collective | whole, ms | on links, ms | against flat | a host sends, MB | formula, MB | ratio |"
    yield "| --- | --- " + "| --: " * 6 + "|"
    for size_bytes, density in dict.fromkeys((one.size_bytes, one.density) for one in found):
        rows = [one for one in found if (one.size_bytes, one.density) == (size_bytes, density)]
        flat = next(one for one in rows if one.form in (DENSE[0], SPARSE[1]))
        what = f"{size_bytes / 1e6:g} MB" + ("" if density is None else f", {density:.1%}")
        for one in rows:
            formula, ratio = "", ""
            if one.formula_bytes is not None and one.host_bytes:
                formula, ratio = f"{one.formula_bytes / 1e6:.3f}", f"{one.host_bytes / one.formula_bytes:.3f}"
            yield (
                f"| {what} | {'/'.join(one.form)} | {one.time_us / 1e3:.1f} | {one.sent_us / 1e3:.1f} "
                f"| {flat.time_us / one.time_us:.2f} × | {one.host_bytes / 1e6:.3f} | {formula} | {ratio} |"
            )


Checked = tuple[str, float, float]
"""(what, found, bound)."""


def targets(found: Sequence[Timed], size_bytes: int, density: float) -> Iterator[Checked]:
    """How many times as fast as its rivals each is, at one size and density, and by how much bytes exceed formulas."""
    time_us: Callable[[tuple[str, str]], float] = lambda form: next(  # noqa: E731
        one.time_us
        for one in found
        if (one.form, one.size_bytes) == (form, size_bytes) and one.density in (None, density)
    )
    yield "torus_2d against flat all-reduce", time_us(DENSE[0]) / time_us(DENSE[2]), 1.3
    yield "hitopk against flat sparse", time_us(SPARSE[1]) / time_us(SPARSE[2]), 1.5
    yield "hitopk against flat dense", time_us(DENSE[0]) / time_us(SPARSE[2]), 3.0
