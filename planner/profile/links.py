"""Times of the runtime's collectives over message sizes, alone and back to back, with arrival skew removed.

Messages grow until all of them, timed some times, take what a collective may; on a slow link that is before they are as
large as the model. Beyond the largest that was timed, curves go on as the line through the last two.

Ranks reach a collective at different moments, and a rank that is early waits for the late ones. Every rank times its
own call; the last to arrive waits for nobody, so the least of the ranks' times is the time from the last arrival. It
needs no common clock. Nor do ranks leave a collective together: in a ring they end as much as a part of the message
apart, and what comes next waits for the last. So ranks meet again after it, and where such a meeting is short beside
the message, the message takes what passes until all have met, less a meeting.

Intra-node and inter-node links are timed apart where there are both. Inside: the ranks of each node among themselves,
all nodes at once. Between: each rank with those of its place in the other nodes, so that the ranks of a node share its
cards, as the phases of a hierarchical collective do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from scipy import stats
from torch import Tensor, nn

from planner.cost.collectives import Coefficients, solve_link
from planner.cost.halves import LIBRARY_GATHER, LIBRARY_SCATTER
from planner.documents.profile import Line, Link, Sample
from planner.profile.progress import Progress
from runtime.comm.by_device import make_communicator
from runtime.comm.collectives import COLLECTIVES
from runtime.comm.collectives.direct import Narrowed, Packed
from runtime.comm.collectives.phases import bounds, gather, reduce_scatter
from runtime.comm.communicator import CommTiming, Payload
from runtime.comm.world import World, first_line
from runtime.core.buckets import BucketBuffer, Message, Slot, lay_out
from runtime.delay.server import Shard
from runtime.errors import CommunicationError
from runtime.fully_sharded.messages import SerialMessages
from runtime.plan.transports import FLAT, LIBRARY, NATIVE, TWO_SHOT
from runtime.torch_compat import all_gather_single, reduce_scatter_single

SMALLEST_BYTES = 1024
QUEUE_US, QUEUED_CALLS = 20_000.0, (12, 32)
"""How long a queue of calls is meant to take, and how many they are. Now and then a small message waits some
milliseconds for a core, so that a typical one says little about how long many take."""
QUEUED_US = 20_000.0
"""Messages that take longer alone are not timed in a queue: they take longer by as much as the largest one timed."""
MIN_PASSES, MAX_PASSES = 3, 25
MEETINGS = 8.0
"""How many times longer than a meeting of all ranks a message is whose end on the last rank is told by one."""
BUDGET_S = 2.5
"""What one collective may take in all, once it has been timed often enough."""

Run = Callable[[], None]
"""One call (or several in a row) of a collective, until its result is there."""
Parts = tuple[list[list[int]], list[list[int]]]
"""(ranks by node, ranks by local rank)."""


Curve = tuple[Sample, ...]


@dataclass(frozen=True)
class LinkTimes:
    """Curves by collective, of one kind of link beginning with `intra/` or `inter/`."""

    samples: dict[str, Curve] = field(default_factory=dict)
    back_to_back: dict[str, Curve] = field(default_factory=dict)
    links: dict[str, Link] = field(default_factory=dict)
    """Constants by kind of link, where an all-reduce over it was timed."""
    cut: tuple[str, ...] = ()
    """Which curves end before the largest message."""

    @property
    def lines(self) -> dict[str, Line]:
        return {name: fit(curve) for name, curve in self.samples.items()}


def undisturbed(curve: Sequence[tuple[float, float]]) -> Curve:
    """Return the curve without sizes whose time was disturbed alone: time per byte is a running median of three.

    Where time per byte falls or rises all the way nothing changes. Left in, a disturbed size makes merging look better
    or worse around it than it is, and the best of many plans is the one that the disturbance flatters most.
    """
    sizes, times = [size for size, _ in curve], [time_us for _, time_us in curve]
    rates = [time_us / size for size, time_us in curve]
    for place in range(1, len(curve) - 1):
        times[place] = round(sizes[place] * sorted(rates[place - 1 : place + 2])[1], 3)
    return tuple(zip(sizes, times, strict=True))


def message_sizes(model_bytes: int, ratio: int, smallest_bytes: int = SMALLEST_BYTES) -> list[int]:
    """Return the smallest, times `ratio` each, up to the model's size, which is the last."""
    sizes = [smallest_bytes]
    while sizes[-1] * ratio < model_bytes:
        sizes.append(sizes[-1] * ratio)
    return [*sizes, model_bytes] if model_bytes > sizes[-1] else sizes


