"""Times of the runtime's collectives over message sizes, alone and back to back, with arrival skew removed.

Messages grow until all of them, timed some times, take what a collective may; on a slow link that is before they are as
large as the model. Beyond the largest that was timed, curves continue as the line through the last two.

Ranks reach a collective at different moments, and an early rank waits for stragglers. Every rank times its own call;
the last to arrive waits for no other, so the least of the ranks' times is the time from the last arrival. It needs no
common clock. Nor do ranks leave a collective together: in a ring they end as much as a part of the message apart, and
what comes next waits for the last. So ranks meet again after it, and where such a meeting is short compared with the
message, the message takes what passes until all have met, less a meeting.

Intra-node and inter-node links are timed apart where there are both. Intra-node: the ranks of each node among
themselves, all nodes at once. Inter-node: each rank with those of its local rank in the other nodes, so that the ranks
of a node share its cards, as the phases of a hierarchical collective do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from planner.cost.collectives import Coefficients, solve_link
from planner.cost.halves import LIBRARY_GATHER, LIBRARY_SCATTER
from planner.documents.profile import Line, Link, Sample
from planner.profile.bench import Bench, Run, fit
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

QUEUE_US, QUEUED_CALLS = 20_000.0, (12, 32)
"""Intended time of a queue of calls, and bounds of their number. Now and then a small message waits some milliseconds
for a core, so that a typical one says little about the time of many."""
QUEUED_US = 20_000.0
"""Messages that take longer alone are not timed in a queue: they take longer by as much as the largest one timed."""
MIN_PASSES, MAX_PASSES = 3, 25
MEETINGS = 8.0
"""Ratio to a meeting of all ranks from which the end of a message on the last rank is measured by one."""
SMALLEST_BYTES = 1024

Parts = tuple[list[list[int]], list[list[int]]]
"""(ranks by node, ranks by local rank)."""
Curve = tuple[Sample, ...]


@dataclass(frozen=True)
class Limits:
    """Bounds of timing one collective."""

    longest_s: float
    """Seconds that it takes at most."""
    budget_s: float = 2.5
    """Seconds that it takes at most once every size has been timed `MIN_PASSES` times."""
    smallest_bytes: int = SMALLEST_BYTES
    """Size of the smallest message."""


@dataclass(frozen=True)
class LinkTimes:
    """Curves by collective; the names of those of one kind of link begin with `intra/` or `inter/`."""

    samples: dict[str, Curve] = field(default_factory=dict)
    back_to_back: dict[str, Curve] = field(default_factory=dict)
    links: dict[str, Link] = field(default_factory=dict)
    """Constants by kind of link, if an all-reduce over it was timed."""
    cut: tuple[str, ...] = ()
    """Sentences about curves that end before the largest message."""

    @property
    def lines(self) -> dict[str, Line]:
        """Return the line through each curve."""
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
    """Return the smallest size, times `ratio` each, up to the model's size, which is the last."""
    sizes = [smallest_bytes]
    while sizes[-1] * ratio < model_bytes:
        sizes.append(sizes[-1] * ratio)
    return [*sizes, model_bytes] if model_bytes > sizes[-1] else sizes


def measure_queued(bench: Bench, name: str, model_bytes: int, limits: Limits) -> tuple[Curve, Curve]:
    """Time the runtime's all-reduce, all-gather or two shots as sessions use them.

    Alone means right after a barrier, when all ranks are there and their threads awake. In a step they are not: after
    a computation a message takes about as long as one in a queue.

    Returns:
        Curves of (calls alone, calls that queue behind one another).
    """
    sizes = message_sizes(model_bytes, _RATIOS.get(name, 4), limits.smallest_bytes)
    with closing(Messages(name, bench, sizes[-1])) as messages:
        alone = undisturbed(measure_curve(bench, sizes, messages.run, name, limits))
        short = max(1, sum(time_us <= QUEUED_US for _, time_us in alone))
        least, most = QUEUED_CALLS
        calls = {int(size): max(least, min(most, round(QUEUE_US / time_us))) for size, time_us in alone[:short]}
        queues = measure_curve(
            bench, list(calls), lambda size: messages.run(size, calls[size]), f"{name} back to back", limits
        )
        queued = [(size, time_us / calls[int(size)]) for size, time_us in queues]
        more_us = max(0.0, queued[-1][1] - dict(alone)[queued[-1][0]])
        queued += [(size, time_us + more_us) for size, time_us in alone if size > queued[-1][0]]
        return alone, undisturbed([(size, round(time_us, 3)) for size, time_us in queued])


