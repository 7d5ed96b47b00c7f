"""Descriptions of plans by modes, and phrases on buckets that modes share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.cost.halves import ALL_GATHER, REDUCE_SCATTER
from planner.documents.text import ms
from planner.ir import Bucket


@dataclass(frozen=True, kw_only=True)
class PlanWords:
    """A mode's description of a plan."""

    short: str = "no delay"
    line: str = ""
    """Action and requirements; empty: those of DDP."""
    paragraph: str = ""
    """The same for readers who do not know the mode."""
    form: str = ""
    """Form of every bucket, in place of each bucket's own."""
    makes_batches: bool = False
    """Whether its steps make their minibatch, which those of other modes leave out."""


def exposure(late_us: float) -> str:
    """Return how much of a bucket's messages compute does not hide."""
    return "hidden" if late_us <= 0.0 else f"{ms(late_us)} exposed"


def difference(saved_us: float) -> str:
    """Return how much less, or more, time something takes."""
    return f"{ms(abs(saved_us))} {'less' if saved_us >= 0.0 else 'more'}"


def merging(bucket: Bucket, alone_us: Sequence[float], time_us: float) -> str:
    """Return what one message gains over one for each gradient, whose times are `alone_us`."""
    if len(bucket.gradients) == 1:
        return "alone"
    saved_us = sum(alone_us[gradient] for gradient in bucket.gradients) - time_us
    gain = f"saves {ms(saved_us)} of latency" if saved_us >= 0.0 else f"costs {ms(-saved_us)} of link time"
    return f"one message for {len(bucket.gradients)} {gain}"


def push_and_pull(push_us: float, pull_us: float, k: int = 1) -> tuple[str, str]:
    """Return the time of a bucket's reduce-scatter in every step, and of its gather after every k-th."""
    often = "step" if k == 1 else f"{k} steps"
    return f"{REDUCE_SCATTER} {ms(push_us)} a step", f"{ALL_GATHER} {ms(pull_us)} every {often}"
