"""Cost of NCCL's collectives, and its choice of algorithm and protocol, from a short description of the machines.

Latencies and bandwidths are those of NCCL's own tuning model: constants and formulas of src/graph/tuning.cc, rates of
links of src/graph/topo.h, rates of channels of src/graph/search.cc (NCCL 2.30.7, commit 5067397). PyTorch's estimates
(torch/_inductor/comm_analysis.py) are the LL part of an older version of the same model. NCCL adds latency and
transfer up; on machines a part of one hides behind the other, so that here a call takes

    launch + ((kₗ·latency)^p + (kₜ·bytes/bandwidth)^p)^(1/p)

with kₗ = kₜ = 1 unless measurements say otherwise (`planner.cost.nccl_fit`). Rings then take their number of steps
times one function of the bytes of a step, which is what measurements on 2 to 32 nodes of 8 H100 show. What is chosen
follows NCCL's model as NCCL has it, or a plugin's table, and not these times: a library does not know how wrong its
model is.

Bytes are the whole tensor (all-reduce, reduce-scatter) or the whole result (all-gather); bandwidths are bytes of that
per microsecond.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from planner.cost.collectives import Coefficients
from planner.cost.curve import CostCurve
from planner.documents.nccl import Family, Generation, Interval, Nccl, NcclFit
from planner.documents.profile import Cluster, Link

Floats = NDArray[np.float64]
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather")
NCCL_VERSION = "2.30.7"
UNMEASURED_INTERVAL = 0.35
"""9 of 10 published rows, predicted from machines alone, lie within 33 % (docs/results/validation.md)."""
LAUNCH_US = 20.0
"""Time of a call that the model lacks, if nothing was measured: 8 A100 take 35 µs for the smallest call (SuperBench),
and the model has 15 of them."""
OVERLAP_INSIDE, OVERLAP_BETWEEN = 1.0, 1.8
"""Exponents p on one node, as NCCL has it, and on several: that of all-gathers on 2 to 32 nodes of 8 H100 (AWS p5),
which a fit to 2 and 4 of them puts at 1.9."""

_GENERATIONS: tuple[Generation, ...] = ("volta", "ampere", "hopper", "blackwell")
_PROTOCOLS = ("ll", "ll128", "simple")
_BASE_US: Mapping[str, tuple[float, ...]] = {
    "tree": (6.8, 14.0, 8.4), "ring": (6.6, 14.0, 8.4), "pat": (8.0, 8.0, 8.0),
}  # fmt: skip
_NVLINK, _PCI, _NET = range(3)
_HARDWARE_US: Mapping[str, tuple[tuple[float, ...], ...]] = {
    "tree": ((0.6, 1.25, 4.0), (1.0, 1.9, 4.0), (5.0, 8.5, 14.0)),
    "ring": ((0.6, 1.9, 3.4), (1.0, 2.5, 5.7), (2.7, 4.0, 14.0)),
    "collnet_direct": ((0, 0, 3.7), (0, 0, 3.7), (0, 0, 31.0)),
    "collnet_chain": ((0, 0, 2.8), (0, 0, 2.8), (0, 0, 30.0)),
    "nvls": ((0, 0, 25.0), (0, 0, 0), (0, 0, 18.0)),
    "nvls_tree": ((0, 0, 25.0), (0, 0, 0), (0, 0, 20.9)),
    "pat": ((0, 0, 4.0), (0, 0, 4.0), (0, 0, 14.0)),
}
"""Latency of a step in µs by algorithm, link (NVLink, PCIe, network) and protocol."""
_LL_MAX = ((39.0, 39.0, 20.4), (87.7, 22.5, 19.0), (141.0, 45.0, 35.0), (282.0, 90.0, 70.0))
_RING_LL128 = ((20.0,) * 3, (20.0,) * 3, (36.7,) * 3, (40.0,) * 3)
_TREE_LL128 = ((20.0,) * 3, (20.0,) * 3, (36.7, 36.7, 29.0), (55.6, 31.67, 20.0))
_TREE = ((26.5, 18.5, 10.0), (24.0, 23.6, 17.8), (38.7, 41.4, 36.0), (70.0, 42.8, 24.0))
_NVLS_TREE = ((26.5, 18.5, 10.0), (24.0, 23.6, 17.8), (0.0, 57.7, 45.5), (0.0, 96.0, 80.0))
"""GB/s at most of LL in all, and of a channel of the others; by generation and nodes (1, 2, more)."""
MOST_HEADS = 8
"""Accelerators whose shares pass through a switch of their own; larger domains are taken to be as good as 8."""
_NVLS_EFFICIENCY = (0.0, 0.0, 0.85, 0.74)
_TREE_CORRECTION: Mapping[str, tuple[float, ...]] = {
    "ll": (1, 1, 1, 1, .9, .8, .7, .7, .7, .7, .6, .5, .4, .4, .5, .6, .7, .8, .9, 1, 1, 1, 1),
    "ll128": (1, 1, 1, 1, 1, .9, .8, .8, .8, .7, .6, .6, .6, .6, .6, .6, .8, .9, .9, .9, .9, 1, 1),
    "simple": (.9, .9, .9, .9, .9, .9, .9, .8, .7, .6, .6, .5, .5, .5, .5, .6, .7, .8, .7, .7, .8, .9, .9),
}  # fmt: skip
"""Share of a tree's bandwidth by octave of the size from 64 B."""
_SPEEDS_INSIDE: tuple[tuple[float, ...], ...] = (
    (40, 30, 20, 18, 15, 12, 10, 9, 7, 6, 5, 4, 3), (40, 30, 20, 18, 15, 12, 10, 9, 7, 6, 5, 4, 3),
    (60, 50, 40, 30, 24, 20, 15, 12, 11, 6, 3), (90, 80, 70, 60, 50, 45, 40, 30, 24, 20, 19, 18),
)  # fmt: skip
_SPEEDS_BETWEEN: tuple[tuple[float, ...], ...] = (
    (48, 30, 28, 24, 20, 18, 15, 12, 10, 9, 7, 6, 5, 4, 3, 2.4, 1.2, 0.24, 0.12),
    (48, 30, 28, 24, 20, 18, 15, 12, 10, 9, 7, 6, 5, 4, 3, 2.4, 1.2, 0.24, 0.12),
    (48, 45, 42, 40, 30, 24, 22, 20, 17.5, 15, 12, 6, 3, 2.4, 1.2, 0.24, 0.12),
    (96, 86, 80, 48, 45.1, 42, 40, 30, 24, 22, 20, 17.5, 15, 12, 6, 3, 2.4, 1.2, 0.24, 0.12),
)
"""GB/s that a channel may have, by generation."""


