"""The monitor of a session's steps: whether they are as long as predicted, and whether compression pays and does no
harm.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runtime.checks.modes import asked_modes
from runtime.comm.world import World
from runtime.core.exchange import Exchange
from runtime.core.options import AttachOptions
from runtime.modes.base import Mode
from runtime.monitor.arrivals import Arrivals
from runtime.monitor.drift import DriftGuard
from runtime.monitor.recorder import Recorder
from runtime.monitor.trial import Trial
from runtime.plan import Plan
from runtime.sparse.guard import Guard, RelaxedBuckets
from runtime.sparse.samples import Sampled


class Monitor:
    """`recorder` has the marks, `drift` and `trial` their last verdicts; see `runtime.monitor`."""

    def __init__(self, plan: Plan, world: World, recorder: Recorder, options: AttachOptions) -> None:
        """Monitor the steps of a plan; of the options, `drift` and `guard` count: see `runtime.attach`."""
        self._world, self.recorder, self._warns, self._guarded = world, recorder, options.drift, options.guard
        self.drift = DriftGuard(world.rank, recorder.clock)
        """Compares steps with the prediction now and then; `drift.verdict` is what came out."""
        self.arrivals = Arrivals(world, recorder.clock)
        """Compares when ranks arrive at messages; `arrivals.rows` is what came out."""
        self.trial: Trial | None = None
        """Trial of a plan against its exact fallback, if any; `trial.verdict` is the result."""
        self.tried: str | None = None
        """Digest of the plan that was tried by the run that this one continues."""
        self._guard: Guard | None = None
        self._relaxed = RelaxedBuckets()
        self._following: Plan | None = None
        """Plan with another form of a bucket, which takes the place of the present one."""
        self.try_plan(plan)

    def try_plan(self, plan: Plan) -> None:
        """Try a plan that the user has given, if it has an exact fallback."""
        sends_less = plan.accuracy != "exact" and not asked_modes(plan)[0].relaxed
        tried = self._guarded and sends_less and plan.fallback is not None and self._world.ranks > 1
        self.trial = Trial(plan, self._world, self.recorder) if tried else None

    def begin(self, mode: Mode, exchange: Exchange) -> None:
        """Record steps anew: another exchange is in place."""
        if mode.plan != self._following:  # what is known of buckets is of another plan
            self._relaxed = RelaxedBuckets()
        self.recorder.restart(len(mode.plan.buckets), len(mode.plan.gradients))
        self.arrivals.restart()
        self.drift.begin(mode.plan if self._warns and mode.predicted else None)
        self._watch(exchange)

    def _watch(self, exchange: Exchange) -> None:
        watched = exchange.carried.watched() if self._guarded else []
        self._guard = Guard(watched, self._world, self.recorder.clock) if watched else None

    def judge(self, mode: Mode, exchange: Exchange, step: int) -> Plan | None:
        """Return the plan that the last steps speak for, alike on all ranks, which may meet here; None: the present
        one.
        """
        if not mode.relaxed:  # else ranks do not wait for each other
            self.arrivals.step_done(self.recorder.steps)
        if not mode.predicted:  # first steps, of another kind than those that the plan is for
            return None
        if self.trial is not None and self.trial.verdict is None:
            return self.trial.step_done()
        if (change := self._change_of_bucket(mode.plan, step)) is None:
            return None
        index, following = change
        if not mode.send_as(index, following):
            self._following = following
            return following
        self._watch(exchange)
        return None

    def _change_of_bucket(self, plan: Plan, step: int) -> tuple[int, Plan] | None:
        """Return a bucket that is to be sent otherwise and the plan with it: one that does harm, or one whose harm is
        long ago.
        """
        if self._guard is not None and (harmful := self._guard.step_done(step)) is not None:
            index = harmful.bucket.index
            wait_steps = self._relaxed.relax(index, plan.buckets[index], step)
            return index, self._guard.relax_bucket(plan, harmful, wait_steps)
        return self._relaxed.restore(plan, step)

    @property
    def samples(self) -> dict[int, list[Sampled]]:
        return {} if self._guard is None else self._guard.samples

    def state(self) -> dict[str, Any]:
        """Return what `load` continues from."""
        over = self.trial is not None and self.trial.verdict is not None
        tried = self.trial.lossy.digest() if over and self.trial is not None else self.tried
        return {} if tried is None else {"tried": tried}

    def load(self, state: Mapping[str, Any], plan: Plan) -> Plan | None:
        """Repeat no trial of this plan that was over; return the exact plan if training continued with that."""
        if self.trial is None or state.get("tried") != plan.digest():
            return None
        self.trial, self.tried = None, plan.digest()
        return plan.fallback if plan.fallback is not None and state["plan"] == plan.fallback.digest() else None
