"""Records of plan.json: everything that a runtime of this version can execute. Torch-free, so that deciding stays
light.

A plan is data. Nothing in it is executed or imported; names are looked up in the runtime's registries.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import Field

from runtime.errors import InputError
from runtime.pages import page
from runtime.plan.fully_sharded import FullyShardPlan
from runtime.plan.interfaces import BFLOAT16_WEIGHTS, DROP_IN, LATE_GATHER, SHARDED_STEP, granted, name_problem
from runtime.plan.measured_accuracy import AccuracyMeasured
from runtime.plan.outer_spec import OuterSpec, partition_problem
from runtime.plan.predicted import (
    Certificate,
    DelayPoint,
    FrontierPoint,
    Loading,
    Prediction,
    ScalingPoint,
    UpdatersPoint,
)
from runtime.plan.strict_json import (
    HINT,
    Count,
    Document,
    Name,
    PositiveCount,
    PredictedUs,
    Ranks,
    Record,
    repeated_item,
)
from runtime.plan.transports import LIBRARY, TORUS_2D, Transport, transport_of

SCHEMA: Literal["planner.plan/1"] = "planner.plan/1"

MAX_BUCKETS = 20_000
"""One for each gradient of the largest model that can be planned."""

MAX_UPDATERS = 1024
"""More processes than any rank has cores or device memory for."""

LARGEST_RANK = 64
"""Largest rank of products that are sent in place of matrices: compute grows with it, and its square where factors are
made orthonormal."""

Accuracy = Literal["exact", "bounded", "relaxed"]


@dataclass(frozen=True, kw_only=True)
class ModelReference(Record):
    """Model that a document is about."""

    name: str
    fingerprint: Annotated[str, Field(pattern=r"^sha256:")] | None = None
    """See `runtime.plan.names.fingerprint`; without it only the gradients' names are compared."""


@dataclass(frozen=True, kw_only=True)
class PlanWorld(Record):
    """The ranks that a plan was made for."""

    ranks: Ranks
    nodes: Ranks | None = None
    """Number of nodes. With a delay or outer steps, if they are fewer than ranks, nodes are the workers."""
    torch: str | None = None
    """The version of torch that compute was profiled with."""

    def problem(self, path: str) -> str | None:
        """Return what is wrong if nodes cannot have equally many ranks."""
        if self.nodes is None or self.ranks % self.nodes == 0:
            return None
        return f"{path}: found {self.ranks} ranks on {self.nodes} nodes, expected as many ranks on each node: {HINT}"


@dataclass(frozen=True, kw_only=True)
class CompressorSpec(Record):
    """A compressor by name with its options; which names and options exist is the registry's affair."""

    name: Name
    dtype: Name | None = None
    selector: Name | None = None
    k: dict[str, PositiveCount] | None = None
    """Number of elements kept, per layer within the bucket."""
    density: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    scope: Literal["bucket", "layer"] | None = None
    block: PositiveCount | None = None
    """Elements with one scale."""
    error_feedback: bool | None = None
    """False: what rounding loses is lost."""
    rounding: Name | None = None
    links: Name | None = None
    rank: PositiveCount | None = None
    """Rank of the matrices that are sent as products."""


NO_COMPRESSION = CompressorSpec(name="none")


@dataclass(frozen=True, kw_only=True)
class PlanBucket(Record):
    """Gradients that are sent as one message (one per dtype), and how."""

    gradients: Annotated[tuple[Name, ...], Field(min_length=1)]
    """Names in readiness order, contiguous in it."""
    collective: Name = "all_reduce"
    algorithm: Name = "library"
    compressor: CompressorSpec = NO_COMPRESSION
    size_bytes: Count | None = None
    """Dense bytes of the bucket, where the planner knew them."""
    reason: str | None = None
    """Reason why this bucket ends where it does, in words."""

    @property
    def transport(self) -> Transport:
        """Return how its messages reach all ranks."""
        return transport_of(self.collective, self.algorithm)

    @property
    def dense(self) -> bool:
        """Return whether all its elements are sent as they are."""
        return self.compressor.name == NO_COMPRESSION.name

    def sent_by(self, transport: Transport, compressor: CompressorSpec) -> PlanBucket:
        """Return the bucket, sent by another transport and compressor."""
        return replace(self, collective=transport.collective, algorithm=transport.algorithm, compressor=compressor)

    def uncompressed(self) -> PlanBucket:
        """Return the bucket with all its elements as they are, in a form of the same phases, so that their order
        stands.
        """
        return (
            self if self.dense else self.sent_by(TORUS_2D if self.transport.hierarchical else LIBRARY, NO_COMPRESSION)
        )


