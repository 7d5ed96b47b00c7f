"""Changed steps: on a faster accelerator, with another batch, another link, a slow rank, or jitter.

Pure functions from records to records. Assumptions, which the results repeat: a faster accelerator shortens forward,
backward and update alike; a batch b times as large takes b times as long forward and backward and leaves the update
alone; a synchronous step is as slow as its slowest rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from planner.cost.phases import LinkName, flat_link, slowest_hop
from planner.documents.estimate import scale_compute, scale_profile
from planner.documents.nccl import Nccl
from planner.documents.profile import Cluster, Link, Profile
from planner.documents.text import parse_bandwidth, parse_latency_us, us_per_byte
from planner.ir import Schedule
from planner.model.modes import simulate_schedule
from planner.model.problem import Problem
from runtime.errors import InputError

T = TypeVar("T")

QUANTILES = (0.5, 0.9, 0.99)


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """Changes to a profile and its cluster; the defaults change nothing."""

    compute_speed: float = 1.0
    """Speed of the accelerator, relative."""
    batch: float = 1.0
    """Size of each rank's batch, relative."""
    straggler: float = 1.0
    """Slow-down factor of the slowest rank."""
    jitter: float = 0.0
    """Standard deviation of a rank's compute time from step to step, as a share of it."""
    seed: int = 0
    steps: int = 200
    """Steps that are drawn where there is jitter."""
    intra: Link | None = None
    inter: Link | None = None

    def __post_init__(self) -> None:
        for name in ("compute_speed", "batch", "straggler"):
            value = getattr(self, name)
            if not (math.isfinite(value) and 1e-6 <= value <= 1e6):
                raise InputError(f"{name}: found {value}, expected a factor between 1e-6 and 1e6")
        if not 0.0 <= self.jitter <= 1.0:
            raise InputError(f"jitter: found {self.jitter}, expected a share between 0 and 1, for example 0.05")
        if not 1 <= self.steps <= 100_000:
            raise InputError(f"steps: found {self.steps}, expected between 1 and 100000")

    def profile(self, profile: Profile) -> Profile:
        """Return the profile of the changed step, with its cluster changed too."""
        slow = self.straggler / self.compute_speed
        cluster = None if profile.cluster is None else self.cluster(profile.cluster)
        return replace(scale_profile(profile, slow * self.batch, slow), cluster=cluster)

    def cluster(self, cluster: Cluster) -> Cluster:
        for name, link in (("intra", self.intra), ("inter", self.inter)):
            if link is not None:
                cluster = relink(cluster, name, link)  # type: ignore[arg-type]
        return cluster


def relink(cluster: Cluster, name: LinkName, link: Link) -> Cluster:
    """Return a cluster with another `intra` or `inter` link, without what was measured over the old one."""
    flat_over = {flat_link(cluster)}
    inter, either = cluster.inter, (cluster, replace(cluster, intra=link if name == "intra" else cluster.intra))
    if inter is not None and any(slowest_hop(each, inter) is not inter for each in either):
        flat_over.add("intra")  # flat collectives proceed at its pace, before or after the change

    def kept(curves: dict[str, T] | None) -> dict[str, T] | None:
        left = {
            key: curve
            for key, curve in (curves or {}).items()
            if name not in ({key.partition("/")[0]} if key.startswith(("intra/", "inter/")) else flat_over)
        }
        return left or None

    measured = {field: kept(getattr(cluster, field)) for field in ("samples", "collectives", "back_to_back")}
    machine = cluster.nccl and _rewired(cluster.nccl, name, link)
    return replace(cluster, **measured, **{name: link}, nccl=machine)  # type: ignore[arg-type]


def _rewired(machine: Nccl, name: LinkName, link: Link) -> Nccl:
    """Return NCCL's model of machines with another link, without what was fitted to the old one."""
    if not link.beta_us_per_byte:
        raise InputError(f"{name}: found a link without a limit to its rate, expected one; give its bandwidth")
    gbyte_per_s = 1e-3 / link.beta_us_per_byte
    if name == "intra":
        return replace(machine, nvlink="none", pcie=f"{gbyte_per_s:.6f}gbyte", nvls=None, ll128=None, fit=None)
    card = f"{gbyte_per_s / machine.nics_per_node:.6f}gbyte"
    return replace(machine, nic=card, net_latency=f"{link.alpha_us:.6f}us", tuner="nccl", fit=None)


def parse_link(option: str, text: str) -> Link:
    """Return the link of a text such as `5us,100gbit`: start-up time and bandwidth.

    Raises:
        InputError: anything else.
    """
    latency, comma, bandwidth = text.partition(",")
    if not comma:
        raise InputError(
            f"{option}: found {text!r}, expected start-up time and bandwidth of the link, for example 5us,100gbit"
        )
    return Link(
        alpha_us=parse_latency_us(latency, option), beta_us_per_byte=us_per_byte(parse_bandwidth(bandwidth, option))
    )


def step_quantiles(problem: Problem, schedule: Schedule, what: WhatIf) -> dict[str, float]:
    """Quantiles of the step time in microseconds, by name (`p50`, …), where ranks' compute times jitter.

    In each drawn step every rank's compute time is its own, normally distributed (never below half of the mean); the
    slowest rank sets the pace. Equal seeds give equal results.
    """
    generator = np.random.default_rng(what.seed)
    slowest = np.array([generator.normal(1.0, what.jitter, problem.ranks).max() for _ in range(what.steps)])
    times_us = []
    for factor in np.maximum(slowest, 0.5).tolist():
        profile = replace(problem.profile, compute=scale_compute(problem.profile.compute, factor, factor))
        times_us.append(simulate_schedule(Problem(profile=profile, cost=problem.cost), schedule).iteration_us)
    return {f"p{round(q * 100)}": float(np.quantile(times_us, q)) for q in QUANTILES}


def describe(what: WhatIf) -> tuple[str, ...]:
    changes: Sequence[tuple[bool, str]] = (
        (what.compute_speed != 1.0, f"accelerator {what.compute_speed:g} × as fast"),
        (what.batch != 1.0, f"batch {what.batch:g} × as large"),
        (what.straggler != 1.0, f"one rank {what.straggler:g} × as slow"),
        (what.jitter != 0.0, f"jitter {what.jitter:.0%} (seed {what.seed})"),
        (what.intra is not None, "another link inside nodes"),
        (what.inter is not None, "another link between nodes"),
    )
    return tuple(text for changed, text in changes if changed)
