"""Shares of the global batch by the speed and memory of ranks (`planner optimize --global-batch`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from planner.documents.accelerators import ROOM
from planner.documents.estimate import on_accelerator, scale_times
from planner.documents.profile import Cluster, Profile
from planner.documents.speeds import on_rank, rank_times
from planner.documents.text import mib, ms
from planner.model.modes import sharded
from planner.model.problem import make_problem
from planner.search.shares import SharedBatch, share_batch
from runtime.errors import InputError

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Memory of ranks, in bytes."""

    fixed: int
    """Weights, gradients and the optimizer's state, which each rank has."""
    sample: NDArray[np.float64]
    """Activations of one sample. Shape (ranks,)."""
    limit: NDArray[np.float64]
    """Memory that each rank may fill. Shape (ranks,)."""
    batch: int
    """Known activations of the batch of the profile."""
    held: int
    """Number of samples that each rank was seen to hold."""

    @property
    def most(self) -> NDArray[np.int64]:
        """Return the largest share of each rank; below 1 if it holds no sample."""
        return np.maximum((self.limit - self.fixed) // self.sample, self.held).astype(np.int64)

    def tightest(self, shares: NDArray[np.int64]) -> int:
        """Return the rank that needs most of what it may fill."""
        return int(((self.fixed + shares * self.sample) / self.limit).argmax())

    def __str__(self) -> str:
        """Return the memory of the rank with the smallest share, in words."""
        rank = int(self.most.argmin())
        return (
            f"rank {rank} may fill {mib(int(self.limit[rank]))}, of which weights, gradients and the optimizer's state "
            f"take {mib(self.fixed)} and each sample {mib(int(self.sample[rank]))}"
        )


@dataclass(frozen=True, kw_only=True)
class ShareChoice:
    """Shares, and the step that the slowest rank makes with them."""

    batch: SharedBatch
    profile: Profile
    """Profile of the rank that computes for longest."""
    cluster: Cluster
    """The cluster, without speeds: they are in the profile."""
    largest: dict[str, int] | None
    """Largest share that each rank has memory for, as plan.json has them; None: not known."""
    equal: Profile
    """Profile of the slowest rank with an equal share."""

    @property
    def shares(self) -> dict[str, int]:
        """Shares as plan.json has them."""
        return _by_rank(self.batch.shares)

    def note(self, shared_us: float, equal_us: float) -> str:
        """Return what the shares gain, in words; the arguments are predicted steps, in microseconds."""
        shares = self.batch.shares
        held = self.largest is None or len(shares) * min(self.largest.values()) >= sum(shares)
        return (
            f"shares of {min(shares)} to {max(shares)} of {sum(shares)} samples: the slowest rank computes for "
            f"{ms(self.batch.slowest_us)}, and no shares make that less than {ms(self.batch.bound_us)}; a step "
            f"of {ms(shared_us)}, with equal shares{'' if held else ', too large for the memory of a rank,'} "
            f"{ms(equal_us)}; the script takes its share from session.share or planner.ShareSampler, and weighs by "
            f"session.weight(n)"
        )


def _by_rank(shares: Sequence[int]) -> dict[str, int]:
    return {str(rank): share for rank, share in enumerate(shares)}


def choose_shares(profile: Profile, cluster: Cluster, total: int, memory_mib: float | None = None) -> ShareChoice:
    """Return the shares of which the slowest rank takes least time, by the speeds and the memory of ranks.

    A step's time besides its samples is the optimizer's, and the part of forward and backward that does not grow with
    them, where that was measured. Messages take as long with any shares.

    Args:
        profile: the step of a rank of speed 1; says how many samples it has.
        cluster: the ranks, their speeds and memory.
        total: samples of all ranks.
        memory_mib: most memory of a rank, for weights, gradients, the optimizer's state and activations; default: what
            cluster or profile have, if it is known.

    Raises:
        InputError: fewer samples than ranks, more than memory holds, or a profile that does not say its batch.
    """
    measured = profile.world.batch_per_rank
    if measured is None:
        raise InputError(
            "--global-batch: found a profile without world.batch_per_rank, expected the samples of its step: profile a "
            "job whose batch has samples (TrainingJob(batch_samples=…)), or write it into the profile"
        )
    if total < cluster.ranks:
        raise InputError(
            f"--global-batch: found {total}, fewer samples than the {cluster.ranks} ranks; expected at least one for "
            f"each: give more, or use fewer ranks"
        )
    usual = on_accelerator(profile, cluster)
    times = rank_times(usual, cluster)
    sample_us = times.batch_us / measured
    if not sample_us.all():
        raise InputError("--global-batch: found a profile without compute times, by which nothing can be shared")
    memory = _memory(profile, cluster, measured, memory_mib)
    most = np.full(cluster.ranks, total - cluster.ranks + 1, dtype=np.int64)
    if memory is not None:
        most = np.minimum(most, memory.most)
        if most.sum() < total:
            raise InputError(
                f"--global-batch: found {total} samples, of which a rank has memory for {most.min()}, expected at most "
                f"{most.sum()} on {cluster.ranks} ranks; {memory}: give fewer, or more memory (--max-memory-mib, "
                f"memory_mib of the cluster)"
            )
    found = share_batch(total, times.fixed_us + times.update_us, sample_us, most)
    shares, equal = np.array(found.shares), total / cluster.ranks / measured
    last, slowest = int(times.step_us(shares / measured).argmax()), int(times.step_us(equal).argmax())
    # Times are of the rank that ends last, and memory of the one that has least left.
    limit_mib: tuple[float, ...] | None = None
    kept = float(shares.max() / measured)
    if memory is not None:
        rank = memory.tightest(shares)
        limit_mib = (float(memory.limit[rank]) / 2**20,)
        kept = float(shares[rank] * memory.sample[rank] / memory.batch) if memory.batch else kept
    return ShareChoice(
        batch=found,
        largest=None if memory is None else _by_rank(most.tolist()),
        profile=_of_batch(on_rank(profile, cluster, last, float(shares[last] / measured)), kept),
        cluster=replace(cluster, speed=None, memory_mib=limit_mib),
        equal=_of_batch(on_rank(profile, cluster, slowest, equal), equal),
    )


def _of_batch(profile: Profile, factor: float) -> Profile:
    """Return the profile with activations of a batch `factor` times as large; times stay."""
    factors = dict.fromkeys(("activation_bytes", "checkpoint_bytes"), factor)
    return replace(
        profile, compute=scale_times(profile.compute, factors), layers=scale_times(profile.layers, factors)
    )  # fmt: skip


def _memory(profile: Profile, cluster: Cluster, measured: int, given_mib: float | None) -> RankMemory | None:
    """Return the memory of ranks; None if it limits no share. What was measured on each rank counts on these ranks.

    Args:
        profile: the step of a rank.
        cluster: the ranks.
        measured: samples of the profile's batch.
        given_mib: most memory of a rank.

    Raises:
        InputError: there is no memory for one sample, or it is stated, and what a sample takes is not known.
    """
    problem, count = make_problem(profile, cluster), cluster.ranks
    (fixed, batch), usual = sharded.memory_parts(problem), problem.profile
    ranks, stated = usual.compute.by_rank or (), cluster.memory_mib
    samples = [rank.sample_bytes or batch / measured for rank in ranks]
    if len(samples) != count:
        samples = [max(samples, default=batch / measured)] * count
    own = [rank.memory_bytes or 0 for rank in ranks]
    of_these = stated is None and cluster.speed is None and len(own) == count and all(own)
    known = cluster.of_ranks(stated) if stated is not None else [one / 2**20 for one in own] if of_these else None
    limit = np.full(count, np.inf) if known is None else ROOM * 2**20 * np.array(known)
    if given_mib is not None:
        limit = np.minimum(limit, given_mib * 2**20)
    elif known is None and usual.world.memory_bytes is not None:
        limit = np.full(count, ROOM * usual.world.memory_bytes)
    if np.isinf(limit).any():
        return None
    where = "--max-memory-mib" if given_mib is not None else "memory_mib of the cluster" if stated is not None else None
    if fixed is None or not all(samples):
        if where is None:
            return None
        raise InputError(
            f"{where}: found a profile without the optimizer's state or activations, so that memory limits no share; "
            f"expected both: profile again, or leave it out"
        )
    held = measured if of_these and given_mib is None else 0
    memory = RankMemory(fixed=fixed, batch=batch, sample=np.array(samples), limit=limit, held=held)
    if memory.most.min() >= 1:
        return memory
    if where is None:  # notes report that a rank needs more than it has
        return None
    raise InputError(
        f"{where}: found too little, in which no sample fits next to the rest: {memory}; expected memory for a sample "
        f"of each rank: give more, or leave that rank out"
    )
