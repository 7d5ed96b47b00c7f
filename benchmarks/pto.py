"""What ranks gain by sharing the norms of layers (PTO), and whether the planner's choice was right.

    python -m benchmarks.pto                        # prints the table; exit code 1 where a target is missed
    python -m benchmarks.pto --output docs/results/pto.md   # writes it there, too

For each case the planner decides on a profile of these ranks: the norms of every layer, and the all-gather. Then both
ways are timed in the same processes, step by step in turn, so that a machine that changes its speed changes both alike.
All ranks begin a step together, as the last bucket lets them; a step counts as long as its slowest rank takes.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.marked import publish
from examples.digits import ResNet20
from planner.documents.profile import Cluster, ComputeProfile, Gradient, Profile, ProfileWorld
from planner.ir import Schedule
from planner.jobs.launch import LocalWorld, run_ranks
from planner.model.norms import replicated_us, shared_us
from planner.model.problem import Problem, make_problem
from planner.passes.shard_updates import ShardUpdates
from planner.profile.bench import Bench
from planner.profile.compute import Training
from planner.profile.links import Limits, measure_links
from planner.profile.norms import measure_norms
from planner.profile.request import CURVE_S
from planner.search.partition import partition_of
from runtime.comm.world import World
from runtime.monitor.clock import WallClock
from runtime.optimizers import LAMB, LARS, LayerwiseOptimizer
from runtime.optimizers.norms import LayerNorms, norm_dtype, pair_norms
from runtime.optimizers.pto import Split
from runtime.plan import ModelReference

RANKS = 4
WARM_UP, STEPS, UPDATES = 4, 40, 10
LINK_BYTES = 64 * 1024
"""Norms of layers are some kilobytes at the most."""
GAIN, LOSS = 1.5, 1.02
"""Where the planner shares norms they have to be so many times as fast; where not, its choice may cost so much."""

Shapes = list[tuple[int, ...]]


def resnet50() -> Shapes:
    """161 parameters of ResNet-50 (He et al., 2016): 25.6 million elements."""
    shapes: Shapes = [(64, 3, 7, 7), (64,), (64,)]
    before = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            for channels, inside, side in ((width, before, 1), (width, width, 3), (4 * width, width, 1)):
                shapes += [(channels, inside, side, side), (channels,), (channels,)]
            if block == 0:
                shapes += [(4 * width, before, 1, 1), (4 * width,), (4 * width,)]
            before = 4 * width
    return [*shapes, (1000, 2048), (1000,)]


def transformer() -> Shapes:
    """A base transformer encoder of twelve layers (BERT's): 85 million elements in 16 parameters each."""
    wide, hidden = 768, 3072
    layer: Shapes = [(wide, wide), (wide,)] * 4 + [(hidden, wide), (hidden,), (wide, hidden), (wide,)] + [(wide,)] * 4
    return layer * 12


def resnet20() -> Shapes:
    """The demo's model: 0.27 million elements."""
    return [tuple(parameter.shape) for parameter in ResNet20().parameters()]


@dataclass(frozen=True)
class Case:
    """An optimizer of a model's parameters."""

    name: str
    shapes: Callable[[], Shapes]
    optimizer: Callable[[Any], LayerwiseOptimizer]


CASES = (
    Case("ResNet-50, LARS, all 161 layers", resnet50, lambda p: LARS(p, lr=1e-3, weight_decay=1e-4, exclude_1d=False)),
    Case("ResNet-50, LARS without norms and biases", resnet50, lambda p: LARS(p, lr=1e-3, weight_decay=1e-4)),
    Case("ResNet-50, LAMB, all 161 layers", resnet50, lambda p: LAMB(p, lr=1e-3, exclude_1d=False)),
    Case("BERT's encoder, LAMB, all 192 layers", transformer, lambda p: LAMB(p, lr=1e-3, exclude_1d=False)),
    Case("ResNet-20, LARS, all 65 layers", resnet20, lambda p: LARS(p, lr=1e-3, exclude_1d=False)),
)


@dataclass(frozen=True)
class Row:
    """One case; medians in microseconds."""

    case: str
    layers: int
    message_bytes: int
    on: bool
    """What the planner chose."""
    replicated_us: float
    """Norms where each rank computes all of them."""
    predicted_replicated_us: float
    shared_us: float
    predicted_shared_us: float
    planned: float
    """Norms as the planner chose, by the optimizer's own means, over those of a plain call on every rank: the median of
    ratios of neighbouring steps."""
    step_replicated_us: float
    """The whole update."""
    step_shared_us: float

    @property
    def gain(self) -> float:
        """How many times as fast norms are shared."""
        return self.replicated_us / self.shared_us

    @property
    def missed(self) -> bool:
        """Whether a target is."""
        return self.gain < GAIN if self.on else self.planned > LOSS


@dataclass(frozen=True)
class Pair:
    """Two ways of doing the same: medians in microseconds, and the median of the ratios of neighbours."""

    one_us: float
    other_us: float
    ratio: float


def measure(index: int) -> Row:
    """One case on this rank; the same row on every rank."""
    torch.manual_seed(0)
    world, device = World.join(None, timeout_s=60.0), torch.device("cpu")
    parameters = {f"p{place}": nn.Parameter(torch.randn(shape)) for place, shape in enumerate(CASES[index].shapes())}
    for parameter in parameters.values():
        parameter.grad = torch.randn_like(parameter)
    optimizer = CASES[index].optimizer(list(parameters.values()))
    problem = _problem(parameters, optimizer, world, device)
    owners = partition_of(problem).owners
    on = ShardUpdates().apply(Schedule.from_boundaries([problem.count]), problem).schedule.norms is not None
    layers = [parameters[layer.name] for layer in problem.norm_layers]
    split = Split(world, owners, [(2,)] * len(layers), norm_dtype(layers), device)
    alone, shared = _norms_us(split, layers, world), _norms_us(split, layers, world, shared=True)
    planned = shared if on else alone
    steps = _steps_us(optimizer, dict(zip(layers, owners, strict=True)), world)
    world.leave()
    return Row(
        CASES[index].name, len(layers), split.message_bytes, on, shared.one_us, replicated_us(problem),
        shared.other_us, shared_us(problem, owners), planned.ratio, steps.one_us, steps.other_us,
    )  # fmt: skip


def _problem(
    parameters: dict[str, nn.Parameter], optimizer: LayerwiseOptimizer, world: World, device: torch.device
) -> Problem:
    """As `planner profile` measures it."""
    gradients = tuple(
        Gradient(name=name, layer=name, numel=parameter.numel(), dtype="float32", backward_us=0.0)
        for name, parameter in parameters.items()
    )
    compute = ComputeProfile(forward_us=0.0, update_us=0.0, gradients=gradients)
    model, bench = nn.ParameterDict(parameters), Bench(world, device)
    norms = measure_norms(Training(model, lambda _: None, optimizer), bench, compute)
    names = ("all_reduce", "reduce_scatter", "all_gather")
    links = measure_links(bench, LINK_BYTES, names, Limits(CURVE_S))
    profile = Profile(
        model=ModelReference(name="norms"),
        world=ProfileWorld(ranks=world.ranks),
        compute=ComputeProfile(forward_us=0.0, update_us=0.0, gradients=gradients, norms=norms),
        cluster=Cluster(nodes=1, ranks_per_node=world.ranks, samples=links.samples, back_to_back=links.back_to_back),
    )
    agreed: Profile = world.gather(profile, "agreeing on the profile")[0]
    return make_problem(agreed)


def _norms_us(split: Split, layers: list[nn.Parameter], world: World, *, shared: bool = False) -> Pair:
    """Norms on every rank by a plain call, and by the optimizer's means: shared, or on every rank, too."""
    pairs = {layer: (layer.detach(), layer.grad) for layer in layers}
    norms, dtype = LayerNorms(), split.dtype
    norms.share(split if shared else None, layers)

    def plain() -> Tensor:
        return pair_norms(list(pairs.values()), dtype)  # type: ignore[arg-type]

    def planned() -> Tensor:
        return norms.start(layers, pairs, dtype)()  # type: ignore[arg-type]

    assert torch.equal(plain(), planned()), "shared norms are other bits"
    return _by_turns(plain, planned, world)


def _steps_us(optimizer: LayerwiseOptimizer, owners: dict[Any, int], world: World) -> Pair:
    """Whole updates: (norms by every rank, shared)."""

    def run(sharing: bool) -> Callable[[], None]:
        def step() -> None:
            optimizer.share_over(world if sharing else World(), owners)
            optimizer.step()

        return step

    optimizer.observe_norms(WallClock())
    return _by_turns(run(False), run(True), world, UPDATES)


def _by_turns(one: Callable[[], object], other: Callable[[], object], world: World, steps: int = STEPS) -> Pair:
    """Each way in every step, the slowest rank's time of it."""
    mine: list[tuple[float, float]] = []
    for step in range(WARM_UP + steps):
        times = {}
        for way in (one, other) if step % 2 else (other, one):
            world.gather(None, "beginning a step together")
            start = time.perf_counter()
            way()
            times[way] = (time.perf_counter() - start) * 1e6
        mine.append((times[one], times[other]))
    slowest = [
        [max(rank[step][way] for rank in everyone) for step in range(WARM_UP, WARM_UP + steps)]
        for everyone in [world.gather(mine, "comparing times")]
        for way in (0, 1)
    ]
    ratio = statistics.median(after / before for before, after in zip(*slowest, strict=True))
    return Pair(statistics.median(slowest[0]), statistics.median(slowest[1]), ratio)


def table(rows: list[Row]) -> str:
    """Markdown; times in milliseconds."""
    columns = ("case", "layers", "message", "every rank", "predicted", "shared", "predicted", "gain", "planner",
               "as planned", "update", "shared")  # fmt: skip
    lines = [f"| {' | '.join(columns)} |", "| --- " * len(columns) + "|"]
    for row in rows:
        times_us = (row.replicated_us, row.predicted_replicated_us, row.shared_us, row.predicted_shared_us)
        cells = [row.case, str(row.layers), f"{row.message_bytes} B", *(f"{time_us / 1e3:.2f}" for time_us in times_us)]
        cells += [f"{row.gain:.2f} ×", "shares" if row.on else "does not", f"{row.planned:.3f}"]
        cells += [f"{row.step_replicated_us / 1e3:.1f}", f"{row.step_shared_us / 1e3:.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    stamp = (
        f"{datetime.now(UTC):%Y-%m-%d}, {platform.machine()}, {os.cpu_count()} cores shared by {RANKS} ranks, torch "
        f"{torch.__version__}, gloo over loopback; medians of {STEPS} steps ({UPDATES} of whole updates) of "
        f"the slowest rank, in milliseconds"
    )
    return "\n".join([*lines, "", stamp])


def main() -> int:
    """Measures and prints; 1 where a target is missed."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--output", type=Path, help="a document whose table is rewritten")
    options = parser.parse_args()
    rows = [run_ranks(LocalWorld(ranks=RANKS), measure, index)[0] for index in range(len(CASES))]
    publish(options.output, {"table": table(rows)})
    return int(any(row.missed for row in rows))


if __name__ == "__main__":
    sys.exit(main())
