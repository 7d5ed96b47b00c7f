"""Work of one step of delayed synchronization (SSD-SGD) on compute and network."""

from __future__ import annotations

from dataclasses import dataclass, replace

from planner.cost.ssd import Terms
from planner.documents.profile import Line
from planner.ir import Bucket, Schedule
from planner.model.codecs import codec_of
from planner.model.problem import Problem
from planner.model.spending import spending


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """Work of one step on compute and network, each alone on the machine."""

    forward_us: float
    ready_us: tuple[float, ...]
    """Ready time of each bucket, from the start of forward."""
    push_us: tuple[float, ...]
    pull_us: tuple[float, ...]
    factors: tuple[tuple[float, float], ...]
    owner_us: float
    """The update of a rank's own part of the weights."""
    local_update_us: float
    pack_us: tuple[float, ...] = ()
    """Compute time of packing each bucket; empty: none."""
    take_us: float = 0.0
    """Compute time of taking over pulled weights, before the local update."""
    scatter_us: tuple[float, ...] = ()
    """Intra-node reduce-scatter of each bucket, where nodes have several ranks."""
    gather_us: tuple[float, ...] = ()
    """The intra-node all-gather of its average."""
    spread_us: tuple[float, ...] = ()
    """The intra-node all-gather of weights that were pulled."""

    @classmethod
    def of(
        cls, problem: Problem, schedule: Schedule, local_update_us: float | None = None, servers: int = 0
    ) -> StepWork:
        """Return the work of a schedule.

        Args:
            problem: the step.
            schedule: its buckets.
            local_update_us: replaces the cluster's.
            servers: number of workers that own weights; 0: all. The link of one of fewer servers receives as many times
                the bytes, and its update takes as many times as long, as there are workers for each server.
        """
        workers = problem.ranks // problem.ranks_per_worker
        load = workers / servers if servers else 1.0
        push, pull = (half.curve.of_share(load) for half in (problem.push, problem.pull))
        members = [bucket.gradients for bucket in schedule.buckets]
        packs_us = [_pack_us(problem, bucket) for bucket in schedule.buckets]
        pushes_us = problem.bucket_cost_us(members, push)
        for index, bucket in enumerate(schedule.buckets):
            if not bucket.whole:  # with what owners do with selected elements
                unpack_us = spending(problem, bucket).after_us / problem.ranks
                pushes_us[index] = push.at(codec_of(bucket).pushed_bytes(problem, bucket)) + unpack_us
        work = cls(
            forward_us=problem.forward_us,
            ready_us=tuple(problem.ready_list_us[max(gradients)] for gradients in members),
            push_us=tuple(pushes_us),
            pull_us=tuple(problem.bucket_cost_us(members, pull)),
            factors=tuple(problem.bucket_factors(members)),
            owner_us=problem.update_us / problem.ranks * load,
            local_update_us=problem.local_update_us if local_update_us is None else local_update_us,
            take_us=known_us(problem.cost.cluster.pull_take, problem.size_bytes.sum()),
        )
        costs = problem.node_costs
        if costs is None:
            return replace(work, pack_us=tuple(packs_us) if any(packs_us) else ())
        scatters_us = problem.bucket_cost_us(members, costs.scatter.times_us)
        gathers_us = tuple(problem.bucket_cost_us(members, costs.gather.times_us))
        return replace(
            work,
            scatter_us=tuple(map(sum, zip(scatters_us, packs_us, strict=True))),  # packed behind it
            gather_us=gathers_us,
            spread_us=gathers_us,
        )

    @property
    def averaged_us(self) -> float:
        """Time at which a step's gradients are averaged inside the node and backward has ended."""
        end_us = 0.0
        for index in sorted(range(len(self.scatter_us)), key=lambda index: self.ready_us[index]):
            end_us = max(end_us, self.ready_us[index]) + self.scatter_us[index] + self.gather_us[index]
        return max(end_us, max(self.ready_us) + sum(self.pack_us))

    @property
    def compute_us(self) -> float:
        """Length of a step without communication between workers."""
        return self.averaged_us + self.local_update_us

    @property
    def _first_us(self) -> float:
        """Time at which the first bucket has been packed."""
        first = min(range(len(self.ready_us)), key=lambda index: self.ready_us[index])
        return self.ready_us[first] + (self.pack_us[first] if self.pack_us else 0.0)

    @property
    def terms(self) -> Terms:
        """Terms of Eq. 4; its sync is a part of the reduce-scatter here, and owners update after each."""
        return Terms(
            forward_us=self.forward_us,
            backward_us=self.averaged_us - self.forward_us,
            first_us=self._first_us - self.forward_us,
            push_us=sum(self.push_us) + self.owner_us,
            exchange_us=sum(self.push_us) + self.owner_us + sum(self.pull_us) + sum(self.spread_us[-1:]),
            local_update_us=self.local_update_us,
        )


def _pack_us(problem: Problem, bucket: Bucket) -> float:
    if not bucket.whole:
        return spending(problem, bucket).before_us / problem.ranks_per_worker
    size_bytes = problem.size_bytes[list(bucket.gradients)].sum()
    return known_us(problem.cost.cluster.push_pack, size_bytes / problem.ranks_per_worker)


def known_us(line: Line | None, size_bytes: float) -> float:
    """Return the time of a rank's own work on a number of bytes, in microseconds; 0 where it was not measured."""
    return 0.0 if line is None else line.at(float(size_bytes))