@dataclass(frozen=True, kw_only=True)
class DelaySpec(Record):
    """SSD-SGD: `steps` is the paper's k."""

    steps: PositiveCount
    warmup_steps: Count = 500
    local_update: Name = "glu"
    alpha: Annotated[float, Field(ge=0.0)] = 2.0
    beta: Annotated[float, Field(ge=0.0)] = 0.5
    local_lr_scale: Annotated[float, Field(gt=0.0)] = 4.0


@dataclass(frozen=True, kw_only=True)
class LocalAsyncSpec(Record):
    """LAP-SGD (blocks None) or LPP-SGD: updaters that share a rank's model without locks, averaged over ranks
    meanwhile."""

    updaters: Annotated[int, Field(ge=1, le=MAX_UPDATERS)]
    blocks: Annotated[tuple[Annotated[tuple[Name, ...], Field(min_length=1)], ...], Field(min_length=1)] | None = None
    """Gradients that one updater takes by itself: in all each gradient once, in a block those that become ready one
    after the other, at most as many blocks as updaters. Updater i has block i modulo their number."""
    full_fraction: Annotated[float, Field(ge=0.0, le=1.0)] = 0.1
    """Share of all minibatches, the first ones, that update the full model; later ones alternate that with the own
    block."""
    average_every: PositiveCount = 1
    """Updates of a rank between averagings over ranks, at first; the paper's K."""
    then_every: PositiveCount = 16
    """The same later; the paper's H."""
    switch_fraction: Annotated[float, Field(ge=0.0, le=1.0)] = 0.5
    """Share of all minibatches after which `then_every` counts."""
    synchronous: bool | None = None
    """True: local SGD, of one updater, which waits for each averaging; post-local SGD where `average_every` is 1."""


@dataclass(frozen=True, kw_only=True)
class NormPlan(Record):
    """Norms of layers, which LARS and LAMB need: whether ranks share the work (PTO), and what was predicted."""

    shares: tuple[tuple[Name, ...], ...] | None = None
    """Parameters whose norms each rank computes for all, by rank; None: each rank computes all of them."""
    replicated_us: PredictedUs | None = None
    """Time if each rank computes all of them."""
    shared_us: PredictedUs | None = None
    """Time if they are shared: the largest share and the all-gather."""
    gather_us: PredictedUs | None = None
    message_bytes: Count | None = None
    bound_us: PredictedUs | None = None
    """No split has a largest share that takes less."""
    method: str | None = None

    @property
    def predicted_us(self) -> float | None:
        return self.replicated_us if self.shares is None else self.shared_us


@dataclass(frozen=True, kw_only=True)
class StepPlan(Record):
    """Whether ranks share the whole step (as ZeRO-1 does), and what was predicted of both ways.

    Shared, gradients are reduce-scattered, each rank updates its part of the weights and keeps the optimizer's state of
    that alone, and weights are all-gathered after the update.
    """

    sharded: bool
    owners: dict[Name, Count] | None = None
    """Rank that updates each of these whole parameters, as matrix optimizers need it; others are cut into equal parts.
    """
    weights: Name | None = None
    """`bfloat16`: float32 weights are gathered in it, and all ranks compute with what is rounded so, while each keeps
    its own part in float32 for the optimizer. None: weights are gathered as they are."""
    gather: Literal["step", "forward"] | None = None
    """Whether weights arrive before the optimizer's step ends (None, too), or during the next forward."""
    gathers: (
        Annotated[
            tuple[Annotated[tuple[Count, ...], Field(min_length=1)], ...], Field(min_length=1, max_length=MAX_BUCKETS)
        ]
        | None
    ) = None
    """Buckets of each gather during the next forward, by index, in the order in which the gathers are launched (any);
    every bucket once, those of a gather without a gap. None: one for each, in the reverse of the plan's order."""
    replicated_us: PredictedUs | None = None
    """The training step where every rank updates all weights."""
    sharded_us: PredictedUs | None = None
    gather_us: PredictedUs | None = None
    """The all-gathers of weights alone."""
    replicated_bytes: Count | None = None
    """Memory of weights, gradients, the optimizer's state and known activations on each rank, updated by every rank."""
    sharded_bytes: Count | None = None
    """The same where ranks share the step, with what the exchange needs."""
    memory_bytes: Count | None = None
    late_us: PredictedUs | None = None
    """Training step with weights gathered during the next forward."""


