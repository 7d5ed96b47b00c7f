"""Records of profile.json and cluster.json: measurements of a training step and of the links. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field

from planner.documents.accelerators import ACCELERATORS, kind_of
from planner.documents.cut_costs import CompiledProfile
from planner.documents.local_async import LocalAsyncProfile
from planner.documents.nccl import Nccl
from planner.documents.text import parse_bandwidth, parse_latency_us, us_per_byte
from planner.documents.units import Units
from runtime.errors import InputError
from runtime.plan import Accuracy, ModelReference
from runtime.plan.predicted import Loading
from runtime.plan.strict_json import (
    Count,
    Document,
    Name,
    PositiveCount,
    Ranks,
    Record,
    TimeUs,
    check_schema,
    repeated_item,
)

PROFILE_SCHEMA: Literal["planner.profile/1"] = "planner.profile/1"
CLUSTER_SCHEMA: Literal["planner.cluster/1"] = "planner.cluster/1"

DTYPE_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "complex64": 8, "complex128": 16,
}  # fmt: skip
"""Bytes per element of every gradient dtype that is known."""

MAX_GRADIENTS = 20_000
"""More would take minutes to plan."""

MAX_MODEL_BYTES = 2**53
"""9 PB; sums of bytes are exact up to here."""

WORTH_STACKING = 0.1
"""Part of the time of an operator that a stack has to save for each further matrix, as it takes memory."""

CURE = "correct it, or measure again with `planner profile`"

Rate = Annotated[float, Field(ge=0.0, le=1e12)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
Speed = Annotated[float, Field(ge=1e-3, le=1e3)]
Memory = Annotated[float, Field(gt=0.0, le=1e12)]
Factor = Annotated[float, Field(ge=1.0, le=1e6)]
Emulated = Literal["namespaces"]
Sample = tuple[Annotated[float, Field(ge=0.0, le=2**60)], TimeUs]
"""(message_bytes, time_us)."""
Interval = tuple[TimeUs, TimeUs]
"""(low, high)."""
SizeFactors = tuple[Annotated[float, Field(gt=0.0, le=2**60)], Factor, Factor]
"""(message_bytes, compute, network)."""
RankName = Annotated[str, Field(pattern=r"^[1-9][0-9]?$")]
DensityLine = tuple[Annotated[float, Field(gt=0.0, le=1.0)], TimeUs, Rate]
"""(density, alpha_us, beta_us_per_byte)."""


@dataclass(frozen=True, kw_only=True)
class Gradient(Record):
    """One trainable parameter's gradient; its place in the profile is its place in readiness order."""

    name: Name
    layer: str
    numel: Annotated[int, Field(ge=0, le=2**40)]
    dtype: Literal[tuple(DTYPE_BYTES)]  # type: ignore[valid-type]
    backward_us: TimeUs
    """Time from the previous gradient's readiness (or the start of backward) to this one's."""
    spread_us: TimeUs | None = None
    """Interquartile range of the readiness time over repeats."""
    matrix: tuple[PositiveCount, PositiveCount] | None = None
    """(rows, columns), as `powersgd` sees it: the slowest dimension in memory, and all others together. Absent: it has
    one dimension, or its shape is not known."""

    @property
    def size_bytes(self) -> int:
        return self.numel * DTYPE_BYTES[self.dtype]

    def problem(self, path: str) -> str | None:
        """Return what is wrong if the matrix has not the gradient's elements."""
        if self.matrix is None or math.prod(self.matrix) == self.numel:
            return None
        return (
            f"{path}.matrix: found {list(self.matrix)}, expected rows and columns of {self.numel} elements; correct "
            f"it, or take it out"
        )


@dataclass(frozen=True, kw_only=True)
class LayerNorm(Record):
    """Time of the two norms that an optimizer needs of one layer."""

    name: Name
    """The parameter's."""
    norm_us: TimeUs


@dataclass(frozen=True, kw_only=True)
class NormProfile(Record):
    """Norms of layers, a part of the update of LARS and LAMB, where every rank computes all of them."""

    optimizer: Name
    row_bytes: Annotated[int, Field(ge=1, le=1024)] = 8
    """Bytes of a layer's norms in a message."""
    layers: Annotated[tuple[LayerNorm, ...], Field(min_length=1, max_length=MAX_GRADIENTS)]


