"""The costs of lossy buckets: selecting and unpacking by selector, encoding and decoding by dtype, products by rank.

Timed on all ranks at once, with the runtime's own buckets, over sizes and densities. The costs are lines over the
bucket's dense bytes, one for each density: a tenth of the elements takes `exact` five times as long as a thousandth.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from planner.cost.low_rank import PARTS
from planner.documents.profile import Line, LowRankLines, SelectionLine
from planner.profile.bench import Bench, Run, fit, median_of_slowest, sizes_up_to
from runtime.comm.collectives.direct import Factored, Narrowed
from runtime.core.buckets import BucketBuffer, Slot, lay_out
from runtime.plan import CompressorSpec
from runtime.sparse.compressors.sparse import SELECTORS
from runtime.sparse.compressors.wire import WIRE_DTYPES
from runtime.sparse.layout import make_lossy

SIZES = tuple(2**exponent for exponent in (16, 18, 20, 22, 24, 26))
"""Bytes of a bucket; none is larger than the model. Beyond them the line continues, which saves memory."""
FEW_SIZES = (SIZES[0], *SIZES[3:])
"""Sizes of what takes little time for each element: if there is time for two sizes alone, these are far apart."""
USUAL = 0.01
"""The density whose line is used if only one is asked for."""
DENSITIES = (0.001, USUAL, 0.1)
MORE = {"exact": (0.001, 0.003, USUAL, 0.03, 0.1, 0.3)}
"""Densities of the selector whose density is decided."""
WARM_UPS = 2
"""Steps that do not count, in which residuals fill."""
LEAST_REPEATS, MOST_REPEATS, REPEATED_BYTES = 3, 9, 2**25
"""Small buckets are repeated until this number of bytes has been selected from: disturbances hit them hardest."""

CROWDING_S = 0.3
"""Seconds for which ranks compute to see how crowded cores are."""

LEAST_SIZES = 2
"""Number of sizes that are timed however long selecting takes; larger buckets are left out then."""

SCRATCH_BYTES, LAYERS, WIDTH = 2**25, 16, 256
"""Size of the computation in between, as in training: it leaves neither data nor code of the selection in the caches,
which costs a small bucket five times as much as one that is selected from again and again."""


ENCODINGS = {dtype: {1.0: CompressorSpec(name="wire", dtype=dtype)} for dtype in WIRE_DTYPES}
"""Compressors that are timed by dtype on the wire, as `SELECTIONS`: all elements are sent."""
PRODUCTS = {str(rank): {1.0: CompressorSpec(name="powersgd", rank=rank)} for rank in (1, 4)}
"""Compressors that are timed by rank: of one square matrix, which costs as much as many but for some microseconds."""
SELECTIONS = {
    selector: {density: CompressorSpec(name="topk", selector=selector, density=density) for density in densities}
    for selector, densities in ((one, MORE.get(one, DENSITIES)) for one in SELECTORS)
}
"""Compressors that are timed by selector and density."""


def measure_selection(
    bench: Bench, model_bytes: int, budget_s: float, *, computes: bool = True
) -> tuple[dict[str, SelectionLine], dict[str, SelectionLine]]:
    """Time (select and pack, unpack) by selector, the same on all ranks, in about `budget_s` at most.

    Args:
        bench: the ranks.
        model_bytes: size of the largest bucket.
        budget_s: seconds that it takes.
        computes: whether these cores compute in between, as they do where they train; otherwise all ranks begin at
            once, on cores that were idle.
    """
    found = _measure(bench, sizes_up_to(SIZES, model_bytes), budget_s, "selection", SELECTIONS, computes)
    chosen, added = ({name: _by_density(lines, part) for name, lines in found.items()} for part in (0, 1))
    return chosen, added


def _by_density(lines: Mapping[float, Sequence[Line]], part: int) -> SelectionLine:
    rows = tuple((density, each[part].alpha_us, each[part].beta_us_per_byte) for density, each in lines.items())
    return SelectionLine(**vars(lines[USUAL][part]), by_density=rows)


def measure_encoding(
    bench: Bench, model_bytes: int, budget_s: float, *, computes: bool = True
) -> tuple[dict[str, Line], dict[str, Line]]:
    """Time (encode, decode) by dtype on the wire; arguments as of `measure_selection`."""
    found = _measure(bench, sizes_up_to(FEW_SIZES, model_bytes), budget_s, "encoding", ENCODINGS, computes)
    encoded, decoded = ({dtype: lines[1.0][part] for dtype, lines in found.items()} for part in (0, 1))
    return encoded, decoded


def measure_low_rank(bench: Bench, model_bytes: int, budget_s: float) -> dict[str, LowRankLines]:
    """Time products of matrices by rank; arguments as of `measure_selection`."""
    found = _measure(bench, sizes_up_to(FEW_SIZES, model_bytes), budget_s, "products", PRODUCTS, True)
    return {rank: LowRankLines(**dict(zip(PARTS, lines[1.0], strict=True))) for rank, lines in found.items()}


def _measure(
    bench: Bench, sizes: Sequence[int], budget_s: float, what: str,
    specs: Mapping[str, Mapping[float, CompressorSpec]], computes: bool,
) -> dict[str, dict[float, list[Line]]]:  # fmt: skip
    """Return the lines of each part of a bucket, as `_time` has them, by name and density."""
    world = bench.world
    between = _computation(bench.device) if computes else bench.meet
    # Of several threads only the calling one's time is known.
    one_thread = computes and bench.device.type == "cpu" and torch.get_num_threads() == 1
    crowded = _crowding(bench, between) if all(world.gather(one_thread, "counting threads")) else None

    def timed_us(run: Run) -> float:
        # A run that is short compared with the turns that ranks are given meets a whole turn of another rank now and
        # then, which a step, of many turns, does not feel. So its own work counts, times how crowded cores are.
        return bench.timed_us(run) if crowded is None else _worked_us(run) * crowded

    found: dict[str, dict[float, list[Line]]] = {}
    left_s = budget_s
    for place, (name, by_density) in enumerate(bench.progress.track(list(specs.items()), what)):
        times: dict[float, list[NDArray[np.float64]]] = {density: [] for density in by_density}
        done, allowed_s, next_s = 0, left_s / (len(specs) - place), 0.0
        for size in sizes:
            if done >= LEAST_SIZES and next_s > allowed_s:
                break
            started = time.perf_counter()
            for density, spec in by_density.items():
                times[density].append(_time(bench, between, timed_us, spec, size))
            took_s = time.perf_counter() - started
            # Of the next size only these take longer, at most by as much as it is larger.
            packed_s = sum(of_density[-1].sum() for of_density in times.values()) * 1e-6
            growth = sizes[done + 1] / size if done + 1 < len(sizes) else 1.0
            said = world.gather((took_s, took_s + (growth - 1.0) * packed_s), f"timing {what}")
            took_s, next_s = map(max, zip(*said, strict=True))
            allowed_s, left_s, done = allowed_s - took_s, left_s - took_s, done + 1
        everyone = world.gather(times, f"comparing {what}")
        found[name] = {density: _lines(sizes, [rank[density] for rank in everyone]) for density in by_density}
    return found


def _lines(sizes: Sequence[int], ranks: Sequence[Sequence[NDArray[np.float64]]]) -> list[Line]:
    """Fit the parts of a bucket: over the slowest rank's times, since the message behind a packed bucket waits for it.

    Each rank has an array of shape (repeats, parts) for each size.
    """
    by_size = [median_of_slowest(np.array(of_ranks)) for of_ranks in zip(*ranks, strict=True)]
    return [
        fit([(float(size), float(time_us)) for size, time_us in zip(sizes, of_part, strict=False)])
        for of_part in zip(*by_size, strict=True)
    ]


def _computation(device: torch.device) -> Callable[[], None]:
    """Return what computes another model's step and makes a pass over memory."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, device=device) for _ in range(LAYERS)))
    batch = torch.zeros(WIDTH // 4, WIDTH, device=device)
    scratch = torch.zeros(SCRATCH_BYTES // 4, device=device)

    def run() -> None:
        model(batch).sum().backward()
        scratch.add_(1.0)

    return run


def _crowding(bench: Bench, compute: Callable[[], None]) -> float:
    """Return the ratio of a computation's wall time to its processor time while all ranks compute.

    It is 1 if each rank has a core for itself.
    """
    bench.meet()
    begun_s, worked_s = time.perf_counter(), time.thread_time()
    while time.perf_counter() - begun_s < CROWDING_S:
        compute()
    taken_s, worked_s = time.perf_counter() - begun_s, time.thread_time() - worked_s
    everyone: list[float] = bench.world.gather(taken_s / worked_s, "seeing how crowded cores are")
    return max(1.0, sum(everyone) / len(everyone))


def _worked_us(run: Run) -> float:
    """Return the microseconds that this thread works on one run."""
    begun_ns = time.thread_time_ns()
    run()
    return (time.thread_time_ns() - begun_ns) / 1e3


def _time(
    bench: Bench, between: Run, timed_us: Callable[[Run], float], spec: CompressorSpec, size_bytes: int
) -> NDArray[np.float64]:
    """Time the parts of a bucket on this rank: pack, unpack, with products in between. Shape (repeats, parts)."""
    repeats = min(MOST_REPEATS, max(LEAST_REPEATS, REPEATED_BYTES // size_bytes))
    bucket = TimedBucket(spec, size_bytes, bench.world.ranks, bench.device, WARM_UPS + repeats)
    rounds: list[list[float]] = []
    for _ in range(WARM_UPS + repeats):
        bucket.begin()
        between()
        times = [timed_us(bucket.pack)]
        if bucket.products:
            between()
            times += [timed_us(each) for each in bucket.products]
        bucket.receive()
        between()
        rounds.append([*times, timed_us(bucket.unpack)])
        bucket.end()
    return np.array(rounds[WARM_UPS:])


class TimedBucket:
    """A compressed bucket of no model, whose parts are timed as a session calls them: `begin`, `pack`, `receive`,
    `unpack` and `end` in each step.
    """

    def __init__(self, spec: CompressorSpec, size_bytes: int, ranks: int, device: torch.device, steps: int) -> None:
        """Lay out a bucket of float32, of one square matrix where products are sent.

        Args:
            spec: its compressor.
            size_bytes: of its elements, dense.
            ranks: number of ranks whose messages it receives.
            device: where it lies.
            steps: number of steps whose gradients differ.
        """
        side = round(math.sqrt(max(1, size_bytes // 4)))
        shape = (side, side) if spec.rank is not None else (max(1, size_bytes // 4),)
        slots = [Slot("parameter", 0, nn.Parameter(torch.zeros(shape, device=device)))]
        bucket = BucketBuffer(0, slots, lay_out(slots), f"a bucket of {size_bytes} bytes")
        self._ranks, self._step, self._steps = ranks, -1, steps
        self._lossy = make_lossy(bucket, spec, ranks)
        self._gradient, self._finite = bucket.messages[0].flat, torch.tensor(True, device=device)
        # Drawing anew takes several times as long as selecting: each step takes another piece of what was drawn.
        self._drawn = torch.randn(self._gradient.numel() + steps, device=device)
        message = self._lossy.packed
        self.products: tuple[Run, ...] = (message.project, message.subtract) if isinstance(message, Factored) else ()
        """Work between the two messages of products."""

    def begin(self) -> None:
        """Take the gradient of the next step."""
        self._step += 1
        first = self._step % self._steps
        self._gradient.copy_(self._drawn[first : first + self._gradient.numel()])

    def pack(self) -> None:
        """Fill the message."""
        self._lossy.pack(self._step)

    def receive(self) -> None:
        """Take this rank's message as every rank's."""
        message = self._lossy.packed
        if isinstance(message, Narrowed):
            message.gathered.copy_(message.rows)
        elif not isinstance(message, Factored):
            message.gathered.copy_(message.flat.repeat(self._ranks))

    def unpack(self) -> None:
        """Turn the messages into sums."""
        self._lossy.unpack()

    def end(self) -> None:
        """Take over the new residual."""
        self._lossy.feedback.commit(self._finite)