@dataclass(frozen=True, kw_only=True)
class OperatorPlan(Record):
    """The stateless operator of a matrix optimizer (Muon's Newton–Schulz): whether owners compute it, and what was
    predicted."""

    owners: dict[Name, Count] | None = None
    """Rank that computes the operator of each parameter for all; every rank computes those of others. None: every rank
    computes all of them."""
    gathers: Annotated[tuple[Annotated[tuple[Name, ...], Field(min_length=1)], ...], Field(min_length=1)] | None = None
    """Parameters of each message, in launch order; each rank computes its own of one message, sends them, and then
    computes those of the next. Those of `owners` once each; None: one message with all of them."""
    inside: Annotated[tuple[Count, ...], Field(min_length=1)] | None = None
    """Messages, by their place in `gathers`, that each node gathers by itself: the owner of their parameters is a local
    rank, of every node. None: all ranks gather all."""
    batched: Annotated[tuple[Name, ...], Field(min_length=2)] | None = None
    """Parameters whose owner computes those of one shape, group and message as one stack, where ranks find that its
    results are near enough to those of one at a time. None: every matrix alone."""
    tolerance: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """Largest difference of such results, relative to the largest element; None: all bits are equal."""
    replicated_us: PredictedUs | None = None
    """The update if each rank computes all operators."""
    shared_us: PredictedUs | None = None
    """The update with these owners and messages."""
    gather_us: PredictedUs | None = None
    """Time of the messages alone."""
    message_bytes: Count | None = None
    bound_us: PredictedUs | None = None
    """No choice of owners and messages makes the update shorter."""
    method: str | None = None

    @property
    def messages(self) -> tuple[tuple[str, ...], ...]:
        """Return the parameters of each message; none where nothing is shared."""
        return (self.gathers or (tuple(self.owners),)) if self.owners else ()

    @property
    def predicted_us(self) -> float | None:
        return self.shared_us if self.owners else self.replicated_us


@dataclass(frozen=True, kw_only=True)
class UpdatePlan(Record):
    """Division of the optimizer's step among ranks."""

    norms: NormPlan | None = None
    operator: OperatorPlan | None = None
    step: StepPlan | None = None


RankNumber = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,6})$")]


@dataclass(frozen=True, kw_only=True)
class PhasePlan(Record):
    """The plan of one phase of a training: a resolution, a part with compression."""

    plan: Plan
    until_step: PositiveCount | None = None
    """First step of the next phase, counted from 0; None: until `session.next_phase()`, or the end."""