@dataclass(frozen=True, kw_only=True)
class OperatorShape(Record):
    """Time of a matrix optimizer's operator for one shape, on all ranks at once."""

    shape: Annotated[tuple[PositiveCount, ...], Field(min_length=1, max_length=16)]
    operator_us: TimeUs
    """Time for one matrix."""
    before_us: TimeUs = 0.0
    """Time of an owner before that: the optimizer's step for the parameter, with copies, up to its call."""
    result_bytes: PositiveCount
    """Bytes of the result in a message."""
    parameters: Annotated[tuple[Name, ...], Field(min_length=1, max_length=MAX_GRADIENTS)]
    """Parameters of this shape, in the order in which the optimizer's step calls the operator; with `stacked_us` of one
    group."""
    stacked_us: TimeUs | None = None
    """Time of each matrix of a stack but the first; None: stacks have other bits, or were not timed."""

    @property
    def saved_us(self) -> float:
        """Time that a stack saves for each of its matrices but the first; 0: too little for the memory it takes."""
        saved_us = 0.0 if self.stacked_us is None else self.operator_us - self.stacked_us
        return saved_us if saved_us >= WORTH_STACKING * self.operator_us else 0.0


@dataclass(frozen=True, kw_only=True)
class OperatorProfile(Record):
    """The stateless operator of a matrix optimizer (Muon's Newton–Schulz), a part of the update, where every rank
    computes it for all matrices."""

    optimizer: Name
    shapes: Annotated[tuple[OperatorShape, ...], Field(min_length=1, max_length=MAX_GRADIENTS)]
    estimated: str | None = None
    """Origin of the times, if they were not measured."""
    applied: bool = False
    """Whether every rank applies results itself in an owned step, which gathers them in place of weights."""

    @property
    def parameters(self) -> tuple[str, ...]:
        return tuple(name for shape in self.shapes for name in shape.parameters)


@dataclass(frozen=True, kw_only=True)
class OptimizerProfile(Record):
    """Optimizer whose update was timed."""

    name: Name
    """Name of its class."""
    adaptive: bool
    """Whether it divides gradients by a measure of their own size, as Adam does."""
    elementwise: bool | None = None
    """Whether it treats every element by itself, so that ranks can share its step; None: not known."""
    unit: Literal["element", "matrix"] | None = None
    """Smallest part that it can update by itself: an element, or a whole parameter; None: not known."""
    matrices: tuple[Name, ...] | None = None
    """Parameters that it updates whole, of several optimizers together; None: there are none, or they are not known."""
    holds_all: bool | None = None
    """Whether it updates every gradient's parameter, without which ranks cannot share its step; None: not known."""
    state_bytes: Count | None = None
    """Bytes that it keeps from step to step."""


@dataclass(frozen=True, kw_only=True)
class ComputeIntervals(Record):
    """Intervals in which the middle half of the repeats lay."""

    forward_us: Interval
    """Forward on all ranks."""
    backward_us: Interval
    """Backward from the median forward to the end on the slowest rank."""
    step_us: Interval
    """Forward, backward and update together, on the slowest rank."""

    @property
    def spread_us(self) -> float:
        """Return the distance of the quartiles of the step."""
        low_us, high_us = self.step_us
        return max(0.0, high_us - low_us)


@dataclass(frozen=True, kw_only=True)
class ComputeEstimate(Record):
    """Origin of compute times that were not measured: FLOPs over a stated share of an accelerator's peak."""

    gpu: Literal[tuple(ACCELERATORS)]  # type: ignore[valid-type]
    """Accelerator of the times; on a cluster of others they are scaled by peak and share."""
    flops: Annotated[float, Field(gt=0.0)]
    """FLOPs of forward and backward of one step of one rank; nothing computed twice."""
    efficiency: dict[str, Annotated[float, Field(gt=0.0, le=1.0)]]
    """Share of its peak that is reached, by accelerator."""
    other_efficiency: Annotated[float, Field(gt=0.0, le=1.0)]
    """Share of accelerators that are not listed: an assumption."""
    activation_bytes: Count = 0
    """Bytes that forward keeps for backward, if nothing is computed twice."""
    checkpoint_bytes: Count = 0
    """The same where only the inputs of blocks are kept, and blocks computed twice."""
    recomputed: bool = False
    """Whether the times are those of blocks that are computed twice."""
    source: str

    def share_of(self, gpu: str) -> float:
        """Return which share of its peak an accelerator reaches."""
        return self.efficiency.get(gpu, self.efficiency.get(kind_of(gpu), self.other_efficiency))


