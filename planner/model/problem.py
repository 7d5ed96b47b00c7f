"""The problem that passes and strategies solve: one training step and the cost of its messages, as arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, wraps
from itertools import chain, groupby
from typing import Literal, TypeVar, TypeVarTuple

import numpy as np
from numpy.typing import NDArray

from planner.cost.halves import ALL_GATHER, REDUCE_SCATTER, Half, NodeCosts, half, node_costs, worker_half
from planner.cost.low_rank import LowRankCost, Thin, low_rank_lines, thin_of
from planner.cost.model import CommunicationCost, communication_cost
from planner.cost.phases import PHASES, Phase, measured_flat, phase_of
from planner.cost.sparse import SPARSE_PHASES, SelectionCost, SparsePhase, selector_line
from planner.cost.wire import WireCost, wire_cost
from planner.documents.estimate import ComputeBasis, compute_basis, on_accelerator
from planner.documents.profile import Cluster, Contention, LayerNorm, Profile
from planner.documents.speeds import on_slowest
from planner.ir import Bucket, Places
from runtime.errors import InputError
from runtime.plan.names import layer_of
from runtime.plan.transports import TWO_SHOT, Transport

Messages = tuple[NDArray[np.float64], NDArray[np.bool_] | None]
"""Messages of one dtype by bucket: size, and whether the bucket has one (None: all have)."""
Factors = float | NDArray[np.float64]
Curve = Callable[[NDArray[np.float64]], NDArray[np.float64]]
"""Bytes → microseconds."""

SELECTORS = ("mstopk", "exact")
"""Selectors of shards; whole buckets have the last one."""


Key = TypeVarTuple("Key")
Price = TypeVar("Price")


def memoised(price: Callable[[Problem, *Key], Price]) -> Callable[[Problem, *Key], Price]:
    """Keep each result of a method, by its arguments, as long as its problem lives."""

    @wraps(price)
    def known(problem: Problem, *key: *Key) -> Price:
        prices: dict[tuple[*Key], Price] = vars(problem).setdefault(f"{price.__name__}, known", {})
        if key not in prices:
            prices[key] = price(problem, *key)
        return prices[key]

    return known


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """A profile on a cluster: a step's arrays and the prices of its messages, each computed once.

    Gradients are named by their index in readiness order.
    """

    profile: Profile
    cost: CommunicationCost
    basis: ComputeBasis | None = None
    """Basis of the compute times; None where it is not needed."""
    cuts: tuple[str, ...] | None = None
    """Modules at which the compiled graph is cut, in the order of forward; None where no cuts were measured."""
    uncut: Problem | None = None
    """The problem that these cuts were made in, which has all places for cuts; None where it has none of them."""

    @property
    def ranks(self) -> int:
        return self.cost.cluster.ranks

    @property
    def contention(self) -> Contention:
        return self.cost.contention

    @property
    def contended(self) -> bool:
        """Return whether compute and network slow each other down."""
        factors = self.contention
        return (factors.compute, factors.network) != (1.0, 1.0) or factors.by_size is not None

    @property
    def forward_us(self) -> float:
        return self.profile.compute.forward_us

    @property
    def update_us(self) -> float:
        return self.profile.compute.update_us

    @property
    def norm_layers(self) -> tuple[LayerNorm, ...]:
        """Layers whose norms the optimizer needs; none for most optimizers."""
        norms = self.profile.compute.norms
        return () if norms is None else norms.layers

    @cached_property
    def count(self) -> int:
        """Number of gradients."""
        return len(self.profile.compute.gradients)

    @cached_property
    def ready_us(self) -> NDArray[np.float64]:
        """Ready time of each gradient without contention: forward_us + sum(backward_us[0..i]). Shape (count,)."""
        steps = [self.forward_us, *(gradient.backward_us for gradient in self.profile.compute.gradients)]
        return np.cumsum(np.array(steps))[1:]

    @cached_property
    def ready_list_us(self) -> list[float]:
        """`ready_us` as numbers of Python's own."""
        # Event loops add these one by one, which takes far longer with scalars of numpy.
        values: list[float] = self.ready_us.tolist()
        return values

    @property
    def compute_end_us(self) -> float:
        """End of backward without contention."""
        return float(self.ready_us[-1])

    @property
    def backward_us(self) -> float:
        return self.compute_end_us - self.forward_us

    @cached_property
    def size_bytes(self) -> NDArray[np.int64]:
        """Bytes of each gradient. Shape (count,)."""
        return np.array([gradient.size_bytes for gradient in self.profile.compute.gradients], dtype=np.int64)

    @cached_property
    def dtype_ids(self) -> NDArray[np.int64]:
        """Small integers per gradient, equal for equal dtypes. Shape (count,)."""
        ids: dict[str, int] = {}
        return np.array([ids.setdefault(g.dtype, len(ids)) for g in self.profile.compute.gradients], dtype=np.int64)

    @cached_property
    def dtype_count(self) -> int:
        return int(self.dtype_ids.max()) + 1

    @cached_property
    def layer_runs(self) -> tuple[tuple[int, int], ...]:
        """(start, stop) of each run of gradients with equal `layer`."""
        layers = [gradient.layer for gradient in self.profile.compute.gradients]
        edges = [i for i in range(self.count) if i == 0 or layers[i] != layers[i - 1]]
        return tuple(zip(edges, [*edges[1:], self.count], strict=True))

    @cached_property
    def _prefix_bytes(self) -> NDArray[np.float64]:
        """Bytes of each dtype before each gradient. Shape (dtypes, count + 1)."""
        return self._prefix(self.size_bytes)

    @cached_property
    def _prefix_messages(self) -> NDArray[np.float64]:
        return self._prefix(np.ones(self.count, dtype=np.int64))

    def _prefix(self, values: NDArray[np.int64]) -> NDArray[np.float64]:
        table = np.zeros((self.dtype_count, self.count + 1))
        for dtype in range(self.dtype_count):
            table[dtype, 1:] = np.cumsum(np.where(self.dtype_ids == dtype, values, 0))
        return table

    def range_cost_us(self, starts: Places, stops: Places) -> NDArray[np.float64]:
        """Return the time of buckets [start, stop): the sum of one message per dtype."""
        return self.range_time_us(self.cost.all_reduce, starts, stops)

    def range_time_us(self, curve: Curve, starts: Places, stops: Places) -> NDArray[np.float64]:
        """Return `range_cost_us` by another curve of time over bytes."""
        return _sum_over(self._range_messages(starts, stops), curve)

    def range_factors(self, starts: Places, stops: Places) -> tuple[Factors, Factors]:
        """Return the slow-down of compute and of the network while the bucket [start, stop) is in flight."""
        if self.cost.slowdown is None:
            return self.contention.compute, self.contention.network
        return self._factors(list(self._range_messages(starts, stops)))

    def _range_messages(self, starts: Places, stops: Places) -> Iterator[Messages]:
        for dtype in range(self.dtype_count):
            prefix, messages = self._prefix_bytes[dtype], self._prefix_messages[dtype]
            present = messages[stops] > messages[starts] if self.dtype_count > 1 else None
            yield prefix[stops] - prefix[starts], present

    def _factors(self, messages: Sequence[Messages]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return factors of buckets whose messages, one per dtype, have factors of their own."""
        slowdown, curve = self.cost.slowdown, self.cost.all_reduce
        assert slowdown is not None
        if len(messages) == 1:
            return slowdown(messages[0][0])
        idle_us = _sum_over(messages, curve)
        busy_us = _sum_over(messages, lambda sizes: curve(sizes) * slowdown(sizes)[1])
        computed_us = _sum_over(messages, lambda sizes: curve(sizes) * slowdown(sizes)[1] / slowdown(sizes)[0])
        takes = busy_us > 0.0
        return (
            np.divide(busy_us, computed_us, out=np.ones_like(busy_us), where=takes & (computed_us > 0.0)),
            np.divide(busy_us, idle_us, out=np.ones_like(busy_us), where=takes & (idle_us > 0.0)),
        )

    @memoised
    def phases(self, transport: Transport) -> tuple[Phase, ...]:
        """Return the phases of a dense collective on this cluster."""
        return PHASES[transport](self.cost.cluster, self.cost.all_reduce, self.cost.link)

    @memoised
    def sparse_phases(self, transport: Transport) -> tuple[SparsePhase, ...]:
        """Return the phases of a collective of selected elements on this cluster."""
        return SPARSE_PHASES[transport](self.cost.cluster, self.cost.link)

    @memoised
    def wire_cost(self, dtype: str, transport: Transport) -> WireCost:
        """Return the costs of buckets whose elements are sent in this dtype; by a torus they are whole inside nodes.

        Raises InputError: by a torus, where a kind of link has no cost.
        """
        cluster = self.cost.cluster
        if transport.native:
            measured = measured_flat(cluster, transport.algorithm, queued=True) or self.cost.all_reduce
            return wire_cost(cluster, dtype, (measured,), self.ranks, owners=False)
        if transport.hierarchical and 1 not in (cluster.nodes, cluster.ranks_per_node):
            scatter, _, gather = self.phases(transport)
            between = (phase_of(cluster, name, "ring", "inter", cluster.nodes) for name in (REDUCE_SCATTER, ALL_GATHER))
            curves = tuple(phase.curve for phase in between if phase is not None)
            return wire_cost(cluster, dtype, curves, cluster.nodes, inside=(scatter, gather))
        two_shots = measured_flat(cluster, TWO_SHOT.algorithm, queued=True)
        halves_known = all(measured_flat(cluster, name) is not None for name in (REDUCE_SCATTER, ALL_GATHER))
        if two_shots is None and (halves_known or cluster.library is not None):
            return wire_cost(cluster, dtype, (self.reduce_scatter.curve, self.all_gather.curve), self.ranks)
        # Links' constants may promise more than the all-reduce shows.
        return wire_cost(cluster, dtype, (two_shots or self.cost.all_reduce,), self.ranks)

    @memoised
    def low_rank_cost(self, rank: int) -> LowRankCost:
        """Return the costs of buckets whose matrices are sent as products of this rank."""
        lines, _ = low_rank_lines(self.cost.cluster, rank)
        return LowRankCost(lines=lines, all_reduce=self.cost.all_reduce)

    @memoised
    def thin(self, rank: int) -> Thin:
        """Return what each gradient sends where matrices are sent as products of this rank."""
        matrices = [gradient.matrix or (0, 0) for gradient in self.profile.compute.gradients]
        return thin_of(self.numel, np.array(matrices, dtype=np.int64), rank)

    def elements(self, bucket: Bucket) -> int:
        """Return the number of elements of a bucket."""
        return int(self.numel[list(bucket.gradients)].sum())

    def selection_cost(self, transport: Transport, field: Literal["sparsify", "unpack"] = "sparsify") -> SelectionCost:
        """Return what selecting, or unpacking, costs over the dense bytes of a bucket; see `shards`."""
        cluster, selector = self.cost.cluster, self.selector(transport)
        line = selector_line(getattr(cluster, field), selector, f"cluster {cluster.name or '(unnamed)'}: $.{field}")
        return SelectionCost.of(line, self.shards(transport))

    def selector(self, transport: Transport) -> str:
        """Return how elements are selected: of shards by CommLib's, but where another one was measured to be faster."""
        if not transport.hierarchical:
            return SELECTORS[-1]
        lines = self.cost.cluster.sparsify
        if not isinstance(lines, dict) or not set(SELECTORS) <= lines.keys():
            return SELECTORS[0]
        return min(SELECTORS, key=lambda name: lines[name].beta_us_per_byte)

    def shards(self, transport: Transport) -> int:
        """Return over how many ranks a bucket is shared out before each selects from its own."""
        return self.cost.cluster.ranks_per_node if transport.hierarchical else 1

    def layer_elements(self, bucket: Bucket) -> list[int]:
        """Return the elements of each run of gradients of one layer in a bucket; layers by name, as in the runtime."""
        runs = groupby(bucket.gradients, self.layers_by_name.__getitem__)
        return [sum(int(self.numel[index]) for index in run) for _, run in runs]

    @cached_property
    def layers_by_name(self) -> tuple[str, ...]:
        """Layer of each gradient by its name; usually the profile's, too."""
        return tuple(layer_of(gradient.name) for gradient in self.profile.compute.gradients)

    @cached_property
    def numel(self) -> NDArray[np.int64]:
        """Elements of each gradient. Shape (count,)."""
        return np.array([gradient.numel for gradient in self.profile.compute.gradients], dtype=np.int64)

    def bucket_cost_us(self, buckets: Sequence[Sequence[int]], curve: Curve | None = None) -> list[float]:
        """Return the time of each bucket of any gradients: all-reduced, or by another curve of time over bytes."""
        result: list[float] = _sum_over(self._bucket_messages(buckets), curve or self.cost.all_reduce).tolist()
        return result

    @cached_property
    def push(self) -> Half:
        """Cost of a reduce-scatter between workers with delay: over all ranks or between nodes."""
        return worker_half(self.cost, REDUCE_SCATTER)

    @cached_property
    def pull(self) -> Half:
        """Cost of an all-gather between workers with delay."""
        return worker_half(self.cost, ALL_GATHER)

    @cached_property
    def reduce_scatter(self) -> Half:
        """Cost of a reduce-scatter over all ranks."""
        return half(self.cost, REDUCE_SCATTER)

    @cached_property
    def all_gather(self) -> Half:
        """Cost of an all-gather over all ranks."""
        return half(self.cost, ALL_GATHER)

    @property
    def ranks_per_worker(self) -> int:
        """Number of ranks of a worker with delay: of a node, where that is the worker."""
        return 1 if self.node_costs is None else self.cost.cluster.ranks_per_node

    @cached_property
    def node_costs(self) -> NodeCosts | None:
        """Costs of delay where nodes have several ranks and the costs of both links are known."""
        return node_costs(self.cost.cluster)

    @cached_property
    def local_update_us(self) -> float:
        """SSD-SGD's h_loc: a rank's own update of all its weights; 0 where the cluster does not have it."""
        line = self.cost.cluster.local_update
        return 0.0 if line is None else line.at(float(self.size_bytes.sum()))

    def bucket_factors(self, buckets: Sequence[Sequence[int]]) -> list[tuple[float, float]]:
        """Return `range_factors` of buckets of any gradients."""
        if self.cost.slowdown is None:
            return [(self.contention.compute, self.contention.network)] * len(buckets)
        compute, network = self._factors(list(self._bucket_messages(buckets)))
        return list(zip(compute.tolist(), network.tolist(), strict=True))

    def _bucket_messages(self, buckets: Sequence[Sequence[int]]) -> Iterator[Messages]:
        members, owner = _flat(buckets)
        for dtype in range(self.dtype_count):
            of_dtype = self.dtype_ids[members] == dtype
            sizes = np.bincount(owner[of_dtype], self.size_bytes[members[of_dtype]], len(buckets))
            yield sizes.astype(np.float64), np.bincount(owner[of_dtype], minlength=len(buckets)) > 0

    def bucket_bytes(self, buckets: Sequence[Sequence[int]]) -> list[float]:
        """Return the bytes of each bucket of any gradients."""
        members, owner = _flat(buckets)
        sizes: list[float] = np.bincount(owner, self.size_bytes[members], len(buckets)).tolist()
        return sizes


def _sum_over(messages: Iterable[Messages], time_us: Curve) -> NDArray[np.float64]:
    """Return the time of buckets: the sum of their messages'."""
    total: NDArray[np.float64] | float = 0.0
    for sizes, present in messages:
        of_dtype = time_us(sizes)
        total = total + (of_dtype if present is None else np.where(present, of_dtype, 0.0))
    return np.asarray(total)


def _flat(buckets: Sequence[Sequence[int]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return all gradients of all buckets, and for each the number of its bucket."""
    members = np.fromiter(chain.from_iterable(buckets), dtype=np.int64)
    return members, np.repeat(np.arange(len(buckets)), [len(bucket) for bucket in buckets])


def make_problem(
    profile: Profile, cluster: Cluster | None = None, ranks: int | None = None, where: str = "profile"
) -> Problem:
    """Join a profile with a cluster (default: the one measured with it), resized to `ranks` where given.

    `where` names the document that holds the cluster in messages.

    Raises:
        InputError: no cluster in the profile and none given; no cost for an all-reduce on it.
    """
    chosen = cluster or profile.cluster
    if chosen is None:
        raise InputError(
            f"{where}: $.cluster: found none and no other was given; expected `--cluster FILE`, `--cluster NAME` "
            f"(`planner catalog` lists names), or a profile made by `planner profile` on the machines in question"
        )
    try:
        return Problem(
            profile=on_slowest(on_accelerator(profile, chosen), chosen), cost=communication_cost(chosen, ranks),
            basis=compute_basis(profile, chosen),
        )  # fmt: skip
    except InputError as error:
        raise InputError(f"{where}: $.cluster: {error}" if cluster is None else f"{where}: {error}") from error
