"""Samples of compressed buckets, for `runtime.sparse.guard`: how much harm they do, from where on that is too much, and
how they are sent then. One class for each way to send less; the guard knows none of them.

**Selected elements** (`Selecting`) have δ of LAGS-SGD's Assumption 1 (Shi et al., ECAI 2020), which compares what is
not sent with what random-k of the summed gradients would leave; while it is at most 1, the paper's convergence
holds.

**Narrow elements** (`Rounding`) have the median, over elements that have a gradient, of |lost| / |gradient|, both of
the sums over ranks. Norms would not tell: where an outlier leaves no code to the other elements of its block, it is
itself most of the norm, so that the relative error of b elements in int8 is at most √b/254 (0.063 for 256) whatever
becomes of them; the median of the ratios is 1. In health that is a part of the format's rounding: about 0.0003 for
float16, 0.002 for bfloat16, 0.03 for float8_e4m3fn, and for int8 1/500 of a block's largest / median magnitude, which
makes 0.01 of normal gradients and 0.1 where the largest is 50 times as large as the usual one. It grows, too, where
ranks' gradients cancel and what rounding them has lost does not.

What is too much depends on what becomes of the loss, not on the format. Without error feedback: half of the elements
lose more than half of themselves (`MOST_LOST`), for good: in int8 that takes a largest magnitude of about 250 times the
usual one. With it, what is lost is the residual, which comes later, and residual / gradient says how many steps later:
half of the elements are later than the ten steps over which a momentum of 0.9, and Adam's first moment, average
(`MOST_STEPS_LATE`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from runtime.core.buckets import BucketBuffer
from runtime.plan import NO_COMPRESSION, PlanBucket
from runtime.sparse.compressors.magnitudes import seed_of
from runtime.sparse.compressors.wire import wider
from runtime.torch_compat import queued_to

MAX_DELTA = 1.0
MOST_LOST, MOST_STEPS_LATE = 0.5, 10.0

DRAWN = 1 << 16
"""Elements of a narrow bucket that are looked at, at most: with this number, the sample's median has between 49 % and
51 % of all elements below it (five standard deviations), and their sums cost little compared with the bucket's own.
"""


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """One bucket at one step, over all ranks; `str` is for reports."""

    step: int
    figure: float
    """Measure of the harm; NaN if gradients were not finite."""
    limit: float
    """Above it is too much."""

    @property
    def harmful(self) -> bool:
        return self.figure > self.limit


class Watched(Protocol):
    """A bucket that may do harm."""

    bucket: BucketBuffer

    def expect(self) -> None:
        """Prepare for the next step, which is sampled."""
        ...

    def sample(self, group: dist.ProcessGroup | None, step: int) -> Sampled:
        """Look at the step that is over, the sums over all ranks, which all call this."""
        ...

    def describe_violation(self, samples: Sequence[Sampled]) -> str:
        """Return the harm that these samples show, as what follows the bucket's name."""
        ...

    def relaxed_bucket(self, planned: PlanBucket) -> tuple[PlanBucket, str]:
        """Return how a harmful bucket is sent from now on, with as many phases, and say so ("it …")."""
        ...


SENDS_EVERYTHING = "it sends everything"


def delta(accumulated_sum: Tensor, sent_sum: Tensor, k: int) -> float:
    """Return δ = ‖Σacc − Σsent‖² / E‖Σacc − RandK(Σacc)‖²; the assumption, and with it convergence, holds while δ ≤ 1.

    RandK keeps each of n elements with probability k/n, so the expectation is (1 − k/n)·‖Σacc‖²: nothing is drawn.
    `accumulated_sum` is the sum over ranks of residual + gradient, `sent_sum` of what was sent, zero where nothing was.
    δ is 0 where everything was sent, +∞ where something was though random-k would leave nothing, NaN where sums are
    not finite.
    """
    elements = accumulated_sum.numel()
    if sent_sum.shape != accumulated_sum.shape or not 0 <= k <= elements:
        raise ValueError(
            f"delta: found k = {k} of tensors of {tuple(accumulated_sum.shape)} and {tuple(sent_sum.shape)}; expected "
            f"two of one shape and k between 0 and their elements"
        )
    left = _energy(accumulated_sum - sent_sum)
    if left == 0.0:
        return 0.0
    expected = (1.0 - k / elements) * _energy(accumulated_sum)
    return left / expected if expected else math.inf


def _energy(values: Tensor) -> float:
    return float(torch.linalg.vector_norm(values, dtype=torch.float64)) ** 2


@dataclass(frozen=True, kw_only=True)
class SelectionSample(Sampled):
    """`figure` is δ."""

    energy: float
    """‖sent‖² / ‖sent + residual‖², of the sums over ranks."""
    residual_norm: float

    def __str__(self) -> str:
        return (
            f"δ {self.figure:.2f}, {self.energy:.0%} of the energy sent, norm of the residual {self.residual_norm:.3g}"
        )