@dataclass(frozen=True, kw_only=True)
class RankCompute(Record):
    """Compute times and memory of one rank by its samples, measured on all ranks at once with two batch sizes."""

    fixed_us: TimeUs
    """Part of forward and backward that does not grow with the samples; 0 if one size alone could be timed."""
    sample_us: Annotated[float, Field(gt=0.0, le=1e12)]
    """Forward and backward of one sample more."""
    update_us: TimeUs
    memory_bytes: PositiveCount | None = None
    """Memory of its accelerator; absent: not known."""
    sample_bytes: Count | None = None
    """Memory that forward keeps for backward of one sample more; absent: not measured."""


@dataclass(frozen=True, kw_only=True)
class ComputeProfile(Record):
    """Times of one step without communication, on all ranks at once."""

    forward_us: TimeUs
    update_us: TimeUs
    gradients: Annotated[tuple[Gradient, ...], Field(min_length=1, max_length=MAX_GRADIENTS)]
    optimizer: OptimizerProfile | None = None
    estimate: ComputeEstimate | None = None
    """Origin of the times, if they were not measured."""
    norms: NormProfile | None = None
    """Absent: the optimizer needs none."""
    operator: OperatorProfile | None = None
    """Absent: the optimizer has no operator without state."""
    compiled: CompiledProfile | None = None
    """Places where the graph can be cut, if the model was compiled and that was measured."""
    repeats: Count | None = None
    step_spread_us: TimeUs | None = None
    """Interquartile range of forward plus backward over repeats."""
    intervals: ComputeIntervals | None = None
    """Spread of the repeats; absent if it is not known."""
    by_rank: Annotated[tuple[RankCompute, ...], Field(min_length=1)] | None = None
    """Times of each rank by its samples, in order of rank; equal where ranks differ by little. Absent: not measured."""

    @property
    def backward_us(self) -> float:
        return sum(gradient.backward_us for gradient in self.gradients)

    @property
    def step_us(self) -> float:
        return self.forward_us + self.backward_us + self.update_us

    @property
    def size_bytes(self) -> int:
        return sum(gradient.size_bytes for gradient in self.gradients)

    def problem(self, path: str) -> str | None:
        """Return what is wrong if a gradient has its name twice, all are larger than any model, or norms are not of
        gradients.
        """
        names = [gradient.name for gradient in self.gradients]
        if (twice := repeated_item([name] for name in names)) is not None:
            return (
                f"{path}.gradients[{twice[0]}].name: found {twice[2]!r}, which is gradient {twice[3]} already; "
                f"expected each parameter once (a shared one too): take one out"
            )
        if self.size_bytes > MAX_MODEL_BYTES:  # each gradient may be in its range, and their sum be no model
            return f"{path}.gradients: found {self.size_bytes} bytes in all, expected at most {MAX_MODEL_BYTES}; {CURE}"
        if (wrong := self._operator_problem(path, set(names))) is not None:
            return wrong
        if self.compiled is not None and (wrong := self.compiled.problem_among(self.gradients, f"{path}.compiled")):
            return wrong
        layers = [layer.name for layer in self.norms.layers] if self.norms else []
        unknown = next((index for index, name in enumerate(layers) if name not in set(names)), None)
        if unknown is not None:
            return (
                f"{path}.norms.layers[{unknown}].name: found {layers[unknown]!r}, which is none of the gradients; "
                f"expected one of them: {CURE}"
            )
        if (twice := repeated_item([name] for name in layers)) is not None:
            place = f"{path}.norms.layers[{twice[0]}].name: found {twice[2]!r}"
            return f"{place} once more; expected each layer once: take one out"
        return None

    def _operator_problem(self, path: str, names: set[str]) -> str | None:
        if self.operator is None:
            return None
        where, listed = f"{path}.operator.shapes", self.operator.parameters
        unknown = next((name for name in listed if name not in names), None)
        if unknown is not None:
            return f"{where}: found {unknown!r}, which is none of the gradients; expected one of them: {CURE}"
        if (twice := repeated_item([name] for name in listed)) is not None:
            return f"{where}: found {twice[2]!r} once more; expected each parameter once: take one out"
        numel = {gradient.name: gradient.numel for gradient in self.gradients}
        for index, shape in enumerate(self.operator.shapes):
            odd = next((name for name in shape.parameters if numel[name] != math.prod(shape.shape)), None)
            if odd is not None:
                return (
                    f"{where}[{index}].shape: found {list(shape.shape)} for {odd!r}, expected one of its "
                    f"{numel[odd]} elements; {CURE}"
                )
        return None