class Channels(NamedTuple):
    """Result of NCCL's search: the number of channels, and the GB/s of each."""

    number: int
    gb_per_s: float


@dataclass(frozen=True)
class Shape:
    """One communicator: machines, and how many of them."""

    machine: Nccl
    nodes: int
    per_node: int

    @property
    def ranks(self) -> int:
        return self.nodes * self.per_node

    @property
    def generation(self) -> int:
        return _GENERATIONS.index(self.machine.kind.generation)

    @property
    def column(self) -> int:
        """Return the column of NCCL's tables: one node, two, more."""
        return min(self.nodes, 3) - 1

    @cached_property
    def local_gb_per_s(self) -> float:
        """Return the GB/s that an accelerator exchanges inside its node."""
        machine = self.machine
        return (machine.nvlink_bytes_per_s or machine.pcie_bytes_per_s) / 1e9

    @property
    def inside(self) -> int:
        return _NVLINK if self.machine.nvlink_bytes_per_s else _PCI

    @cached_property
    def channels(self) -> Channels:
        """Rings' and trees'."""
        limit = self.local_gb_per_s if self.per_node > 1 else math.inf
        if self.nodes == 1:
            fitting = [speed for speed in _SPEEDS_INSIDE[self.generation] if speed <= limit] or [limit]
            # The search gives up below half of the first speed that works; of equals it takes the fewest channels.
            wide = [speed for speed in fitting if speed >= 0.49 * fitting[0]]
            speed = max(wide, key=lambda one: (math.floor(limit / one + 1e-9) * one, one))
            found = Channels(math.floor(limit / speed + 1e-9), speed)
        else:
            cards, rate = self.machine.nics_per_node, self.machine.nic_bytes_per_s / 1e9
            fits = min(rate, limit / cards)
            speed = next((one for one in _SPEEDS_BETWEEN[self.generation] if one <= fits), fits)
            found = Channels(cards, speed)
        if found.gb_per_s < 25.0 or (self.generation >= 2 and found.gb_per_s < 50.0 and found.number > 4):
            return found
        return Channels(2 * found.number, found.gb_per_s / 2)

    def step_latency_us(self, algorithm: str, protocol: int) -> float:
        """Return the latency of one step between nodes."""
        # One rank a node has nothing to hide it behind: NCCL takes the tree's.
        kind = "tree" if self.per_node == 1 and algorithm != "pat" else algorithm
        plugin_us = self.machine.net_latency_us
        return _HARDWARE_US[kind][_NET][protocol] + plugin_us * (2.0 if _PROTOCOLS[protocol] == "simple" else 1.0)


