"""Records of what a plan says about itself: predicted times, distance from the optimum, alternatives. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal

from pydantic import Field

from runtime.plan.strict_json import Count, Name, PositiveCount, PredictedUs, Ranks, Record, TimeUs
from runtime.plan.timeline import computes


@dataclass(frozen=True, kw_only=True)
class PredictedTask(Record):
    """One bar of the predicted timeline."""

    task: str
    resource: str
    start_us: PredictedUs
    end_us: PredictedUs
    bucket: Count | None = None
    ready_us: PredictedUs | None = None
    tasks: Annotated[int, Field(ge=1, le=2**53)] | None = None
    """Number of neighbouring tasks that this bar stands for; absent: one."""
    gradients: Count | None = None
    """Their number, in timelines of baselines, whose buckets the plan does not hold."""
    first_gradient: Count | None = None
    """Index of the first of them in the plan's order, where they are consecutive."""
    size_bytes: Count | None = None
    step: Count | None = None
    """Step that the task belongs to, of those that the timeline shows, if steps overlap."""
    critical: bool | None = None
    """Whether the length of overlapping steps comes from it."""


@dataclass(frozen=True, kw_only=True)
class Prediction(Record):
    """Prediction of one step by the simulator; times from the start of forward."""

    iteration_us: PredictedUs
    forward_us: PredictedUs | None = None
    backward_us: PredictedUs | None = None
    update_us: PredictedUs | None = None
    exposed_us: PredictedUs | None = None
    compute_spread_us: PredictedUs | None = None
    """Distance of the quartiles of forward, backward and update together while they were profiled: the
    prediction is uncertain by half of it, either way. Absent where that is not known."""
    buckets: Count | None = None
    extrapolated: bool | None = None
    """True where costs were derived for another number of ranks than was measured."""
    timeline: tuple[PredictedTask, ...] | None = None

    def accumulated_us(self, micro_batches: int, exchanged: int = 1, iteration_us: float | None = None) -> float | None:
        """Return how long a step of the optimizer takes with gradient accumulation, in microseconds: all micro-batches
        and one update. None where the parts of the step are not known.

        Args:
            micro_batches: their number, each as large as the batch that was profiled.
            exchanged: how many of them exchange gradients (backward outside of `no_sync`).
            iteration_us: the step with one micro-batch, of another schedule of the same work; default: this one's.
        """
        iteration_us = self.iteration_us if iteration_us is None else iteration_us
        if micro_batches == 1:
            return iteration_us
        if self.forward_us is None or self.backward_us is None or self.update_us is None:
            return None
        alone_us = (micro_batches - exchanged) * (self.forward_us + self.backward_us)
        return exchanged * (iteration_us - self.update_us) + alone_us + self.update_us

    def accumulated(self, micro_batches: int, exchanged: int = 1) -> Prediction | None:
        """Return the whole prediction of such a step, drawn as measured ones are: the last micro-batch in full."""
        whole_us = self.accumulated_us(micro_batches, exchanged)
        if micro_batches == 1 or whole_us is None or self.forward_us is None or self.backward_us is None:
            return self if micro_batches == 1 else None
        before, offset_us = micro_batches - 1, whole_us - self.iteration_us
        earlier, start_us = [], 0.0
        for name, end_us in (("forward", before * self.forward_us), ("backward", offset_us)):
            task = f"{name} of {before} micro-batches before"
            earlier.append(PredictedTask(task=task, resource="compute", start_us=start_us, end_us=end_us))
            start_us = end_us
        later = [
            replace(
                task, start_us=task.start_us + offset_us, end_us=task.end_us + offset_us,
                ready_us=None if task.ready_us is None else task.ready_us + offset_us,
            )
            for task in self.timeline or ()
        ]  # fmt: skip
        return replace(
            self,
            iteration_us=whole_us,
            forward_us=micro_batches * self.forward_us,
            backward_us=micro_batches * self.backward_us,
            exposed_us=None if self.exposed_us is None else exchanged * self.exposed_us,
            compute_spread_us=None if self.compute_spread_us is None else micro_batches * self.compute_spread_us,
            timeline=None if self.timeline is None else (*earlier, *later),
        )

    def bucket_times(self, count: int) -> list[tuple[float, float] | None]:
        """(start_us, end_us) of the communication of each of `count` buckets; None where it is not known.

        Tasks without `bucket` are taken in launch order, as in plans written by hand. Where steps overlap it is the
        bucket's first push.
        """
        sent = [
            task for task in self.timeline or ()
            if not computes(task.resource) and not (task.step is not None and task.task.endswith("all_gather"))
        ]  # fmt: skip
        times: list[tuple[float, float] | None] = [None] * count
        for place, task in enumerate(sent):
            index = place if task.bucket is None else task.bucket
            if index < count and (task.step is None or times[index] is None):
                start_us, end_us = times[index] or (task.start_us, task.end_us)
                times[index] = min(start_us, task.start_us), max(end_us, task.end_us)
        return times