@dataclass(frozen=True, kw_only=True)
class Layer(Record):
    """One layer of the traced graph."""

    name: str
    kind: str
    flops: Annotated[float, Field(ge=0.0)]
    """Forward floating-point operations, a multiply-add counted as two."""
    activation_bytes: Annotated[float, Field(ge=0.0)]
    forward_us: TimeUs | None = None
    grad_input_us: TimeUs | None = None
    grad_weight_us: TimeUs | None = None
    parameters: tuple[str, ...] | None = None
    inputs: tuple[str, ...] | None = None
    """Names of layers before it whose outputs it reads."""


@dataclass(frozen=True, kw_only=True)
class GradWeightShare(Record):
    """Share of backward spent on gradients of weights: from FLOPs, and as measured."""

    estimated: Share
    measured: Share | None = None


@dataclass(frozen=True, kw_only=True)
class Tracing(Record):
    """Tracer that saw the model, and why better ones did not."""

    method: Literal["export", "symbolic_trace", "hooks"]
    failures: dict[str, str] | None = None
    grad_weight_share: GradWeightShare | None = None


@dataclass(frozen=True, kw_only=True)
class ProfileWorld(Record):
    """Place and time of the measurement."""

    ranks: Ranks
    nodes: Ranks | None = None
    backend: str | None = None
    device: str | None = None
    torch: str | None = None
    measured: str | None = None
    threads_per_rank: Count | None = None
    cores: Count | None = None
    accelerator: str | None = None
    """The name of the device, for example `Tesla V100`."""
    memory_bytes: PositiveCount | None = None
    """The accelerator's."""
    batch_per_rank: PositiveCount | None = None
    """Samples that each rank computes in a step."""
    emulated: Emulated | None = None
    """Means by which the hosts were emulated; absent on a real cluster."""
    emulation: str | None = None
    """Emulated hosts, for example `4x1@1gbit`."""


@dataclass(frozen=True, kw_only=True)
class Link(Record):
    """Start-up time, time per byte and reduction time per byte of one link.

    In a file `"latency": "3us"` may stand for `alpha_us`, and `"bandwidth": "400gbit"` for `beta_us_per_byte`.
    """

    alpha_us: TimeUs
    beta_us_per_byte: Rate
    gamma_us_per_byte: Rate = 0.0


@dataclass(frozen=True, kw_only=True)
class Line(Record):
    """Fitted line: time_us = alpha_us + beta_us_per_byte · bytes."""

    alpha_us: TimeUs
    beta_us_per_byte: Rate
    r_squared: Annotated[float, Field(le=1.0)] | None = None
    mean_error: Annotated[float, Field(ge=0.0)] | None = None
    """Mean of |line − sample| / sample over the samples."""

    def at(self, size_bytes: float) -> float:
        """Return the time of a message of this size, in microseconds."""
        return self.alpha_us + self.beta_us_per_byte * size_bytes


@dataclass(frozen=True, kw_only=True)
class SelectionLine(Line):
    """Cost of selecting (or adding up what was selected) over a bucket's dense bytes."""

    by_density: Annotated[tuple[DensityLine, ...], Field(min_length=1)] | None = None
    """The same by the share of elements that is selected, where that was measured; `alpha_us` and `beta_us_per_byte`
    then are those of one share."""


@dataclass(frozen=True, kw_only=True)
class LowRankLines(Record):
    """Compute time of a rank for a bucket whose matrices are sent as products of two thin ones, over the bytes of its
    elements as float32."""

    pack: Line
    """Before it is sent: residual + gradient, and left factors."""
    project: Line
    """Time after the sum of left factors has arrived: right ones. The network waits for it."""
    subtract: Line
    """Time during the second message: the new residual."""
    unpack: Line
    """Time after the sum of right factors has arrived: the averages."""


