"""What modes say of their plans, and phrases of why a bucket is what it is, which they have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.cost.halves import ALL_GATHER, REDUCE_SCATTER
from planner.documents.text import ms
from planner.ir import Bucket


@dataclass(frozen=True, kw_only=True)
class PlanWords:
    """What a mode says of a plan that has it."""

    short: str = "no delay"
    line: str = ""
    """What it does, and asks for; empty: nothing that DDP does not."""
    paragraph: str = ""
    """The same for somebody who has not read of it."""
    form: str = ""
    """How every bucket travels, in place of what each says."""
    makes_batches: bool = False
    """Whether its steps make their minibatch, which those of other modes leave out."""


def exposure(late_us: float) -> str:
    """How much of a bucket's messages compute does not hide."""
    return "hidden" if late_us <= 0.0 else f"{ms(late_us)} exposed"


def difference(saved_us: float) -> str:
    """How much less time something takes, or more."""
    return f"{ms(abs(saved_us))} {'less' if saved_us >= 0.0 else 'more'}"


def merging(bucket: Bucket, alone_us: Sequence[float], time_us: float) -> str:
    """What one message gains over one for each gradient; `alone_us`: of each gradient."""
    if len(bucket.gradients) == 1:
        return "alone"
    saved_us = sum(alone_us[gradient] for gradient in bucket.gradients) - time_us
    gain = f"saves {ms(saved_us)} of latency" if saved_us >= 0.0 else f"costs {ms(-saved_us)} of link time"
    return f"one message for {len(bucket.gradients)} {gain}"


def push_and_pull(push_us: float, pull_us: float, k: int = 1) -> tuple[str, str]:
    """How long a bucket is reduce-scattered in every step, and how long gathered after every k-th one."""
    often = "step" if k == 1 else f"{k} steps"
    return f"{REDUCE_SCATTER} {ms(push_us)} a step", f"{ALL_GATHER} {ms(pull_us)} every {often}"
