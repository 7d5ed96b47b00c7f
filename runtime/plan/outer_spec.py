"""Outer steps in plan.json (`outer`), and partitions of a plan's gradients. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from runtime.plan.strict_json import HINT, Count, Name, PositiveCount, Record, repeated_item

if TYPE_CHECKING:
    from runtime.plan.document import PlanBucket


OPTIMIZERS = ("nesterov",)
"""Outer optimizers that the runtime has."""
GUARDED_PERIODS = 2
"""Periods of synchronous steps before local ones in a run that switches to outer steps: the guard compares distances
with their movement."""


@dataclass(frozen=True, kw_only=True)
class OuterOptimizer(Record):
    """Optimizer of the outer steps, by name, and its options; DiLoCo's defaults."""

    name: Name = "nesterov"
    """`nesterov`: torch.optim.SGD with Nesterov's momentum, on pseudo-gradients."""
    lr: Annotated[float, Field(gt=0.0)] = 0.7
    momentum: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.9


@dataclass(frozen=True, kw_only=True)
class OuterSpec(Record):
    """Local steps with an outer optimizer (DiLoCo, arXiv 2311.08105; Streaming DiLoCo, arXiv 2501.18512)."""

    every: PositiveCount
    """Local steps between two rounds of a fragment (H)."""
    fragments: Annotated[tuple[Annotated[tuple[Name, ...], Field(min_length=1)], ...], Field(min_length=1)] | None = (
        None
    )
    """Gradients of the parameters that are averaged in one round, each of them once; None: one fragment of all."""
    delay_steps: Count = 0
    """Local steps between the launch of a round and its outer step (t); 0 blocks behind the same step."""
    mix: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Share of a worker's own weights in the weights that it continues with; 0 takes the anchor."""
    optimizer: OuterOptimizer = OuterOptimizer()
    warmup_steps: Count = 0
    """Synchronous steps before local ones, counted from the beginning of the run; see `local_after`."""
    sharded_step: bool | None = None
    """Whether the optimizer step is sharded inside nodes that are workers: a rank updates its part of the weights."""

    def fragments_of(self, gradients: Sequence[str]) -> tuple[tuple[str, ...], ...]:
        """Return the fragments of a plan with these gradients."""
        return self.fragments or (tuple(gradients),)

    def due_after(self, fragment: int, fragments: int) -> int:
        """Return the first local step, from 1, behind which a fragment's round is launched; then every H-th."""
        return (fragment + 1) * self.every // fragments

    def local_after(self, step: int) -> int:
        """Return the number of steps of a run behind which local ones begin, if it takes up outer steps behind `step`.

        A run that switches to them has had their warm-up without the guard. So at least `GUARDED_PERIODS` periods more
        are synchronous; none without a warm-up.
        """
        if not step or not self.warmup_steps:
            return self.warmup_steps
        return max(self.warmup_steps, step + GUARDED_PERIODS * self.every)

    def problem(self, path: str) -> str | None:
        """Return what is wrong between the fields; see `Record.problem`."""
        if self.every < 1 or self.optimizer.lr <= 0.0 or not 0.0 <= self.mix < 1.0:  # of a plan that a program made
            return (
                f"{path}: found every {self.every}, mix {self.mix:g} and an outer lr of {self.optimizer.lr:g}; "
                f"expected every of at least 1, mix from 0 to below 1 (with 1 nothing is exchanged), and lr above 0: "
                f"{HINT}"
            )
        if self.optimizer.name not in OPTIMIZERS:
            return (
                f"{path}.optimizer.name: found {self.optimizer.name!r}, expected {' or '.join(OPTIMIZERS)}: correct it"
            )
        if self.delay_steps >= self.every:
            return (
                f"{path}.delay_steps: found {self.delay_steps}, expected fewer than the {self.every} steps of every, "
                f"for a round ends before the next one of its fragment begins: lower it, or raise every"
            )
        if self.fragments is not None and len(self.fragments) > self.every:
            return (
                f"{path}.fragments: found {len(self.fragments)}, expected at most {self.every}, the steps of every, "
                f"or two fragments would be sent behind one step: join fragments, or raise every"
            )
        return None

    def problem_in(self, buckets: Sequence[PlanBucket], path: str = "the plan") -> str | None:
        """Return why a plan with these buckets cannot take outer steps so; None if it can.

        Args:
            buckets: of the plan.
            path: JSON path of the plan, which the message begins with.
        """
        where = f"{path}.outer"
        if (problem := self.problem(where)) is not None or self.fragments is None:
            return problem
        gradients = [name for bucket in buckets for name in bucket.gradients]
        if (problem := partition_problem(self.fragments, gradients, f"{where}.fragments", "fragment")) is not None:
            return problem
        fragment_of = {name: index for index, fragment in enumerate(self.fragments) for name in fragment}
        for index, bucket in enumerate(buckets):
            found = {fragment_of[name]: name for name in bucket.gradients}
            if len(found) > 1:
                (one, first), (other, second) = sorted(found.items())[:2]
                return (
                    f"{path}.buckets[{index}].gradients: found {first!r} of fragment {one} and {second!r} of fragment "
                    f"{other}, expected one fragment's, whose message a bucket is: divide the bucket"
                )
        return None


def partition_problem(parts: Sequence[Sequence[str]], gradients: Sequence[str], where: str, part: str) -> str | None:
    """Return why parts, each called a `part`, do not hold each gradient exactly once; None if they do."""
    known = set(gradients)
    for index, names in enumerate(parts):
        unknown = next((position for position, name in enumerate(names) if name not in known), None)
        if unknown is not None:
            return (
                f"{where}[{index}][{unknown}]: found {names[unknown]!r}, which is in no bucket; expected a gradient of "
                f"the plan: {HINT}"
            )
    if (twice := repeated_item(parts)) is not None:
        index, position, name, earlier = twice
        return (
            f"{where}[{index}][{position}]: found {name!r}, which is in {part} {earlier} already; expected each "
            f"gradient in exactly one {part}: take one out"
        )
    held = {name for names in parts for name in names}
    missing = [name for name in gradients if name not in held]
    if not missing:
        return None
    return (
        f"{where}: found no {part} with {missing[0]!r}{f' and {len(missing) - 1} more' if missing[1:] else ''}, "
        f"expected each gradient in exactly one {part}: add it to one"
    )
