"""The one record of a traced step, whatever format it was read from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def union(spans: Floats) -> tuple[Floats, Floats]:
    """Return starts and ends of the union of intervals that are ordered by start."""
    reach = np.maximum.accumulate(spans[:, 1])
    first = np.concatenate([[True], spans[1:, 0] > reach[:-1]])
    last = np.concatenate([first[1:], [True]])
    return spans[first, 0], reach[last]


def covered(spans: Floats) -> tuple[Floats, Floats]:
    """Return the edges of the union of intervals, and how much of it lies before each of them."""
    begin, end = union(spans)
    within = np.cumsum(end - begin)
    return np.stack([begin, end], axis=1).ravel(), np.stack([within - (end - begin), within], axis=1).ravel()


def covered_us(*spans: Floats) -> float:
    """Return for how long any of these intervals lasts, in whatever order they are. Each of shape (intervals, 2)."""
    every = np.concatenate(spans)
    return float(covered(every[np.argsort(every[:, 0], kind="stable")])[1][-1]) if len(every) else 0.0


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A stretch of time, in microseconds from the step's first kernel."""

    start_us: float
    end_us: float

    @property
    def duration_us(self) -> float:
        return self.end_us - self.start_us


@dataclass(frozen=True, kw_only=True)
class Message(Interval):
    """One collective of a step."""

    collective: str
    size_bytes: int | None
    dtype: str | None
    group: str
    ranks: int | None
    gradients: int
    """Number of the step's gradients that were ready when it was launched."""
    ready_us: float
    """Time when the last of these was ready; its launch, where there were none."""
    exchanges: bool = False
    """Whether gradients may be exchanged with its collective."""
    last_rank: int | None = None
    """The rank that arrived last, of several traced ranks."""
    arrivals_us: tuple[float, ...] = ()
    """Start on each traced rank, from the first of them."""
    least_us: float | None = None
    """Shortest duration on any rank: from the last arrival to the end, where several ranks were traced."""

    @property
    def cost_us(self) -> float:
        """Duration without waiting for other ranks, as far as that is known."""
        return self.duration_us if self.least_us is None else self.least_us


@dataclass(frozen=True, kw_only=True)
class Step:
    """One training step of one rank. Times are in microseconds from its first kernel."""

    number: int
    forward_us: float
    """End of forward."""
    ready_us: Floats
    """Time when each gradient was ready. Shape (gradients,)."""
    shapes: tuple[tuple[int, ...], ...] | None
    """Shape of each gradient, of one dimension where only its size is known; None where the trace does not tell."""
    estimated: int = 0
    """Number of these that were not recorded."""
    dtypes: tuple[str, ...]
    buckets: tuple[Message, ...]
    """Messages that hold gradients, in launch order."""
    others: tuple[Message, ...]
    """All other messages."""
    compute: Floats
    """Start and end of kernels and copies, ordered by start. Shape (kernels, 2)."""
    kernels: NDArray[np.int64]
    """The name and grid of each of them, as a number; −1 where no grid was recorded."""
    begin_us: float
    """Start of the first kernel on the clock of the trace."""
    span_us: float
    """End of its last kernel."""
    gap_us: float | None = None
    """Time from there to the first kernel of the next step; None where that is not traced."""
    input_us: float = 0.0
    """Time for which the script waited for its data loader."""
    parts_us: tuple[tuple[float, float], ...] = ()
    """Time to the last gradient and time of input on each of several traced ranks."""
    micro_batches: int = 1
    """Backwards of one optimizer step, of which the last one synchronizes."""
    modules: tuple[str, ...] | None = None
    """FSDP2's group of each gradient, by its module's path; None of a run without such groups."""
    forwards_us: Mapping[str, float] = field(default_factory=dict)
    """Time of kernels in the forward of each of FSDP2's groups, in order of forward."""
    copied_us: tuple[float, ...] | None = None
    """Time of DDP's copy of each gradient out of its bucket on the host; None where these are not recorded."""
    overhead: tuple[Floats, Floats] | None = None
    """Moments on hosts, and how many operations the profiler has recorded before each of them."""

    @property
    def numel(self) -> tuple[int, ...] | None:
        """Elements of each gradient."""
        return None if self.shapes is None else tuple(map(prod, self.shapes))

    @property
    def backward_us(self) -> float:
        """Time from the end of forward to the last gradient."""
        return self.last_gradient_us - self.forward_us

    @property
    def last_gradient_us(self) -> float:
        return float(self.ready_us[-1])

    @cached_property
    def messages(self) -> tuple[Message, ...]:
        """Messages of both kinds, by start."""
        return tuple(sorted((*self.buckets, *self.others), key=lambda message: message.start_us))

    @property
    def messages_end_us(self) -> float:
        """Time when all gradients are exchanged."""
        return max([self.last_gradient_us, *(message.end_us for message in self.buckets)])

    @property
    def update_us(self) -> float:
        """Time from then on to the end of the step."""
        return max(0.0, self.span_us - self.messages_end_us)

    @cached_property
    def _sent(self) -> Floats:
        """Start and end of messages, ordered by start. Shape (messages, 2)."""
        return np.array([(message.start_us, message.end_us) for message in self.messages]).reshape(-1, 2)

    @property
    def compute_us(self) -> float:
        """Time for which kernels ran."""
        return covered_us(self.compute)

    @property
    def communication_us(self) -> float:
        """Time for which messages were in flight."""
        return covered_us(self._sent)

    @cached_property
    def busy_us(self) -> float:
        """Time for which kernels ran or messages were in flight."""
        return covered_us(self.compute, self._sent)

    @property
    def exposed_us(self) -> float:
        """Communication during which no kernel ran."""
        return self.busy_us - self.compute_us

    @property
    def hidden_us(self) -> float:
        """Communication during which kernels ran."""
        return self.communication_us - self.exposed_us

    @property
    def idle_us(self) -> float:
        """Neither kernels nor communication."""
        return max(0.0, self.span_us - self.busy_us)

    def exposed_of(self, message: Message) -> float:
        """Return how much of a message no kernel hides, and no message that started before it."""
        before = self._sent[: np.searchsorted(self._sent[:, 0], message.start_us)]
        begin_us = min(message.end_us, float(before[:, 1].max(initial=message.start_us)))
        hidden = np.interp([begin_us, message.end_us], *self._computed)
        return message.end_us - begin_us - float(hidden[1] - hidden[0])

    @cached_property
    def _computed(self) -> tuple[Floats, Floats]:
        return covered(self.compute)


@dataclass(frozen=True, kw_only=True)
class Run:
    """Traced steps of one rank, or of several ranks of one job."""

    paths: tuple[str, ...]
    rank: int
    world: int
    host: str | None = None
    """Name of its machine."""
    begun_s: float | None = None
    """Time of its first step on the clock of its machine, in seconds."""
    nodes: int | None = None
    backend: str | None = None
    device: str
    devices_per_node: int = 0
    """Accelerators that the host lists; 0 where it lists none."""
    accelerator: str | None = None
    memory_bytes: int | None = None
    steps: Sequence[Step]
    exchanging: int | None = None
    """Ranks of the group that exchanges gradients; None where the trace does not tell."""
    traced_ranks: tuple[int, ...] = (0,)
    group: str = ""
    """The process group that exchanges gradients."""
    optimizer: str | None = None
    """The class whose step was annotated."""
    notes: tuple[str, ...] = ()
    unplanned: tuple[str, ...] = ()
    """Collectives that are not planned, in words."""

    @property
    def ranks(self) -> int:
        """Number of ranks that exchange gradients."""
        return max(1, self.exchanging or self.world)
