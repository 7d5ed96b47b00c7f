"""What the planner asks of a codec: costs and limits of its buckets, forms in searches, and its words in plans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.ir import Bucket, Codec, Schedule
from planner.model.compression import Limits
from planner.model.problem import Problem
from runtime.plan import CompressorSpec, PlanBucket
from runtime.plan.predicted import FrontierPoint
from runtime.plan.transports import Transport

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Message(NamedTuple):
    """One phase of a bucket's collective."""

    resource: str
    """`network`, which passes through all ranks, or one of its two kinds of link, `intra` and `inter`."""
    name: str
    sent_bytes: float
    time_us: float


class Spending(NamedTuple):
    """What a bucket asks of networks and compute, each alone on the machine."""

    messages: tuple[Message, ...]
    before_us: float = 0.0
    """Compute time, once its last gradient is ready, for selecting or encoding."""
    after_us: float = 0.0
    """Compute time, after backward and once it has arrived, for unpacking or decoding."""


class Column(NamedTuple):
    """Buckets of one form that stop at one place, by where they start."""

    scatter_us: Floats
    cost_us: Floats
    gather_us: Floats
    select_us: Floats
    unpack_us: Floats
    densities: Floats


ColumnOf = Callable[[Ints, int], Column]
"""(starts, stop) → buckets; where one cannot have the form, its `cost_us` is infinite."""
BucketOf = Callable[[int, int], Bucket | None]
"""(start, stop) → the bucket of these gradients; None where it cannot have the form."""

Elements = Callable[[Bucket], Sequence[int]]
"""The elements of each run of gradients of one layer in a bucket."""


class CodecModel(Codec):
    """A codec with what the planner asks of it; the defaults are those of one that sends every element."""

    option: ClassVar[str] = ""
    """Its name in `--compress`; empty: no option allows it."""
    counted_as: ClassVar[str] = ""
    """The field of `FrontierPoint` with the number of its buckets."""

    def defect(self, bucket: Bucket, elements: Elements | None) -> str | None:
        """Return what is wrong with a bucket, or None; without `elements` its layers' are not looked at."""
        return None

    def spend(self, problem: Problem, bucket: Bucket) -> Spending:
        """Return what a bucket asks of networks and compute."""
        raise NotImplementedError

    def spec(self, problem: Problem, bucket: Bucket) -> CompressorSpec:
        """Return the compressor of a bucket as plan.json has it."""
        raise NotImplementedError

    @classmethod
    def of_spec(cls, spec: CompressorSpec, problem: Problem, bucket: Bucket) -> Bucket:
        """Return a bucket, given without codec, as a compressor of plan.json sends it: the inverse of `spec`."""
        raise NotImplementedError

    def ratio(self, problem: Problem, bucket: Bucket) -> float:
        """Return the largest ratio among a bucket's layers of elements, or bytes, to those sent."""
        return 1.0

    def densities(self, problem: Problem, bucket: Bucket) -> float:
        """Return the density (1 over the ratio) summed over the gradients of a bucket."""
        return len(bucket.gradients) / self.ratio(problem, bucket)

    def sent_elements(self, problem: Problem, bucket: Bucket) -> int:
        """Return how many elements of a bucket each rank sends, or each node of a hierarchical transport."""
        return problem.elements(bucket)

    def pushed_bytes(self, problem: Problem, bucket: Bucket) -> float:
        """Return the bytes of a bucket that a worker pushes with delay."""
        return float(problem.size_bytes[list(bucket.gradients)].sum())

    def sent_text(self) -> str:
        """Return what is sent in place of a bucket's elements, in a word or two."""
        return self.name

    def content_text(self, bucket: Bucket) -> str:
        """Return what a bucket holds, in a word or two."""
        return f"{len(bucket.gradients)} gradients"

    def on_links(self, form: Form) -> list[Form]:
        """Return the forms on intra-node and inter-node links of one on a single network."""
        return [form]

    def has_cost(self, problem: Problem, form: Form) -> bool:
        """Return whether the cluster has costs for a form. Raises InputError where a link has none."""
        return True

    def columns(self, problem: Problem, form: Form, limits: Limits) -> ColumnOf:
        """Return what buckets of a form spend, as columns of the search's tables."""
        raise NotImplementedError

    def buckets(self, problem: Problem, form: Form, limits: Limits) -> BucketOf:
        """Return what makes buckets of a form."""
        raise NotImplementedError

    def form_text(self, form: Form) -> str:
        """Return a form in a word or two."""
        return self.sent_text()

    def point_fields(self) -> dict[str, Any]:
        """Return the fields of `FrontierPoint` that name the codec's options."""
        return {}

    @classmethod
    def forms(cls, problem: Problem, limits: Limits, steps: Steps) -> list[Form]:
        """Return its forms on a single network that a search looks at, from the least to the most compression."""
        return []

    @classmethod
    def forms_text(cls, forms: Sequence[Form]) -> str:
        """Return what buckets in these forms, all of this codec, do; as follows "plans whose buckets"."""
        raise NotImplementedError

    @classmethod
    def point_text(cls, point: FrontierPoint) -> str | None:
        """Return the form of a point in a word or two; None where it is another codec's."""
        return None

    @classmethod
    def notes(cls, problem: Problem, schedule: Schedule, buckets: Sequence[Bucket], limits: Floats) -> list[str]:
        """Return what a plan says of these buckets of it, all of this codec; `limits`: see `Limits.ratios`."""
        return []

    @classmethod
    def summary(cls, buckets: Sequence[PlanBucket]) -> str:
        """Return these buckets of a plan, all of this codec, in a few words; empty for dense ones."""
        return ""


class Steps(NamedTuple):
    """How much compression searches look at."""

    ratios: tuple[float, ...]
    """Ratios of elements to selected ones, ascending."""
    max_rank: int
    """The largest rank of factors."""


@dataclass(frozen=True)
class Form:
    """A way to send a bucket that searches choose among; what the codec selects follows from the bucket and `ratio`."""

    transport: Transport
    codec: CodecModel
    ratio: float = 1.0
    """Largest ratio of its bytes as they are added up to those that are sent; 1: dense."""

    def by_link(self, times_us: Sequence[Floats]) -> Sequence[Floats]:
        """Return the times of the phases on intra-node links before, on the network, and on intra-node links after."""
        if self.transport.hierarchical:
            return times_us
        nothing = np.zeros(len(times_us[0]))
        return [nothing, *times_us, nothing]


def prefix_sums(*values: NDArray[Any]) -> list[NDArray[Any]]:
    """Return the sums of each array before every place from 0 to its length."""
    return [np.concatenate([[0], np.cumsum(of)]) for of in values]


def unmeasured(what: str, field: str, sources: set[str]) -> list[str]:
    """Return a note on a compute time of no or computed cost; none where it was measured."""
    if sources == {"measured"}:
        return []
    taken = "free" if "free" in sources else "as long as it moves its bytes in memory"
    return [
        f"{what} is taken to be {taken}, where the cluster has no `{field}` cost: the gain may be less; "
        f"`planner profile --for bounded` on that machine measures it"
    ]