def measure_queued(
    name: str, world: World, device: torch.device, model_bytes: int, progress: Progress, longest_s: float,
    budget_s: float, smallest_bytes: int = SMALLEST_BYTES,
) -> tuple[Curve, Curve]:  # fmt: skip
    """Time the runtime's all-reduce, all-gather or two shots as sessions use them: (calls alone, calls that queue
    behind one another).

    Alone means right after a barrier, when all ranks are there and their threads awake. In a step they are not: after
    a computation a message takes about as long as one in a queue.
    """
    sizes, limits = message_sizes(model_bytes, _RATIOS.get(name, 4), smallest_bytes), (longest_s, budget_s)
    with closing(_QueueProbe(name, world, device, sizes[-1])) as probe:
        alone = undisturbed(_curve(world, device, sizes, probe.run, progress, name, *limits))
        short = max(1, sum(time_us <= QUEUED_US for _, time_us in alone))
        least, most = QUEUED_CALLS
        calls = {int(size): max(least, min(most, round(QUEUE_US / time_us))) for size, time_us in alone[:short]}
        queue, what = (lambda size: probe.run(size, calls[size])), f"{name} back to back"
        queues = _curve(world, device, list(calls), queue, progress, what, *limits)
        queued = [(size, time_us / calls[int(size)]) for size, time_us in queues]
        more_us = max(0.0, queued[-1][1] - dict(alone)[queued[-1][0]])
        queued += [(size, time_us + more_us) for size, time_us in alone if size > queued[-1][0]]
        return alone, undisturbed([(size, round(time_us, 3)) for size, time_us in queued])


def measure_links(
    world: World, device: torch.device, model_bytes: int, progress: Progress, names: Sequence[str], longest_s: float,
    smallest_bytes: int = SMALLEST_BYTES,
) -> LinkTimes:  # fmt: skip
    """Time collectives over all ranks, by name; those that buckets are sent by through the runtime's communicator,
    alone and in a queue. Each takes at most `longest_s`; messages begin with `smallest_bytes`.
    """
    samples: dict[str, Curve] = {}
    queues: dict[str, Curve] = {}
    for name in names:
        if name in _QUEUED:
            samples[name], queues[name] = measure_queued(
                name, world, device, model_bytes, progress, longest_s, BUDGET_S, smallest_bytes
            )
        else:
            make = _bind(_LIBRARY[name], world, device)
            sizes = message_sizes(model_bytes, 4, smallest_bytes)
            samples[name] = undisturbed(_curve(world, device, sizes, make, progress, name, longest_s))
    return LinkTimes(samples, queues, cut=cut_short(samples, model_bytes))


def cut_short(curves: Mapping[str, Curve], largest_bytes: int) -> tuple[str, ...]:
    """Return a sentence for each collective that was not timed up to its largest message."""
    return tuple(
        f"{name}: timed up to {curve[-1][0]:,.0f} of {largest_bytes:,} bytes, for that took {curve[-1][1] / 1e6:.2g} "
        f"s; larger messages are on the line through the last two"
        for name, curve in curves.items()
        if curve[-1][0] < largest_bytes
    )


def measure_part(
    world: World, part: World, device: torch.device, largest_bytes: int, names: Sequence[str], progress: Progress,
    kind: str, longest_s: float,
) -> dict[str, Curve]:  # fmt: skip
    """Time collectives among this rank's part of the ranks, `intra` or `inter`, while all other parts do the same.

    Times are those of the slowest part.
    """
    sizes = message_sizes(largest_bytes, 4)
    with closing(_QueueProbe("all_reduce", part, device, sizes[-1])) as probe:
        makers = {"all_reduce": probe.run, **{name: _bind(make, part, device) for name, make in _LIBRARY.items()}}
        if kind == "intra":
            makers["reduce_scatter"] = _bind(_scatter, part, device)  # between nodes gradients are pushed
        found = {}
        for name in names:
            what = f"{kind}/{name}"
            curve = _curve(part, device, sizes, makers[name], progress, what, longest_s, everybody=world)
            found[what] = undisturbed(curve)
        return found