def _steps(collective: str, ranks: int) -> int:
    return 2 * (ranks - 1) if collective == "all_reduce" else ranks - 1


def _ll128(shape: Shape) -> bool:
    machine = shape.machine
    if machine.ll128 is not None:
        return machine.ll128
    return shape.inside == _NVLINK and (shape.nodes == 1 or machine.rdma)


def _in_switch(shape: Shape) -> bool:
    machine = shape.machine
    possible = machine.kind.in_switch and shape.inside == _NVLINK and shape.per_node > 1
    return possible and (machine.nvls if machine.nvls is not None else shape.per_node > 4)


def families(collective: str, shape: Shape) -> tuple[Family, ...]:
    """Return what NCCL may choose among."""
    several, reduces_all = shape.nodes > 1, collective == "all_reduce"
    protocols = ["ll", *(["ll128"] if _ll128(shape) else []), "simple"]
    found = [f"ring/{protocol}" for protocol in protocols]
    if reduces_all and shape.ranks > 2:
        found += [f"tree/{protocol}" for protocol in protocols]
    if _in_switch(shape):
        if not several:
            found.append("nvls/simple")
        elif reduces_all:
            found += ["nvls_tree/simple", *(["nvls/simple"] if shape.machine.sharp else [])]
    if shape.machine.sharp and several and reduces_all:
        found += ["collnet_chain/simple", *(["collnet_direct/simple"] if shape.inside == _NVLINK else [])]
    if several and shape.per_node == 1 and not reduces_all:
        found.append("pat/simple")
    return tuple(found)  # type: ignore[arg-type]


def latency_us(family: Family, collective: str, shape: Shape) -> float:
    """Return NCCL's latency of a call."""
    algorithm, _, name = family.partition("/")
    protocol = _PROTOCOLS.index(name)
    base = _BASE_US.get(algorithm, (0.0, 0.0, 0.0))[protocol]
    inside = _HARDWARE_US[algorithm][shape.inside][protocol]
    between = shape.step_latency_us(algorithm, protocol)
    nodes, depth = shape.nodes, math.log2(shape.nodes) // 1
    if algorithm == "ring":
        steps = _steps(collective, shape.ranks)
        crossing = 0 if nodes == 1 else _steps(collective, nodes)
        if nodes > 1:
            overhead = 2.0 if shape.machine.cpu == "amd" else 1.0
            inside = max(inside, overhead * (3.0 if name == "simple" else 1.0))
        return base + (steps - crossing) * inside + crossing * between
    if algorithm == "tree":
        return base + 2.0 * ((shape.per_node - 1) * inside + depth * between)
    if algorithm == "nvls":
        return inside + (between if nodes > 1 else 0.0)
    if algorithm == "nvls_tree":
        return base + inside + 2.0 * depth * between
    if algorithm == "collnet_direct":
        return 2.0 * (min(1, shape.per_node - 1) * inside + (shape.per_node - 1) * 0.4) + between
    if algorithm == "collnet_chain":
        return 2.0 * (shape.per_node - 1) * inside + between
    return base + depth * between / 3.5 + shape.ranks * 2.8


def bytes_per_us(family: Family, collective: str, shape: Shape) -> float:
    """Return NCCL's bandwidth of a call of many bytes."""
    algorithm, _, name = family.partition("/")
    generation, column, (count, speed) = shape.generation, shape.column, shape.channels
    ll_row = generation if shape.nodes == 1 else int(shape.machine.cpu == "amd")
    ll_max, bus = _LL_MAX[ll_row][column], count * speed
    steps, ranks = _steps(collective, shape.ranks), shape.ranks
    if algorithm == "ring":
        if name == "ll":
            bus = min(ll_max, bus * 0.5)
        elif name == "ll128":
            bus = min(bus * 0.92, count * _RING_LL128[generation][column])
    elif algorithm == "tree":
        bus = min(bus * 0.92, count * _TREE[generation][column])
        if name == "ll":
            bus = min(bus / 3.8, ll_max)
        elif name == "ll128":
            factor = 7.0 / 9.0 if shape.nodes == 1 else 120.0 / 128.0
            bus = min(bus * factor, count * _TREE_LL128[generation][column])
    elif algorithm in ("nvls", "nvls_tree"):
        bus = _in_switch_bus(algorithm, collective, shape)
    elif algorithm == "collnet_direct":
        factor = shape.per_node / count
        bus /= factor - (factor - 1.0) / 2.0
        bus *= 0.85 if generation >= 2 else 1.0
    elif algorithm == "pat":
        bus *= 0.75
    if algorithm in ("ring", "nvls", "nvls_tree"):
        bus *= ranks / steps
    elif collective == "all_reduce":
        bus *= 0.5
    return bus * 1e3


