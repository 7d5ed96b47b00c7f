"""Shares of the global batch by the speed and memory of ranks (`planner optimize --global-batch`)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from planner.documents.estimate import on_accelerator, scale_times
from planner.documents.profile import Cluster, Profile
from planner.documents.speeds import on_rank, rank_times
from planner.documents.text import ms
from planner.model.modes import sharded
from planner.model.problem import make_problem
from planner.search.shares import SharedBatch, share_batch
from runtime.errors import InputError


@dataclass(frozen=True, kw_only=True)
class ShareChoice:
    """Shares, and the step that the slowest rank makes with them."""

    batch: SharedBatch
    profile: Profile
    """Profile of the rank that computes for longest."""
    cluster: Cluster
    """The cluster, without speeds: they are in the profile."""
    largest: int | None
    """Largest share that a rank has memory for; None: not known."""
    equal: Profile
    """Profile of the slowest rank with an equal share."""

    @property
    def shares(self) -> dict[str, int]:
        """Shares as plan.json has them."""
        return {str(rank): share for rank, share in enumerate(self.batch.shares)}

    def note(self, shared_us: float, equal_us: float) -> str:
        """Return what the shares gain, in words; the arguments are predicted steps, in microseconds."""
        shares = self.batch.shares
        return (
            f"shares of {min(shares)} to {max(shares)} of {sum(shares)} samples: the slowest rank computes for "
            f"{ms(self.batch.slowest_us)}, and no shares make that less than {ms(self.batch.bound_us)}; a step "
            f"of {ms(shared_us)}, with equal shares {ms(equal_us)}; the script takes its share from "
            f"session.share or planner.ShareSampler, and weighs by session.weight(n)"
        )


def choose_shares(profile: Profile, cluster: Cluster, total: int, memory_mib: float | None = None) -> ShareChoice:
    """Return the shares of which the slowest rank takes least time, by the cluster's speeds.

    A step's time besides its samples is the optimizer's, and the part of forward and backward that does not grow with
    them, where that was measured. Messages take as long with any shares.

    Args:
        profile: the step of a rank of speed 1; says how many samples it has.
        cluster: the ranks and their speeds.
        total: samples of all ranks.
        memory_mib: memory of a rank, for weights, gradients, the optimizer's state and activations; default: what the
            profile has, if it is known.

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
    largest = _largest(profile, cluster, measured, memory_mib)
    unlimited = total - cluster.ranks + 1
    most = np.full(cluster.ranks, unlimited if largest is None else min(unlimited, largest), dtype=np.int64)
    if most.sum() < total:
        raise InputError(
            f"--global-batch: found {total} samples, of which a rank has memory for {int(most[0])}, expected at most "
            f"{int(most.sum())} on {cluster.ranks} ranks: give fewer, or raise --max-memory-mib"
        )
    found = share_batch(total, times.fixed_us + times.update_us, sample_us, most)
    shares = np.array(found.shares) / measured
    equal = total / cluster.ranks / measured
    last, slowest = int(times.step_us(shares).argmax()), int(times.step_us(equal).argmax())
    return ShareChoice(
        batch=found,
        largest=largest,
        # Times are of the rank that ends last, and memory of the one that needs most.
        profile=_of_batch(on_rank(profile, cluster, last, float(shares[last])), float(shares.max())),
        cluster=replace(cluster, speed=None),
        equal=_of_batch(on_rank(profile, cluster, slowest, equal), equal),
    )


def _of_batch(profile: Profile, factor: float) -> Profile:
    """Return the profile with activations of a batch `factor` times as large; times stay."""
    factors = dict.fromkeys(("activation_bytes", "checkpoint_bytes"), factor)
    return replace(
        profile, compute=scale_times(profile.compute, factors), layers=scale_times(profile.layers, factors)
    )  # fmt: skip


def _largest(profile: Profile, cluster: Cluster, measured: int, memory_mib: float | None) -> int | None:
    """Return the largest share that the memory of a rank holds; None where that is not known. Raises InputError."""
    problem = make_problem(profile, cluster)
    needed, known = sharded.memory_parts(problem)
    memory_bytes = sharded.memory_bytes(problem, memory_mib or 0.0)
    fits = 0 if needed is None or not known else int(((memory_bytes or 0) - needed) // (known / measured))
    if fits >= 1:
        return fits
    if memory_mib is None:  # where it is known, notes say that a rank needs more than it has
        return None
    if needed is None or not known:
        raise InputError(
            "--max-memory-mib: found a profile without the optimizer's state or activations, so that memory limits no "
            "share; expected both: profile again, or leave it out"
        )
    raise InputError(
        f"--max-memory-mib: found {memory_mib:g}, in which no sample fits next to {needed / 2**20:.0f} MiB for "
        f"weights, gradients and the optimizer's state; expected more memory"
    )