@dataclass(frozen=True, kw_only=True)
class Plan(Document):
    """The contents of plan.json."""

    hint: ClassVar[str] = HINT
    schema: Literal["planner.plan/1"] = SCHEMA
    model: ModelReference
    world: PlanWorld
    accuracy: Accuracy
    interface: Literal["drop-in"] | Annotated[tuple[Name, ...], Field(min_length=1)] | None = None
    """Interfaces that the script has to know about, by name (see `runtime.plan.interfaces`); None is drop-in: every
    line that works with DDP works. Delay and local updaters are interfaces of their own, which `accuracy` permits."""
    buckets: Annotated[tuple[PlanBucket, ...], Field(max_length=MAX_BUCKETS)]
    """Buckets; at least one, but none in a plan for FSDP2 or in phases."""
    from_step: PositiveCount | None = None
    """First step of the run with compressed buckets, as `Session.step` counts; those before it are exact, in the same
    buckets. None: all steps are compressed."""
    phases: Annotated[tuple[PhasePlan, ...], Field(min_length=2, max_length=1000)] | None = None
    """Plans that follow each other, in place of buckets; `accuracy` and `interface` are those of all of them."""
    fsdp2: FullyShardPlan | None = None
    """Wrapping for `planner.fully_shard`, in place of buckets."""
    delay: DelaySpec | None = None
    outer: OuterSpec | None = None
    local_async: LocalAsyncSpec | None = None
    predicted: Prediction | None = None
    baselines: dict[str, Prediction] | None = None
    certificate: Certificate | None = None
    scaling: tuple[ScalingPoint, ...] | None = None
    """The strategies over numbers of ranks."""
    frontier: tuple[FrontierPoint, ...] | None = None
    """Speed over compression, from none to the most that was allowed; where lossy plans were asked for."""
    delays: tuple[DelayPoint, ...] | None = None
    """Speed over delay, for k from 1 to the most that was allowed; where relaxed plans were asked for."""
    updaters: tuple[UpdatersPoint, ...] | None = None
    """Speed over local updaters, for each number that was measured; where relaxed plans were asked for."""
    loading: Loading | None = None
    """Times of input, if the job has a dataset."""
    sources: dict[str, str] | None = None
    """Origins of the numbers, in words: `model`, `cluster`, `compute`, `communication`, `planner`."""
    fallback: Plan | None = None
    alternatives: dict[str, Plan] | None = None
    """Accuracy class → the best plan of that class; `bounded:all` → what `--compress all` would give."""
    phase_order: tuple[tuple[Count, Count], ...] | None = None
    """(bucket, phase) pairs in launch order, for collectives of several phases."""
    updates: UpdatePlan | None = None
    """Parts of the optimizer's step that ranks share; None: each does all of it."""
    accuracy_measured: AccuracyMeasured | None = None
    """Loss against DDP's on a job, where it was measured; no part of the digest."""
    shares: dict[RankNumber, PositiveCount] | None = None
    """Samples of each rank in a step, by rank; absent: ranks have equal shares, or the script decides."""
    largest_shares: dict[RankNumber, PositiveCount] | None = None
    """Largest share that each rank has memory for, by rank; absent: not known."""
    cuts: Annotated[tuple[Name, ...], Field(max_length=MAX_BUCKETS)] | None = None
    """Modules at which a graph of `torch.compile` is cut, by path, in the order of forward: a region begins at each.
    Executed with `attach(compile=...)`; absent: not decided."""
    notes: tuple[str, ...] = field(default=())
    """Notes of the planner for readers."""

    @property
    def first(self) -> Plan:
        """Return the plan of the first steps: that of the first phase, or the plan itself."""
        return self.all_phases[0]

    @property
    def all_phases(self) -> tuple[Plan, ...]:
        """Return the plans of its phases, in order; the plan itself where it has none."""
        return (self,) if self.phases is None else tuple(phase.plan for phase in self.phases)

    @property
    def gradients(self) -> tuple[str, ...]:
        """Return all gradient names in readiness order."""
        return tuple(name for bucket in self.buckets for name in bucket.gradients)

    @property
    def compresses(self) -> bool:
        """Return whether a bucket is compressed."""
        return not all(bucket.dense for bucket in self.buckets)

    def with_dense_buckets(self) -> Plan:
        """Return the plan with all buckets dense: for the synchronous steps that another mode begins with."""
        return replace(self, buckets=tuple(bucket.uncompressed() for bucket in self.buckets))

    def uncompressed(self) -> Plan:
        """Return the exact plan of the same buckets, without a prediction."""
        dense = self.with_dense_buckets()
        return replace(dense, accuracy="exact", from_step=None, fallback=None, predicted=None)

    @property
    def first_steps(self) -> int:
        """Return the number of exact steps that a run begins with."""
        warm_ups = [mode.warmup_steps for mode in (self.delay, self.outer) if mode is not None]
        return max([self.from_step or 0, *warm_ups])

    def without_first_steps(self) -> Plan:
        """Return the plan of its later steps alone: those that its prediction is for (for measuring)."""
        delay = None if self.delay is None else replace(self.delay, warmup_steps=0)
        outer = None if self.outer is None else replace(self.outer, warmup_steps=0)
        return replace(self, from_step=None, delay=delay, outer=outer)

    @property
    def synchronous(self) -> bool:
        """Return whether each step ends with the average on all ranks, and each rank updates all weights."""
        return self.delay is None and self.outer is None and self.local_async is None and not self.sharded

    @property
    def sharded(self) -> bool:
        """Return whether ranks share the optimizer's step."""
        return self.updates is not None and self.updates.step is not None and self.updates.step.sharded

    @property
    def shares_step(self) -> bool:
        """Return whether the optimizer step is sharded, over all ranks or inside nodes that are workers."""
        return self.sharded or (self.outer is not None and bool(self.outer.sharded_step))

    @property
    def owners(self) -> dict[str, int]:
        """Return the rank that updates each whole parameter of a shared step, where it has one."""
        step = self.updates.step if self.updates else None
        return (step.owners or {}) if step is not None and step.sharded else {}

    @property
    def rounds_weights(self) -> bool:
        """Return whether weights are gathered in fewer bits than the optimizer updates."""
        return self.updates is not None and self.updates.step is not None and self.updates.step.weights is not None

    @property
    def gathers(self) -> tuple[tuple[int, ...], ...] | None:
        """Return the buckets of each gather of weights during the next forward, in order; None if there are none."""
        step = self.updates.step if self.updates else None
        if step is None or not step.sharded or step.gather != "forward":
            return None
        return step.gathers or tuple((bucket,) for bucket in reversed(range(len(self.buckets))))

    @property
    def interfaces(self) -> tuple[str, ...]:
        """Return the interfaces that the script has to know about; none of a drop-in plan."""
        return () if self.interface is None or self.interface == DROP_IN else tuple(self.interface)

    def problem(self, path: str) -> str | None:
        """Return the first contradiction in interface, gathers, buckets or blocks of local updaters; None if none.

        Args:
            path: JSON path of the plan, which the message begins with.
        """
        checks = (
            interface_problem, gathers_problem, _buckets_problem, _from_step_problem, _shares_problem, _cuts_problem
        )  # fmt: skip
        problem = next(filter(None, (check(self, path) for check in checks)), None)
        if problem is None and self.outer is not None:
            problem = self.outer.problem_in(self.buckets, path)
        if problem is not None or self.local_async is None:
            return problem
        return blocks_problem(self.local_async, self.gradients, f"{path}.local_async.blocks")

    def to_document(self) -> dict[str, Any]:
        """Return plain JSON types, in the order in which people read them."""
        document = super().to_document()
        document.setdefault("delay", None)
        document.setdefault("local_async", None)
        if not self.notes:
            document.pop("notes", None)
        order = (
            "schema", "model", "world", "accuracy", "interface", "notes", "from_step", "buckets", "phases", "fsdp2",
            "delay", "outer",
        )  # fmt: skip
        return {key: document[key] for key in (*order, "local_async", *document) if key in document}

    def digest(self) -> str:
        """Return the SHA-256 of every field but `accuracy_measured`, as `sha256:<hex>`; equal on all ranks or nothing
        starts. What was measured of a plan does not change how it is executed.
        """
        # Sorted and without spaces: equal plans are one text, however their files are laid out.
        text = json.dumps(
            replace(self, accuracy_measured=None).to_document(),
            sort_keys=True,
            separators=(",", ":"),
            ensure_ascii=False,
        )
        return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def load_plan(path: str | Path) -> Plan:
    """Read and check plan.json.

    Args:
        path: path of the file; of a plan in phases also with the number of one, from 0: `plan.json@1`.

    Returns:
        The plan, or that of the phase.

    Raises:
        InputError: no such phase; not a plan of this schema; unknown, missing or wrong fields; ranks that nodes cannot
            have alike; an unknown interface, or a shared step that the interface does not name; gathers that are no
            partition of the buckets; a gradient in two buckets; groups for FSDP2 that no model could have; blocks of
            local updaters that are no partition of the gradients, each of them contiguous.
    """
    file, number = split_phase(path)
    plan = Plan.load(file)
    if number is None:
        return plan
    phases = plan.phases or ()
    if number >= len(phases):
        expected = f"a phase from 0 to {len(phases) - 1}" if phases else "one in phases"
        raise InputError(f"{path}: found a plan in {len(phases)} phases, expected {expected}; correct the number")
    return phases[number].plan