def _in_switch_bus(algorithm: str, collective: str, shape: Shape) -> float:
    """Return the bandwidth of all heads: each accelerator's share goes through its own."""
    heads = min(shape.per_node, MOST_HEADS)
    fits = shape.local_gb_per_s / heads
    speed = next((one for one in _SPEEDS_INSIDE[shape.generation] if one <= fits), fits)
    one = speed * _NVLS_EFFICIENCY[shape.generation] * (heads - 1) / heads
    one *= 2.0 if collective == "all_reduce" else (shape.per_node - 1) / shape.per_node
    if shape.nodes > 1:
        cards = shape.channels
        between = cards.number * cards.gb_per_s / heads
        one = min(one, between * (2.0 if shape.nodes == 2 and algorithm == "nvls_tree" else 1.0))
        if algorithm == "nvls_tree":
            one = min(one, _NVLS_TREE[shape.generation][shape.column])
    return heads * one


def _corrected(family: Family, sizes: Floats) -> Floats:
    """Return the share of a tree's bandwidth that NCCL counts with at these sizes."""
    algorithm, _, protocol = family.partition("/")
    if algorithm != "tree":
        return np.ones_like(sizes)
    table = np.array([*_TREE_CORRECTION[protocol], 1.0])
    octave = np.floor(np.log2(np.maximum(sizes, 1.0) / 64.0)).astype(int)
    return np.where(octave < 0, 1.0, table[np.clip(octave, 0, len(table) - 1)])


def believed_us(family: Family, collective: str, shape: Shape, sizes: Floats) -> Floats:
    """Return what NCCL itself takes a call to cost when it chooses."""
    bandwidth = bytes_per_us(family, collective, shape) * _corrected(family, sizes)
    latency = np.full_like(sizes, latency_us(family, collective, shape))
    if family == "ring/simple" and shape.nodes > 1 and collective == "all_reduce":
        plateau = sizes / (shape.channels.number * shape.ranks) >= 64
        latency = np.where(plateau, latency * (1.9 if shape.generation == 0 else 1.4), latency)
    return latency + sizes / bandwidth


_IN_SWITCH: Family = "nvls_tree/simple"
_AWS_P5: tuple[tuple[int, tuple[tuple[float, Family], ...]], ...] = (
    (16, ((31457280, "tree/ll128"), (math.inf, _IN_SWITCH))),
    (32, ((37748736, "tree/ll128"), (1610612736, "ring/ll128"), (math.inf, "ring/simple"))),
    (64, ((117440512, "tree/ll128"), (2147483648, "ring/ll128"), (math.inf, "ring/simple"))),
    (128, (
        (301989888, "tree/ll128"), (2147483648, "ring/ll128"), (6264193024, _IN_SWITCH), (math.inf, "ring/simple"),
    )),
    (160, (
        (304087040, "tree/ll128"), (444596224, _IN_SWITCH), (1342177280, "ring/ll128"), (8053063680, _IN_SWITCH),
        (math.inf, "ring/simple"),
    )),
    (256, (
        (301989888, "tree/ll128"), (1074790400, _IN_SWITCH), (2147483648, "ring/ll128"), (12884901888, _IN_SWITCH),
        (math.inf, "ring/simple"),
    )),
    (512, ((335544320, "tree/ll128"), (25769803776, _IN_SWITCH), (math.inf, "ring/simple"))),
    (1024, ((536870912, "tree/ll128"), (51539607552, _IN_SWITCH), (math.inf, "ring/simple"))),
    (2048, ((402653184, "tree/ll128"), (math.inf, _IN_SWITCH))),
)  # fmt: skip
"""All-reduces on 8 ranks a node by number of ranks: up to so many bytes, what AWS's plugin takes. From the corners of
its regions (aws-ofi-nccl, src/tuner/nccl_ofi_regions.cpp, commit 2daf7d3), on the lines between them. Between rows the
nearest one holds."""