@dataclass(frozen=True, kw_only=True)
class Contention(Record):
    """Slow-down of each resource while the other one is active."""

    compute: Factor = 1.0
    network: Factor = 1.0
    by_size: Annotated[tuple[SizeFactors, ...], Field(min_length=1)] | None = None
    """The same for flat all-reduces by the size of the message, where that was measured; `compute` and `network` then
    are those of a usual size, for what has no size here."""
    gathers_by_size: Annotated[tuple[SizeFactors, ...], Field(min_length=1)] | None = None
    """The same for flat gathers of selected elements, by what all ranks send; where absent, `by_size` holds.
    Never without that: all-reduces would then have factors of no size."""

    def problem(self, path: str) -> str | None:
        """Return what is wrong if gathers alone have factors by size."""
        if self.gathers_by_size is None or self.by_size is not None:
            return None
        return f"{path}: found gathers_by_size without by_size, expected both, or by_size alone; {CURE}"


@dataclass(frozen=True, kw_only=True)
class Cluster(Document):
    """Nodes, ranks and links, with measured collectives where there are any."""

    schema: Literal["planner.cluster/1"] = CLUSTER_SCHEMA
    name: str | None = None
    nodes: PositiveCount
    ranks_per_node: PositiveCount = 1
    nics_per_node: PositiveCount = 1
    accelerator: Literal[tuple(ACCELERATORS)] | None = None  # type: ignore[valid-type]
    """Accelerator of each rank; by default the one that `nccl` names, else not known. Both have to be of one kind."""
    speed: Annotated[tuple[Speed, ...], Field(min_length=1)] | None = None
    """Speed of each rank, or of the ranks of each node, over that of the profile; absent: all are as fast."""
    memory_mib: Annotated[tuple[Memory, ...], Field(min_length=1)] | None = None
    """Memory of each rank, or of the ranks of each node; absent: as profiled, or that of the accelerator."""
    intra: Link | None = None
    inter: Link | None = None
    collectives: dict[str, Line] | None = None
    samples: dict[str, Annotated[tuple[Sample, ...], Field(min_length=1)]] | None = None
    back_to_back: dict[str, Annotated[tuple[Sample, ...], Field(min_length=1)]] | None = None
    """Samples per call when calls queue behind one another: the cost of messages in a step, if it is known. In
    `samples` all ranks and their threads have just met, which they have not at the end of a computation."""
    sparsify: SelectionLine | dict[str, SelectionLine] | None = None
    unpack: SelectionLine | dict[str, SelectionLine] | None = None
    encode: dict[str, Line] | None = None
    """Compute time of a rank before a bucket is sent, by dtype on the wire, over the bytes of its elements as
    float32."""
    decode: dict[str, Line] | None = None
    """The same when it has arrived."""
    low_rank: Annotated[dict[RankName, LowRankLines], Field(min_length=1)] | None = None
    """Compute times by rank of the products."""
    push_pack: Line | None = None
    """Compute time of a rank before a push, with a delay or outer steps, over its bytes. Absent: nothing."""
    local_update: Line | None = None
    pull_take: Line | None = None
    """Compute time of a rank with weights that were pulled, with a delay or outer steps, over the bytes of all. Absent:
    nothing."""
    library: Literal["nccl"] | None = None
    """Library whose cost model holds if nothing was measured, on any number of nodes; it ranks before links."""
    nccl: Nccl | None = None
    """The machines as that model sees them; never without `library`, nor that without this."""
    all_reduce_algorithm: Literal["ring", "recursive_doubling", "halving_doubling", "binary_tree"] = "ring"
    contention: Contention | None = None
    measured_for: Accuracy | None = None
    """The riskiest class of plans whose costs were measured; absent where that is not known."""
    emulated: Emulated | None = None
    """Means of emulation, as in the profile's world; the name then is what was emulated."""
    scaled_from: Ranks | None = None
    """Number of ranks on which the collectives were measured, if they were scaled to these."""
    source: str | None = None
    """Author of the measurements, publication, and how each constant was obtained."""
    notes: tuple[str, ...] | None = None
    """Notes for readers: assumptions, fits and what they were checked on."""

    @property
    def ranks(self) -> int:
        """Number of ranks on all nodes."""
        return self.nodes * self.ranks_per_node

    @property
    def speeds(self) -> tuple[float, ...]:
        """Return the speed of each rank over that of the profile."""
        return self.of_ranks(self.speed or (1.0,))

    def of_ranks(self, given: Sequence[float]) -> tuple[float, ...]:
        """Return the number of each rank.

        Args:
            given: numbers by rank or by node, or one for all.
        """
        repeat = self.ranks // len(given)
        return tuple(one for one in given for _ in range(repeat))

    @property
    def computes_on(self) -> str | None:
        """Return the name of its accelerator in `ACCELERATORS`; None if it is not known."""
        return self.accelerator or (None if self.nccl is None else self.nccl.gpu)

    @classmethod
    def parse(cls, document: Any, where: str) -> Self:
        """Check a parsed document, in which links may be written as `bandwidth` and `latency`.

        Args:
            document: the parsed JSON.
            where: name of the document in messages.

        Returns:
            The cluster.

        Raises:
            InputError: as `load_cluster`.
        """
        return super().parse(_with_link_constants(document, f"{where}: $"), where)

    def problem(self, path: str) -> str | None:
        """Return the first contradiction between NCCL's model, its machines and the rest; None: there is none.

        Args:
            path: JSON path of the cluster, which the message begins with.
        """
        for field, given in (("speed", self.speed), ("memory_mib", self.memory_mib)):
            if given is not None and len(given) not in (self.nodes, self.ranks):
                return (
                    f"{path}.{field}: found {len(given)} numbers, expected one for each of {self.ranks} ranks, or for "
                    f"each of {self.nodes} nodes"
                )
        if self.nccl is None:
            missing = f'{path}.nccl: missing with "library": "nccl"; describe the machines, or take library out'
            return None if self.library is None else missing
        if self.library is None:
            return f'{path}.library: missing with nccl; add "library": "nccl", or take nccl out'
        cards, gpu = self.nccl.nics_per_node, self.nccl.gpu
        if self.nics_per_node not in (1, cards):
            return f"{path}.nics_per_node: found {self.nics_per_node}, and {cards} in nccl; expected the same, or one"
        if self.accelerator is not None and kind_of(self.accelerator) != gpu:
            return (
                f"{path}.accelerator: found {self.accelerator}, and {gpu} in nccl; expected that kind, or none: "
                f"correct one of them"
            )
        self.nccl.check(self.nodes, self.ranks_per_node, f"{path}.nccl.")
        return None