def measure_links(bench: Bench, model_bytes: int, names: Sequence[str], limits: Limits) -> LinkTimes:
    """Time collectives over all ranks, by name, in messages of up to `model_bytes`.

    Those that buckets are sent by go through the runtime's communicator, alone and in a queue.
    """
    samples: dict[str, Curve] = {}
    queues: dict[str, Curve] = {}
    for name in names:
        if name in QUEUED:
            samples[name], queues[name] = measure_queued(bench, name, model_bytes, limits)
        else:
            sizes, make = message_sizes(model_bytes, 4, limits.smallest_bytes), partial(_LIBRARY[name], bench)
            samples[name] = undisturbed(measure_curve(bench, sizes, make, name, limits))
    return LinkTimes(samples, queues, cut=cut_short(samples, model_bytes))


def cut_short(curves: Mapping[str, Curve], largest_bytes: int) -> tuple[str, ...]:
    """Return a sentence for each collective that was not timed up to its largest message."""
    return tuple(
        f"{name}: timed up to {curve[-1][0]:,.0f} of {largest_bytes:,} bytes, for that took {curve[-1][1] / 1e6:.2g} "
        f"s; larger messages are on the line through the last two"
        for name, curve in curves.items()
        if curve[-1][0] < largest_bytes
    )


def parts_of(nodes: Sequence[str]) -> Parts | None:
    """Return the parts, given every rank's node; None if there is one kind of link only, and for uneven nodes."""
    inside = [[rank for rank, node in enumerate(nodes) if node == name] for name in dict.fromkeys(nodes)]
    count = len(inside[0])
    if len(inside) == 1 or count == 1 or any(len(ranks) != count for ranks in inside):
        return None
    return inside, [list(ranks) for ranks in zip(*inside, strict=True)]


def measure_apart(
    bench: Bench, parts: Parts, model_bytes: int, names: Mapping[str, Sequence[str]], limits: Limits
) -> LinkTimes:
    """Time the phases of hierarchical collectives within parts of the ranks; every rank calls it.

    All parts measure at the same time, and the times are those of the slowest part.

    Args:
        bench: all ranks.
        parts: the ranks of each node, and those of each local rank.
        model_bytes: size of the largest message, which inter-node phases divide among the ranks of a node.
        names: the collectives by kind of link, `intra` and `inter`.
        limits: bounds of each collective.

    Raises:
        CommunicationError: a rank died or missed the deadline.
    """
    world, ranks_per_node = bench.world, len(parts[0][0])
    samples: dict[str, Curve] = {}
    links: dict[str, Link] = {}
    cut: tuple[str, ...] = ()
    for kind, ranks, sharing in (("intra", parts[0], 1), ("inter", parts[1], ranks_per_node)):
        if not names[kind]:
            continue
        largest_bytes = model_bytes // sharing
        part = replace(bench, world=world.split(ranks))
        try:
            with world.error_context("timing the collectives"):
                curves = _measure_part(part, world, kind, names[kind], largest_bytes, limits)
        except CommunicationError as error:
            # The part knows its ranks by other numbers.
            raise CommunicationError(
                f"rank {world.rank}: timing the collectives ({kind}): another rank died or did not answer within "
                f"{world.timeout_s:g} s ({first_line(error.__cause__ or error)})"
            ) from error
        finally:
            part.world.leave()
        samples |= curves
        cut += cut_short(curves, largest_bytes)
        if (all_reduce := curves.get(f"{kind}/all_reduce")) is not None:
            links[kind] = implied_link(fit(all_reduce), len(ranks[0]), sharing)
    return LinkTimes(samples, links=links, cut=cut)


def _measure_part(
    part: Bench, everybody: World, kind: str, names: Sequence[str], largest_bytes: int, limits: Limits
) -> dict[str, Curve]:
    """Time collectives among this rank's part of the ranks, by name."""
    sizes = message_sizes(largest_bytes, 4)
    # Inside nodes gradients are scattered as a phase; between them they are pushed.
    library = {**_LIBRARY, "reduce_scatter": _scatter} if kind == "intra" else _LIBRARY
    with closing(Messages("all_reduce", part, sizes[-1])) as messages:
        return {
            what: undisturbed(measure_curve(part, sizes, make, what, limits, everybody))
            for what, make in (
                (f"{kind}/{name}", messages.run if name == "all_reduce" else partial(library[name], part))
                for name in names
            )
        }


