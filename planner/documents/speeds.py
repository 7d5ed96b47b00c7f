"""Compute times of ranks that are not equally fast."""

from __future__ import annotations

from planner.documents.estimate import scale_profile
from planner.documents.profile import Cluster, Profile


def on_slowest(profile: Profile, cluster: Cluster) -> Profile:
    """Return the profile of the slowest rank, for which all others wait in each step."""
    return on_rank(profile, cluster, cluster.speeds.index(min(cluster.speeds)))


def on_rank(profile: Profile, cluster: Cluster, rank: int, batch: float = 1.0) -> Profile:
    """Return the profile of one rank; `batch`: the size of its batch over that of the profile."""
    slow = 1.0 / cluster.speeds[rank % len(cluster.speeds)]
    return scale_profile(profile, slow * batch, slow)