@dataclass(frozen=True, kw_only=True)
class Profile(Document):
    """The contents of profile.json."""

    hint: ClassVar[str] = CURE
    schema: Literal["planner.profile/1"] = PROFILE_SCHEMA
    model: ModelReference
    world: ProfileWorld
    compute: ComputeProfile
    layers: tuple[Layer, ...] | None = None
    tracing: Tracing | None = None
    cluster: Cluster | None = None
    loading: Loading | None = None
    """Times of input, if the job has a dataset."""
    local_async: LocalAsyncProfile | None = None
    """Times of local updaters, if they were measured."""
    units: Units | None = None
    """Modules that FSDP2 could gather together, if they were measured."""
    source: str | None = None
    """Author of the measurements and publication, if it was not measured here."""
    notes: tuple[str, ...] | None = None
    """Notes for readers: assumptions, and the rule by which a known total was split."""

    @classmethod
    def parse(cls, document: Any, where: str) -> Self:
        """Check a parsed document, in which a cluster that is not known may be `{}`.

        Args:
            document: the parsed JSON.
            where: name of the document in messages.

        Returns:
            The profile.

        Raises:
            InputError: as `load_profile`.
        """
        record = dict(check_schema(document, PROFILE_SCHEMA, where))
        if record.get("cluster") == {}:
            del record["cluster"]
        if "cluster" in record:
            record["cluster"] = _with_link_constants(record["cluster"], f"{where}: $.cluster")
        return super().parse(record, where)

    def problem(self, path: str) -> str | None:
        """Return what is wrong if other ranks were timed than there are, or a layer reads one that is not before it;
        raise InputError if local updaters were measured of other layers than the gradients'.

        Args:
            path: JSON path of the profile, which the message begins with.
        """
        timed = self.compute.by_rank
        if timed is not None and len(timed) != self.world.ranks:
            return (
                f"{path}.compute.by_rank: found the times of {len(timed)} ranks, expected those of the "
                f"{self.world.ranks} in world.ranks; {CURE}"
            )
        known: set[str] = set()
        for index, layer in enumerate(self.layers or ()):
            if odd := sorted({*(layer.inputs or ())} - known):
                return f"{path}.layers[{index}].inputs: found {odd[0]!r}, expected names of layers before it; {CURE}"
            known.add(layer.name)
        if self.local_async is not None:
            layers = [gradient.layer for gradient in self.compute.gradients]
            self.local_async.check(layers, f"{path}.local_async", CURE)
        return None

    def to_document(self) -> dict[str, Any]:
        """Return plain JSON types; a cluster that is not known is `{}`."""
        document = super().to_document()
        document.setdefault("cluster", {})
        return document


