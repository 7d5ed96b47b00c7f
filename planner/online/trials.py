"""Trials of plans in a run: both train in interleaved blocks, and training continues with the faster one."""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Mapping
from dataclasses import replace

from planner.ir import ACCURACIES, GAIN
from planner.jobs.replanning import with_operators
from planner.online.candidates import Candidates
from planner.online.ddp import in_dtype, region_plans
from planner.online.measuring import SAVED_SHARE, Overlap, Seen, median_overlap, observe, sizes_of
from planner.online.planned_run import TRIAL_STEPS, PlannedRun, Steps, called
from planner.online.trying import FEWEST_ROUNDS, climb, judge
from runtime.core.compiled import default_cuts
from runtime.monitor.trial import Rounds, block_of, trial_steps
from runtime.monitor.verdict import BLOCK_STEPS, Verdict
from runtime.plan import Plan
from runtime.plan.executed import executed_digest
from runtime.plan.transports import NATIVE, TWO_SHOT, Transport, transport_of

COMPILE_BUDGET = 0.05
"""Share of the time so far that compiling for trials may take."""
TRIAL_BUDGET, MIN_BUDGET_STEPS = 0.01, 0.5
"""Share of the steps so far that all trials may cost, with a part of what has been saved in them, and the steps of it
that another trial needs to begin."""
FORMS = (("bfloat16", NATIVE), ("bfloat16", TWO_SHOT), ("int8", TWO_SHOT))
"""Dtypes and transports in which narrow buckets are tried."""