def split_phase(path: str | Path) -> tuple[str | Path, int | None]:
    """Return the file and the number of the phase of `plan.json@1`; None: the whole plan."""
    file, at, number = str(path).rpartition("@")
    if not (at and number.isascii() and number.isdecimal() and len(number) < 10) or Path(path).exists():
        return path, None
    return file, int(number)


def parse_plan(document: Any, where: str = "plan") -> Plan:
    """Check a parsed plan document.

    Args:
        document: the parsed JSON.
        where: name of the document in messages.

    Returns:
        The plan.

    Raises:
        InputError: as `load_plan`.
    """
    return Plan.parse(document, where)


def check_has_buckets(plan: Plan, where: str, cure: str) -> None:
    """Raise InputError where a plan is for FSDP2 or in phases, and what is asked of it is about buckets; `where` names
    the plan.
    """
    if plan.phases is not None:
        raise InputError(
            f"{where}: found a plan in {len(plan.phases)} phases, expected one with buckets; name one phase, from 0 "
            f"on, behind the file: plan.json@0"
        )
    if plan.fsdp2 is not None:
        raise InputError(f"{where}: found a plan for FSDP2, expected one with buckets; {cure}")


def _shares_problem(plan: Plan, path: str) -> str | None:
    """Return what is wrong where not each rank has one share, or one is larger than its memory."""
    ranks, largest = [str(rank) for rank in range(plan.world.ranks)], plan.largest_shares
    for name, shares in (("shares", plan.shares), ("largest_shares", largest)):
        if shares is not None and list(shares) != ranks:
            return (
                f"{path}.{name}: found shares of {len(shares)} ranks, expected one for each of 0 to {ranks[-1]}, in "
                f"order: plan again with --global-batch, or take them out"
            )
    over = next((rank for rank, share in (plan.shares or {}).items() if largest and share > largest[rank]), None)
    if plan.shares is None or largest is None or over is None:
        return None
    return (
        f"{path}.shares: found {plan.shares[over]} for rank {over}, expected at most {largest[over]}, for which it has "
        f"memory by largest_shares: plan again with --global-batch, or correct them"
    )


