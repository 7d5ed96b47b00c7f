"""What it costs to choose the elements of a lossy bucket and pack them, and to add up those of all ranks, by selector;
to encode a bucket in fewer bytes, and decode it, by dtype; and to make products of matrices, by rank.

Timed on all ranks at once, with the runtime's own buckets, over sizes and densities. The costs are lines over the
bucket's dense bytes, one for each density: a tenth of the elements takes `exact` five times as long as a thousandth.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from planner.cost.low_rank import PARTS
from planner.documents.profile import Line, LowRankLines, SelectionLine
from planner.profile.links import sizes_up_to, slowest_line, timed_us
from planner.profile.progress import Progress
from runtime.comm.collectives.direct import Factored, Narrowed
from runtime.comm.world import World
from runtime.core.buckets import BucketBuffer, Slot, lay_out
from runtime.plan import CompressorSpec
from runtime.sparse.compressors.sparse import SELECTORS
from runtime.sparse.compressors.wire import WIRE_DTYPES
from runtime.sparse.layout import make_lossy

SIZES = tuple(2**exponent for exponent in (16, 18, 20, 22, 24, 26))
"""Bytes of a bucket; none larger than the model. Beyond them the line goes on: no memory has to be found for more."""
FEW_SIZES = (SIZES[0], *SIZES[3:])
"""Of what takes little time for each element: where there is time for two sizes alone, these are far apart."""
USUAL = 0.01
"""The density whose line stands for all where only one is asked for."""
DENSITIES = (0.001, USUAL, 0.1)
MORE = {"exact": (0.001, 0.003, USUAL, 0.03, 0.1, 0.3)}
"""By selector: this is the one whose densities are decided."""
WARM_UPS = 2
"""Residuals fill in the first steps."""
LEAST_REPEATS, MOST_REPEATS, REPEATED_BYTES = 3, 9, 2**25
"""Small buckets are repeated until so much has been selected from: what else the machine does hits them hardest."""
Times = list[float]

CROWDING_S = 0.3
"""For how long ranks compute to see how crowded cores are."""

LEAST_SIZES = 2
"""Where selecting takes long, the largest buckets are left out, but for so many."""

SCRATCH_BYTES, LAYERS, WIDTH = 2**25, 16, 256
"""Of what is computed in between, as in training: it leaves neither data nor code of the selection in the caches, which
costs a small bucket five times as much as one that is selected from again and again."""


ENCODINGS = {dtype: {1.0: CompressorSpec(name="wire", dtype=dtype)} for dtype in WIRE_DTYPES}
"""By dtype on the wire, as `SELECTIONS`: all elements are sent."""
PRODUCTS = {str(rank): {1.0: CompressorSpec(name="powersgd", rank=rank)} for rank in (1, 4)}
"""By rank: of one square matrix, which gives what a bucket of many takes, but for some microseconds each."""
SELECTIONS = {
    selector: {density: CompressorSpec(name="topk", selector=selector, density=density) for density in densities}
    for selector, densities in ((one, MORE.get(one, DENSITIES)) for one in SELECTORS)
}
"""By selector and density, what is timed."""


def measure_selection(
    world: World, device: torch.device, model_bytes: int, progress: Progress, budget_s: float, *, computes: bool = True
) -> tuple[dict[str, SelectionLine], dict[str, SelectionLine]]:
    """Time (select and pack, unpack) by selector, the same on all ranks, in about `budget_s` at the most.

    `computes`: whether these cores compute in between, as they do where they train; where they do not, all ranks begin
    at once, on cores that were idle.
    """
    sizes = sizes_up_to(SIZES, model_bytes)
    found = _measure(world, device, sizes, progress, budget_s, computes, "selection", SELECTIONS)
    chosen, added = ({name: _by_density(lines, part) for name, lines in found.items()} for part in (0, 1))
    return chosen, added


def _by_density(lines: Mapping[float, Sequence[Line]], part: int) -> SelectionLine:
    rows = tuple((density, each[part].alpha_us, each[part].beta_us_per_byte) for density, each in lines.items())
    return SelectionLine(**vars(lines[USUAL][part]), by_density=rows)


def measure_encoding(
    world: World, device: torch.device, model_bytes: int, progress: Progress, budget_s: float, *, computes: bool = True
) -> tuple[dict[str, Line], dict[str, Line]]:
    """Time (encode, decode) by dtype on the wire; as `measure_selection`."""
    sizes = sizes_up_to(FEW_SIZES, model_bytes)
    found = _measure(world, device, sizes, progress, budget_s, computes, "encoding", ENCODINGS)
    encoded, decoded = ({dtype: lines[1.0][part] for dtype, lines in found.items()} for part in (0, 1))
    return encoded, decoded


def measure_low_rank(
    world: World, device: torch.device, model_bytes: int, progress: Progress, budget_s: float
) -> dict[str, LowRankLines]:
    """Time what products take, by rank; as `measure_selection`."""
    sizes = sizes_up_to(FEW_SIZES, model_bytes)
    found = _measure(world, device, sizes, progress, budget_s, True, "products", PRODUCTS)
    return {rank: LowRankLines(**dict(zip(PARTS, lines[1.0], strict=True))) for rank, lines in found.items()}


def _measure(
    world: World,
    device: torch.device,
    sizes: Sequence[int],
    progress: Progress,
    budget_s: float,
    computes: bool,
    what: str,
    specs: Mapping[str, Mapping[float, CompressorSpec]],
) -> dict[str, dict[float, list[Line]]]:
    """Return by name and density the lines of each part, as `_time` has them."""
    between = _computation(device) if computes else partial(dist.barrier, group=world.group)
    # Of several threads only the calling one's time is known.
    one_thread = computes and device.type == "cpu" and torch.get_num_threads() == 1
    crowded = _crowding(world, between) if all(world.gather(one_thread, "counting threads")) else None
    timed = partial(_spent_us, device=device, crowded=crowded)
    found: dict[str, dict[float, list[Line]]] = {}
    left_s = budget_s
    for place, (name, by_density) in enumerate(progress.track(list(specs.items()), what)):
        times: dict[float, list[tuple[Times, ...]]] = {density: [] for density in by_density}
        done, allowed_s, next_s = 0, left_s / (len(specs) - place), 0.0
        for size in sizes:
            if done >= LEAST_SIZES and next_s > allowed_s:
                break
            started = time.perf_counter()
            for density, spec in by_density.items():
                times[density].append(_time(world, device, between, timed, spec, size))
            took_s = time.perf_counter() - started
            # Of the next size only these take longer, at most by as much as it is larger.
            packed_s = sum(sum(map(sum, of_density[-1])) for of_density in times.values()) * 1e-6
            growth = sizes[done + 1] / size if done + 1 < len(sizes) else 1.0
            said = world.gather((took_s, took_s + (growth - 1.0) * packed_s), f"timing {what}")
            took_s, next_s = map(max, zip(*said, strict=True))
            allowed_s, left_s, done = allowed_s - took_s, left_s - took_s, done + 1
        # Over the slowest rank's times: the message behind a bucket that is packed waits for it.
        found[name] = {
            density: [
                slowest_line(world, sizes[:done], list(of_part), f"comparing {what}")
                for of_part in zip(*of_density, strict=True)
            ]
            for density, of_density in times.items()
        }
    return found


def _computation(device: torch.device) -> Callable[[], None]:
    """Return what computes another model's step and makes a pass over memory."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, device=device) for _ in range(LAYERS)))
    batch = torch.zeros(WIDTH // 4, WIDTH, device=device)
    scratch = torch.zeros(SCRATCH_BYTES // 4, device=device)

    def run() -> None:
        model(batch).sum().backward()
        scratch.add_(1.0)

    return run


def _crowding(world: World, compute: Callable[[], None]) -> float:
    """Return how many times as long as its processor works on it a rank's computation takes while all ranks compute: 1
    where each has a core for itself.
    """
    dist.barrier(group=world.group)
    begun_s, worked_s = time.perf_counter(), time.thread_time()
    while time.perf_counter() - begun_s < CROWDING_S:
        compute()
    taken_s, worked_s = time.perf_counter() - begun_s, time.thread_time() - worked_s
    everyone: list[float] = world.gather(taken_s / worked_s, "seeing how crowded cores are")
    return max(1.0, sum(everyone) / len(everyone))


def _spent_us(run: Callable[[], object], device: torch.device, crowded: float | None) -> float:
    """Return microseconds of one run; where ranks share cores, of what it works, times how crowded these are.

    A run that is short beside the turns that ranks are given meets a whole turn of another one now and then, which a
    step, of many turns, does not feel.
    """
    if crowded is None:
        return timed_us(run, device)
    begun_ns = time.thread_time_ns()
    run()
    return (time.thread_time_ns() - begun_ns) / 1e3 * crowded


def _time(
    world: World,
    device: torch.device,
    between: Callable[[], None],
    timed: Callable[[Callable[[], object]], float],
    spec: CompressorSpec,
    size_bytes: int,
) -> tuple[Times, ...]:
    """Time the parts of a bucket on this rank, of each repeat: (pack, unpack), with products in between."""
    side = round(math.sqrt(max(1, size_bytes // 4)))
    shape = (side, side) if spec.rank is not None else (max(1, size_bytes // 4),)
    parameter = nn.Parameter(torch.zeros(shape, device=device))
    slots = [Slot("parameter", 0, parameter)]
    bucket = BucketBuffer(0, slots, lay_out(slots), f"a bucket of {size_bytes} bytes")
    lossy = make_lossy(bucket, spec, world.ranks)
    message = lossy.packed
    gradient, finite = bucket.messages[0].flat, torch.tensor(True, device=device)
    # Drawing anew takes several times as long as selecting: each step takes another piece of what was drawn.
    drawn = torch.randn(gradient.numel() + WARM_UPS + MOST_REPEATS, device=device)
    rounds: list[Times] = []
    repeats = min(MOST_REPEATS, max(LEAST_REPEATS, REPEATED_BYTES // size_bytes))
    for step in range(WARM_UPS + repeats):
        gradient.copy_(drawn[step : step + gradient.numel()])
        between()
        times = [timed(lambda step=step: lossy.pack(step))]  # type: ignore[misc]
        if isinstance(message, Factored):
            between()
            times += [timed(message.project), timed(message.subtract)]
        elif isinstance(message, Narrowed):
            message.gathered.copy_(message.rows)
        else:
            message.gathered.copy_(message.flat.repeat(world.ranks))
        between()
        rounds.append([*times, timed(lossy.unpack)])
        lossy.feedback.commit(finite)
    return tuple(map(list, zip(*rounds[WARM_UPS:], strict=True)))