class Trials:
    """All trials of one run, and what they have cost."""

    def __init__(self, run: PlannedRun, candidates: Candidates) -> None:
        self._run, self._candidates = run, candidates
        self._lost_steps = self._compiled_us = 0.0
        """Cost of trials, in steps of the plans that they began with; time of compiling for them."""
        self._tried_cuts = False

    @property
    def tries_cuts(self) -> bool:
        """Return whether other cuts of a compiled graph are still to be tried."""
        return self._run.opening.key.compile is not None and not self._tried_cuts

    def try_plan(self, plan: Plan) -> Steps[list[Seen]]:
        """Train by both plans in interleaved blocks and keep the faster; return the measurements of the present one and
        of the plan, nothing where a rank cannot lay the plan out.

        Waits until trials may cost something again. Outer steps are tried without their warm-up, and kept with one: the
        guard compares distances with its movement.
        """
        run, lost_steps = self._run, self._lost_steps
        block_steps = sum(block_of(plan))
        share = TRIAL_BUDGET + SAVED_SHARE * run.saved
        begin_step = math.ceil((lost_steps + MIN_BUDGET_STEPS) / share)
        begin_step = max(begin_step, plan.outer.warmup_steps if plan.outer else 0)
        left = max(0, begin_step - run.session.step)
        run.begin_stage(f"{called(plan)} is tried", left + TRIAL_STEPS + (block_steps - BLOCK_STEPS) * FEWEST_ROUNDS)
        yield from run.wait(left)
        old, new = run.present, plan.without_first_steps() if plan.outer else plan
        rounds: Rounds = []
        may_lose_steps = share * run.session.step - lost_steps
        riskier = ACCURACIES.index(plan.accuracy) > ACCURACIES.index(old.accuracy)
        seen: dict[bool, list[Overlap]] = {True: [], False: []}

        def verdict_on(found: Rounds) -> Verdict | None:
            nonlocal rounds
            rounds = found
            exchanges = run.session._recorder.exchanges_per_update
            names, must_win = (called(plan), called(old)), GAIN if riskier else 0.0
            return judge(found, names, may_lose_steps * found[0][1], exchanges, must_win, block_steps)

        def look(tried: Plan) -> None:
            run.present = tried
            if (sample := observe(run.session, BLOCK_STEPS - 1)) is not None:
                seen[tried is new].append(sample.overlap)

        run.next = None  # a block begins with its own plan
        verdict = yield from trial_steps((new, old), old, run.session._recorder, run.session._world, verdict_on, look)
        if verdict is None:  # the session has said why
            run.present = old
            return []
        self._lost_steps += block_steps * max(0.0, sum(new / old - 1.0 for new, old in rounds))
        run.cost_us += block_steps * max(0.0, sum(new - old for new, old in rounds))
        run.trials += 1
        run.has_changed |= verdict.good
        if verdict.good and verdict.other_us - verdict.step_us > verdict.noise_us:
            run.ratio *= verdict.step_us / verdict.other_us
            if plan.accuracy == "exact":
                run.exact_ratio = run.ratio
        run.tell(verdict.text, aloud=True)
        self._candidates.learn(plan, verdict)
        run.switch(plan if verdict.good else old)
        if verdict.good:  # the run may end before it has tried everything
            run.remember(verdict.step_us, settled=False)
        ranks: list[dict[bool, list[Overlap]]] = run.gather(seen, "comparing what plans overlap")
        if not all(one[True] and one[False] for one in ranks):
            return []
        tried = ((True, plan), (False, old))
        return [Seen(tuple(sizes_of(one)), tuple(median_overlap(rank[new]) for rank in ranks)) for new, one in tried]

    def try_sizes(self, tried: set[str]) -> Steps[None]:
        """Try DDP's buckets of other sizes, and keep what is faster: as it would be tuned by hand. Where narrow buckets
        are faster, these in their dtype, and then the faster ones in other dtypes; but not if any has done harm.
        """
        run, off = self._run, self._candidates.off
        known = self._candidates.others.items()
        others = {count: (with_operators(plan, run.present), ratio) for count, (plan, ratio) in known}
        if narrow := [bucket for bucket in run.present.buckets if not bucket.dense]:
            if run.harmed:
                return
            widest = max(narrow, key=lambda bucket: bucket.size_bytes or 0)
            form = (widest.compressor.dtype or "", transport_of(widest.collective, widest.algorithm))
            # Their predictions err by what encoding takes while the model computes.
            others = {count: (self._in_form(plan, form), 1.0) for count, (plan, _) in others.items()}
        others = {count: other for count, other in others.items() if executed_digest(other[0]) not in tried}
        sizes = climb({count: ratio for count, (_, ratio) in others.items()}, len(run.present.buckets), off)
        why = f"the simulator was {off:.0%} off here: other sizes of buckets are tried"
        yield from self._climb({count: plan for count, (plan, _) in others.items()}, sizes, why)
        tried |= {executed_digest(plan) for plan, _ in others.values()} | {executed_digest(run.present)}
        for form in FORMS if narrow else ():
            if executed_digest(plan := self._in_form(run.present, form)) not in tried:
                tried.add(executed_digest(plan))
                yield from self.try_plan(plan)

    def _in_form(self, plan: Plan, form: tuple[str, Transport]) -> Plan:
        """Return a plan's buckets in a dtype, by a transport; its fallback is the present plan's."""
        made = in_dtype(plan, self._run.session._parameters, *form)
        return replace(made, fallback=self._run.present.fallback)

    def try_cuts(self) -> Steps[bool]:
        """Try one graph and other cuts of a compiled one, as long as compiling may cost something; return whether the
        faster plan has other cuts than before.
        """
        run, self._tried_cuts = self._run, True
        model, before = run.session.model, run.present.cuts
        cuts = default_cuts(model) if before is None else before
        plans = region_plans(model, run.session._parameters, run.present)
        plans = {count: with_operators(plan, run.present) for count, plan in plans.items() if plan.cuts != cuts}

        def counts() -> Generator[int, bool, None]:
            if len(cuts) in plans:  # as many, elsewhere
                yield len(cuts)
            yield from climb(dict.fromkeys(plans, 1.0), len(cuts), 0.0)

        yield from self._climb(plans, counts(), "other cuts of the compiled graph are tried", compiles=True)
        return run.present.cuts != before

    def _climb(
        self, plans: Mapping[int, Plan], counts: Generator[int, bool, None], why: str, *, compiles: bool = False
    ) -> Steps[None]:
        """Try plans by number as `climb` gives them; `compiles`: each is compiled before."""
        count = next(counts, None)
        if count is not None:
            self._run.tell(why)
        while count is not None:
            if compiles:
                yield from self._compile(plans[count])
            yield from self.try_plan(plans[count])
            try:
                count = counts.send(self._run.present is plans[count])
            except StopIteration:
                count = None

    def _compile(self, plan: Plan) -> Steps[None]:
        """Wait until compiling may cost something, then make a step with a plan, in which its graphs are compiled."""
        run = self._run
        known: list[tuple[float, float]] = run.gather((run.compile_us, run.step_us), "agreeing when to compile")
        expected_us, step_us = (max(column) for column in zip(*known, strict=True))
        begin_step = math.ceil((self._compiled_us + expected_us) / (COMPILE_BUDGET * step_us))
        left = max(0, begin_step - run.session.step)
        run.begin_stage(f"{called(plan)} is compiled and tried", left + TRIAL_STEPS)
        yield from run.wait(left)
        started_s, old = time.perf_counter(), run.present
        run.switch(plan)
        yield from run.wait(1)
        mine_us = max(0.0, (time.perf_counter() - started_s) * 1e6 - step_us)
        run.compile_us = max(run.gather(mine_us, "comparing times of compiling"))
        self._compiled_us += run.compile_us
        run.cost_us += run.compile_us
        run.tell(f"{called(plan)}: compiled in {run.compile_us / 1e6:.1f} s")
        run.switch(old)