def _cuts_problem(plan: Plan, path: str) -> str | None:
    """Return which cut is there twice, or that a plan that no compiled graph follows has some."""
    for position, name in enumerate(plan.cuts or ()):
        if name in (plan.cuts or ())[:position]:
            return f"{path}.cuts[{position}]: found {name!r} again, expected each module once: take one out"
    if not plan.cuts or (plan.fsdp2 is None and plan.local_async is None):
        return None
    what = "fsdp2" if plan.fsdp2 is not None else "local_async"
    return f"{path}.cuts: found them with {what}, which compiles no graph; expected none: take them out"


def _from_step_problem(plan: Plan, path: str) -> str | None:
    """Return why `from_step` means nothing in a plan; None if it does, or if there is none."""
    if plan.from_step is None or (plan.compresses and plan.accuracy != "exact"):
        return None
    what = "an exact plan" if plan.accuracy == "exact" else "a plan that compresses no bucket"
    return (
        f"{path}.from_step: found {plan.from_step} in {what}, whose steps are all alike; expected it in a plan with "
        f"compressed buckets: take it out, or plan with --accuracy bounded"
    )


def _buckets_problem(plan: Plan, path: str) -> str | None:
    """Return what is wrong where a plan has not one of buckets, phases and a wrapping for FSDP2; or of the last two."""
    if plan.phases is not None:
        return _phases_problem(plan, plan.phases, path)
    if plan.fsdp2 is None:
        if not plan.buckets:
            return f"{path}.buckets: found [], expected at least 1 item; {HINT}"
        if (twice := repeated_item(bucket.gradients for bucket in plan.buckets)) is None:
            return None
        index, position, name, earlier = twice
        return (
            f"{path}.buckets[{index}].gradients[{position}]: found {name!r}, which is in bucket {earlier} already; "
            f"expected each gradient in exactly one bucket: take one out"
        )
    if plan.buckets:
        return f"{path}.buckets: found {len(plan.buckets)} beside fsdp2, expected []: {HINT}"
    for name in ("delay", "outer", "local_async", "updates", "fallback"):
        if getattr(plan, name) is not None:
            return f"{path}.{name}: found it beside fsdp2, expected null: FSDP2 exchanges gradients itself; take it out"
    if plan.fsdp2.reduce_dtype is not None and plan.accuracy == "exact":
        return (
            f"{path}.fsdp2.reduce_dtype: found {plan.fsdp2.reduce_dtype} in an exact plan, whose gradients it would "
            f"round; expected accuracy bounded: plan with --accuracy bounded, or take it out"
        )
    return plan.fsdp2.problem_on(plan.world.ranks, f"{path}.fsdp2")