def implied_link(all_reduce: Line, ranks: int, sharing: int) -> Link:
    """Return the constants of a link that `sharing` all-reduces (rings) of `ranks` ranks each used at once."""
    link = solve_link("all_reduce/ring", ranks, Coefficients.of(all_reduce))
    return Link(alpha_us=round(link.alpha_us, 3), beta_us_per_byte=float(f"{link.beta_us_per_byte / sharing:.6g}"))


QUEUED = {"all_reduce": LIBRARY, "all_gather": FLAT, "two_shot": TWO_SHOT, "native": NATIVE}
"""Names of samples with the transports that buckets are sent by."""
_RATIOS = {"all_reduce": 2}
"""Ratio of neighbouring sizes, if it is not 4."""


class Messages:
    """Sends messages as a session does; those of all sizes lie in one piece of memory, which is as large as one."""

    def __init__(self, name: str, bench: Bench, largest_bytes: int) -> None:
        self._name, self._ranks = name, bench.world.ranks
        self._memory = torch.zeros(max(1, largest_bytes // 4), device=bench.device)
        self._communicator = make_communicator(bench.world, [COLLECTIVES[QUEUED[name]]], bench.device)
        self.close = self._communicator.close

    def _payload(self, size_bytes: int, place: int) -> Payload:
        numel = max(1, size_bytes // 4)
        places = max(1, self._memory.numel() // numel)
        start = place % places * numel
        return make_payload(self._name, self._memory[start : start + numel], self._ranks)

    def run(self, size_bytes: int, calls: int = 1) -> Run:
        """Return what sends this number of messages, which queue behind one another."""
        payloads = [self._payload(size_bytes, place) for place in range(calls)]

        def send() -> None:
            for payload in payloads:
                self._communicator.launch(payload, CommTiming())
            self._communicator.wait()

        return send


def make_payload(name: str, part: Tensor, ranks: int, index: int = 0) -> Payload:
    """Return a message of a collective (`QUEUED`) over float32 zeros of no model.

    Args:
        name: of the collective's samples.
        part: 1-D float32; as many bytes are sent in all.
        ranks: number of ranks that send.
        index: of the bucket, by which a communicator finds the collective.
    """
    transport, label = QUEUED[name], f"{name} of {4 * part.numel()} bytes"
    if transport.exact or transport.native:
        flat = part.view(torch.bfloat16) if transport.native else part
        return BucketBuffer(index, [], [Message(flat, [])], label).payload
    own = part[: max(1, part.numel() // ranks)]
    message: Packed | Narrowed
    if transport.sparse:
        message = Packed(own, own.new_empty(ranks * own.numel()))
    else:
        message = Narrowed(ranks, 4 * own.numel(), own.device, lambda received, summed: None)
    return Payload(index, label, [message])


def make_bucket(size_bytes: int, device: torch.device, label: str | None = None) -> BucketBuffer:
    """Return a bucket of float32 zeros that belongs to no model; `label` names it in errors."""
    flat = torch.zeros(max(1, size_bytes // 4), device=device)
    return BucketBuffer(0, [], [Message(flat, [])], label or f"a message of {size_bytes} bytes")


def make_shard(bench: Bench, size_bytes: int) -> Shard:
    """Return float32 zeros of no model, of which this rank owns its part."""
    slots = [Slot("parameter", 0, nn.Parameter(torch.zeros(max(1, size_bytes // 4), device=bench.device)))]
    return Shard(lay_out(slots)[0], bench.world.rank, bench.world.ranks)


def _finish(phases: Iterable[dist.Work]) -> None:
    for work in phases:
        work.wait()


def _reduce_scatter(bench: Bench, size_bytes: int) -> Run:
    """Return a push of gradients, as plans with delay do it: libraries' own can take several times as long."""
    shard = make_shard(bench, size_bytes)
    return lambda: _finish(shard.phases(bench.world.process_group))


def _scatter(bench: Bench, size_bytes: int) -> Run:
    """Return a reduce-scatter as intra-node phases do it."""
    vector = torch.zeros(max(1, size_bytes // 4), device=bench.device)
    first, last = bounds(vector.numel(), bench.world.ranks, bench.world.rank)
    received, summed = vector.new_zeros(bench.world.ranks, last - first), vector.new_zeros(last - first)
    return lambda: _finish(reduce_scatter(vector, received, summed, bench.world.process_group))


def _all_gather(bench: Bench, size_bytes: int) -> Run:
    whole, part = _whole_and_part(bench, size_bytes)
    part = part.clone()
    return lambda: _finish(gather(whole, part, bench.world.process_group))


def _whole_and_part(bench: Bench, size_bytes: int) -> tuple[Tensor, Tensor]:
    """Return zeros of (all ranks, this rank, a view of them)."""
    numel, rank = max(1, size_bytes // 4 // bench.world.ranks), bench.world.rank
    whole = torch.zeros(numel * bench.world.ranks, device=bench.device)
    return whole, whole[rank * numel : (rank + 1) * numel]


def _library_scatter(bench: Bench, size_bytes: int) -> Run:
    """Return FSDP2's reduce-scatter: the library's own, averaged; on hosts that of `overlap_on_hosts`."""
    whole, part = _whole_and_part(bench, size_bytes)
    part, group = part.clone(), bench.world.group
    if bench.device.type != "cpu" or group is None:
        return lambda: reduce_scatter_single(part, whole, op=dist.ReduceOp.AVG, group=group)
    messages = SerialMessages(bench.world.timeout_s)
    return lambda: messages.reduce_scatter(part, whole, group, average=True).result()


def _library_gather(bench: Bench, size_bytes: int) -> Run:
    """Return FSDP2's all-gather of parameters: this rank's part lies where it is gathered."""
    (whole, part), group = _whole_and_part(bench, size_bytes), bench.world.group
    if bench.device.type != "cpu" or group is None:
        return lambda: all_gather_single(whole, part, group=group)
    messages = SerialMessages(bench.world.timeout_s)
    return lambda: messages.gather(whole, part, group).result()


_LIBRARY: dict[str, Callable[[Bench, int], Run]] = {
    "reduce_scatter": _reduce_scatter, "all_gather": _all_gather, LIBRARY_SCATTER: _library_scatter,
    LIBRARY_GATHER: _library_gather,
}  # fmt: skip


def measure_curve(
    bench: Bench, sizes: Sequence[int], make: Callable[[int], Run], what: str, limits: Limits,
    everybody: World | None = None,
) -> Curve:  # fmt: skip
    """Time the sizes that fit into the time. All are timed once in every pass, so that a drift hits them alike.

    Args:
        bench: the ranks that call the collective.
        sizes: of messages, in bytes, from the smallest on.
        make: returns a call of the collective with messages of one size.
        what: names the collective.
        limits: bounds of the time.
        everybody: ranks that measure at the same time in groups of their own; the slowest group counts.

    Returns:
        (bytes, microseconds from the last arrival, the median over passes) of each size.
    """
    everybody = everybody or bench.world
    # The runs by size that fit into the time, the same on all ranks; each is run once to warm up. The next size is
    # taken to take longer by as much as it is larger.
    runs: dict[int, Run] = {}
    pass_s = last_s = 0.0
    for size in sizes:
        if runs and (1 + MIN_PASSES) * (pass_s + last_s * size / next(reversed(runs))) > limits.longest_s:
            if len(runs) > 2:  # what follows is the line through the last two, which had better not be neighbours
                del runs[list(runs)[-2]]
            break
        run = make(size)
        last_s = max(everybody.gather(_timed_us(bench, run, everybody)[0] / 1e6, f"warming up {what}"))
        runs[size], pass_s = run, pass_s + last_s
    passes = int(min(MAX_PASSES, max(MIN_PASSES, min(limits.budget_s, limits.longest_s) / max(pass_s, 1e-9))))
    mine = [
        [_timed_us(bench, run, everybody) for run in (*runs.values(), lambda: None)]
        for _ in bench.progress.track(range(passes), what)
    ]
    group = tuple(dist.get_process_group_ranks(bench.world.group)) if bench.world.group else ()
    everyone = everybody.gather((group, mine), f"comparing times of {what}")
    by_group = [np.array([times for of, times in everyone if of == one]) for one in {of for of, _ in everyone}]
    passes_us = np.max([times.min(axis=0) for times in by_group], axis=0)  # (passes, sizes and nothing, until)
    (*times_us, (_, meeting_us)) = np.median(passes_us, axis=0)
    lasting_us = [
        max(done_us, met_us - meeting_us) if done_us > MEETINGS * meeting_us else done_us
        for done_us, met_us in times_us
    ]
    return tuple((float(size), round(float(time_us), 3)) for size, time_us in zip(runs, lasting_us, strict=True))


def _timed_us(bench: Bench, run: Run, everybody: World) -> tuple[float, float]:
    """Return the microseconds of one run until it was done on this rank, and until all ranks had met again."""
    all_ranks = replace(bench, world=everybody)
    all_ranks.meet()
    done_us = bench.timed_us(run)
    return done_us, done_us + bench.timed_us(all_ranks.meet)