def load_profile(path: str | Path) -> Profile:
    """Read and check profile.json.

    Args:
        path: path of the file.

    Returns:
        The profile.

    Raises:
        InputError: not a profile of this schema; unknown, missing or wrong fields; a gradient named twice; norms, or
            backward's parts, of layers that are none; inputs of a layer that are not before it; contention of gathers
            alone.
    """
    return Profile.load(path)


def parse_profile(document: Any, where: str = "profile") -> Profile:
    """Check a parsed profile document, which `where` names in messages. Raises as `load_profile` does."""
    return Profile.parse(document, where)


def load_cluster(path: str | Path) -> Cluster:
    """Read and check cluster.json.

    Args:
        path: path of the file.

    Returns:
        The cluster.

    Raises:
        InputError: not a cluster of this schema; unknown, missing or wrong fields.
    """
    return Cluster.load(path)


def parse_cluster(document: Any, where: str = "cluster") -> Cluster:
    """Check a parsed cluster document, which `where` names in messages. Raises as `load_profile` does."""
    return Cluster.parse(document, where)


def merge_duplicates(samples: Iterable[Sequence[float]]) -> dict[float, float]:
    """Return, by bytes, the median time of the samples (bytes, time) of that size."""
    by_size: dict[float, list[float]] = {}
    for size_bytes, time_us in samples:
        by_size.setdefault(float(size_bytes), []).append(float(time_us))
    return {size: float(median(times)) for size, times in by_size.items()}


def _with_link_constants(document: Any, where: str) -> Any:
    """Return a cluster document in which links that are written as `bandwidth` and `latency` have α and β.

    Raises InputError: a rate or a time that is none, or one together with the constant that it stands for.
    """
    if not isinstance(document, Mapping):
        return document
    record = dict(document)
    for name in ("intra", "inter"):
        link = record.get(name)
        if not isinstance(link, Mapping):
            continue
        record[name] = dict(link)
        for written, constant, parse in (
            ("bandwidth", "beta_us_per_byte", lambda text, at: us_per_byte(parse_bandwidth(text, at))),
            ("latency", "alpha_us", parse_latency_us),
        ):
            place = f"{where}.{name}"
            if written in link and constant in link:
                raise InputError(f"{place}: found {written} and {constant}, expected one of them: take one out")
            if written in link:
                record[name][constant] = parse(record[name].pop(written), f"{place}.{written}")
            elif constant not in link:
                raise InputError(f"{place}.{constant}: missing field; add it, or {written}")
    return record


LACKS: dict[Accuracy, str] = {
    "bounded": "gathers, and what selecting and encoding elements costs",
    "relaxed": "what delayed updates cost",
}


def unmeasured(cluster: Cluster, where: str) -> dict[str, str]:
    """Return, by class that the cluster was not measured for, what is missing and the command that adds it.

    `where` is the path of its profile. Nothing is missing of a single rank, and where what was measured is not known.
    """
    order: list[Accuracy] = ["exact", *LACKS]
    if cluster.measured_for is None or cluster.ranks == 1:
        return {}
    return {
        accuracy: f"not measured: {LACKS[accuracy]}; `planner profile JOB --for {accuracy} --add-to {where}` adds it"
        for accuracy in order[order.index(cluster.measured_for) + 1 :]
    }


def refuse_unmeasured(cluster: Cluster, accuracy: Accuracy, where: str) -> None:
    """Raise InputError where plans of this class cannot be decided, since what they cost was not measured."""
    missing = unmeasured(cluster, where)
    if accuracy in missing:
        raise InputError(
            f"--accuracy {accuracy}: found {where}, which was measured for {cluster.measured_for} plans, expected one "
            f"for {accuracy} plans: {missing[accuracy]}"
        )