def phase_problem(plan: Plan, number: int, first: Plan, ranks: int) -> str | None:
    """Return why a plan cannot be the phase of this number of a run with these ranks and this first plan, or None."""
    fingerprints = {plan.model.fingerprint, first.model.fingerprint} - {None}
    if plan.world.ranks != ranks or set(plan.gradients) != set(first.gradients) or len(fingerprints) > 1:
        return (
            "found another model or number of ranks than in the first phase, expected the same model on the same "
            "ranks, with other inputs; profile it again"
        )
    what = "local updaters, which are processes of their own for a whole run" if plan.local_async is not None else None
    if plan.delay is not None and number:
        what = "a delay, whose warm-up begins with a run, behind the first phase"
    return what and f"found {what}; expected none: plan with --accuracy exact or bounded"


def _phases_problem(plan: Plan, phases: Sequence[PhasePlan], path: str) -> str | None:
    for name in ("buckets", "fsdp2", "delay", "outer", "local_async", "updates", "fallback"):
        if getattr(plan, name):
            return f"{path}.{name}: found it with phases, which have their own; take it out"
    before = 0
    for number, phase in enumerate(phases):
        here, of = f"{path}.phases[{number}]", phase.plan
        if of.phases is not None or of.fsdp2 is not None:
            return f"{here}.plan: found no plan with buckets, expected one: {HINT}"
        if problem := phase_problem(of, number, phases[0].plan, plan.world.ranks):
            return f"{here}.plan: {problem}"
        if get_args(Accuracy).index(of.accuracy) > get_args(Accuracy).index(plan.accuracy):
            return f"{here}.plan.accuracy: found {of.accuracy}, expected at most the plan's own, {plan.accuracy}"
        if missing := sorted(set(of.interfaces) - set(plan.interfaces)):
            return f"{path}.interface: found no {missing[0]}, which phase {number} needs; add it"
        if number == len(phases) - 1:
            if phase.until_step is not None:
                return f"{here}.until_step: found {phase.until_step} in the last phase, expected none; take it out"
        elif phase.until_step is not None:
            if phase.until_step <= before:
                return f"{here}.until_step: found {phase.until_step}, expected more than {before}, where it begins"
            before = phase.until_step
    return None


def interface_problem(plan: Plan, path: str = "the plan") -> str | None:
    """Return why the interface is wrong, or lacks what the plan does to a script; None if it is right.

    A lossy plan's `fallback` may take its place in a run, so the plan has to name the fallback's interface, too.
    """
    for position, name in enumerate(plan.interfaces):
        if (problem := name_problem(name)) is not None:
            return f"{path}.interface[{position}]: {problem}: {HINT}"
    if plan.rounds_weights and BFLOAT16_WEIGHTS not in plan.interfaces:
        return (
            f"{path}.interface: found none of {BFLOAT16_WEIGHTS}, beside {path}.updates.step.weights, by which the "
            f"model's weights are rounded while attached; expected it beside {SHARDED_STEP}: add that if the script is "
            f"made for it ({page('concepts/sharded-step')}), or leave weights out"
        )
    both = {path: plan} | ({} if plan.fallback is None else {f"{path}.fallback": plan.fallback})
    asking = {
        f"{where}.{'updates.step' if one.sharded else 'outer.sharded_step'}": LATE_GATHER
        if one.gathers
        else SHARDED_STEP
        for where, one in both.items()
        if one.shares_step
    }
    where, name = next(
        ((where, name) for where, name in asking.items() if name not in granted(plan.interfaces)), ("", "")
    )
    if not name:
        return None
    drop_in = DROP_IN if plan.interface is not None else f"no interface, so {DROP_IN}"
    what, how = _ASKING[name]
    return (
        f"{path}.interface: found {', '.join(plan.interfaces) or drop_in}, beside {where}, where {what}; "
        f'expected ["{name}"]: add that if the script is made for it, or make the plan again with `planner optimize`, '
        f"which {how} with --allow {name} alone"
    )