def _by_table(table: Sequence[tuple[float, Family]], sizes: Floats) -> list[Family]:
    """Return the family of the first segment that reaches each size."""
    ends = np.array([end for end, _ in table])
    index = np.minimum(np.searchsorted(ends, sizes), len(table) - 1)
    return [table[at][1] for at in index]


def choice(collective: str, shape: Shape, sizes: ArrayLike) -> list[Family]:
    """Return what is taken for each size: as measurements showed, as a plugin's table says, or as NCCL's model does."""
    asked = np.asarray(sizes, dtype=np.float64)
    machine = shape.machine
    seen = {} if machine.fit is None else (machine.fit.choice or {}).get(collective, {})
    if seen:
        nearest = min(seen, key=lambda ranks: (abs(math.log(int(ranks) / shape.ranks)), int(ranks)))
        scale = shape.ranks / int(nearest)
        allowed = families(collective, shape)
        table = [(end * scale, family) for end, family in seen[nearest]]
        if all(family in allowed for _, family in table):
            return _by_table(table, asked)
    if machine.tuner == "aws-ofi-p5" and collective == "all_reduce" and shape.per_node == 8 and shape.nodes > 1:
        row = min(_AWS_P5, key=lambda one: (abs(math.log(one[0] / shape.ranks)), one[0]))
        return _by_table(row[1], asked)
    return believed_choice(collective, shape, asked)


def believed_choice(collective: str, shape: Shape, sizes: Floats) -> list[Family]:
    """Return what NCCL's own model finds fastest."""
    names = families(collective, shape)
    times = np.array([believed_us(name, collective, shape, sizes) for name in names])
    return [names[index] for index in np.argmin(times, axis=0)]


def family_us(
    latency: float, transfer: ArrayLike, launch: float, overlap: float, factors: tuple[float, float] = (1.0, 1.0)
) -> Floats:
    """Return launch + the overlapping sum of latency and transfer, elementwise."""
    waits, moves = factors[0] * latency, factors[1] * np.asarray(transfer, dtype=np.float64)
    return np.asarray(launch + (waits**overlap + moves**overlap) ** (1.0 / overlap))


def factors_of(fit: NcclFit | None, family: Family, collective: str) -> tuple[float, float]:
    """Return the multipliers of latency and transfer."""
    if fit is None:
        return 1.0, 1.0
    half = 1.0 if collective == "all_reduce" else fit.halves.get(family, 1.0)
    return fit.latency.get(family, fit.other_latency), half * fit.transfer.get(family, fit.other_transfer)


def constants(shape: Shape) -> tuple[float, float]:
    """Return the time of a call that the model lacks, and the exponent p."""
    fit, inside = shape.machine.fit, shape.nodes == 1
    if fit is None:
        return LAUNCH_US, OVERLAP_INSIDE if inside else OVERLAP_BETWEEN
    return fit.launch_us, fit.overlap_inside if inside else fit.overlap


def times_us(collective: str, shape: Shape, sizes: ArrayLike, chosen: Sequence[Family] | None = None) -> Floats:
    """Return what calls of these sizes take, with the algorithm and protocol that is chosen for each."""
    asked = np.asarray(sizes, dtype=np.float64)
    if shape.ranks == 1:
        return np.zeros_like(asked)
    taken = np.array(choice(collective, shape, asked) if chosen is None else list(chosen))
    fit = shape.machine.fit
    launch, overlap = constants(shape)
    times = np.zeros_like(asked)
    for family in dict.fromkeys(taken.tolist()):
        here = taken == family
        transfer = asked[here] / bytes_per_us(family, collective, shape)
        latency = latency_us(family, collective, shape)
        times[here] = family_us(latency, transfer, launch, overlap, factors_of(fit, family, collective))
    return times


KNOTS_AN_OCTAVE, LEAST_LOG2, MOST_LOG2 = 4, 6, 36


def curve(collective: str, shape: Shape) -> CostCurve:
    """Return time over bytes, from 64 B to 64 GiB in quarter octaves; a single rank sends nothing."""
    if shape.ranks == 1:
        return CostCurve.from_line(Coefficients(0.0, 0.0))
    octaves = np.arange(LEAST_LOG2 * KNOTS_AN_OCTAVE, MOST_LOG2 * KNOTS_AN_OCTAVE + 1) / KNOTS_AN_OCTAVE
    sizes = 2.0**octaves
    times = times_us(collective, shape, sizes)
    # The line of a start-up and a rate, for those who ask for two numbers: the smallest call, and the largest's slope.
    per_byte_us = (times[-1] - times[-2]) / (sizes[-1] - sizes[-2])
    line = Coefficients(float(times[0]), float(per_byte_us))
    return CostCurve.from_samples(list(zip(sizes.tolist(), times.tolist(), strict=True)), line)