@dataclass(frozen=True, kw_only=True)
class ScalingPoint(Record):
    """Times of strategies on another number of ranks of the same cluster."""

    ranks: Ranks
    nodes: Ranks | None = None
    basis: Literal["measured", "formula", "extrapolated"]
    """Origin of costs: measured on so many ranks, computed from link constants, or derived from a measurement
    on another number of ranks."""
    source: str | None = None
    iteration_us: dict[Name, PredictedUs]
    """Strategy → predicted time of one step; `optimal` is decided anew for each number of ranks."""


@dataclass(frozen=True, kw_only=True)
class FrontierPoint(Record):
    """Best plan found whose layers are compressed at most so much."""

    max_ratio: Annotated[float, Field(ge=1.0)]
    """The largest ratio of a layer's elements to those that are sent, or of its bytes, as allowed; 1: nothing is left
    out."""
    dtype: Name | None = None
    """Dtype on the wire, if the most that is allowed is that all elements are sent in fewer bytes."""
    algorithm: Name | None = None
    rank: Annotated[int, Field(ge=1)] | None = None
    """Rank of products in place of matrices, if that is the most that is allowed."""
    iteration_us: PredictedUs
    buckets: Count
    sparse_buckets: Count
    narrow_buckets: Count = 0
    low_rank_buckets: Count = 0
    sent_share: Annotated[float, Field(ge=0.0, le=1.0)]


@dataclass(frozen=True, kw_only=True)
class DelayPoint(Record):
    """Prediction for a delay of k steps, with the best buckets found for it."""

    steps: PositiveCount
    iteration_us: PredictedUs
    """The mean step in the steady state, simulated."""
    closed_form_us: PredictedUs
    """The same by SSD-SGD's Eq. 4."""
    case: Annotated[int, Field(ge=1, le=3)]
    """Case of Eq. 4: 1, pulls are late; 2, the network is never idle; 3, nothing is exposed."""
    buckets: Count


@dataclass(frozen=True, kw_only=True)
class UpdatersPoint(Record):
    """Prediction for a number of local updaters."""

    updaters: PositiveCount
    lap_us: PredictedUs
    """A rank's mean time for a minibatch, where every minibatch updates the full model (LAP-SGD)."""
    lpp_us: PredictedUs
    """The same with blocks (LPP-SGD)."""
    blocks: PositiveCount
    saved_backwards: Annotated[float, Field(ge=0.0)]
    """Number of full backwards that one partial backward of each updater saves."""
    closed_form: Annotated[float, Field(ge=0.0)]
    """The same for blocks that cost alike: (updaters − 1)/2, as the paper counts."""
    fits: bool = True
    """Whether so many updaters fit into the memory, as far as that is known."""


@dataclass(frozen=True)
class SolverBound(Record):
    """Bound of the step that a solver proved, apart from the certificate's own bound."""

    name: str
    bound_us: PredictedUs
    proven: bool
    """Whether the bound is the optimum of its model, up to rounding."""
    limit: Annotated[float, Field(gt=0.0)]
    """Deterministic time that it was allowed, in its own unit."""


@dataclass(frozen=True, kw_only=True)
class Certificate(Record):
    """Distance from the optimum: under the cost model no schedule of this class takes less than `lower_bound_us`."""

    method: str
    lower_bound_us: PredictedUs
    gap: Annotated[float, Field(ge=0.0)]
    """Relative distance: iteration_us / lower_bound_us − 1."""
    note: str | None = None
    solver: SolverBound | None = None
    """The bound of `planner optimize --solver`; `lower_bound_us` is the highest that is known."""


@dataclass(frozen=True, kw_only=True)
class Loading(Record):
    """Times of loading the job's samples, by one process of each rank, all ranks at once."""

    samples: PositiveCount
    """Number of samples in the dataset."""
    batch_samples: PositiveCount
    """Number of samples of each rank and step."""
    cold_us: TimeUs
    """One sample from its storage, decoded; the median on the slowest rank."""
    disk_us: TimeUs
    """One from `runtime.datacache` on the local disk, decoded."""
    memory_us: TimeUs
    """One from the memory of the node."""
    raw_bytes: PositiveCount
    """Bytes of one sample as it is kept on the disk."""
    decoded_bytes: PositiveCount
    """Bytes of one sample as it is kept in memory; the mean."""
    nodes: Ranks
    memory_available_bytes: Count
    """Free memory of the node that has least."""
