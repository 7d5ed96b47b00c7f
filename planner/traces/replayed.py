"""The run's own buckets, replayed by the simulator: how far predictions from this trace may be off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.documents.profile import Profile
from planner.emit.lower import predict
from planner.fsdp2.inputs import make_setting
from planner.fsdp2.simulator import simulate
from planner.ir import Schedule
from planner.model.problem import Problem, make_problem
from planner.traces.events import Run, Step
from planner.traces.gradients import cuts_of
from planner.traces.to_profile import profile_of
from runtime.plan import FullyShardPlan, ModelReference

MOST_STEPS = 8
"""The most steps that are left out, one after the other."""
OFF = 0.03
"""A replay further off than this is said before any advice."""
_ANY = ModelReference(name="traced")


@dataclass(frozen=True, kw_only=True)
class BucketReplay:
    """One bucket of the run, as it was traced and as it is replayed."""

    gradients: int
    size_bytes: int
    ready_us: float
    end_us: float
    replayed_end_us: float

    @property
    def error(self) -> float:
        """Relative error of its end."""
        return self.replayed_end_us / self.end_us - 1.0 if self.end_us > 0.0 else 0.0


@dataclass(frozen=True, kw_only=True)
class Replay:
    """A run's steps predicted from its profile, with its own buckets."""

    traced_us: float
    """Median step, from its first kernel to its last."""
    replayed_us: float
    buckets: tuple[BucketReplay, ...]
    errors: tuple[float, ...]
    """Relative error of each step's length, with the costs of messages from all others."""

    @property
    def error(self) -> float:
        """Largest of these and that of the median step."""
        return max(map(abs, (*self.errors, self.replayed_us / self.traced_us - 1.0)))


def own_schedule(problem: Problem, step: Step) -> Schedule:
    """Return the buckets of the run; all gradients in one where it sent none."""
    return Schedule.from_boundaries(cuts_of(step, problem.size_bytes) or [problem.count])


def replay(run: Run, profile: Profile) -> Replay | None:
    """Replay the run's own buckets as they were traced; None where it sent none, or the cluster has no costs."""
    if profile.cluster is None or not run.steps[0].buckets:
        return None
    traced_us = float(np.median([one.span_us for one in run.steps]))
    if profile.units is not None:
        setting = make_setting(profile)
        own = FullyShardPlan(groups=tuple((unit.module,) for unit in profile.units.units))
        step_us = simulate(setting.shape, own, setting.costs(None), setting.executor, bars=False).iteration_us
        return Replay(traced_us=traced_us, replayed_us=step_us, buckets=(), errors=())
    shapes = tuple((gradient.numel,) for gradient in profile.compute.gradients)
    sized = replace(run, steps=[replace(step, shapes=shapes) for step in run.steps])
    step, problem = sized.steps[0], make_problem(profile_of(sized, profile.model))
    prediction = predict(problem, own_schedule(problem, step), timeline=True)
    ends = {task.bucket: task.end_us for task in prediction.timeline or () if task.bucket is not None}
    cuts, rows = cuts_of(step, problem.size_bytes), []
    for index, (start, stop) in enumerate(zip([0, *cuts], cuts, strict=False)):
        messages = [[message for message in one.buckets if start < message.gradients <= stop] for one in run.steps]
        traced = [max(message.end_us for message in found) for found in messages if found]
        rows.append(
            BucketReplay(
                gradients=stop - start, size_bytes=int(problem.size_bytes[start:stop].sum()),
                ready_us=float(np.median([one.ready_us[stop - 1] for one in run.steps])),
                end_us=float(np.median(traced)) if traced else 0.0, replayed_end_us=ends[index],
            )
        )  # fmt: skip
    some = list(sized.steps[:: -(-len(sized.steps) // MOST_STEPS)])
    return Replay(
        traced_us=traced_us, replayed_us=prediction.iteration_us,
        buckets=tuple(rows), errors=tuple(_without(sized, some, step) for step in some) if len(some) > 1 else (),
    )  # fmt: skip


def _without(run: Run, steps: Sequence[Step], step: Step) -> float:
    """Return the error of one step, whose own compute meets the messages' costs of all other steps."""
    others = profile_of(run, _ANY, steps=[other for other in steps if other is not step])
    problem = make_problem(profile_of(run, _ANY, steps=[step]), others.cluster)
    return predict(problem, own_schedule(problem, step)).iteration_us / step.span_us - 1.0