class Selecting:
    """`Watched` of a bucket of which the k largest elements are sent."""

    def __init__(
        self, bucket: BucketBuffer, k: int, sums: Callable[[dist.ProcessGroup | None], tuple[Tensor, Tensor]]
    ) -> None:
        """`sums`: (group) → (residual, what was sent in the last step), added up over all ranks, which all call this.
        1-D.
        """
        self.bucket, self._k, self._sums = bucket, k, sums

    def expect(self) -> None: ...

    def keep(self, gradient: Tensor, unsent: Callable[[], Tensor], step: int) -> None: ...

    def arrived(self, sums: Tensor) -> None: ...

    def sample(self, group: dist.ProcessGroup | None, step: int) -> Sampled:
        residual, sent = self._sums(group)
        total, went = _energy(residual + sent), _energy(sent)
        return SelectionSample(
            step=step,
            figure=delta(residual + sent, sent, self._k),
            limit=MAX_DELTA,
            energy=went / total if total > 0.0 else 1.0,
            residual_norm=math.sqrt(_energy(residual)),
        )

    def describe_violation(self, samples: Sequence[Sampled]) -> str:
        values = ", ".join(f"{sample.figure:.2f}" for sample in samples)
        return f"leaves more behind than random choice would (δ {values}, expected at most {samples[-1].limit:g})"

    def relaxed_bucket(self, planned: PlanBucket) -> tuple[PlanBucket, str]:
        return planned.uncompressed(), SENDS_EVERYTHING


@dataclass(frozen=True, kw_only=True)
class RoundingSample(Sampled):
    """`figure` is the median of |lost| / |gradient|."""

    what: str
    """`residual`, or `loss` where none is kept."""
    error: float
    """‖lost‖ / ‖residual of the step before + gradient‖, of the sums over ranks."""

    def __str__(self) -> str:
        return f"{self.what} / gradient {self.figure:.2g} (median), relative error of the sum {self.error:.2g}"


class Rounding:
    """`Watched` of a bucket in a narrow format. What is lost is what all ranks had to send, less what came: also what a
    backend's own narrow sums lose, which no residual knows.
    """

    def __init__(self, bucket: BucketBuffer, *, feedback: bool) -> None:
        """`feedback`: what is lost is kept in a residual."""
        self.bucket = bucket
        self._what, self._limit = ("residual", MOST_STEPS_LATE) if feedback else ("loss", MOST_LOST)
        self._expected = False

    def expect(self) -> None:
        self._expected = True

    @property
    def expected(self) -> bool:
        """True if the step is to be sampled."""
        return self._expected

    def keep(
        self, gradient: Tensor, unsent: Callable[[], Tensor], step: int, *, start: int = 0, elements: int | None = None
    ) -> None:  # fmt: skip
        """Remember, in a step that is to be sampled, some elements of this rank's gradient and of its residual, which
        `unsent` returns; both 1-D. `start`, `elements`: first of them, in a vector of which each rank has
        a part to send; by default each has all.
        """
        if not self._expected:
            return
        residual, elements = unsent(), len(gradient) if elements is None else elements
        if elements <= DRAWN:
            self._places = torch.arange(elements, device=gradient.device)
        else:  # by chance, for what is amiss may come back with each block; the same ones on all ranks
            lots = torch.Generator().manual_seed(seed_of(f"sampled\n{self.bucket.slots[0].name}", step))
            self._places = queued_to(torch.randint(elements, (DRAWN,), generator=lots), gradient.device)
        own, held = (self._of_part(part, start).to(residual.dtype) for part in (gradient, residual))
        self._given = torch.stack((own, own + held))

    def _of_part(self, part: Tensor, start: int) -> Tensor:
        """Return the elements to remember of a part that begins there; 0 where they are in others."""
        if not len(part):
            return part.new_zeros(len(self._places))
        at = self._places - start
        inside = (at >= 0) & (at < len(part))
        # By `where`: a mask as an index would have the host wait for a device.
        return torch.where(inside, part[at.clamp(0, len(part) - 1)], part.new_zeros(()))

    def arrived(self, sums: Tensor) -> None:
        """Remember the same elements of what came. 1-D."""
        if self._expected:
            self._sent, self._parted = sums[self._places], False

    def part_arrived(self, sums: Tensor, start: int) -> None:
        """Remember elements as `arrived` does, if ranks have different parts, or summands, of the result: this one
        `sums` (1-D), from element `start`; what it has nothing of is 0.
        """
        if self._expected:
            self._sent, self._parted = self._of_part(sums, start).to(self._given.dtype), True

    def sample(self, group: dist.ProcessGroup | None, step: int) -> Sampled:
        self._expected = False
        dist.all_reduce(self._given, group=group)
        if self._parted:
            dist.all_reduce(self._sent, group=group)
        gradient, accumulated = self._given
        lost, gradient = (accumulated - self._sent).abs_(), gradient.abs()
        used = gradient > 0.0
        total = _energy(accumulated)
        return RoundingSample(
            step=step,
            figure=float((lost[used] / gradient[used]).median()) if bool(used.any()) else 0.0,
            limit=self._limit,
            what=self._what,
            error=math.sqrt(_energy(lost) / total) if total > 0.0 else 0.0,
        )

    def describe_violation(self, samples: Sequence[Sampled]) -> str:
        values = ", ".join(f"{sample.figure:.3g}" for sample in samples)
        return (
            f"rounds too coarsely: of half its elements the {self._what} is more than {values} times the gradient "
            f"(expected at most {self._limit:g})"
        )

    def relaxed_bucket(self, planned: PlanBucket) -> tuple[PlanBucket, str]:
        spec = wider(planned.compressor)
        if spec == NO_COMPRESSION:
            return planned.uncompressed(), SENDS_EVERYTHING
        return replace(planned, compressor=spec), f"it is sent as {spec.dtype}"
