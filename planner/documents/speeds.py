"""Compute times of ranks that are not equally fast, or have batches of other sizes than the profile's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from planner.documents.estimate import scale_profile
from planner.documents.profile import Cluster, Profile

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True)
class RankTimes:
    """Compute times of a step on each rank, in microseconds. Shape (ranks,)."""

    fixed_us: NDArray[np.float64]
    """Part of forward and backward that does not grow with the batch."""
    batch_us: NDArray[np.float64]
    """The part that does, for the batch of the profile."""
    update_us: NDArray[np.float64]

    def step_us(self, batches: float | NDArray[np.float64] = 1.0) -> NDArray[np.float64]:
        """Return the time of a step on each rank; `batches`: the sizes of batches over that of the profile."""
        return self.fixed_us + batches * self.batch_us + self.update_us


def rank_times(profile: Profile, cluster: Cluster) -> RankTimes:
    """Return the compute times of each rank of a cluster.

    A profile has the times of its slowest rank. What was measured on each rank counts where the cluster has as many
    ranks and gives no speeds; else all ranks are as the slowest one that was measured, times their speeds.
    """
    compute, samples = profile.compute, profile.world.batch_per_rank
    step_us, known = compute.forward_us + compute.backward_us, compute.by_rank
    fixed, batch, update = np.zeros(1), np.array([step_us]), np.array([compute.update_us])
    if known is not None and samples is not None:
        fixed = np.array([one.fixed_us for one in known])
        batch = samples * np.array([one.sample_us for one in known])
        update = np.array([one.update_us for one in known])
        # The profile's own times are of steps with the runtime's hooks, on whichever rank was last in each of them.
        factor = step_us / (fixed + batch).max()
        fixed, batch = fixed * factor, batch * factor
        update = update * (compute.update_us / update.max()) if update.max() > 0.0 else update + compute.update_us
    if cluster.speed is not None or len(batch) != cluster.ranks:
        slowest = int((fixed + batch + update).argmax())
        slow = 1.0 / np.array(cluster.speeds)
        fixed, batch, update = (slow * one[slowest] for one in (fixed, batch, update))
    return RankTimes(fixed, batch, update)


def on_slowest(profile: Profile, cluster: Cluster, batch: float = 1.0) -> Profile:
    """Return the profile of the slowest rank, for which all others wait in each step; `batch` as of `on_rank`."""
    if cluster.speed is None and batch == 1.0:
        return profile
    return on_rank(profile, cluster, int(rank_times(profile, cluster).step_us(batch).argmax()), batch)


def on_rank(profile: Profile, cluster: Cluster, rank: int, batch: float = 1.0) -> Profile:
    """Return the profile of one rank; `batch`: the size of its batch over that of the profile."""
    times, compute = rank_times(profile, cluster), profile.compute
    step_us = compute.forward_us + compute.backward_us
    step = (times.fixed_us[rank] + batch * times.batch_us[rank]) / step_us if step_us else 1.0
    update = times.update_us[rank] / compute.update_us if compute.update_us else 1.0
    return scale_profile(profile, float(step), float(update))