_ASKING = {
    SHARDED_STEP: (
        "ranks share the optimizer's step, so that lines which work with DDP do not (p.grad.abs(), "
        "optimizer.state_dict() on one rank)",
        "shares the step",
    ),
    LATE_GATHER: (
        "weights come beside the next forward, so that code which torch does not see has to wait for them",
        "gathers so",
    ),
}
"""Interface → what a plan that needs it does to a script, and what `planner optimize` does."""


def gathers_problem(plan: Plan, path: str = "the plan") -> str | None:
    """Return why weights cannot be gathered as `updates.step` says; None if they can."""
    step = plan.updates.step if plan.updates else None
    if step is None:
        return None
    where = f"{path}.updates.step"
    if step.gather == "forward" and not step.sharded:
        return f'{where}.gather: found "forward" beside "sharded": false; expected "sharded": true: {HINT}'
    if step.gathers is None:
        return None
    if step.gather != "forward":
        return (
            f'{where}.gathers: found groups of buckets, but weights are gathered inside the step; expected "gather": '
            f'"forward" beside them: {HINT}'
        )
    count = len(plan.buckets)
    for position, group in enumerate(step.gathers):
        if max(group) >= count:
            return f"{where}.gathers[{position}]: found bucket {max(group)}, expected one of {count}: {HINT}"
        if (between := _first_gap(group)) is not None:
            return (
                f"{where}.gathers[{position}]: found buckets {min(group)} and {max(group)} without bucket {between}, "
                f"which lies between them; expected buckets that follow one another: gather {between} with them, or "
                f"make two gathers of them"
            )
    if (twice := repeated_item(step.gathers)) is not None:
        position, _, bucket, earlier = twice
        return (
            f"{where}.gathers[{position}]: found bucket {bucket}, which is in gather {earlier} already; expected each "
            f"bucket in exactly one gather: take one out"
        )
    missing = set(range(count)).difference(*step.gathers)
    if not missing:
        return None
    return f"{where}.gathers: found none with bucket {min(missing)}, expected each bucket in exactly one: add it to one"


def _first_gap(places: Iterable[int]) -> int | None:
    """Return the first number that lies between others and is none of them; None if they follow one another."""
    return next((before + 1 for before, after in pairwise(sorted(places)) if after > before + 1), None)


def blocks_problem(spec: LocalAsyncSpec, gradients: Sequence[str], where: str) -> str | None:
    """Return why blocks are no partition of the gradients, given in readiness order, into runs of them; None if they
    are one.
    """
    if spec.blocks is None:
        return None
    if len(spec.blocks) > spec.updaters:
        return (
            f"{where}: found {len(spec.blocks)} blocks for {spec.updaters} updaters, expected at most as many, or "
            f"nobody has some for its own: join blocks or add updaters"
        )
    if (problem := partition_problem(spec.blocks, gradients, where, "block")) is not None:
        return problem
    place = {name: position for position, name in enumerate(gradients)}
    for index, block in enumerate(spec.blocks):
        places = [place[name] for name in block]
        if (between := _first_gap(places)) is not None:
            return (
                f"{where}[{index}]: found {gradients[min(places)]!r} and {gradients[max(places)]!r} without "
                f"{gradients[between]!r}, which becomes ready between them; expected gradients that become ready one "
                f"after the other, as the buckets have them: {HINT}"
            )
    return None