def shape_of(cluster: Cluster) -> Shape | None:
    """Return the communicator of all ranks of a cluster of this library, else None."""
    if cluster.library != "nccl" or cluster.nccl is None:
        return None
    return Shape(cluster.nccl, cluster.nodes, cluster.ranks_per_node)


def shape_on(cluster: Cluster, link: str) -> Shape | None:
    """Return that of one node's ranks (`intra`), or of one rank of each node while the node's others do the same."""
    whole = shape_of(cluster)
    if whole is None:
        return None
    if link == "intra":
        return Shape(whole.machine, 1, whole.per_node)
    machine = whole.machine
    share = machine.nic_bytes_per_s * min(1.0, machine.nics_per_node / whole.per_node)
    return Shape(replace(machine, nics_per_node=1, nic=f"{share / 1e9:.6f}gbyte"), whole.nodes, 1)


def link_of(cluster: Cluster, name: str) -> Link | None:
    """Return constants of a link for formulas of other algorithms: a step of NCCL's ring by LL128 and by its rate."""
    shape = shape_of(cluster)
    if shape is None:
        return None
    if name == "intra":
        if not shape.local_gb_per_s:
            return None
        return Link(alpha_us=_HARDWARE_US["ring"][shape.inside][1], beta_us_per_byte=1e-3 / shape.local_gb_per_s)
    rate = shape.machine.nic_bytes_per_s * shape.machine.nics_per_node
    if not rate:
        return None
    alpha_us = _HARDWARE_US["ring"][_NET][1] + shape.machine.net_latency_us
    return Link(alpha_us=alpha_us, beta_us_per_byte=1e6 / rate)


def describe(collective: str, shape: Shape) -> str:
    """Return in words what a call costs and by whose word: algorithms by size, and what was fitted."""
    octaves = 2.0 ** np.arange(LEAST_LOG2, MOST_LOG2 + 1)
    taken = choice(collective, shape, octaves)
    ends = [at for at, (family, other) in enumerate(pairwise(taken)) if family != other]
    parts = [*(f"{taken[at]} to {_size_text(octaves[at])}" for at in ends), taken[-1]]
    fit, machine = shape.machine.fit, shape.machine
    if fit is None:
        how = f"constants of NCCL {NCCL_VERSION}, nothing measured"
    else:
        how = f"fitted on {', '.join(map(str, fit.measured_on))} ranks, within {interval_of(shape):.0%} for 9 of 10"
    by = "" if machine.tuner == "nccl" or (fit and fit.choice) else f" (chosen by {machine.tuner})"
    return f"NCCL's {collective.replace('_', '-')}: {', '.join(parts)}{by}; {how}"


def interval_of(shape: Shape) -> float:
    """Return by what share 9 of 10 measurements lie off at most; `UNMEASURED_INTERVAL` where nothing was."""
    fit = shape.machine.fit
    if fit is None:
        return UNMEASURED_INTERVAL
    return math.expm1(fit.interval.inside if shape.ranks in fit.measured_on else fit.interval.beyond)


def scaled(machine: Nccl, factor: float) -> Nccl:
    """Return machines on which every call takes so many times as long."""
    fit = machine.fit
    if fit is None:
        fit = NcclFit(
            launch_us=LAUNCH_US, overlap=OVERLAP_BETWEEN, overlap_inside=OVERLAP_INSIDE, latency={}, transfer={},
            halves={}, other_latency=1.0, other_transfer=1.0, interval=Interval(inside=0.0, beyond=0.0),
            measured_on=(), samples=0, mean_error=0.0,
        )  # fmt: skip
    longer = replace(
        fit,
        launch_us=fit.launch_us * factor,
        latency={family: value * factor for family, value in fit.latency.items()},
        transfer={family: value * factor for family, value in fit.transfer.items()},
        other_latency=fit.other_latency * factor,
        other_transfer=fit.other_transfer * factor,
    )
    return replace(machine, fit=longer)


def _size_text(size_bytes: float) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size_bytes >= scale:
            return f"{size_bytes / scale:g} {unit}"
    return f"{size_bytes:g} B"