def parts_of(nodes: Sequence[str]) -> Parts | None:
    """Return the parts, given every rank's node; None where there is one kind of link only, and for uneven nodes."""
    inside = [[rank for rank, node in enumerate(nodes) if node == name] for name in dict.fromkeys(nodes)]
    count = len(inside[0])
    if len(inside) == 1 or count == 1 or any(len(ranks) != count for ranks in inside):
        return None
    return inside, [list(ranks) for ranks in zip(*inside, strict=True)]


def measure_apart(
    world: World, parts: Parts, device: torch.device, model_bytes: int, progress: Progress, inside: Sequence[str],
    between: Sequence[str], longest_s: float,
) -> LinkTimes:  # fmt: skip
    """Time the phases of hierarchical collectives, those `inside` nodes and `between` them; every rank calls it.

    The largest message has `model_bytes`, and each collective takes at most `longest_s`.

    Raises CommunicationError: a rank died or missed the deadline.
    """
    ranks_per_node = len(parts[0][0])
    samples: dict[str, Curve] = {}
    links: dict[str, Link] = {}
    cut: tuple[str, ...] = ()
    kinds = (("intra", parts[0], inside, model_bytes), ("inter", parts[1], between, model_bytes // ranks_per_node))
    for kind, ranks, names, largest_bytes in kinds:
        if not names:
            continue
        part = world.split(ranks)
        try:
            with world.error_context("timing the collectives"):
                curves = measure_part(world, part, device, largest_bytes, names, progress, kind, longest_s)
        except CommunicationError as error:
            # The part knows its ranks by other numbers.
            raise CommunicationError(
                f"rank {world.rank}: timing the collectives ({kind}): another rank died or did not answer within "
                f"{world.timeout_s:g} s ({first_line(error.__cause__ or error)})"
            ) from error
        finally:
            part.leave()
        samples |= curves
        cut += cut_short(curves, largest_bytes)
        if "all_reduce" in names:
            sharing = 1 if kind == "intra" else ranks_per_node
            links[kind] = implied_link(fit(curves[f"{kind}/all_reduce"]), len(ranks[0]), sharing)
    return LinkTimes(samples, links=links, cut=cut)


def implied_link(all_reduce: Line, ranks: int, sharing: int) -> Link:
    """Return the constants of a link over which so many all-reduces (rings) went at once, each of `ranks` ranks."""
    link = solve_link("all_reduce/ring", ranks, Coefficients.of(all_reduce))
    return Link(alpha_us=round(link.alpha_us, 3), beta_us_per_byte=float(f"{link.beta_us_per_byte / sharing:.6g}"))


_Maker = Callable[[World, torch.device, int], Run]


def _bind(make: _Maker, world: World, device: torch.device) -> Callable[[int], Run]:
    return lambda size: make(world, device, size)


_QUEUED = {"all_reduce": LIBRARY, "all_gather": FLAT, "two_shot": TWO_SHOT, "native": NATIVE}
"""Names of samples with the transports that buckets are sent by."""
_RATIOS = {"all_reduce": 2}
"""Of neighbouring sizes, where it is not 4."""


class _QueueProbe:
    """Sends messages as a session does; those of all sizes lie in one piece of memory, which is as large as one."""

    def __init__(self, name: str, world: World, device: torch.device, largest_bytes: int) -> None:
        self._name, self._transport, self._ranks = name, _QUEUED[name], world.ranks
        self._memory = torch.zeros(max(1, largest_bytes // 4), device=device)
        self._communicator = make_communicator(world, [COLLECTIVES[self._transport]], device)
        self.close = self._communicator.close

    def _payload(self, size_bytes: int, place: int) -> Payload:
        numel = max(1, size_bytes // 4)
        places = max(1, self._memory.numel() // numel)
        start = place % places * numel
        part = self._memory[start : start + numel]
        if self._transport in (LIBRARY, NATIVE):
            return _as_bucket(part if self._transport == LIBRARY else part.view(torch.bfloat16), size_bytes).payload
        own = part[: max(1, numel // self._ranks)]
        message: Packed | Narrowed
        if self._transport == FLAT:
            message = Packed(own, own.new_empty(self._ranks * own.numel()))
        else:
            message = Narrowed(self._ranks, 4 * own.numel(), own.device, lambda received, summed: None)
        return Payload(0, f"{self._name} of {size_bytes} bytes", [message])

    def run(self, size_bytes: int, calls: int = 1) -> Run:
        """Return what sends so many messages that queue behind one another."""
        payloads = [self._payload(size_bytes, place) for place in range(calls)]

        def send() -> None:
            for payload in payloads:
                self._communicator.launch(payload, CommTiming())
            self._communicator.wait()

        return send


def make_bucket(size_bytes: int, device: torch.device, label: str | None = None) -> BucketBuffer:
    """Return a bucket of float32 zeros that belongs to no model; `label` names it in errors."""
    return _as_bucket(torch.zeros(max(1, size_bytes // 4), device=device), size_bytes, label)


def _as_bucket(flat: Tensor, size_bytes: int, label: str | None = None) -> BucketBuffer:
    return BucketBuffer(0, [], [Message(flat, [])], label or f"a message of {size_bytes} bytes")


def make_shard(world: World, device: torch.device, size_bytes: int) -> Shard:
    """Return float32 zeros of no model, of which this rank owns its part."""
    slots = [Slot("parameter", 0, nn.Parameter(torch.zeros(max(1, size_bytes // 4), device=device)))]
    return Shard(lay_out(slots)[0], world.rank, world.ranks)


def _reduce_scatter(world: World, device: torch.device, size_bytes: int) -> Run:
    """As plans with delay push gradients: libraries' own reduce-scatters can take several times as long."""
    shard, group = make_shard(world, device, size_bytes), world.group
    assert group is not None
    return lambda: _finish(shard.phases(group))


def _scatter(world: World, device: torch.device, size_bytes: int) -> Run:
    """As phases inside nodes do it."""
    vector = torch.zeros(max(1, size_bytes // 4), device=device)
    first, last = bounds(vector.numel(), world.ranks, world.rank)
    received, summed, group = vector.new_zeros(world.ranks, last - first), vector.new_zeros(last - first), world.group
    assert group is not None
    return lambda: _finish(reduce_scatter(vector, received, summed, group))


def _finish(phases: Iterable[dist.Work]) -> None:
    for work in phases:
        work.wait()


def _all_gather(world: World, device: torch.device, size_bytes: int) -> Run:
    part = torch.zeros(max(1, size_bytes // 4 // world.ranks), device=device)
    whole, group = torch.zeros(part.numel() * world.ranks, device=device), world.group
    assert group is not None
    return lambda: _finish(gather(whole, part, group))


def _library_scatter(world: World, device: torch.device, size_bytes: int) -> Run:
    """As FSDP2 sends gradients: the library's own, averaged; on hosts beside computation, `overlap_on_hosts`."""
    part = torch.zeros(max(1, size_bytes // 4 // world.ranks), device=device)
    whole, group = torch.zeros(part.numel() * world.ranks, device=device), world.group
    if device.type != "cpu" or group is None:
        return lambda: reduce_scatter_single(part, whole, op=dist.ReduceOp.AVG, group=group)
    messages = SerialMessages(world.timeout_s)
    return lambda: messages.reduce_scatter(part, whole, group, average=True).result()


def _library_gather(world: World, device: torch.device, size_bytes: int) -> Run:
    """As FSDP2 gathers parameters: this rank's part lies where it is gathered."""
    numel = max(1, size_bytes // 4 // world.ranks)
    whole, group = torch.zeros(numel * world.ranks, device=device), world.group
    part = whole[world.rank * numel : (world.rank + 1) * numel]
    if device.type != "cpu" or group is None:
        return lambda: all_gather_single(whole, part, group=group)
    messages = SerialMessages(world.timeout_s)
    return lambda: messages.gather(whole, part, group).result()


_LIBRARY: dict[str, _Maker] = {
    "reduce_scatter": _reduce_scatter, "all_gather": _all_gather, LIBRARY_SCATTER: _library_scatter,
    LIBRARY_GATHER: _library_gather,
}  # fmt: skip


def _curve(
    world: World, device: torch.device, sizes: Sequence[int], make: Callable[[int], Run], progress: Progress, what: str,
    longest_s: float, budget_s: float = BUDGET_S, everybody: World | None = None,
) -> Curve:  # fmt: skip
    """Time each size that there is time for: (message bytes, median over passes of the time from the last arrival).

    All sizes are timed once in every pass, so that a drift of the machine hits them alike. Passes may take `budget_s`
    once there are enough of them, and never more than `longest_s`. `everybody`: ranks of which all do so at the same
    time, in groups of their own; then the time is that of the slowest group.
    """
    everybody, budget_s = everybody or world, min(budget_s, longest_s)
    # The runs by size that fit into the time, the same on all ranks; each is run once to warm up. The next size is
    # taken to take longer by as much as it is larger.
    runs: dict[int, Run] = {}
    pass_s = last_s = 0.0
    for size in sizes:
        if runs and (1 + MIN_PASSES) * (pass_s + last_s * size / next(reversed(runs))) > longest_s:
            if len(runs) > 2:  # what follows is the line through the last two, which had better not be neighbours
                del runs[list(runs)[-2]]
            break
        run = make(size)
        last_s = max(everybody.gather(_timed(run, device, everybody)[0] / 1e6, f"warming up {what}"))
        runs[size], pass_s = run, pass_s + last_s
    passes = int(min(MAX_PASSES, max(MIN_PASSES, budget_s / max(pass_s, 1e-9))))
    nothing: list[Run] = [lambda: None]
    mine = [
        [_timed(run, device, everybody) for run in (*runs.values(), *nothing)]
        for _ in progress.track(range(passes), what)
    ]
    group = tuple(dist.get_process_group_ranks(world.group)) if world.group else ()
    everyone = everybody.gather((group, mine), f"comparing times of {what}")
    by_group = [np.array([times for of, times in everyone if of == one]) for one in {of for of, _ in everyone}]
    passes_us = np.max([times.min(axis=0) for times in by_group], axis=0)  # (passes, sizes and nothing, until)
    (*times_us, (_, meeting_us)) = np.median(passes_us, axis=0)
    lasting_us = [
        max(done_us, met_us - meeting_us) if done_us > MEETINGS * meeting_us else done_us
        for done_us, met_us in times_us
    ]
    return tuple((float(size), round(float(time_us), 3)) for size, time_us in zip(runs, lasting_us, strict=True))


def _timed(run: Run, device: torch.device, world: World) -> tuple[float, float]:
    """Return microseconds of one run on this rank, begun by all ranks together as nearly as a barrier allows: until it
    was done here, and until all ranks had met again.
    """
    dist.barrier(group=world.group)
    done_us = timed_us(run, device)
    return done_us, done_us + timed_us(lambda: dist.barrier(group=world.group), device)


def timed_us(run: Callable[[], object], device: torch.device) -> float:
    """Return microseconds of one run, until the device is through with it."""
    synchronize(device)
    start = time.perf_counter()
    run()
    synchronize(device)
    return (time.perf_counter() - start) * 1e6


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was told; before a clock is read."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def sizes_up_to(sizes: Sequence[int], model_bytes: int) -> list[int]:
    """Return those below the model's size, and that, or the largest of them if it is less."""
    return sorted({*(size for size in sizes if size < model_bytes), min(max(model_bytes, 4), sizes[-1])})


def slowest_line(world: World, sizes: Sequence[int], times_us: Sequence[Sequence[float]], what: str) -> Line:
    """Fit a line over the times of each size, the same on all ranks: of each repeat the slowest rank, whom others wait
    for, then the median over repeats. `what` names the exchange in errors.
    """
    everyone: list[Sequence[Sequence[float]]] = world.gather(times_us, what)
    slowest_us = [float(np.median(np.max(of_ranks, axis=0))) for of_ranks in zip(*everyone, strict=True)]
    return fit([(float(size), time_us) for size, time_us in zip(sizes, slowest_us, strict=True)])


def fit(curve: Sequence[Sample]) -> Line:
    """Fit α and β by Theil-Sen (the median of all slopes, then of all intercepts), and how well the line fits."""
    size, time_us = (np.array(column, dtype=np.float64) for column in zip(*curve, strict=True))
    if len(curve) < 2:
        return Line(alpha_us=float(time_us[0]), beta_us_per_byte=0.0)
    beta = max(0.0, float(stats.theilslopes(time_us, size).slope))
    alpha = max(0.0, float(np.median(time_us - beta * size)))
    residual = time_us - (alpha + beta * size)
    variance = float(((time_us - time_us.mean()) ** 2).sum())
    return Line(
        alpha_us=round(alpha, 3),
        beta_us_per_byte=float(f"{beta:.6g}"),
        r_squared=round(1.0 - float((residual**2).sum()) / variance, 6) if variance > 0.0 else None,
        mean_error=round(float(np.mean(np.abs(residual) / time_us)), 6),
    )
